"""Cross entropy over a large vocabulary on a CPU, in pieces of a few rows: the numbers of torch's, without its three fp32 tensors of all logits.

torch makes the logarithms of all probabilities, keeps them for the backward pass, and makes their gradient before that of the logits. Here both
passes go over the logits a few rows at a time, in the cache; what the forward pass found is computed again in the backward pass. With 512 tokens and
32,000 words this takes 200 MB less.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.amp.mode import Route
from halfstep.amp.ops import HALF
from halfstep.amp.rounding import applied, exactly, forward_mode, recorded, transformed, unseen
from halfstep.amp.scratch import is_batch, straight

WHOLE = 1 << 23  # logits up to which torch's own function is faster: 32 MiB in fp32, from where on each new tensor is fresh memory
PIECE = 1 << 19  # logits of a piece: 2 MiB in fp32
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # torch's numbers for them


def _pieces(logits: Tensor) -> list[slice]:
    step = max(1, PIECE // logits.shape[1])
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def _loss(logits: Tensor, target: Tensor, reduction: str, ignored: int) -> tuple[Tensor, Tensor]:
    """The loss in fp32, and how many rows count."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for s in _pieces(logits):
        losses[s] = F.nll_loss(torch.log_softmax(logits[s].float(), 1), target[s], reduction="none", ignore_index=ignored)
    counts = target != ignored
    if reduction == "none":
        return losses, counts.sum().float()
    # summed by torch's function, in its order; the row that a target of 0 chooses is the only one
    rows = torch.where(counts, 0, -1)
    return F.nll_loss(losses.neg_()[:, None], rows, reduction=reduction, ignore_index=-1), counts.sum().float()


def _gradient(grad: Tensor, logits: Tensor, target: Tensor, reduction: str, ignored: int, count: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # it will be differentiated in its turn
        wide = logits.float()
        loss = F.cross_entropy(wide, target, reduction=reduction, ignore_index=ignored)
        return torch.autograd.grad(loss, wide, grad, create_graph=True)[0].to(logits.dtype)
    if is_batch(grad):
        with torch.enable_grad():
            wide = logits.detach().float().requires_grad_()
            loss = F.cross_entropy(wide, target, reduction=reduction, ignore_index=ignored)
        return torch.autograd.grad(loss, wide, grad)[0].to(logits.dtype)
    found = torch.empty_like(logits)
    for s in _pieces(logits):
        logs = torch.log_softmax(logits[s].float(), 1)
        each = grad[s] if reduction == "none" else grad
        above = torch.ops.aten.nll_loss_backward(each, logs, target[s], None, _REDUCTIONS[reduction], ignored, count)
        found[s].copy_(torch._log_softmax_backward_data(above, logs, 1, torch.float32))
    return found


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits as they were given, and no other tensor of their size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str, ignored: int) -> Tensor:
        loss, count = exactly(_loss, logits, target, reduction, ignored)
        ctx.save_for_backward(logits, target, count)
        ctx.how = (reduction, ignored)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, count = ctx.saved_tensors
        return unseen(_gradient, grad, logits, target, *ctx.how, count), None, None, None


def in_pieces(otherwise: Route) -> Route:
    """torch.nn.functional.cross_entropy of [rows, classes] with one class for each row; other forms of it go the other way."""

    def route(dtype: torch.dtype, func: Route, /, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = dict(zip(names, args, strict=False)) | kwargs
        ignored, reduction = given.pop("ignore_index", -100), given.pop("reduction", "mean")
        plain = not given.pop("label_smoothing", 0.0) and not any(v is not None for v in given.values()) and reduction in _REDUCTIONS
        if not plain or not _large(input, target) or forward_mode() or transformed() or not recorded(input):
            return otherwise(dtype, func, input, target, *args, **kwargs)
        return applied(_CrossEntropy, input, target, reduction, ignored)

    return route


def _large(logits: Any, target: Any) -> bool:
    if not isinstance(logits, Tensor) or not isinstance(target, Tensor) or not straight(logits) or logits.device.type != "cpu":
        return False
    fits = logits.dim() == 2 and target.dim() == 1 and logits.shape[0] == target.shape[0] and target.dtype == torch.int64
    return fits and logits.numel() > WHOLE and logits.dtype in (*HALF, torch.float32)
