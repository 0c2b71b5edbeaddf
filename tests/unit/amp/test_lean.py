"""Weights in 16 bits: when they go there, what uses of them see, and that nothing of their masters is lost on the way."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.amp.mode import inside
from halfstep.errors import PolicyError
from halfstep.optim import AdamW, master_of
from halfstep.policy import parse

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Net(nn.Module):
    """Two linear layers and a norm. `extra` is what else its forward pass does."""

    def __init__(self, extra: Callable[[Net], Any] | None = None) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.full((4,), 0.1))
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.norm(F.gelu(self.one(x)))) + self.shift
        return y if self.extra is None else y + self.extra(self)


def net(precision: str | None, extra: Callable[[Net], Any] | None = None, loaded: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    model = Net(extra).to(loaded)
    if precision is not None:
        amp.bind(model, parse(precision), CPU)
    return model


def gradients(model: nn.Module, *inputs: Any) -> list[Tensor]:
    model.zero_grad()
    model(*inputs).square().sum().backward()
    return [p.grad.float() for p in model.parameters() if p.grad is not None]


def masters(model: nn.Module) -> dict[str, Tensor]:
    return {name: master.read() for name, p in model.named_parameters() if (master := master_of(p)) is not None}


def trained(precision: str = "bf16-lean", steps: int = 3) -> Net:
    """After a few steps, so that residuals are not those of the first cast."""
    model = net(precision)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        gradients(model, X)
        optimizer.step()
    return model


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


KEPT = ["one.weight", "one.bias", "two.weight", "two.bias"]


# --- when ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["split", "split24", "kahan", "stochastic"])
@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_the_first_call_puts_castable_weights_into_16_bits(form: str, storage: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "halfstep")
    model, plain = net(f"{form}-lean,weights={storage}"), net(None)
    assert amp.layout(model) == {"16bit": [], "loaded": dict.fromkeys([*dict(plain.named_parameters()), "shift"], "float32")}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(X)
    assert amp.layout(model)["16bit"] == KEPT
    dtype = parse(f"{form}-lean").dtype
    for name, p in model.named_parameters():
        original = plain.get_parameter(name)
        master = master_of(p)
        rounded = p if storage == "split24" and name in KEPT else original.to(dtype) if name in KEPT else original
        assert torch.equal(p, rounded)  # split24 may take the other neighbour close to a tie, which its 8 bits do not hold
        assert master is None or storage == "stochastic" or (master.read() - original).abs().max() <= 2**-14
        assert (master is not None) == (name in KEPT)
        assert master is None or master.storage.name == storage
    gradients(model, X)
    assert {name: p.grad.dtype for name, p in model.named_parameters()} == {
        name: dtype if name in KEPT else torch.float32 for name, _ in model.named_parameters()
    }
    lines = [r.getMessage() for r in caplog.records if r.name == "halfstep"]
    assert len(lines) == 1
    assert f"4 of 6 parameters (87.1 % of the weights) are kept in {form} with {storage} masters" in lines[0]


def test_nothing_to_keep_in_16_bits_is_refused_at_the_first_call_with_the_remedy() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.PReLU())
    amp.bind(model, parse("fp16-lean"), CPU)
    with pytest.raises(PolicyError, match=r"this Sequential has none\. Use fp16-mixed"):
        model(X)
    held = net("bf16-lean,fp32=one|two")
    with pytest.raises(PolicyError, match=r"has none outside fp32=one\|two"):
        held(X)


def test_what_the_first_forward_pass_raises_comes_through_and_nothing_is_decided() -> None:
    model = net("bf16-lean")
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(3, 5))
    assert amp.layout(model)["16bit"] == []
    model(X)
    assert amp.layout(model)["16bit"] == KEPT


def test_weights_used_directly_stay_fp32() -> None:
    model = net("bf16-lean", lambda m: m.one.weight.norm() + (m.two.bias * 2).sum())
    model(X)
    assert amp.layout(model)["16bit"] == ["one.bias", "two.weight"]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), gradients(net("bf16-mixed", model.extra), X), strict=True))


def test_the_first_call_runs_the_forward_pass_with_the_random_numbers_and_statistics_of_one() -> None:
    def made(precision: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        amp.bind(model, parse(precision), CPU)
        return model

    lean, mixed = made("bf16-lean"), made("bf16-mixed")
    outputs = []
    for model in (lean, mixed):
        torch.manual_seed(1)
        outputs.append(model(X))
    assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(lean.buffers(), mixed.buffers(), strict=True))


def test_a_forward_pass_that_differentiates_is_rehearsed_too() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            return force

    torch.manual_seed(0)
    lean = Force()
    mixed = copy.deepcopy(lean)
    amp.bind(lean, parse("bf16-lean"), CPU)
    amp.bind(mixed, parse("bf16-mixed"), CPU)
    for _ in range(2):
        assert torch.equal(lean(X), mixed(X))
    assert len(amp.layout(lean)["16bit"]) == 4


def test_an_iterator_among_the_arguments_is_read_once() -> None:
    class Reads(Net):
        def forward(self, batches: Any) -> Tensor:
            return super().forward(next(batches)) + self.one.weight.sum()

    model = Reads()
    amp.bind(model, parse("bf16-lean"), CPU)
    batches = iter([X, X + 1])
    with pytest.warns(UserWarning, match=r"one\.weight .* kept in 16 bits, and sum uses it"):
        model(batches)
    assert amp.layout(model)["16bit"] == KEPT
    assert torch.equal(next(batches), X + 1)


def test_lazy_modules_and_stand_ins_put_the_decision_off() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    amp.bind(lazy, parse("bf16-lean"), CPU)
    lazy(X)
    assert amp.layout(lazy)["16bit"] == []
    lazy(X)
    assert amp.layout(lazy)["16bit"] == ["0.weight", "0.bias"]
    model = net("bf16-lean")
    torch.func.functional_call(model, {k: v.detach() for k, v in model.named_parameters()}, (X,))
    assert amp.layout(model)["16bit"] == []
    model(X)
    assert amp.layout(model)["16bit"] == KEPT


def test_the_first_call_may_be_in_inference_mode_and_in_several_threads() -> None:
    model, outputs = net("fp16-lean"), list[Tensor]()

    def call() -> None:
        with torch.inference_mode():
            outputs.append(model(X))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = net("fp16-mixed")
    assert [torch.equal(y, expected(X)) for y in outputs] == [True] * 4
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), gradients(expected, X), strict=True))


def test_a_part_called_alone_gives_the_numbers_of_autocast_before_and_after() -> None:
    model, mixed = net("bf16-lean"), net("bf16-mixed")
    assert torch.equal(model.one(X), mixed.one(X))
    assert amp.layout(model)["16bit"] == []
    model(X)
    assert torch.equal(model.one(X), mixed.one(X))
    assert inside.joins is None


def test_a_part_with_a_policy_of_its_own_is_left_alone() -> None:
    model = net(None)
    amp.bind(model.one, parse("fp16-mixed"), CPU)
    amp.bind(model, parse("bf16-lean"), CPU)
    model(X)
    assert amp.layout(model)["16bit"] == ["two.weight", "two.bias"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself, when it compiles
@pytest.mark.parametrize("how", ["compile-bound", "bind-compiled", "in-place"])
def test_compiled_models_decide_as_written_and_give_the_same_numbers(how: str) -> None:
    torch._dynamo.reset()
    model = net("bf16-lean" if how != "bind-compiled" else None)
    run: Any = model
    if how == "in-place":
        model.compile(backend="aot_eager")
    else:
        run = torch.compile(model, backend="aot_eager")
    if how == "bind-compiled":
        amp.bind(run, parse("bf16-lean"), CPU)
    mixed = net("bf16-mixed")
    for _ in range(3):
        assert torch.equal(run(X), mixed(X))
        assert all(torch.equal(a, b) for a, b in zip(gradients(run, X), gradients(mixed, X), strict=True))
    assert amp.layout(run if how == "bind-compiled" else model)["16bit"] == [("_orig_mod." if how == "bind-compiled" else "") + n for n in KEPT]
    torch._dynamo.reset()


# --- uses that the first forward pass did not have -----------------------------------------------------------------------------------

LATER: dict[str, Callable[[Net], Any]] = {
    "norm": lambda m: m.one.weight.norm(),
    "masked": lambda m: F.linear(X, m.one.weight * (m.one.weight > 0)).sum(),
    "row": lambda m: m.one.weight[0].exp().sum(),
    "view-of-view": lambda m: m.one.weight.t()[1:].unsqueeze(0).pow(2).sum(),
    "chunk": lambda m: m.one.weight.chunk(2)[1].abs().sum(),
    "reshaped": lambda m: m.one.weight.t().reshape(-1).cumsum(0).mean(),
    "indexed": lambda m: m.one.weight[torch.tensor([0, 0, 3])].sum(),
    "stacked": lambda m: torch.stack([m.one.weight, m.two.weight.t().repeat(1, 2)]).square().mean(),
    "cast": lambda m: m.one.weight.float().sum() + m.one.weight.to(torch.float32).sum() + m.one.weight.double().mean().float(),
    "detached": lambda m: m.one.weight.detach().sum() * m.one.bias.sum(),
    "keyword": lambda m: torch.sum(input=m.one.bias),
    "operator": lambda m: (1 / (2 + m.one.bias) - m.one.bias**2).sum(),
    "embedding": lambda m: F.embedding(torch.tensor([1, 1]), m.one.weight).sum(),
    "product-of-products": lambda m: (m.one.weight @ m.one.weight.t() - torch.eye(8)).square().sum(),
    "as-the-dtype-says": lambda m: (torch.ones(4, dtype=m.two.weight.dtype) * 1.001).sum(),
    "as-the-tensor-is": lambda m: (torch.full_like(m.two.bias, 1.001) + X[0, :4].type_as(m.two.bias)).sum(),
}


@pytest.mark.parametrize("use", LATER.values(), ids=LATER)
def test_a_later_direct_use_sees_the_fp32_master_and_its_gradient_goes_to_the_weight(use: Callable[[Net], Any]) -> None:
    lean, mixed = net("bf16-lean"), net("bf16-mixed")
    lean(X)
    lean.extra = mixed.extra = use
    with pytest.warns(UserWarning) if use not in (LATER["as-the-dtype-says"], LATER["product-of-products"]) else pytest.MonkeyPatch.context():
        outputs = lean(X)
    assert torch.equal(outputs, mixed(X))
    for name, ours, theirs in zip(dict(lean.named_parameters()), gradients(lean, X), gradients(mixed, X), strict=True):
        # the sum of a product's gradient and another is rounded to 16 bits
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-7 * float(theirs.abs().max()), msg=name)


def test_a_direct_use_is_told_once_by_name() -> None:
    model = net("bf16-lean")
    model(X)
    model.extra = lambda m: m.one.weight.norm()
    with pytest.warns(UserWarning, match=r"one\.weight \(8, 8\) is kept in 16 bits, and norm uses it in fp32") as told:
        model(X)
    assert len(told) == 1
    model(X)  # warnings are errors here


def test_a_direct_use_on_an_fp32_island_and_in_products_there() -> None:
    def on_an_island(m: Net) -> Tensor:
        with amp.autocast("cpu", enabled=False):
            return F.linear(X, m.one.weight, m.one.bias).sum()

    lean, mixed = net("bf16-lean"), net("bf16-mixed", on_an_island)
    lean(X)
    lean.extra = on_an_island
    with pytest.warns(UserWarning, match="linear uses it in fp32"):
        assert torch.equal(lean(X), mixed(X))


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.clamp_(-0.1, 0.1),
        lambda w: w.mul_(1.001),
        lambda w: w[0].add_(1e-4),
        lambda w: w.__setitem__(0, 0.3),
        lambda w: w.t().copy_(w.clone() * 0.999),
    ],
    ids=["clamp", "mul", "row", "setitem", "transposed"],
)
def test_a_write_in_the_forward_pass_is_done_to_the_master(write: Callable[[Tensor], Any]) -> None:
    def constrain(m: Net) -> float:
        with torch.no_grad():
            write(m.one.weight)
        return 0.0

    lean, mixed = net("bf16-lean"), net("bf16-mixed")
    lean(X)
    lean.extra = mixed.extra = constrain
    lean.one.weight.halfstep_told = True  # reads beside the write are told, too
    for _ in range(3):
        assert torch.equal(lean(X), mixed(X))
    torch.testing.assert_close(masters(lean)["one.weight"], mixed.one.weight.detach(), rtol=2**-22, atol=0)


class Twice(nn.Module):
    """One layer applied three times, and a cell over four steps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.cell, self.two = nn.Linear(8, 8), nn.GRUCell(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.one(x).tanh()
        state = torch.zeros_like(x)
        for _ in range(4):
            state = self.cell(x, state)
        return self.two(state)


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_gradients_of_a_weight_that_several_products_share_are_summed_in_fp32(form: str) -> None:
    torch.manual_seed(0)
    lean = Twice()
    mixed = copy.deepcopy(lean)
    amp.bind(lean, parse(f"{form}-lean"), CPU)
    amp.bind(mixed, parse(f"{form}-mixed"), CPU)
    lean(X)
    twin = copy.deepcopy(lean)
    expected = gradients(mixed, X)
    for model in (lean, twin):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), expected, strict=True))
        assert {name for name, p in model.named_parameters() if p.grad.dtype != torch.float32} == {"two.weight", "two.bias"}
    assert len(amp.layout(lean)["16bit"]) == 8


