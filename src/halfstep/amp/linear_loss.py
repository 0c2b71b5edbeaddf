"""`linear_cross_entropy`: the loss of a language model from its last hidden states, without a tensor of all logits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.amp import large
from halfstep.amp.chunks import Form, Found, computed, reduced, weights_of
from halfstep.amp.emulation import ROUTES
from halfstep.amp.mode import current, inside, numbered, without_autocast
from halfstep.amp.ops import HALF
from halfstep.amp.rounding import _LIBRARY, applied, forward_mode, rounded
from halfstep.amp.scratch import is_batch
from halfstep.errors import ConfigError, DataError, suggest
from halfstep.hardware import emulated_families
from halfstep.numerics.standins import is_shape

REDUCTIONS = ("mean", "sum", "none")
_FLOATS = (torch.float32, torch.float64, *HALF)
_Three = tuple[bool, bool, bool]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    num_items_in_batch: Tensor | float | None = None,
    shift: bool = False,
) -> Tensor:
    """F.cross_entropy(F.linear(hidden, weight, bias), labels), a few rows of logits at a time.

    hidden: (..., h), labels: (...) of int64, weight: (v, h), bias: (v,). shift: the label of a place is that of the next one along the last
    dimension of `labels`, and the last place has none. scale, softcap: the logits are softcap * tanh(scale * (x @ w + b) / softcap), as Gemma's
    (softcap) and Cohere's (scale) are. num_items_in_batch: divide the sum of losses by this instead of the number of labels that count: those of a
    whole step, where losses of several batches make one gradient. label_smoothing, ignore_index and reduction as in torch: a mean over no label is
    NaN with gradients of 0.

    Result in fp32 (fp64 for fp64 operands). Products are of the operands that F.linear would have where it is called: 16-bit under autocast, as the
    policy in force says. Logits, softmax and every sum are in fp32 and never rounded to 16 bits, nor are gradients of logits on a CPU with emulated
    products, so the loss is nearer to that of fp32 than that of 16-bit logits.

    Where a gradient is wanted the forward pass makes it at once, which saves a product, and keeps it in fp32 (for `weight` 4 bytes per element)
    for the first backward pass, which multiplies it by what comes from above: a loss scale lets nothing underflow. Further backward passes of the
    same graph, and those of reduction="none", compute it again. Memory besides: 32 MiB of logits, or 128 rows where that is more.

    torch.compile runs it as one op. Raises ConfigError for shapes, formats and settings that do not fit, and for second derivatives, forward mode and
    torch.func transforms, which it does not have; DataError for a label that is no class, where the labels are on a CPU.
    """
    form = _form(hidden, weight, bias, reduction, ignore_index, label_smoothing, scale, softcap, num_items_in_batch)
    _check_shapes(hidden, weight, labels, bias, shift)
    targets = F.pad(labels[..., 1:], (0, 1), value=ignore_index) if shift else labels
    if inside.joins is not None and not torch.compiler.is_compiling():
        given = (hidden, weight, bias)
        with torch._C.DisableTorchFunction():  # it asks for the formats that the tensors have
            if inside.joins.touches(hidden.device.type, F.linear, given, {}):
                _, _, (hidden, weight, bias), _ = inside.joins.settled(F.linear, given, {})
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if torch.compiler.is_compiling():
        loss = _as_op(rows, weight, bias, flat, form)
    else:
        _refuse_transforms()
        needs = tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in (hidden, weight, bias))
        loss = (
            applied(_LinearCrossEntropy, rows, weight, bias, flat, form)
            if any(needs)
            else _quiet(_loss, hidden.device.type, rows, weight, bias, flat, form)
        )
    if num_items_in_batch is not None:
        divisor = num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
        return loss / divisor
    return loss.view(targets.shape) if reduction == "none" else loss


def _form(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    reduction: str,
    ignored: int,
    smoothing: float,
    scale: float,
    softcap: float | None,
    items: Tensor | float | None,
) -> Form:
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r} is not known", suggest(str(reduction), REDUCTIONS))
    if items is not None and reduction != "mean":
        raise ConfigError(
            f"num_items_in_batch says what the sum of losses is divided by, and reduction={reduction!r} divides by nothing",
            "Leave out one of them.",
        )
    if not 0 <= smoothing <= 1:
        raise ConfigError(f"label_smoothing={smoothing!r} is not between 0 and 1", "Use 0.1, or leave it out.")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ConfigError(f"softcap={softcap!r} is not above 0", "Use the bound of the logits, such as 30.0, or leave it out.")
    if not math.isfinite(scale) or scale == 0:
        raise ConfigError(f"scale={scale!r} makes logits that are no numbers or all the same", "Leave it out for logits as they are.")
    dtype, wide = _products(hidden, weight, bias)
    return Form(dtype, wide, "sum" if items is not None else reduction, ignored, smoothing, float(scale), float(softcap or 0.0))


def _products(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[torch.dtype, bool]:
    """The format of the operands that F.linear would have here, and whether 16-bit ones are multiplied in fp32."""
    device = hidden.device.type
    given = [t.dtype for t in (hidden, weight) if t.dtype in _FLOATS]
    if len(given) < 2 or (bias is not None and bias.dtype not in _FLOATS):
        raise ConfigError(f"hidden and weight are {hidden.dtype} and {weight.dtype}", "They must be fp32, fp64, bf16 or fp16.")
    on = torch.is_autocast_enabled(device) and torch.float64 not in given
    mode = current(device)
    wanted = torch.get_autocast_dtype(device) if on else torch.promote_types(*given)
    return _decided(device, wanted, on, mode.tables.number if mode is not None else -1)


def _decided(device: str, dtype: torch.dtype, on: bool, number: int) -> tuple[torch.dtype, bool]:
    """on: whether autocast is. number: of the tables that are in force, -1 for none."""
    tables = numbered(number) if number >= 0 else None
    route = tables.on.get(F.linear) if on and tables is not None else None
    low = tables.low if not on and tables is not None else None  # inside a model that is in 16 bits as a whole
    emulated = route is ROUTES[F.linear] or route is rounded or F.linear in (low or {})
    if route not in (None, large.linear) and not emulated:
        return torch.float32, False  # the user's list has it in fp32
    if device != "cpu" or dtype not in HALF:
        return dtype, False
    # results of fp16's own kernels would be in fp16, and leave its range; where no policy is in force what was measured decides
    told = low is not None or (on and tables is not None)
    return dtype, emulated or dtype == torch.float16 or (not told and "matmul" in emulated_families("bf16"))


_decided._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in autocast


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, shift: bool) -> None:
    if labels.dtype != torch.int64:
        raise ConfigError(f"labels are {labels.dtype}", "Give classes as int64; for probabilities use F.cross_entropy of logits.")
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1] or not weight.shape[0]:
        raise ConfigError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not multiply",
            "hidden is (..., h) and weight is (v, h), as in F.linear.",
        )
    if hidden.shape[:-1] != labels.shape or (shift and labels.dim() == 0):
        raise ConfigError(
            f"hidden {tuple(hidden.shape)} has places {tuple(hidden.shape[:-1])} and labels are {tuple(labels.shape)}", "One label for each place."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}", f"It is ({weight.shape[0]},).")


def _refuse_transforms() -> None:
    if forward_mode() or torch._C._are_functorch_transforms_active():
        raise ConfigError(
            "linear_cross_entropy has a backward pass of its own, which torch.func transforms and forward-mode derivatives do not go through",
            "Use F.cross_entropy(F.linear(hidden, weight, bias), labels) there.",
        )


def _check_labels(labels: Tensor, vocabulary: int, ignored: int) -> None:
    """Refuse a label that is no class, where reading them waits for no device."""
    if labels.device.type != "cpu" or is_shape(labels):
        return
    bad = ((labels < 0) | (labels >= vocabulary)) & (labels != ignored)
    if bool(bad.any()):
        raise DataError(
            f"label {int(labels[bad][0])} is no class: there are {vocabulary}, and {int(bad.sum())} of {labels.numel()} labels are outside",
            f"Classes are 0 to {vocabulary - 1}; ignore_index={ignored} marks places without one.",
        )


def _quiet(function: Any, device: str, *args: Any) -> Any:
    """The function with autocast off, its ops not looked at by modes that are open."""
    with torch._C.DisableTorchFunction():
        return without_autocast(device, function, *args)


def _loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, form: Form) -> Tensor:
    """Without gradients."""
    _check_labels(labels, weight.shape[0], form.ignored)
    return reduced(computed(hidden, weight, bias, labels, None, (False, False, False), form).losses, labels, form)


def _loss_and_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, needs: _Three, form: Form) -> Found:
    """The reduced loss in the place of losses, and its gradients."""
    _check_labels(labels, weight.shape[0], form.ignored)
    found = computed(hidden, weight, bias, labels, weights_of(labels, form), needs, form)
    return found._replace(losses=reduced(found.losses, labels, form))


def _gradients(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, needs: _Three, form: Form) -> Found:
    """Gradients for what comes from above, computed again."""
    if form.reduction == "none":
        return computed(hidden, weight, bias, labels, grad.to(form.sums), needs, form)
    return _scaled(computed(hidden, weight, bias, labels, weights_of(labels, form), needs, form), grad)


def _scaled(found: Found, grad: Tensor) -> Found:
    """Gradients times what comes from above, in their place."""
    if grad.device.type != "cpu" or is_shape(grad) or float(grad) != 1:
        for t in found[1:]:
            if t is not None:
                t.mul_(grad)
    return found


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps the gradients that the forward pass has made until the first backward pass, which hands them over; later ones compute them again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, form: Form) -> Tensor:
        ctx.form, ctx.needs = form, ctx.needs_input_grad[:3]
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.dtype, ctx.kept = hidden.dtype, None
        device = hidden.device.type
        if form.reduction == "none":
            return _quiet(_loss, device, hidden, weight, bias, labels, form)  # type: ignore[no-any-return]
        found = _quiet(_loss_and_gradients, device, hidden, weight, bias, labels, ctx.needs, form)
        ctx.kept = found._replace(losses=None)
        return found.losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or is_batch(grad):
            what = "batched gradients" if is_batch(grad) else "gradients that can be differentiated again (create_graph=True)"
            raise ConfigError(
                f"linear_cross_entropy was asked for {what}, and it keeps no logits to make them of",
                "Use F.cross_entropy(F.linear(hidden, weight, bias), labels) for this loss.",
            )
        kept, ctx.kept = ctx.kept, None
        device = grad.device.type
        found = _quiet(_scaled, device, kept, grad) if kept is not None else _quiet(_gradients, device, grad, *ctx.saved_tensors, ctx.needs, ctx.form)
        # autograd casts those of weight and bias to what they take
        return None if found.hidden is None else found.hidden.to(ctx.dtype), found.weight, found.bias, None, None


# --- as one op that a compiler does not look into ---------------------------------------------------------------------------------------------------

_SETTINGS = "ScalarType dtype, bool wide, str reduction, int ignored, float smoothing, float scale, float softcap, bool[] needs"
_LIBRARY.define(  # type: ignore[no-untyped-call]
    f"linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    f"linear_cross_entropy_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)


def _or_nothing(found: Found, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, with an empty tensor for one that was not asked for."""
    made = [t if t is not None else like.new_empty(0) for t in found[1:]]
    return made[0], made[1], made[2]


