"""SGD and Lion over every storage and codec: compiled and plain steps with equal bits, torch's numbers, torch's states, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import CheckpointError, ConfigError
from halfstep.kernels import cpu_kernels
from halfstep.optim import CODECS, HALF, SGD, STORAGES, AdamW, Lion, full_values, master_of, wrap
from halfstep.optim.onepass import OnePass
from halfstep.policy import tensor_bytes

Make = Callable[..., OnePass]
RULES: dict[str, Make] = {
    "sgd": lambda ps, **more: SGD(ps, 0.1, weight_decay=0.1, **more),
    "momentum": lambda ps, **more: SGD(ps, 0.1, 0.9, 0.25, 0.1, **more),
    "nesterov": lambda ps, **more: SGD(ps, 0.1, 0.9, 0.0, 0.1, True, **more),
    "lion": lambda ps, **more: Lion(ps, 0.01, weight_decay=0.1, **more),
}
SHAPES = ((4, 40), (130,), (3, 5, 7), (), (0, 3))
COMBINATIONS = [("fp32", torch.float32), *((s, d) for s in STORAGES if s != "fp32" for d in HALF)]
FULL = [(rule, *kind, states) for rule in RULES for kind in COMBINATIONS for states in CODECS if rule != "sgd" or states == "fp32"]


def made(dtype: torch.dtype) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in SHAPES]


def give(params: list[nn.Parameter], step: int, kind: torch.dtype | None = None) -> None:
    draws = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = None
        p.grad_dtype = kind or p.dtype
        p.grad = (torch.randn(p.shape, generator=draws) * 0.3).to(kind or p.dtype)


def look(params: list[nn.Parameter], optimizer: OnePass) -> list[Tensor]:
    """All bits: weights, residuals, states."""
    found: list[Tensor] = []
    for p in params:
        master = master_of(p)
        found += [p.detach(), *([] if master is None or master.residual is None else [master.residual])]
        found += [t for _, t in sorted(optimizer.state.get(p, {}).items())]
    return [t.clone() for t in found]


def raw(t: Tensor) -> Tensor:
    """Numbers that are equal only where the bits are."""
    return t.reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def alike(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(raw(a), raw(b)) for a, b in zip(these, those, strict=True))


def run(rule: str, storage: str, dtype: torch.dtype, states: str) -> list[Tensor]:
    """Six steps over two groups of different settings, gradients of every format, with and without a factor; one step goes without a gradient."""
    params = made(dtype)
    groups: list[dict[str, Any]] = [{"params": params[:2], "lr": torch.tensor(3e-3)}, {"params": params[2:], "maximize": True, "weight_decay": 0.0}]
    optimizer = RULES[rule](groups, weights=None if storage == "fp32" else storage, states=None if states == "fp32" else states, seed=7)
    for step in range(6):
        give(params, step, (dtype, torch.float32, torch.float16)[step % 3])
        params[1].grad = None if step in (0, 4) else params[1].grad  # its first step is not the others'
        optimizer.step(factor=(1.0, 0.37)[step % 2])
    return look(params, optimizer)


@pytest.mark.skipif(cpu_kernels() is None, reason="without numba, or with HALFSTEP_KERNELS=off, there is only the plain definition")
@pytest.mark.parametrize(("rule", "storage", "dtype", "states"), FULL)
def test_compiled_and_plain_steps_give_equal_bits(rule: str, storage: str, dtype: torch.dtype, states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = run(rule, storage, dtype, states)
    monkeypatch.setenv("HALFSTEP_KERNELS", "off")
    assert alike(compiled, run(rule, storage, dtype, states))


# --- steps that are refused


def test_a_refused_step_leaves_no_states_of_the_parameters_before_it() -> None:
    """The first buffer is the gradient, whatever the dampening: a buffer of zeros would make 0.25 of it."""
    first, resized = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(4))
    optimizer = SGD([first, resized], lr=1.0, momentum=0.5, dampening=0.75)
    resized.grad = torch.ones(4)
    optimizer.step()
    resized.grad, resized.data = None, torch.zeros(6)
    first.grad, resized.grad = torch.ones(2), torch.ones(6)
    for _ in range(2):
        with pytest.raises(ConfigError, match="parameter 1 had 4 elements"):
            optimizer.step()
    assert optimizer.steps == 1
    assert not optimizer.state.get(first)
    resized.grad = None
    optimizer.step()
    assert torch.equal(optimizer.state[first]["momentum_buffer"], torch.ones(2))
    assert torch.equal(first.detach(), -torch.ones(2))


@pytest.mark.parametrize("make", [AdamW, Lion])
def test_a_refused_step_leaves_no_masters_and_no_states(make: Any) -> None:
    narrow, table = nn.Parameter(torch.ones(3).bfloat16()), nn.Embedding(5, 3, sparse=True)
    optimizer = make([narrow, table.weight])
    narrow.grad = torch.ones(3).bfloat16()
    table(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(ConfigError, match=r"parameter 1 of shape .* has a sparse gradient"):
        optimizer.step()
    assert master_of(narrow) is None
    assert not any(optimizer.state.values())


@pytest.mark.parametrize("make", [AdamW, lambda ps: wrap(torch.optim.AdamW(ps))])
def test_a_weight_that_fp16_may_not_hold_is_refused_before_others_get_masters(make: Any) -> None:
    fits, large = nn.Parameter(torch.ones(3).half()), nn.Parameter(torch.full((3,), 4e4).half())
    optimizer = make([fits, large])
    fits.grad, large.grad = torch.ones(3).half(), torch.ones(3).half()
    with pytest.raises(ConfigError, match=r"magnitude above 2\^15"):
        optimizer.step()
    assert master_of(fits) is None


# --- torch's numbers


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("kind", [torch.float32, *HALF])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    ],
)
def test_fp32_weights_step_as_torchs_sgd_does(settings: dict[str, Any], kind: torch.dtype, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", switch)
    ours, theirs = nn.Parameter(torch.randn(70, 5)), nn.Parameter(torch.empty(70, 5))
    ours.grad_dtype = kind
    with torch.no_grad():
        theirs.copy_(ours)
    mine, stock = SGD([ours], lr=1e-2, **settings), torch.optim.SGD([theirs], lr=1e-2, **settings)
    for _ in range(30):
        ours.grad = torch.randn(70, 5).to(kind)
        theirs.grad = ours.grad.float()
        mine.step()
        stock.step()
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=16 * 2.0**-23 * 4)  # they fuse products and sums where the machine can
    for key, state in stock.state[theirs].items():
        assert state is None or torch.allclose(mine.state[ours][key], state, rtol=1e-6, atol=1e-6)


def test_the_first_buffer_is_the_gradient_whatever_the_dampening() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = SGD([p], lr=1.0, momentum=0.5, dampening=0.75)
    for value in (4.0, 8.0):
        p.grad = torch.full((2,), value)
        optimizer.step()
    assert optimizer.state[p]["momentum_buffer"].tolist() == [4.0, 4.0]  # 0.5 * 4 + 0.25 * 8
    assert p.tolist() == [-8.0, -8.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_fp64_and_complex_weights_step_as_torchs_sgd_does(dtype: torch.dtype) -> None:
    ours, theirs = nn.Parameter(torch.randn(40, dtype=dtype)), nn.Parameter(torch.empty(40, dtype=dtype))
    with torch.no_grad():
        theirs.copy_(ours)
    settings = {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    mine, stock = SGD([ours], states="int8", **settings), torch.optim.SGD([theirs], **settings)
    for _ in range(20):
        ours.grad = torch.randn(40, dtype=dtype)
        theirs.grad = ours.grad.clone()
        mine.step()
        stock.step()
    tight = 1e-5 if dtype == torch.complex64 else 1e-13
    torch.testing.assert_close(ours, theirs, rtol=tight, atol=tight)
    assert mine.state[ours]["momentum_buffer"].dtype == dtype


def test_momentum_that_is_switched_off_and_on_goes_on_with_its_buffer() -> None:
    """As in torch: without momentum the buffer waits, and new weights get none."""
    ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    mine, stock = SGD([ours], lr=0.25, momentum=0.5), torch.optim.SGD([theirs], lr=0.25, momentum=0.5)
    for step in range(12):
        for p, optimizer in ((ours, mine), (theirs, stock)):
            optimizer.param_groups[0]["momentum"] = 0.0 if 4 <= step < 8 else 0.5
            p.grad = torch.full((3,), float(step))
            optimizer.step()
        assert torch.equal(ours, theirs)
        assert torch.equal(mine.state[ours]["momentum_buffer"], stock.state[theirs]["momentum_buffer"])


def test_sparse_gradients_of_an_embedding_are_stepped_as_torchs_sgd_does() -> None:
    found = []
    for make in (SGD, torch.optim.SGD):
        torch.manual_seed(0)
        table = nn.Embedding(10, 3, sparse=True)
        optimizer = make(table.parameters(), lr=0.5)
        for rows in ([1, 1, 4], [2], [4, 9]):
            optimizer.zero_grad()
            table(torch.tensor(rows)).square().sum().backward()
            optimizer.step()
        found.append(table.weight.detach())
    assert torch.equal(*found)


# --- 16-bit weights


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", HALF)
def test_split_weights_follow_fp32_ones(rule: str, dtype: torch.dtype) -> None:
    """By the same kernel, 50 steps: an ulp of the largest weight a step at most."""
    narrow = made(dtype)
    wide = [nn.Parameter(p.detach().float()) for p in narrow]
    ours, theirs = RULES[rule](narrow, weights="split"), RULES[rule](wide)
    largest = [float(p.detach().abs().max()) if p.numel() else 0.0 for p in wide]
    for step in range(50):
        give(narrow, step)
        give(wide, step, dtype)
        ours.step()
        theirs.step()
        largest = [max(was, float(p.detach().abs().max()) if p.numel() else 0.0) for was, p in zip(largest, wide, strict=True)]
    for p, q, top in zip(narrow, wide, largest, strict=True):
        assert torch.equal(p, full_values(p).to(dtype))
        assert not p.numel() or float((full_values(p) - q.detach()).abs().max()) <= 50 * 2.0**-23 * top


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", HALF)
def test_split_weights_follow_fp32_ones_for_a_thousand_steps(rule: str, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(0)
    start = (torch.randn(10_000, generator=draws) * 0.02).to(dtype)
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    wide.grad_dtype = dtype
    ours, theirs = RULES[rule]([narrow], weights="split"), RULES[rule]([wide])
    largest = wide.detach().abs()
    for _ in range(1000):
        narrow.grad = (torch.randn(10_000, generator=draws) * 1e-3).to(dtype)
        wide.grad = narrow.grad
        ours.step()
        theirs.step()
        largest = torch.maximum(largest, wide.detach().abs())
    assert bool(((full_values(narrow) - wide.detach()).abs() <= 1000 * 2.0**-23 * largest.clamp(min=2.0**-14)).all())


@pytest.mark.parametrize("states", CODECS)
@pytest.mark.parametrize("storage", ["fp32", "split", "split24", "stochastic"])
@pytest.mark.parametrize("rule", RULES)
def test_bytes_are_those_that_the_policy_counts(rule: str, storage: str, states: str) -> None:
    dtype = torch.float32 if storage == "fp32" else torch.bfloat16
    p = nn.Parameter(torch.randn(1000).to(dtype))
    optimizer = RULES[rule]([p], policy=f"{'bf16-mixed' if storage == 'fp32' else 'bf16-lean'},weights={storage},states={states}")
    give([p], 0)
    optimizer.step()
    residual = getattr(master_of(p), "residual", None)
    expected = tensor_bytes(f"{'bf16-mixed' if storage == 'fp32' else 'bf16-lean'},weights={storage},states={states}", optimizer, 1000)
    assert expected.weight == p.nbytes
    assert expected.residual == (0 if residual is None else residual.nbytes)
    assert expected.states == sum(t.nbytes for t in optimizer.state.get(p, {}).values())


# --- repeats, copies, states


@pytest.mark.skipif(cpu_kernels() is None, reason="steps are repeated by the compiled kernels")
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_repeated_with_the_same_bits_and_changes_are_noticed(rule: str) -> None:
    results = []
    for repeats in (True, False):
        params = made(torch.bfloat16)
        optimizer = RULES[rule](params, weights="split24")
        repeated = []
        for step in range(9):
            give(params, step)
            if step == 5 and rule != "lion":  # other states are in use
                optimizer.param_groups[0].update(momentum=0.0 if rule != "sgd" else 0.9, nesterov=False)
            if step == 7:
                optimizer.param_groups[0]["lr"] = 0.5
            if not repeats:
                optimizer._compiled._repeat = None
            before = optimizer._compiled._repeat
            optimizer.step(factor=0.5)
            repeated.append(before is not None and optimizer._compiled._repeat is before)
        results.append((look(params, optimizer), repeated))
    assert alike(results[0][0], results[1][0])
    assert results[0][1] == [False, False, True, True, True, rule == "lion", rule == "lion", True, True]
    assert not any(results[1][1])


@pytest.mark.parametrize("states", CODECS)
@pytest.mark.parametrize("rule", ["momentum", "lion"])
def test_a_saved_state_goes_on_with_the_same_bits(rule: str, states: str) -> None:
    params, others = made(torch.bfloat16), made(torch.bfloat16)
    optimizer, other = (RULES[rule](ps, weights="split24", states=states, seed=3) for ps in (params, others))
    for step in range(3):
        give(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [p.detach() for p in params]), file)
    file.seek(0)
    saved, weights = torch.load(file, weights_only=True)
    with torch.no_grad():
        for p, w in zip(others, weights, strict=True):
            p.copy_(w)
    other.load_state_dict(saved)
    held = nn.ParameterList(params)
    copies, twin = copy.deepcopy((held, optimizer))
    for step in range(3, 6):
        for ps, one in ((params, optimizer), (others, other), (list(copies), twin)):
            give(ps, step)
            one.step()
    assert alike(look(params, optimizer), look(others, other))
    assert alike(look(params, optimizer), look(list(copies), twin))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_torchs_sgd_state_is_loaded(momentum: float, dtype: torch.dtype) -> None:
    """Also one that it kept in 16 bits beside 16-bit weights; it goes on in fp32. And torch loads ours."""
    theirs, ours = (nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(2))
    stock, mine = torch.optim.SGD([theirs], 0.25, momentum), SGD([ours], 0.25, momentum)
    for value in (1.0, 3.0):
        theirs.grad = torch.full((5,), value, dtype=dtype)
        stock.step()
    state = stock.state_dict()
    if not momentum:
        state["state"] = {0: {"momentum_buffer": None}}  # as some versions write it
    mine.load_state_dict(state)
    with torch.no_grad():
        ours.copy_(theirs)
    buffer = mine.state[ours].get("momentum_buffer")
    assert buffer is None if not momentum else (buffer.dtype, buffer.tolist()) == (torch.float32, [3.5] * 5)
    ours.grad = torch.full((5,), 2.0, dtype=dtype)
    mine.step()
    theirs.grad = ours.grad.clone()
    stock.step()
    assert torch.equal(ours, theirs)
    back = torch.optim.SGD([nn.Parameter(torch.ones(5))], 0.25, momentum)
    back.load_state_dict({key: value for key, value in mine.state_dict().items() if key in ("state", "param_groups")})
    assert not momentum or back.state[back.param_groups[0]["params"][0]]["momentum_buffer"].tolist() == [3.75] * 5


@pytest.mark.parametrize("make", [Lion, AdamW])
@pytest.mark.parametrize("dtype", HALF)
def test_states_that_were_kept_in_the_weights_format_are_loaded(make: Any, dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(5, dtype=dtype))
    optimizer = make([p])
    keys = {key: torch.full((5,), 0.5, dtype=dtype) for key in optimizer.roles}
    counted = {"step": torch.tensor(3.0)} if make is AdamW else {}
    groups = [{key: value for key, value in optimizer.param_groups[0].items() if key != "params"} | {"params": [0]}]
    optimizer.load_state_dict({"state": {0: keys | counted}, "param_groups": groups})
    assert {optimizer.state[p][key].dtype for key in keys} == {torch.float32}
    give([p], 0)
    optimizer.step()
    assert not torch.equal(full_values(p), torch.ones(5))


def test_a_state_of_another_optimizer_is_refused() -> None:
    p = nn.Parameter(torch.ones(5))
    sgd, lion = SGD([p], momentum=0.9), Lion([p])
    give([p], 0)
    sgd.step()
    with pytest.raises(CheckpointError, match="parameter 0 has momentum_buffer, which Lion does not keep"):
        lion.load_state_dict(sgd.state_dict())


# --- what is refused

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lr": (lambda: SGD(made(torch.float32), -1.0), r"lr=-1.0 is out of range"),
    "momentum": (lambda: SGD(made(torch.float32), momentum=-0.5), r"momentum=-0.5 is out"),
    "weight_decay": (lambda: SGD(made(torch.float32), weight_decay=-0.5), r"weight_decay=-0.5 is out"),
    "nesterov without momentum": (lambda: SGD(made(torch.float32), nesterov=True), r"nesterov=True with momentum=0.0"),
    "nesterov with dampening": (lambda: SGD(made(torch.float32), 0.1, 0.9, 0.5, nesterov=True), r"nesterov=True .* dampening=0.5"),
    "dampening without momentum": (lambda: SGD(made(torch.float32), dampening=0.5), r"dampening=0.5 has no effect without momentum"),
    "states without momentum": (lambda: SGD(made(torch.float32), states="int8"), r"states=int8 has no effect: without momentum"),
    "storage": (lambda: SGD(made(torch.float32), weights="splitt"), r"'splitt' is not known.*'split'"),
    "a group": (lambda: SGD([{"params": made(torch.float32), "nesterov": True}]), r"nesterov=True with momentum=0.0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_cannot_work_are_refused(what: str) -> None:
    make, said = REFUSED[what]
    with pytest.raises(ConfigError, match=said):
        make()