# --- loaded in 16 bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-lean", "bf16-lean,weights=kahan", "fp16-mixed", "fp16-lean"])
def test_a_model_loaded_in_16_bits_computes_as_one_loaded_in_fp32(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "halfstep")
    policy = parse(precision)
    model = net(precision, loaded=policy.dtype)
    reference = net(None, loaded=policy.dtype).float()
    amp.bind(reference, parse(f"{policy.autocast}-mixed"), CPU)
    assert amp.layout(model)["16bit"] == KEPT
    assert set(amp.layout(model)["loaded"].values()) == {str(policy.dtype).removeprefix("torch.")}
    assert {name for name, p in model.named_parameters() if p.dtype == policy.dtype} == set(KEPT)
    assert model.shift.dtype == torch.float32
    storage = "split" if policy.weights == "fp32" else policy.weights
    assert {master_of(model.get_parameter(n)).storage.name for n in KEPT} == {storage}
    assert "6 parameters were loaded in 16 bits; 4 that autocast only casts stay" in caplog.text
    for _ in range(2):
        assert torch.equal(model(X), reference(X))
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), gradients(reference, X), strict=True))


def test_a_model_loaded_in_the_other_16_bit_format_goes_up_to_fp32() -> None:
    model = net("bf16-mixed", loaded=torch.float16)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    assert amp.layout(model)["16bit"] == []
    model(X)
    assert set(amp.model_state(model)) == set(model.state_dict())
    assert {t.dtype for t in amp.model_state(model).values()} == {torch.float16}
    lean = net("bf16-lean", loaded=torch.float16)
    lean(X)
    assert amp.layout(lean)["16bit"] == KEPT


