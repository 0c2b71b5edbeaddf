"""Gradients of 16-bit weights: 16-bit while there is one backward pass, fp32 once there is more to add up or to divide.

Source of the need: a sum of n 16-bit gradients in 16 bits is off by up to n ulps; fp16 gradients divided by the loss scale underflow.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from halfstep.optim import HALF
from halfstep.step.marks import parameters
from halfstep.step.record import Record
from halfstep.step.state import StepState


def is_narrow(p: Tensor) -> bool:
    """Whether a parameter is 16-bit and holds a 16-bit gradient."""
    return p.dtype in HALF and p.grad is not None and p.grad.dtype in HALF and p.grad.layout == torch.strided


def widen(state: StepState, chosen: Iterable[Tensor]) -> None:
    """Turn the 16-bit gradients of these parameters into fp32 ones of the same values; later backward passes add to them in fp32.

    Memory: 4 bytes per weight instead of 2, until the gradient is cleared.
    """
    changed: dict[int, Tensor] = {}
    for p in chosen:
        if p.dtype not in HALF or not is_narrow(p):
            continue
        old = p.grad
        assert old is not None
        p.grad, p.grad_dtype = None, torch.float32
        p.grad = new = old.float()
        if hasattr(old, "made_by"):
            new.made_by = old.made_by  # type: ignore[attr-defined]
        state.ledger.replace(p, old, new)
        state.widened[id(p)] = ref(p)
        changed[id(old)] = new
    if changed:
        for record in state.records.values():
            _mark_anew(record, changed)


def _mark_anew(record: Record, changed: dict[int, Tensor]) -> None:
    """What was judged stays judged: the values are the same."""

    def twin(mark: tuple[ref[Tensor], int]) -> tuple[ref[Tensor], int]:
        old = mark[0]()
        new = changed.get(id(old)) if old is not None and old._version == mark[1] else None
        return mark if new is None else (ref(new), new._version)

    record.marks, record.spent = tuple(map(twin, record.marks)), tuple(map(twin, record.spent))


def before_a_backward_pass(state: StepState, known: Iterable[Tensor]) -> None:
    """What comes adds to gradients of `known` that wait: those are fp32 from now on. Where gradients were cleared, 16 bits do again."""
    widen(state, known)
    for i, owner in list(state.widened.items()):
        p = owner()
        if p is None or p.grad is None:
            del state.widened[i]
            if p is not None and p.dtype in HALF:
                p.grad_dtype = p.dtype
    if state.agree is not None and state.noticed:
        _widen_together(state)


def _widen_together(state: StepState) -> None:
    """A weight whose gradient waits in fp32 on some rank will have one in fp32 on all, also where no loss has reached it yet in this step."""
    held = [p for p in state.owned() if p.dtype in HALF]
    if state.agree is None or not held:
        return
    wide = state.agree(torch.tensor([float(p.grad is not None and p.grad.dtype == torch.float32) for p in held]))
    for p, elsewhere in zip(held, wide.tolist(), strict=True):
        if elsewhere and p.grad is None:
            p.grad_dtype = torch.float32
            state.widened[id(p)] = ref(p)


def divides_late(optimizer: Any) -> bool:
    """Whether an optimizer takes its gradients times a factor, with nobody looking at them between."""
    return bool(getattr(optimizer, "takes_factor", False)) and not optimizer._optimizer_step_pre_hooks and _knows_factor(type(optimizer).step)


@functools.cache
def _knows_factor(step: Callable[..., Any]) -> bool:
    """Whether the step of a class, which may be a subclass of ours with a step of its own, takes `factor`."""
    return "factor" in inspect.signature(step).parameters


def has_fp16_gradients(optimizer: Any) -> bool:
    """Whether some gradients are fp16, so that dividing them by the loss scale in place would lose the small ones."""
    return any(p.grad is not None and p.grad.dtype == torch.float16 for p in parameters(optimizer))


def widen_fp16(state: StepState, owner: Any) -> None:
    """Before gradients are divided in place: fp16 ones become fp32."""
    widen(state, [p for p in parameters(owner) if p.grad is not None and p.grad.dtype == torch.float16])