def _forward_op(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    form, needs = Form(*settings[:-1]), settings[-1]
    if not any(needs) or form.reduction == "none":
        loss = _quiet(_loss, hidden.device.type, hidden, weight, bias, labels, form)
        return loss, *_or_nothing(Found(loss, None, None, None), loss)
    found = _quiet(_loss_and_gradients, hidden.device.type, hidden, weight, bias, labels, needs, form)
    return found.losses, *_or_nothing(found, found.losses)


def _backward_op(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    form, needs = Form(*settings[:-1]), settings[-1]
    return _or_nothing(_quiet(_gradients, hidden.device.type, grad, hidden, weight, bias, labels, needs, form), grad)


def _shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    form, needs = Form(*settings[:-1]), settings[-1]
    made = form.reduction != "none"
    loss = hidden.new_empty(() if made else labels.shape, dtype=form.sums)
    gradients = _shapes_of_gradients(loss, hidden, weight, bias, labels, *settings[:-1], [n and made for n in needs])
    return loss, gradients[0], gradients[1], gradients[2]


def _shapes_of_gradients(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, _: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    form, needs = Form(*settings[:-1]), settings[-1]
    shapes = zip((hidden, weight, bias), needs, strict=True)
    return tuple(hidden.new_empty(t.shape if need and t is not None else (0,), dtype=form.sums) for t, need in shapes)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    hidden, weight, bias, labels, *ctx.settings = inputs
    ctx.dtype = hidden.dtype
    ctx.made = Form(*ctx.settings[:-1]).reduction != "none"
    ctx.save_for_backward(*(output[1:] if ctx.made else (hidden, weight, bias, labels)))


def _from_above(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    needs = ctx.settings[-1]
    if ctx.made:
        made = [t * grad for t in ctx.saved_tensors]
    else:
        made = list(torch.ops.halfstep.linear_cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.settings))
    found = [t if need else None for t, need in zip(made, needs, strict=True)]
    return found[0] if found[0] is None else found[0].to(ctx.dtype), *found[1:], None, *(None for _ in ctx.settings)


_LIBRARY.impl("linear_cross_entropy", _forward_op, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("linear_cross_entropy", _shapes, "Meta")  # type: ignore[no-untyped-call]
_LIBRARY.impl("linear_cross_entropy_backward", _backward_op, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("linear_cross_entropy_backward", _shapes_of_gradients, "Meta")  # type: ignore[no-untyped-call]
torch.library.register_autograd("halfstep::linear_cross_entropy", _from_above, setup_context=_remember, lib=_LIBRARY)


def _as_op(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, form: Form) -> Tensor:
    on = torch.is_grad_enabled()
    needs = [on and hidden.requires_grad, on and weight.requires_grad, on and bias is not None and bias.requires_grad]
    settings = (form.dtype, form.wide, form.reduction, form.ignored, form.smoothing, form.scale, form.softcap, needs)
    loss: Tensor = torch.ops.halfstep.linear_cross_entropy(hidden, weight, bias, labels, *settings)[0]
    return loss
