"""16-bit weights through the accelerator: accumulation, averages, copies, several accelerators, and what is refused."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import halfstep
from halfstep import Accelerator
from halfstep.errors import ConfigError, PolicyError
from halfstep.optim import full_values, master_of

PRESETS = ["bf16-lean", "fp16-lean", "bf16-true", "fp16-true"]
FORMS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 3))


def adamw(net: nn.Module, **settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, **settings)


def prepared(precision: str, make: Callable = adamw, loaded: torch.dtype = torch.float32, **settings) -> tuple:
    accelerator, net = Accelerator(precision=precision, cpu=True, **settings), build().to(loaded)
    return accelerator, *accelerator.prepare(net, make(net))


def step(accelerator: Accelerator, net: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 1) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(net(x).float(), (x[:, :3]).argmax(1))
    accelerator.backward(loss)
    assert optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def masters(net: nn.Module) -> list[Tensor]:
    return [full_values(p) for p in net.parameters()]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(some, others, strict=True))


# --- accumulation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRESETS)
def test_gradients_of_64_micro_batches_are_summed_in_fp32(precision: str) -> None:
    count = 64
    accelerator, net, optimizer = prepared(precision, gradient_accumulation_steps=count)
    lone, twin, alone = prepared(precision)  # the same weights: gives the 16-bit gradient of each micro-batch
    with torch.no_grad():
        net(torch.zeros(1, 6)), twin(torch.zeros(1, 6))
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) + 1 for i in range(count)]
    parts: dict[str, list[Tensor]] = {name: [] for name, _ in twin.named_parameters()}
    scale = accelerator.scaler.get_scale
    for x in batches:
        with accelerator.accumulate(net):
            accelerator.backward(net(x).float().square().mean())
        lone.scaler.update(scale())
        lone.backward(twin(x).float().square().mean() / count)
        for name, p in twin.named_parameters():
            assert p.grad is not None
            parts[name].append(p.grad.double() / lone.scaler.get_scale())
        alone.zero_grad()
    for name, p in net.named_parameters():
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        exact = torch.stack(parts[name]).sum(0)
        difference = (p.grad.double() / scale() - exact).norm() / exact.norm()
        assert float(difference) < 1e-5, name
    assert optimizer.step()
    optimizer.zero_grad()
    accelerator.gradient_accumulation_steps = 1
    accelerator.backward(net(batches[0]).float().square().mean())
    assert net[0].weight.grad.dtype == net[0].weight.dtype == FORMS[precision[:4]], "one micro-batch needs no wider gradient"


@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-true", "bf16-mixed"])
def test_two_halves_of_a_batch_give_the_step_of_the_whole(precision: str) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))
    results = []
    for parts in (1, 2):
        accelerator, net, optimizer = prepared(precision, lambda n: torch.optim.SGD(n.parameters(), lr=0.1), gradient_accumulation_steps=parts)
        for part in x.chunk(parts):
            with accelerator.accumulate(net):
                accelerator.backward(net(part).float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
        results.append(masters(net))
    first = [p.detach() for p in build().parameters()]
    for whole, halves, start in zip(*results, first, strict=True):
        assert torch.allclose(whole, halves, rtol=0, atol=0.02 * float((whole - start).abs().max()))
        assert not torch.equal(whole, start)


# --- averages, schedules, copies, several accelerators -------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [*PRESETS, "bf16-mixed"])
def test_an_average_of_the_weights_follows_applied_steps_in_full(precision: str) -> None:
    accelerator, net, optimizer = prepared(precision)
    step(accelerator, net, optimizer)
    average, expected = masters(net), masters(net)
    calls = itertools.count()

    def update() -> None:
        next(calls)
        for a, p in zip(average, net.parameters(), strict=True):
            a.lerp_(full_values(p), 0.1)

    accelerator.on_applied(optimizer, update)
    for i in range(5):
        step(accelerator, net, optimizer, seed=i)
        expected = [e.lerp(full_values(p), 0.1) for e, p in zip(expected, net.parameters(), strict=True)]
    accelerator.backward(net(torch.full((2, 6), float("nan"))).sum())
    assert not optimizer.step()
    assert next(calls) == 5
    assert same(average, expected)
    assert not same(average, [p.detach().float() for p in net.parameters()])


def test_an_average_that_is_swapped_in_and_out_leaves_full_masters_when_it_is_written_back() -> None:
    accelerator, net, optimizer = prepared("bf16-lean")
    for i in range(3):
        step(accelerator, net, optimizer, seed=i)
    kept, average = masters(net), [v * 0.5 for v in masters(net)]
    with torch.no_grad():
        for p, value in zip(net.parameters(), average, strict=True):
            p.copy_(value)
    assert same([p.detach().float() for p in net.parameters()], [a.to(p.dtype).float() for a, p in zip(average, net.parameters(), strict=True)])
    for p, value in zip(net.parameters(), kept, strict=True):
        master = master_of(p)
        if master is None:
            p.data.copy_(value)
        else:
            master.write(value)
    assert same(masters(net), kept)


def test_a_state_dict_of_fp32_values_loads_into_the_masters_in_full() -> None:
    accelerator, net, optimizer = prepared("bf16-lean")
    step(accelerator, net, optimizer)
    state = {name: torch.randn_like(p, dtype=torch.float32) for name, p in net.named_parameters()}
    net.load_state_dict(state)
    assert same(masters(net), list(state.values()))
    step(accelerator, net, optimizer)


@pytest.mark.parametrize("precision", PRESETS)
def test_a_schedule_made_from_the_inner_optimizer_moves_the_rate_that_is_used(precision: str) -> None:
    accelerator, net = Accelerator(precision=precision, cpu=True), build()
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule = LambdaLR(inner, lambda n: 0.0 if n else 1.0)
    net, optimizer, schedule = accelerator.prepare(net, inner, schedule)
    step(accelerator, net, optimizer)
    schedule.step()
    assert schedule.get_last_lr() == [0.0]
    before = masters(net)
    step(accelerator, net, optimizer)
    assert same(masters(net), before), "the rate is 0 now"


@pytest.mark.parametrize("precision", PRESETS)
def test_a_copy_of_a_prepared_model_has_masters_of_its_own(precision: str) -> None:
    accelerator, net, optimizer = prepared(precision)
    step(accelerator, net, optimizer)
    twin = copy.deepcopy(net)
    assert same(masters(twin), masters(net))
    assert [master_of(p) is None for p in twin.parameters()] == [master_of(p) is None for p in net.parameters()]
    other = Accelerator(precision=precision, cpu=True)
    twin, its = other.prepare(twin, adamw(twin))
    kept = masters(net)
    step(other, twin, its)
    assert same(masters(net), kept)
    assert not same(masters(twin), kept)
    trained = masters(twin)
    step(accelerator, net, optimizer)
    assert same(masters(twin), trained)


def test_two_accelerators_with_different_policies_do_not_meet() -> None:
    names = ["bf16-lean", "fp16-mixed", "fp16-true", "fp32"]
    alone = {}
    for name in names:
        accelerator, net, optimizer = prepared(name)
        alone[name] = [step(accelerator, net, optimizer, seed=i) for i in range(3)], masters(net)
    runs = {name: prepared(name) for name in names}
    losses = {name: [] for name in names}
    for i in range(3):
        for name in names:
            losses[name].append(step(*runs[name], seed=i))
    for name in names:
        assert losses[name] == alone[name][0]
        assert same(masters(runs[name][1]), alone[name][1])


def test_the_same_optimizer_prepared_twice_is_one() -> None:
    accelerator, net = Accelerator(precision="bf16-lean", cpu=True), build()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    net, first = accelerator.prepare(net, inner)
    assert accelerator.prepare(inner) is first
    assert accelerator.prepare(first) is first
    assert accelerator.prepare(first.optimizer) is first
    other = Accelerator(precision="bf16-lean", cpu=True)
    with pytest.raises(ConfigError, match="this optimizer was prepared by another accelerator"):
        other.prepare(first)
    with pytest.raises(ConfigError, match=r"masters already|prepared by another accelerator"):
        other.prepare(inner)
    step(accelerator, net, first)


@pytest.mark.parametrize("precision", PRESETS)
def test_unwrapping_gives_the_users_fp32_model_with_exactly_its_masters(precision: str) -> None:
    accelerator, net, optimizer = prepared(precision)
    step(accelerator, net, optimizer)
    kept = masters(net)
    plain = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    assert same([p.detach() for p in plain.parameters()], kept)
    assert all(master_of(p) is None and p.grad_dtype == torch.float32 for p in plain.parameters())
    assert torch.equal(plain(torch.ones(2, 6)), build_with(kept)(torch.ones(2, 6))), "it runs in fp32 again"
    plain(torch.ones(2, 6)).sum().backward()
    assert {p.grad.dtype for p in plain.parameters()} == {torch.float32}
    other = Accelerator("fp16", cpu=True)
    again, its = other.prepare(plain, adamw(plain))
    step(other, again, its)


def build_with(values: list[Tensor]) -> nn.Module:
    net = build()
    with torch.no_grad():
        for p, value in zip(net.parameters(), values, strict=True):
            p.copy_(value)
    return net


def test_keeping_the_wrapper_keeps_the_16_bit_weights() -> None:
    accelerator, net, optimizer = prepared("bf16-lean")
    step(accelerator, net, optimizer)
    assert accelerator.unwrap_model(net) is net
    assert net[0].weight.dtype == torch.bfloat16
    step(accelerator, net, optimizer)


def test_an_optimizer_made_before_the_cast_still_trains_the_models_weights() -> None:
    for form in FORMS:
        accelerator, net = Accelerator(form, cpu=True), build()
        inner = adamw(net)
        net.to(FORMS[form])  # keeps the parameters, with other contents
        net, optimizer = accelerator.prepare(net, inner)
        before = masters(net)
        step(accelerator, net, optimizer)
        assert not any(torch.equal(a, b) for a, b in zip(before, masters(net), strict=True))


# --- refused ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "precision", "words"),
    [
        ({"states": "int8"}, "bf16-mixed", "made with states=int8, and the precision bf16-mixed has states=fp32"),
        ({"states": "fp32"}, "bf16-lean", "made with states=fp32, and the precision bf16-lean has states=int8"),
        ({"weights": "kahan"}, "bf16-lean", "made with weights=kahan, and the precision bf16-lean has weights=split"),
        ({"policy": "fp16-true"}, "bf16-true", "made with weights=split, and the precision bf16-true has weights=kahan"),
    ],
)
def test_an_optimizer_made_for_other_formats_is_refused(settings: dict, precision: str, words: str) -> None:
    accelerator, net = Accelerator(precision=precision, cpu=True), build()
    with pytest.raises(ConfigError, match=rf"this AdamW was {words}. Leave one of them out"):
        accelerator.prepare(net, halfstep.optim.AdamW(net.parameters(), **settings))


@pytest.mark.parametrize("settings", [{}, {"states": "int8"}, {"weights": "split"}, {"policy": "bf16-lean"}])
def test_an_optimizer_that_says_nothing_or_the_same_takes_the_policys_formats(settings: dict) -> None:
    accelerator, net, optimizer = prepared("bf16-lean", lambda n: halfstep.optim.AdamW(n.parameters(), lr=1e-2, **settings))
    plain, other, its = prepared("bf16-lean", lambda n: halfstep.optim.AdamW(n.parameters(), lr=1e-2, policy="bf16-lean"))
    for i in range(3):
        step(accelerator, net, optimizer, seed=i)
        step(plain, other, its, seed=i)
    assert same(masters(net), masters(other))
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.int8}


@pytest.mark.parametrize(
    ("precision", "cast"),
    [
        *itertools.product(["bf16-lean", "fp16-lean", "bf16-mixed", "fp16-mixed"], ["half", "bfloat16", "float"]),
        ("bf16-true", "bfloat16"),
        ("fp16-true", "half"),
        *itertools.product(["bf16-true"], ["half", "float"]),
        *itertools.product(["fp16-true"], ["bfloat16", "float"]),
    ],
)
def test_a_model_that_is_cast_after_prepare_trains_on_or_is_refused_by_name(precision: str, cast: str) -> None:
    """Where the cast changes nothing it is none; where it does, the error names a parameter and the weights are not stepped."""
    accelerator, net, optimizer = prepared(precision)
    step(accelerator, net, optimizer)
    before, formats = masters(net), [p.dtype for p in net.parameters()]
    getattr(net, cast)()
    unchanged = [p.dtype for p in net.parameters()] == formats
    try:
        step(accelerator, net, optimizer)
    except ConfigError as error:
        assert not unchanged
        assert "weight was" in error.cause or "bias was" in error.cause  # noqa: PT017
        assert "prepare" in f"{error.cause} {error.remedy}"  # noqa: PT017
    else:
        assert unchanged
        assert not same(masters(net), before)


def test_a_model_that_is_moved_after_prepare_is_refused() -> None:
    accelerator, net, optimizer = prepared("bf16-lean")
    step(accelerator, net, optimizer)
    accelerator.backward(net(torch.ones(2, 6)).sum())
    net.to("meta")
    with pytest.raises(ConfigError, match=r"0.weight was (on cpu|replaced in the model).*(Move the model before prepare|prepare it then)"):
        optimizer.step()


class Sequence(nn.Module):
    """Embeddings and a norm: nothing in it is only cast."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.table(x))


