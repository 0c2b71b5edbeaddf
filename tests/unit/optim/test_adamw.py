"""AdamW: the compiled pass and the plain definition give equal bits, settings are torch's, and what cannot work is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.kernels import cpu_kernels
from halfstep.optim import CODECS, HALF, AdamW, full_values, master_of
from halfstep.policy import tensor_bytes

STORAGES = ["split", "split24", "kahan", "stochastic", "plain"]


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    """Weights of many kinds: matrix, vector, scalar, one element, empty, more than a block, channels-last, sliced, transposed."""
    g = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) * 0.1

    base = drawn(12, 20).to(dtype)
    made = [drawn(33, 17), drawn(129), drawn(), drawn(1), drawn(0, 4), drawn(2, 700), drawn(4, 3, 3, 3).to(memory_format=torch.channels_last)]
    return [nn.Parameter(t.to(dtype)) for t in made] + [nn.Parameter(base[:, ::2]), nn.Parameter(base[:6].t())]


def gradients(step: int, params: list[nn.Parameter]) -> None:
    """Gradients of the weight's dtype, or fp32 ones, or none, and some with other strides than their weight."""
    g = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        size = 10.0 ** float(torch.empty(()).uniform_(-6, 1, generator=g))
        drawn = torch.randn(p.shape, generator=g) * size
        p.grad = None
        if (i + step) % 5 == 0:
            continue
        kind = torch.float32 if (i + step) % 3 == 0 else torch.bfloat16 if p.dtype == torch.float32 and i % 2 else p.dtype
        p.grad_dtype = kind
        drawn[drawn.abs() < 1e-6] = 0.0
        p.grad = drawn.t().contiguous().t().to(kind) if drawn.dim() == 2 and step % 2 else drawn.to(kind)


def run(switch: str, storage: str, states: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, steps: int = 8) -> list[Tensor]:
    """All bits after some steps."""
    monkeypatch.setenv("HALFSTEP_KERNELS", switch)
    params = weights(dtype)
    groups: list[dict[str, Any]] = [
        {"params": params[:3], "lr": torch.tensor(3e-3), "weight_decay": 0.3},
        {"params": params[3:7], "betas": (0.8, 0.95), "eps": 1e-6, "maximize": True},
    ]
    optimizer = AdamW(groups, lr=1e-3, weights=None if dtype == torch.float32 else storage, states=states, seed=7)
    optimizer.add_param_group({"params": params[7:8]})
    for step in range(steps):
        if step == 4:
            optimizer.add_param_group({"params": params[8:], "lr": 1e-2})
        optimizer.param_groups[1]["lr"] = 1e-3 * (1 + step)
        gradients(step, params)
        optimizer.step(factor=1.0 if step % 2 else 0.37)
    found: list[Tensor] = []
    for p in params:
        master = master_of(p)
        found += [p.detach(), *([] if master is None or master.residual is None else [master.residual])]
        found += [t for _, t in sorted(optimizer.state[p].items())]
    return [t.clone() for t in found]