def test_weights_loaded_in_16_bits_that_are_used_directly_go_up_at_the_first_call() -> None:
    extra: Callable[[Net], Tensor] = lambda m: m.one.weight.norm()
    model = net("bf16-mixed", extra, torch.bfloat16)
    reference = net(None, extra, torch.bfloat16).float()
    amp.bind(reference, parse("bf16-mixed"), CPU)
    for _ in range(2):
        assert torch.equal(model(X), reference(X))
    assert amp.layout(model)["16bit"] == KEPT[1:]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), gradients(reference, X), strict=True))


def test_plain_leaves_a_model_as_it_was_loaded() -> None:
    model = net("bf16-mixed,weights=plain", loaded=torch.bfloat16)
    model(X)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert masters(model) == {}
    assert amp.layout(model) == {"16bit": [], "loaded": {}}


# --- whole -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "storage"), [("bf16-true", "kahan"), ("fp16-true", "split"), ("bf16-true,weights=stochastic", "stochastic")])
def test_true_puts_everything_into_16_bits_when_it_is_bound(precision: str, storage: str) -> None:
    model, policy = net(precision), parse(precision)
    plain = net(None).to(policy.dtype)
    assert {t.dtype for t in model.state_dict().values()} == {policy.dtype}
    assert {master_of(p).storage.name for p in model.parameters()} == {storage}
    assert amp.layout(model)["16bit"] == [*dict(model.named_parameters())]
    outputs = model(X)
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, plain(X.to(policy.dtype)).float())
    assert torch.equal(net(f"{precision},output=compute")(X), plain(X.to(policy.dtype)))
    assert torch.equal(model.one(X), plain.one(X.to(policy.dtype)).float())
    if storage == "split":
        assert equal(masters(model), dict(net(None).named_parameters()))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), gradients_of_true(plain, policy.dtype), strict=True))


