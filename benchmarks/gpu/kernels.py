"""Whether the device's kernels for AdamW, SGD and Lion give the bits of the plain definitions on a CPU, in every storage."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.laws import same, without_kernels
from benchmarks.gpu.setting import Setting, error_text
from halfstep.kernels import kernels_for
from halfstep.optim import SGD, AdamW, Lion, master_of

LONGEST = 100  # seconds: each case is compiled first
RULES: dict[str, Callable[..., Any]] = {
    "AdamW": lambda held, **given: AdamW(held, lr=1e-2, **given),
    "SGD": lambda held, **given: SGD(held, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01, **given),
    "Lion": lambda held, **given: Lion(held, lr=1e-3, weight_decay=0.1, **given),
}
WEIGHTS = [(None, torch.float32)]
WEIGHTS += [(name, dtype) for name in ("split", "split24", "kahan", "stochastic", "plain") for dtype in (torch.bfloat16, torch.float16)]
STATES = ("fp32", "bf16", "int8")
SHAPES = ((130, 7), (5,), (1000, 701))
SMALL = ((130, 7), (5,), (40, 71))


def run(setting: Setting) -> None:
    """The part `kernels`."""
    there = kernels_for(setting.device) is not None
    setting.add("laws", "kernels are there", {"holds": there, "seen": f"on {setting.device}" if there else "none: the log says why"})
    if not there:
        return
    begun, shapes = time.monotonic(), SMALL if setting.small else SHAPES
    cases = [(rule, *weights, STATES[(i + j) % 3]) for i, weights in enumerate(WEIGHTS) for j, rule in enumerate(RULES)]
    for rule, weights, dtype, states in cases[:4] if setting.small else cases:
        name = f"{rule}, {weights or 'fp32'} {str(dtype).removeprefix('torch.')}, states {states}"
        if time.monotonic() - begun > LONGEST:
            setting.add("left_out", name, "no time left")
            continue
        try:
            found, taken = _ends(rule, weights, dtype, states, shapes, setting.device)
            with without_kernels():
                wanted, _ = _ends(rule, weights, dtype, states, shapes, torch.device("cpu"))
            wrong = [key for key in wanted if not same(found[key], wanted[key])]
            said = (
                f"other bits: {', '.join(wrong)}" if wrong else f"{taken} weights by the kernel, {sum(t.numel() for t in wanted.values())} elements"
            )
            setting.add("laws", name, {"holds": not wrong and taken == len(shapes), "seen": said})
        except Exception as error:  # noqa: BLE001  a case that cannot be tried stops no other
            setting.add("laws", name, {"holds": None, "seen": error_text(error)})
    _squares(setting)


def _ends(
    rule: str, weights: str | None, dtype: torch.dtype, states: str, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[dict[str, Tensor], int]:
    """Weights, residuals and states after four steps, and how many weights a kernel has taken. The first one's gradients lie at odd addresses."""
    draws = torch.Generator().manual_seed(3)
    held = [nn.Parameter((torch.randn(shape, generator=draws) * 0.1).to(dtype).to(device)) for shape in shapes]
    optimizer, bucket = RULES[rule](held, weights=weights, states=states), torch.zeros(1000, dtype=dtype, device=device)
    for step in range(4):
        for number, p in enumerate(held):
            gradient = (torch.randn(p.shape, generator=draws) * 2.0 ** (step - 2)).to(dtype).to(device)
            p.grad = bucket[1 : 1 + gradient.numel()].view(p.shape).copy_(gradient) if number == 0 else gradient
        optimizer.step(factor=0.37)
    found = {f"weight {n}": p.detach() for n, p in enumerate(held)}
    found |= {f"residual {n}": m.residual for n, p in enumerate(held) if (m := master_of(p)) is not None and m.residual is not None}
    found |= {f"{key} {n}": t for n, p in enumerate(held) for key, t in optimizer.state[p].items() if key != "step"}
    plan = optimizer._compiled._plan
    return found, 0 if plan is None else len(plan.items)


def _squares(setting: Setting) -> None:
    """Sums of squares against fp64, and twice the same bits."""
    kernels: Any = kernels_for(setting.device)
    tensors = [torch.randn(n, device=setting.device).mul_(1e15).to(d) for n in (1, 4097, 3_000_001) for d in (torch.float32, torch.bfloat16)]
    one, other = kernels.squares(tensors), kernels.squares(tensors)
    wanted = torch.stack([t.double().square().sum() for t in tensors])
    off = float(((one[0] - wanted).abs() / wanted).max())
    top = torch.equal(one[1], torch.stack([t.float().abs().max() for t in tensors]))
    holds = off < 1e-12 and top and all(map(same, one, other))
    setting.add("laws", "squares", {"holds": holds, "seen": f"{off:.1e} from fp64, largest magnitudes {'equal' if top else 'others'}"})