def raw(t: Tensor) -> Tensor:
    """Numbers that are equal only where the bits are."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return t.contiguous().reshape(-1).view(kinds[t.element_size()])


COMBINATIONS = [("fp32", torch.float32), *((s, d) for s in STORAGES for d in HALF)]


@pytest.mark.skipif(cpu_kernels() is None, reason="without numba, or with HALFSTEP_KERNELS=off, there is only the plain definition")
@pytest.mark.parametrize("states", CODECS)
@pytest.mark.parametrize(("storage", "dtype"), COMBINATIONS)
def test_compiled_and_plain_steps_give_equal_bits(storage: str, dtype: torch.dtype, states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, plain = (run(switch, storage, states, dtype, monkeypatch) for switch in ("on", "off"))
    assert len(compiled) == len(plain) > 30
    for i, (a, b) in enumerate(zip(compiled, plain, strict=True)):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(raw(a), raw(b)), f"tensor {i} of shape {tuple(a.shape)}"


@pytest.mark.parametrize("switch", ["on", "off"])
def test_the_same_seed_gives_the_same_bits_and_another_others(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", switch)

    def bits(seed: int, threads: int = 1) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            p = nn.Parameter(torch.linspace(-1, 1, 200_000 if switch == "on" else 1000).bfloat16())
            optimizer = AdamW([p], weights="stochastic", states="int8", seed=seed)
            for _ in range(2):
                p.grad = torch.full_like(p.detach(), 0.1)
                optimizer.step()
            return raw(p.detach())
        finally:
            torch.set_num_threads(before)

    first = bits(0)
    assert torch.equal(first, bits(0))
    assert not torch.equal(first, bits(1))
    if switch == "on":
        assert torch.equal(first, bits(0, threads=2))


# --- torch's optimizer


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_fp32_weights_step_as_torchs_do(kind: torch.dtype, maximize: bool, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", switch)
    ours, theirs = nn.Parameter(torch.randn(70, 5)), nn.Parameter(torch.empty(70, 5))
    ours.grad_dtype = kind
    with torch.no_grad():
        theirs.copy_(ours)
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1, "maximize": maximize}
    mine, stock = AdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for _ in range(30):
        ours.grad = torch.randn(70, 5).to(kind)
        theirs.grad = ours.grad.float()
        mine.step()
        stock.step()
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1024 * 2.0**-23 * 4)
    torch.testing.assert_close(mine.state[ours]["exp_avg"], stock.state[theirs]["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(mine.state[ours]["exp_avg_sq"], stock.state[theirs]["exp_avg_sq"], rtol=1e-5, atol=1e-9)
    assert float(mine.state[ours]["step"]) == 30


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("states", CODECS)
def test_fp64_and_complex_weights_step_as_torchs_do(states: str, dtype: torch.dtype) -> None:
    ours, theirs = nn.Parameter(torch.randn(40, dtype=dtype)), nn.Parameter(torch.empty(40, dtype=dtype))
    with torch.no_grad():
        theirs.copy_(ours)
    mine, stock = AdamW([ours], lr=1e-2, states=states), torch.optim.AdamW([theirs], lr=1e-2)
    for _ in range(20):
        ours.grad = torch.randn(40, dtype=dtype)
        theirs.grad = ours.grad.clone()
        mine.step(factor=1.0)
        stock.step()
    tight = 1e-5 if dtype == torch.complex64 else 1e-13
    torch.testing.assert_close(ours, theirs, rtol=tight, atol=tight)
    assert mine.state[ours]["exp_avg"].dtype == dtype


def test_a_gradient_that_is_a_lazy_conjugate_is_used() -> None:
    p = nn.Parameter(torch.randn(5, dtype=torch.complex64))
    q = nn.Parameter(p.detach().clone())
    (p.conj() * torch.full((5,), 1 + 2j)).real.sum().backward()
    assert p.grad is not None
    q.grad = p.grad.resolve_conj().clone()
    for one in (p, q):
        AdamW([one]).step()
    assert torch.equal(p.detach(), q.detach())


def test_double_weights_do_not_lose_their_second_moment() -> None:
    p = nn.Parameter(torch.randn(6, dtype=torch.float64))
    optimizer = AdamW([p])
    p.grad = torch.full((6,), 3.0, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], torch.full((6,), 9.0 * (1 - 0.999), dtype=torch.float64), rtol=1e-12, atol=0.0)


# --- the factor, closures, groups


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("kind", [torch.float32, *HALF])
def test_a_factor_is_taken_in_fp32_and_leaves_gradients_alone(kind: torch.dtype, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", switch)
    factor = 1 / 3 / 1024
    start = torch.randn(50).bfloat16()
    late, early = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    gradient = (torch.randn(50) * 100).to(kind)
    for p in (late, early):
        p.grad_dtype = torch.float32 if p is early else kind
    late.grad, early.grad = gradient.clone(), gradient.float() * factor
    AdamW([late]).step(factor=factor)
    AdamW([early]).step()
    assert torch.equal(late.grad, gradient)
    assert torch.equal(full_values(late), full_values(early))


def test_a_closure_is_evaluated_once_with_gradients_on() -> None:
    p = nn.Parameter(torch.randn(4).bfloat16())
    optimizer = AdamW([p], lr=0.1)
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.float().square().sum()
        loss.backward()
        seen.append(float(loss.detach()))
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert [float(loss.detach())] == seen
    assert full_values(p).square().sum() < seen[0]


def test_schedulers_change_the_rate_that_is_used() -> None:
    p = nn.Parameter(torch.zeros(3).bfloat16())
    optimizer = AdamW([p], lr=1.0, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    for expected in (-1.0, -1.0):
        p.grad = torch.ones(3).bfloat16()
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(full_values(p), torch.full((3,), expected), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("switch", ["on", "off"])
def test_frozen_weights_and_weights_without_gradients_stay_as_they_are(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", switch)
    frozen, unused, used = (nn.Parameter(torch.randn(4).bfloat16(), requires_grad=i > 0) for i in range(3))
    optimizer = AdamW([frozen, unused, used], lr=0.1)
    before, versions = [p.detach().clone() for p in (frozen, unused)], [p._version for p in (frozen, unused)]
    used.grad = torch.ones(4).bfloat16()
    optimizer.step()
    assert [p._version for p in (frozen, unused)] == versions
    assert all(torch.equal(p.detach(), was) for p, was in zip((frozen, unused), before, strict=True))
    assert master_of(frozen) is None
    assert set(optimizer.state) == {used}


def test_a_step_without_any_gradient_does_nothing() -> None:
    p = nn.Parameter(torch.randn(4).bfloat16())
    optimizer = AdamW([p])
    before = p.detach().clone()
    assert optimizer.step() is None
    assert torch.equal(p.detach(), before)
    assert not optimizer.state


def test_shared_weights_are_stepped_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    net[1].weight = net[0].weight
    optimizer = AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    before = net[0].weight.detach().float()
    net(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()
    moved = (full_values(net[1].weight) - before).abs()
    assert float(moved.max()) <= 1.01e-2
    assert master_of(net[0].weight) is master_of(net[1].weight)


def test_named_parameters_and_tensor_rates_are_taken() -> None:
    net = nn.Linear(3, 2).bfloat16()
    optimizer = AdamW(net.named_parameters(), lr=torch.tensor([0.01]))
    net(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert float(optimizer.state[net.weight]["step"]) == 1


# --- tensors that move, bytes


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", CODECS)
def test_weights_that_change_their_memory_format_step_on(states: str, dtype: torch.dtype, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", switch)
    start = (torch.randn(4, 3, 2, 2) * 0.1).to(dtype)
    results = []
    for moving in (False, True):
        p = nn.Parameter(start.clone(memory_format=torch.channels_last if moving else torch.contiguous_format))
        optimizer = AdamW([p], states=states)
        for step in range(4):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.step()
            if moving:
                p.grad = None
                p.data = p.data.clone(memory_format=torch.contiguous_format if step % 2 == 0 else torch.channels_last)
        results.append(full_values(p))
    assert torch.equal(*results)


def test_weights_whose_memory_moves_are_followed() -> None:
    p, q = nn.Parameter(torch.randn(200).bfloat16()), nn.Parameter(torch.empty(200).bfloat16())
    with torch.no_grad():
        q.copy_(p)
    moving, resting = AdamW([p], states="int8"), AdamW([q], states="int8")
    kept = []
    for step in range(5):
        g = torch.randn(200, generator=torch.Generator().manual_seed(step)).bfloat16()
        p.grad, q.grad = g, g.clone()
        moving.step()
        resting.step()
        kept.append(p.data)
        p.data = p.data.clone()
        moving.state[p]["exp_avg"] = moving.state[p]["exp_avg"].clone()
    assert torch.equal(full_values(p), full_values(q))
    assert not torch.equal(kept[0], kept[-1])  # the old memory is no longer written


def test_a_copy_of_an_optimizer_writes_into_its_own_weights() -> None:
    p = nn.Parameter(torch.randn(40).bfloat16())
    optimizer = AdamW([p], states="bf16")
    p.grad = torch.ones(40).bfloat16()
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    q = twin.param_groups[0]["params"][0]
    assert torch.equal(full_values(p), full_values(q))
    before = full_values(p)
    q.grad = torch.ones(40).bfloat16()
    twin.step()
    assert torch.equal(full_values(p), before)
    optimizer.step()
    assert torch.equal(full_values(p), full_values(q))


@pytest.mark.parametrize("numel", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("states", CODECS)
@pytest.mark.parametrize("storage", ["fp32", *STORAGES])
def test_bytes_are_those_that_the_policy_counts(storage: str, states: str, numel: int) -> None:
    dtype = torch.float32 if storage == "fp32" else torch.bfloat16
    p = nn.Parameter(torch.randn(numel).to(dtype))
    optimizer = AdamW([p], weights=None if storage == "fp32" else storage, states=states)
    p.grad = torch.randn(numel).to(dtype)
    optimizer.step()
    made = master_of(p)
    preset = "bf16-mixed" if storage == "fp32" else "bf16-lean" if storage != "plain" else "bf16-true"
    expected = tensor_bytes(f"{preset},weights={storage},states={states}", optimizer, numel)
    assert expected.weight == p.nbytes
    assert expected.gradient == p.grad.nbytes
    assert expected.residual == (made.nbytes() if made is not None else 0)
    assert expected.states == sum(t.nbytes for t in optimizer.state[p].values())


def test_memory_that_moves_under_the_same_tensors_is_found() -> None:
    """As when states are offloaded: `.data` is another tensor, the object is not."""
    results = []
    for moves in (False, True):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(300).bfloat16())
        optimizer = AdamW([p], lr=1e-2)
        for _ in range(4):
            p.grad = torch.randn(300).bfloat16()
            optimizer.step()
            if moves:
                master = master_of(p)
                assert master is not None
                assert master.residual is not None
                for t in (*optimizer.state[p].values(), master.residual, p):
                    t.data = t.data.clone()
        results.append((full_values(p), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor([3.0])])
def test_a_step_count_of_any_kind_is_loaded(count: Any) -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = AdamW([p])
    state = {"step": count, "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {0: state}})
    p.grad = torch.ones(4)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 4


def test_a_gradient_that_is_read_with_its_sign_turned() -> None:
    values, g = torch.linspace(-1, 1, 300), torch.linspace(-2, 3, 300)
    found = []
    for turned in (True, False):
        p = nn.Parameter(values.clone())
        optimizer = AdamW([p], lr=0.1)
        for _ in range(4):  # the long way, then repeated
            p.grad = torch._neg_view(-g) if turned else g.clone()
            optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)