@pytest.mark.parametrize("form", FORMS)
def test_lean_with_nothing_to_keep_in_16_bits_is_refused_with_what_to_use(form: str) -> None:
    accelerator, net = Accelerator(precision=f"{form}-lean", cpu=True), Sequence()
    net, _ = accelerator.prepare(net, adamw(net))
    with pytest.raises(PolicyError, match=rf"this Sequence has none. Use {form}-mixed, whose weights are fp32; or {form}-true"):
        net(torch.tensor([1]))
    other = Accelerator(precision=f"{form}-true", cpu=True)
    twin = Sequence()
    twin, optimizer = other.prepare(twin, adamw(twin))
    other.backward(twin(torch.tensor([1, 2])).float().square().sum())
    assert optimizer.step()
    assert {p.dtype for p in twin.parameters()} == {FORMS[form]}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda n: torch.optim.LBFGS(n.parameters()), "LBFGS evaluates the closure itself"),
        (lambda n: adamw(n, differentiable=True), "differentiable=True"),
    ],
)
@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-true", "bf16-mixed,states=int8"])
def test_an_optimizer_that_cannot_have_masters_is_refused_when_it_is_prepared(precision: str, make: Callable, words: str) -> None:
    accelerator, net = Accelerator(precision=precision, cpu=True), build()
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ConfigError, match=words) as caught:
        accelerator.prepare(net, make(net))
    assert caught.value.remedy
    assert all(torch.allclose(a, b, rtol=2.0**-15, atol=0) for a, b in zip(masters(net), before, strict=True))


def test_the_resolution_says_how_weights_and_states_are_kept() -> None:
    for precision, words in {
        "bf16-lean": ["castable bf16 weights (split)", "int8 optimizer states"],
        "fp16-true": ["fp16 weights (split)"],
        "bf16-mixed": ["fp32 weights"],
    }.items():
        said = str(prepared(precision)[0].resolution)
        assert all(word in said for word in words), said
    said = str(prepared("bf16-mixed", loaded=torch.bfloat16)[0].resolution)
    assert "castable bf16 weights (split)" in said
    assert "4 of the 6 trainable parameters were loaded in bf16" in said or "6 of the 6 trainable parameters were loaded in bf16" in said
