"""Cross entropy over a large vocabulary on a CPU, without torch's three fp32 tensors of all logits.

torch makes the logarithms of all probabilities, keeps them for the backward pass, and makes their gradient before that of the logits. Here both
passes go over the logits a row at a time, in the cache, and two numbers of each row are kept. The arithmetic is that of
`halfstep.numerics.cross_entropy`: sums in fp64 and one rounding of each loss, so the numbers are nearer to the exact ones than torch's.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.amp.mode import Route, inside
from halfstep.amp.ops import HALF
from halfstep.amp.rounding import applied, exactly, forward_mode, recorded, transformed, unseen
from halfstep.amp.scratch import is_batch, straight
from halfstep.kernels import loss_kernels
from halfstep.numerics.standins import asked

WHOLE = 1 << 20  # logits up to which torch's own function runs
_REDUCTIONS = ("none", "mean", "sum")


def _arithmetic() -> ModuleType:
    return loss_kernels() or importlib.import_module("halfstep.numerics.cross_entropy")


def _loss(logits: Tensor, source: Tensor, target: Tensor, reduction: str, ignored: int) -> tuple[Tensor, ...]:
    """The loss in fp32, what is kept of the logits, how many rows count, and of each row its largest logit and the sum of its exponentials.

    source: the logits, or 16-bit ones that they are a copy of unless somebody has written to the copy behind autograd's back.
    """
    found = None if source is logits else _arithmetic().losses_of_copy(source, target, ignored, logits)
    losses, largest, sums = _arithmetic().losses(logits, target, ignored) if found is None else found
    counts = target != ignored
    if reduction != "none":
        # summed by torch's function, in its order; the row that a target of 0 chooses is the only one
        losses = F.nll_loss(losses.neg_()[:, None], torch.where(counts, 0, -1), reduction=reduction, ignore_index=-1)
    return losses, logits if found is None else source, counts.sum().float(), largest, sums


def _gradient(
    grad: Tensor, logits: Tensor, target: Tensor, count: Tensor, largest: Tensor, sums: Tensor, form: torch.dtype, reduction: str, ignored: int
) -> Tensor:
    if torch.is_grad_enabled():  # it will be differentiated in its turn
        wide = logits.float()
        loss = F.cross_entropy(wide, target, reduction=reduction, ignore_index=ignored)
        return torch.autograd.grad(loss, wide, grad, create_graph=True)[0].to(form)
    if is_batch(grad):
        with torch.enable_grad():
            wide = logits.detach().float().requires_grad_()
            loss = F.cross_entropy(wide, target, reduction=reduction, ignore_index=ignored)
        return torch.autograd.grad(loss, wide, grad)[0].to(form)
    above = grad / count if reduction == "mean" else grad
    return _arithmetic().gradient(logits, target, ignored, largest, sums, above.expand(len(logits)), form)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    """Of the size of the logits it saves one tensor: these themselves, or `source`, which they are a copy of."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, source: Tensor, target: Tensor, reduction: str, ignored: int) -> Tensor:
        loss, kept, *found = exactly(_loss, logits, source, target, reduction, ignored)
        ctx.save_for_backward(kept, target, *found)
        ctx.how = (logits.dtype, reduction, ignored)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return unseen(_gradient, grad, *ctx.saved_tensors, *ctx.how), None, None, None, None


def widened(dtype: torch.dtype, func: Route, /, x: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.Tensor.float and torch.Tensor.to: logits of which an fp32 copy is made for their loss alone are remembered with it."""
    wide = func(x, *args, **kwargs)
    if transformed() or not inside.loss_alone or not isinstance(wide, Tensor) or not isinstance(x, Tensor):
        return wide
    grows = x.dtype in HALF and wide.dtype == torch.float32 and x.numel() > WHOLE and x.device.type == wide.device.type == "cpu"
    if grows and x.requires_grad and straight(x, wide):
        wide.halfstep_copy_of = (x, x._version)  # type: ignore[attr-defined]
    return wide


_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"}


def _source(logits: Tensor) -> Tensor:
    """The 16-bit logits that these are an fp32 copy of, in their shape, where nobody reads the copy but the loss; else these.

    They are kept for the backward pass in its place. The gradient is that of the copy as ever, so that whoever looks at it finds it.
    """
    wide = logits if logits._base is None else logits._base
    x, version = getattr(wide, "halfstep_copy_of", (None, 0))
    if x is None or not inside.loss_alone or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return logits
    whole = logits.numel() == x.numel() and logits.is_contiguous() and wide.is_contiguous() and x.is_contiguous()
    if not whole or logits.is_neg() or wide.is_neg() or x.is_neg() or x._version != version or wide._version:
        return logits
    node = logits.grad_fn
    while node is not None and node is not wide.grad_fn:
        node = node.next_functions[0][0] if node.name() in _VIEWS else None
    return logits if node is None else x.view(logits.shape)


def by_rows(otherwise: Route) -> Route:
    """torch.nn.functional.cross_entropy of [rows, classes] with one class for each row; other forms of it go the other way."""

    def route(dtype: torch.dtype, func: Route, /, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = dict(zip(names, args, strict=False)) | kwargs
        ignored, reduction = given.pop("ignore_index", -100), given.pop("reduction", "mean")
        smooth = given.pop("label_smoothing", 0.0)
        plain = (
            type(ignored) is int
            and type(smooth) is float
            and not smooth
            and reduction in _REDUCTIONS
            and not any(v is not None for v in given.values())
        )
        if not plain or not _large(input, target) or forward_mode() or transformed() or not recorded(input) or not _classes(input, target, ignored):
            return otherwise(dtype, func, input, target, *args, **kwargs)
        return applied(_CrossEntropy, input, _source(input), target, reduction, ignored)

    return route


def _large(logits: Any, target: Any) -> bool:
    if not isinstance(logits, Tensor) or not isinstance(target, Tensor) or not straight(logits) or logits.device.type != "cpu":
        return False
    fits = logits.dim() == 2 and target.dim() == 1 and logits.shape[0] == target.shape[0] and target.dtype == torch.int64
    return fits and logits.numel() > WHOLE and logits.dtype in (*HALF, torch.float32)


def _classes(logits: Tensor, target: Tensor, ignored: int) -> bool:
    """Whether every target is a class or ignored: torch says which is not."""
    return asked(target, lambda t: bool(((t >= 0) & (t < logits.shape[1]) | (t == ignored)).all()), unknown=True)
