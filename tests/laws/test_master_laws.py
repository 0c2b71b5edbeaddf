"""Laws of 16-bit weights: no update is lost, decay arrives, states fade, and a split weight is an fp32 weight."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.optim import HALF, AdamW, attach, full_values

STORAGES = ["split", "split24", "kahan", "stochastic", "plain"]
COUNT = 10_000


def drawn(step: int, count: int = COUNT) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(step))


def run(start: Tensor, dtype: torch.dtype, storage: str | None, steps: int, gradient: Any, **settings: Any) -> tuple[nn.Parameter, AdamW]:
    """Some steps from the 16-bit numbers nearest to `start`. storage: None for fp32 weights that begin there."""
    p = nn.Parameter(start.to(dtype) if storage is not None else start.to(dtype).float())
    p.grad_dtype = dtype  # fp32 weights too take the 16-bit gradients
    if storage is not None:
        attach(p, storage)
    optimizer = AdamW([p], **settings)
    for step in range(steps):
        p.grad = gradient(step).to(dtype)
        optimizer.step()
    return p, optimizer


# --- moved weights


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("storage", ["split", "split24", "kahan"])
def test_small_updates_move_nearly_every_weight(storage: str, dtype: torch.dtype) -> None:
    start = drawn(-1) * 0.02  # as a language model's
    p, _ = run(start, dtype, storage, 20, lambda step: drawn(step) * 0.1 + 0.02, lr=1e-5)
    moved = (full_values(p) != start.to(dtype).float()).double().mean()
    assert float(moved) > 0.99


def test_without_masters_most_bf16_weights_stay_where_they_are() -> None:
    start = drawn(-1) * 0.02
    p, _ = run(start, torch.bfloat16, "plain", 20, lambda step: drawn(step) * 0.1 + 0.02, lr=1e-5)
    assert float((p.detach() != start.bfloat16()).double().mean()) < 0.3


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("storage", ["stochastic", "split24"])
def test_rounding_by_chance_moves_weights_as_fp32_does_in_the_mean(storage: str, dtype: torch.dtype) -> None:
    start = drawn(-1) * 0.02

    def moved(storage: str | None) -> Tensor:
        p, _ = run(start, dtype, storage, 20, lambda step: drawn(step) * 0.1 + 0.05, lr=1e-5, weight_decay=0.0)
        return full_values(p).double() - start.to(dtype).double()

    off = moved(storage) - moved(None)
    error = float(off.std()) / COUNT**0.5
    assert abs(float(off.mean())) < 3 * error
    assert abs(float(moved(None).mean())) > 10 * error  # the law can tell moving from standing still


# --- decay


def decayed(storage: str | None, dtype: torch.dtype) -> Tensor:
    """1.0 after 1000 steps of lr 1e-4 times weight decay 0.1: 0.990 in fp32."""
    p, _ = run(torch.ones(COUNT), dtype, storage, 1000, lambda step: torch.zeros(COUNT), lr=1e-4, weight_decay=0.1)
    return full_values(p)


@pytest.mark.parametrize("dtype", HALF)
def test_decay_arrives_at_every_split_weight(dtype: torch.dtype) -> None:
    found = decayed("split", dtype)
    assert float((found - 0.990).abs().max()) < 1e-3
    assert float((found - decayed(None, dtype)).abs().max()) <= 1000 * 2.0**-24


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("storage", ["split24", "stochastic"])
def test_decay_arrives_in_the_mean_where_rounding_is_by_chance(storage: str, dtype: torch.dtype) -> None:
    assert abs(float(decayed(storage, dtype).double().mean()) - 0.990) < 1e-3


@pytest.mark.parametrize("dtype", HALF)
def test_decay_arrives_within_the_floor_of_a_compensation(dtype: torch.dtype) -> None:
    found = decayed("kahan", dtype).double()
    floor = 2.0**-18 if dtype == torch.bfloat16 else 2.0**-24  # of the weight, in each write
    assert float((found - 0.99005).abs().max()) <= 1000 * floor + 1e-5
    assert float(found.max()) < 1 - 2.0**-8


@pytest.mark.parametrize("dtype", HALF)
def test_decay_never_arrives_without_anything_beside_the_weight(dtype: torch.dtype) -> None:
    assert bool((decayed("plain", dtype) == 1.0).all())


# --- states


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_a_second_moment_fades_as_it_should(states: str, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", switch)
    count, steps = (COUNT, 2000) if switch == "on" else (2560, 200)  # the plain definition gives the same bits, slower
    p = nn.Parameter(torch.zeros(count))
    optimizer = AdamW([p], lr=0.0, betas=(0.9, 0.999), states=states)
    first = torch.exp(drawn(0, count))  # magnitudes over three decades, of their squares over six
    p.grad = first
    optimizer.step()
    p.grad = torch.zeros(count)
    for _ in range(steps):
        optimizer.step()
    share = optimizer.decoded(optimizer.state[p], "exp_avg_sq", p) / (first.square() * (1 - 0.999))
    assert abs(float(share.double().mean()) / 0.999**steps - 1) < 0.03
    assert switch == "off" or 0.999**steps == pytest.approx(0.135, abs=1e-3)


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_updates_under_encoded_states_are_near_those_of_fp32_states(states: str) -> None:
    columns = torch.logspace(0, -4, 100).repeat(10)  # of very different size within a block

    def moved(states: str) -> Tensor:
        p, _ = run(torch.zeros(1000), torch.float32, None, 50, lambda step: drawn(step, 1000) * columns, lr=1e-3, weight_decay=0.0, states=states)
        return p.detach()

    wide, narrow = moved("fp32"), moved(states)
    assert float(narrow.abs().max()) <= 4 * float(wide.abs().max())
    large = columns > 1e-2
    assert float((narrow - wide)[large].norm() / wide[large].norm()) < (0.05 if states == "bf16" else 0.5)


# --- split weights are fp32 weights


@pytest.mark.parametrize("dtype", HALF)
def test_split_weights_stay_within_an_ulp_a_step_of_fp32_weights(dtype: torch.dtype) -> None:
    count, steps = 4096, 1000
    start = drawn(-1, count) * torch.logspace(-3, 0.5, count)
    pair = [nn.Parameter(start.to(dtype)), nn.Parameter(start.to(dtype).float())]
    largest = pair[1].detach().abs()
    optimizers = [AdamW([p], lr=1e-3, weight_decay=0.1) for p in pair]
    pair[1].grad_dtype = dtype
    for step in range(steps):
        gradient = (drawn(step, count) * 0.01 + 0.002).to(dtype)
        for p, optimizer in zip(pair, optimizers, strict=True):
            p.grad = gradient
            optimizer.step()
        largest = torch.maximum(largest, pair[1].detach().abs())
    off = (full_values(pair[0]).double() - pair[1].detach().double()).abs()
    assert bool((off <= steps * 2.0**-23 * largest.double()).all())
    assert bool((pair[1].detach() != start.to(dtype).float()).all())


# --- against torch and the definition in fp64


def definition(start: Tensor, gradients: list[Tensor], lr: float, beta1: float, beta2: float, eps: float, decay: float) -> Tensor:
    """AdamW in fp64, as it is written in the paper."""
    w, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double()
        w = w - lr * decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return w


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("kind", [torch.float32, *HALF])
@pytest.mark.parametrize("narrow", [None, *HALF])
def test_steps_are_as_near_to_the_definition_as_torchs_are(
    narrow: torch.dtype | None, kind: torch.dtype, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFSTEP_KERNELS", switch)
    start = drawn(-1, 2000) * 0.1
    start = start if narrow is None else start.to(narrow).float()
    gradients = [(drawn(step, 2000) * 0.01).to(kind) for step in range(200)]
    exact = definition(start, gradients, 1e-3, 0.9, 0.999, 1e-8, 0.1)

    def stepped(p: nn.Parameter, optimizer: torch.optim.Optimizer, kind: torch.dtype) -> Tensor:
        p.grad_dtype = kind
        for g in gradients:
            p.grad = g.to(kind)
            optimizer.step()
        return (full_values(p).double() - exact).abs()

    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    own = nn.Parameter(start.clone() if narrow is None else start.to(narrow))
    ours = stepped(own, AdamW([own], **settings), kind)
    theirs = []
    for way in ("fused", "foreach"):
        p = nn.Parameter(start.clone())
        theirs.append(stepped(p, torch.optim.AdamW([p], **settings, **{way: True}), torch.float32))
    assert float(ours.max()) <= 1.25 * max(float(t.max()) for t in theirs)
    assert float(ours.mean()) <= 1.05 * max(float(t.mean()) for t in theirs)
    assert float(ours.max()) <= 1024 * 2.0**-23 * float(exact.abs().max())