def gradients_of_true(plain: Net, dtype: torch.dtype) -> list[Tensor]:
    plain.zero_grad()
    plain(X.to(dtype)).float().square().sum().backward()
    return [p.grad.float() for p in plain.parameters() if p.grad is not None]


def test_true_holds_named_modules_and_running_statistics_in_fp32() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.inner, self.head = nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Linear(6, 6), nn.Linear(6, 3)
            self.rotary = nn.Module()
            self.rotary.register_buffer("inv_freq", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(self.norm(self.conv(x)))
            return self.head(torch.relu(y)) + self.conv(x).sum()

    model = Images()
    amp.bind(model, parse("bf16-true,fp32=inner,output=compute"), CPU)
    wide = {name for name, t in model.state_dict().items() if t.dtype == torch.float32}
    assert wide == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "inner.weight", "inner.bias", "rotary.inv_freq"}
    x = torch.randn(5, 2, 6)
    assert model(x).dtype == torch.bfloat16
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    assert not torch.equal(model.norm.running_mean, torch.zeros(4))


def test_true_refuses_what_it_cannot_hold() -> None:
    model = net(None)
    with torch.no_grad():
        model.one.weight[0, 0] = 40000
    with pytest.raises(PolicyError, match=r"one\.weight has weights of a magnitude above 2\^15.*fp32=one"):
        amp.bind(model, parse("fp16-true"), CPU)
    tied = nn.Sequential(OrderedDict(table=nn.Embedding(4, 4), head=nn.Linear(4, 4, bias=False)))
    tied.head.weight = tied.table.weight
    with pytest.raises(PolicyError, match=r"head\.weight is tied to a weight of table, which fp32= holds in fp32.*\|head"):
        amp.bind(tied, parse("bf16-true,fp32=table"), CPU)


