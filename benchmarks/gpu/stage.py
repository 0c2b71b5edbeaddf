"""Everything between backward and the next forward: measure, clip, update, on tensors of the shapes of GPT-2."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import contenders, models
from benchmarks.gpu.measure import Timing, Waits, compared, in_turns, ratios, wait
from benchmarks.gpu.setting import Setting, error_text
from halfstep.amp import GradScaler
from halfstep.kernels import kernels_for
from halfstep.optim import SGD, AdamW, Lion

RATE, SCALE = 1e-4, 1024.0


class Give(torch.autograd.Function):
    """A loss whose backward pass gives these gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:  # noqa: D102
        ctx.gradients = gradients
        return torch.zeros((), device=gradients[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        return (None, *ctx.gradients)


@dataclass
class Row:
    """One way to take the step. prepare is not timed. moved: bytes that must be read and written, each tensor twice at most. A runner."""

    prepare: Callable[[], Any]
    work: Callable[[], Any]
    moved: float
    device: torch.device

    def run(self, steps: int, waits: Waits | None = None) -> Timing:
        """See Runner."""
        seconds = host = 0.0
        for _ in range(steps):
            self.prepare()
            wait(self.device)
            begun = time.perf_counter()
            with waits.counted() if waits is not None else nullcontext():
                self.work()
            host += time.perf_counter() - begun
            wait(self.device)
            seconds += time.perf_counter() - begun
        return Timing(steps, seconds, host)

    def close(self) -> None:
        """See Runner."""
        self.prepare = self.work = lambda: None


def run(setting: Setting) -> None:
    """The part `stage`."""
    shapes = [p.shape for p in models.made("gpt2-124m", setting.small, torch.device("meta")).parameters()]
    setting.tell(tensors=len(shapes), elements=sum(s.numel() for s in shapes))
    rows: dict[str, Row] = {}
    for name, make in ROWS.items():
        try:
            rows[name] = make(shapes, setting)
            rows[name].run(2)
        except contenders.Missing as reason:
            setting.add("left_out", name, str(reason))
        except Exception as error:  # noqa: BLE001  one row that fails stops no other
            rows.pop(name, None)
            setting.add("left_out", name, error_text(error))
    taken = in_turns(rows, dict.fromkeys(rows, 2 if setting.small else 5), setting.rounds)
    ours = [n for n in rows if n.startswith("halfstep")]
    kinds = {n: next((rule for rule in OTHERS if f" {rule}," in n), "AdamW") for n in ours}
    setting.tell(**compared(taken, ("torch", "torch again"), ("torch", *contenders.LEAN_PEERS), [n for n in ours if kinds[n] == "AdamW"]))
    over = {n: ratios(taken[n], taken[OTHERS[kinds[n]]]) for n in ours if OTHERS.get(kinds[n]) in taken}
    setting.tell(over_best_peer=setting.found.get("over_best_peer", {}) | over, kernels=kernels_for(setting.device) is not None)
    bandwidth = setting.options.get("rates", {}).get("copy_bytes")
    for name, row in rows.items():
        waits = Waits(setting.device)
        row.run(2, waits)
        setting.add("waits_per_step", name, waits.per_step(2))
        if bandwidth:
            setting.add("floor_ms", name, round(1e3 * row.moved / bandwidth, 3))


def _tensors(shapes: list[torch.Size], setting: Setting, dtype: torch.dtype, scale: float) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Weights and the gradients that a backward pass would leave."""
    torch.manual_seed(0)
    weights = [nn.Parameter((torch.randn(s, device=setting.device) * 0.02).to(dtype)) for s in shapes]
    return weights, [(torch.randn(s, device=setting.device) * 1e-3 * scale).to(dtype) for s in shapes]


def _torch(
    shapes: list[torch.Size],
    setting: Setting,
    fp16: bool = False,
    make: Callable[..., Any] | None = None,
    dtype: torch.dtype = torch.float32,
    states: float = 8,
) -> Row:
    """A plain loop: torch's scaler where there is one, clip_grad_norm_ and an optimizer. states: their bytes per element."""
    weights, gradients = _tensors(shapes, setting, dtype, SCALE if fp16 else 1.0)
    optimizer = make(weights) if make is not None else torch.optim.AdamW(weights, lr=RATE, fused=True)
    scaler = torch.amp.GradScaler(setting.device.type, init_scale=SCALE, enabled=fp16)
    scaler.scale(torch.ones((), device=setting.device))  # the scaler makes its tensors
    for p in weights:
        p.grad = torch.empty_like(p)

    def prepare() -> None:
        torch._foreach_copy_([p.grad for p in weights], gradients)

    def work() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, 1.0)
        scaler.step(optimizer)
        scaler.update()

    each = 4 if dtype == torch.float32 else 2
    return Row(prepare, work, sum(s.numel() for s in shapes) * (2 * each + 2 * (4 + states)), setting.device)


def _flashoptim(shapes: list[torch.Size], setting: Setting) -> Row:
    contenders.needs("flashoptim", setting)
    from flashoptim import FlashAdamW

    return _torch(shapes, setting, make=lambda weights: FlashAdamW(weights, lr=RATE), dtype=torch.bfloat16)


def _torchao(shapes: list[torch.Size], setting: Setting) -> Row:
    contenders.needs("torchao", setting)
    from torchao.optim import AdamW8bit

    return _torch(shapes, setting, make=lambda weights: AdamW8bit(weights, lr=RATE, bf16_stochastic_round=True), dtype=torch.bfloat16)


class ForeachLion(torch.optim.Optimizer):
    """Lion in torch's operations over all tensors at once, which is what torch offers for it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: D102
        held: list[Any] = self.param_groups[0]["params"]
        for p in held:
            self.state[p].setdefault("exp_avg", torch.zeros_like(p))
        gradients, averages, rate = [p.grad for p in held], [self.state[p]["exp_avg"] for p in held], self.param_groups[0]["lr"]
        direction = torch._foreach_lerp(averages, gradients, 0.1)
        torch._foreach_sign_(direction)
        torch._foreach_mul_(held, 1 - rate * 0.1)
        torch._foreach_add_(held, direction, alpha=-rate)
        torch._foreach_lerp_(averages, gradients, 0.01)


def _sgd(weights: list[nn.Parameter]) -> Any:
    return torch.optim.SGD(weights, lr=RATE, momentum=0.9, fused=True)


KEPT = {"fp32": 4.0, "int8": 1 + 4 / 128}  # bytes of a moment; AdamW has two
OURS: dict[str, Callable[..., Any]] = {"AdamW": AdamW, "SGD": lambda *given, **named: SGD(*given, momentum=0.9, **named), "Lion": Lion}
BESIDE = {None: 4, "split": 4, "split24": 3}  # bytes of a weight with its residual


def _ours(
    shapes: list[torch.Size], setting: Setting, weights: str | None, states: str, fp16: bool = False, fused: bool = False, rule: str = "AdamW"
) -> Row:
    """`scaler.step(optimizer, max_norm=1.0)`. fused: torch's fused AdamW on fp32 weights, else halfstep's optimizer of this rule."""
    dtype = torch.float32 if weights is None else torch.float16 if fp16 else torch.bfloat16
    held, gradients = _tensors(shapes, setting, dtype, 1.0)
    given = [g * SCALE if fp16 else g for g in gradients]
    optimizer: Any = torch.optim.AdamW(held, lr=RATE, fused=True) if fused else OURS[rule](held, lr=RATE, weights=weights, states=states)
    scaler = GradScaler(init_scale=SCALE, strategy="stock", enabled=fp16)

    def prepare() -> None:
        optimizer.zero_grad()
        scaler.scale(Give.apply(given, *held)).backward()

    def work() -> None:
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()

    per = 2 * gradients[0].element_size() + 2 * (BESIDE[weights] + (2 if rule == "AdamW" else 1) * KEPT[states])
    return Row(prepare, work, sum(s.numel() for s in shapes) * per, setting.device)


ROWS: dict[str, Callable[[list[torch.Size], Setting], Row]] = {
    "torch": _torch,
    "torch again": _torch,
    "torch fp16": lambda shapes, setting: _torch(shapes, setting, fp16=True),
    "halfstep, torch's fused AdamW": lambda shapes, setting: _ours(shapes, setting, None, "fp32", fused=True),
    "halfstep, torch's fused AdamW, fp16": lambda shapes, setting: _ours(shapes, setting, None, "fp32", fp16=True, fused=True),
    "halfstep AdamW, fp32": lambda shapes, setting: _ours(shapes, setting, None, "fp32"),
    "halfstep AdamW, split": lambda shapes, setting: _ours(shapes, setting, "split", "fp32"),
    "halfstep AdamW, split, int8": lambda shapes, setting: _ours(shapes, setting, "split", "int8"),
    "halfstep AdamW, split24, int8": lambda shapes, setting: _ours(shapes, setting, "split24", "int8"),
    "halfstep AdamW, split, fp16": lambda shapes, setting: _ours(shapes, setting, "split", "fp32", fp16=True),
    "flashoptim": _flashoptim,
    "torchao": _torchao,
    "torch SGD": lambda shapes, setting: _torch(shapes, setting, make=_sgd, states=4),
    "halfstep SGD, split": lambda shapes, setting: _ours(shapes, setting, "split", "fp32", rule="SGD"),
    "halfstep SGD, split, int8": lambda shapes, setting: _ours(shapes, setting, "split", "int8", rule="SGD"),
    "foreach Lion": lambda shapes, setting: _torch(shapes, setting, make=lambda weights: ForeachLion(weights, RATE), states=4),
    "halfstep Lion, split": lambda shapes, setting: _ours(shapes, setting, "split", "fp32", rule="Lion"),
    "halfstep Lion, split, int8": lambda shapes, setting: _ours(shapes, setting, "split", "int8", rule="Lion"),
}
OTHERS = {"SGD": "torch SGD", "Lion": "foreach Lion"}  # what rows of ours are compared with, where it is no AdamW
