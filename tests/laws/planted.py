"""Gradients that are spoiled on purpose, and the arithmetic of the fp64 reference."""

import math
from typing import Any

import torch
from torch import Tensor

SPOILS = ("inf", "nan", "huge", "large", "limit")  # of a gradient; `large` is fit for use, `limit` overflows at large scales only


class Planted(torch.autograd.Function):
    """The input; in the backward pass notes the gradient's first value and spoils the gradient."""

    repeatable = True  # the backward pass may run several times, so that the scale can be calibrated

    @staticmethod
    def forward(ctx: Any, x: Tensor, plant: str, seen: list[float]) -> Tensor:
        ctx.plant, ctx.seen = plant, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.seen.append(float(gradient.reshape(-1)[0]))
        return spoiled(gradient, ctx.plant, 1.0), None, None


def norm_of(gradients: list[Tensor]) -> float:
    return float(torch.cat([g.reshape(-1) for g in gradients]).norm())


def multiply(tensors: list[Tensor], factor: float) -> None:
    for t in tensors:
        t.grad.mul_(factor)  # type: ignore[union-attr]


def spoiled(gradient: Tensor, plant: str, scale: float) -> Tensor:
    """`gradient` as the plant leaves it; `scale` is what it will yet be multiplied by."""
    if plant == "limit":  # as an fp16 activation gradient of four times the size
        return torch.where(gradient.abs() * 4 * scale > 65504, math.inf, gradient)
    result = gradient * {"huge": 1e30, "large": 1e15}.get(plant, 1.0)
    if plant in ("inf", "nan"):
        result[..., 0] = float(plant)
    return result