# --- nothing is lost ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean", "bf16-lean,weights=split24", "bf16-lean,weights=kahan", "bf16-true"])
def test_masters_go_with_copies_and_pickles(precision: str) -> None:
    model = trained(precision)
    before = masters(model)
    twin, back = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301  made on this line
    amp.bind(back, parse(precision), CPU)
    expected = gradients(model, X)
    for other in (twin, back):
        assert equal(masters(other), before)
        assert amp.layout(other) == amp.layout(model)
        assert all(torch.equal(a, b) for a, b in zip(gradients(other, X), expected, strict=True))
        assert {id(p) for p in other.parameters()}.isdisjoint(id(p) for p in model.parameters())
    optimizer = AdamW(twin.parameters(), lr=0.1)
    optimizer.step()
    assert equal(masters(model), before)
    assert not equal(masters(twin), before)


@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-true,weights=split"])
def test_a_loaded_fp32_state_becomes_the_masters_in_full(precision: str) -> None:
    state = {k: v + 1e-3 / 3 for k, v in net(None).state_dict().items()}
    model, part, other = trained(precision), trained(precision), trained(precision)
    model.load_state_dict(state)
    expected = {k: state[k] for k in masters(model)}
    for name, values in masters(model).items():
        torch.testing.assert_close(values, expected[name], rtol=2**-23, atol=0)
        assert torch.equal(model.get_parameter(name), expected[name].to(parse(precision).dtype))
    part.one.load_state_dict({k.removeprefix("one."): v for k, v in state.items() if k.startswith("one.")})
    torch.testing.assert_close(masters(part)["one.weight"], state["one.weight"], rtol=2**-23, atol=0)
    half = {k: v.to(parse(precision).dtype) for k, v in state.items()}
    other.load_state_dict(half)
    assert torch.equal(masters(other)["one.weight"], half["one.weight"].float())
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({**state, "one.weight": torch.zeros(2, 2)})
    assert torch.equal(masters(other)["one.weight"], half["one.weight"].float())


def test_a_state_that_is_assigned_gets_masters() -> None:
    model, state = trained(), {k: v.clone() for k, v in net(None).state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert equal(masters(model), {k: net(None).state_dict()[k] for k in KEPT})
    assert torch.equal(model(X), net("bf16-mixed")(X))


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_the_state_to_be_saved_has_the_dtypes_that_were_loaded(loaded: torch.dtype) -> None:
    model = net("bf16-lean", loaded=loaded)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        gradients(model, X)
        optimizer.step()
    state, full = amp.model_state(model), masters(model)
    assert list(state) == list(model.state_dict())
    assert {v.dtype for v in state.values()} == {loaded}
    for name, values in full.items():
        assert torch.equal(state[name], values.to(loaded))
    assert amp.model_state(net(None)).keys() == state.keys()


def test_removing_the_binding_gives_fp32_weights_back() -> None:
    for precision in ("bf16-lean", "bf16-true,weights=split"):
        model = net(precision)
        before = {name: set(part.__dict__) for name, part in net(None).named_modules()}
        binding = amp.bind(other := net(None), parse(precision), CPU)
        other(X)
        binding.remove()
        assert {k: v.dtype for k, v in other.state_dict().items()} == dict.fromkeys(other.state_dict(), torch.float32)
        assert masters(other) == {}
        assert {name: set(part.__dict__) for name, part in other.named_modules()} == before
        if precision == "bf16-lean":
            assert torch.equal(other(X), net(None)(X))
        model(X)


def test_a_list_of_a_checkpoint_decides_instead_of_the_first_call() -> None:
    model = net("bf16-lean")
    amp.convert(model, parse("bf16-lean"), ["two.weight"])
    assert amp.layout(model)["16bit"] == ["two.weight"]
    assert torch.equal(model(X), net("bf16-mixed")(X))
    assert amp.layout(model)["16bit"] == ["two.weight"]
    amp.convert(model, parse("bf16-lean"), ["one.weight", "one.bias"])
    assert sorted(amp.layout(model)["16bit"]) == ["one.bias", "one.weight"]
    assert torch.equal(model.two.weight, net(None).two.weight)
    with pytest.raises(PolicyError, match=r"three\.weight is to be 16-bit"):
        amp.convert(model, parse("bf16-lean"), ["three.weight"])
    with pytest.raises(PolicyError, match="is not bound to a policy that keeps any so"):
        amp.convert(net(None), parse("bf16-lean"), ["one.weight"])


def test_frozen_weights_go_to_16_bits_when_they_fit_and_get_masters_when_they_are_trained() -> None:
    model = net(None)
    with torch.no_grad():
        model.one.weight.copy_(model.one.weight.bfloat16())
    model.one.requires_grad_(False)
    amp.bind(model, parse("bf16-lean"), CPU)
    model(X)
    assert amp.layout(model)["16bit"] == ["one.weight", "two.weight", "two.bias"]
    assert master_of(model.one.weight).nbytes() == 0
    before = model.one.weight.float()
    model.one.requires_grad_(True)
    gradients(model, X)
    assert master_of(model.one.weight).storage.name == "split"
    AdamW(model.parameters(), lr=1e-6).step()
    assert not torch.equal(masters(model)["one.weight"], before)
    frozen = net(None)
    frozen.one.requires_grad_(False)
    frozen.one.weight.data = frozen.one.weight.data.bfloat16().float()
    amp.bind(frozen, parse("bf16-lean"), CPU)
    frozen(X)
    state = {**frozen.state_dict(), "one.weight": torch.full((8, 8), 1 / 3)}
    frozen.load_state_dict(state)
    assert torch.equal(frozen.one.weight, state["one.weight"])  # which bf16 does not hold: it is fp32 again


def test_steps_with_split_masters_are_those_with_fp32_weights() -> None:
    lean, mixed = net("bf16-lean"), net("bf16-mixed")
    lean(X)
    ours, theirs = AdamW(lean.parameters(), lr=1e-3), AdamW(mixed.parameters(), lr=1e-3)
    for _, (model, optimizer) in itertools.product(range(3), ((lean, ours), (mixed, theirs))):
        gradients(model, X)
        optimizer.step()
    for name, values in masters(lean).items():
        reference = mixed.get_parameter(name).detach()
        torch.testing.assert_close(values, reference, rtol=0, atol=3 * 2**-23 * float(reference.abs().max()))
