"""What an op costs by its sizes alone: its class, the bytes that it reads and writes, and the operations of a product."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch.utils.flop_counter import flop_registry

from halfstep.tracing.observe import Event
from halfstep.tracing.products import is_product

Class = Literal["products", "casts", "norms", "softmax and losses", "lookups", "sums", "copies", "elementwise", "custom", "views"]
CLASSES: tuple[Class, ...] = get_args(Class)
_CASTS = ("_to_copy", "copy", "narrow")
_LOOKUPS = ("embedding", "index", "gather", "scatter", "take", "masked_select")
_SUMS = frozenset(
    ("sum", "mean", "amax", "amin", "max", "min", "prod", "cumsum", "var", "std", "norm", "var_mean", "std_mean", "argmax", "logsumexp")
)
_COPIES = frozenset(("clone", "copy", "cat", "stack", "zeros", "ones", "empty", "full", "fill", "zero", "new_zeros", "constant_pad_nd", "arange"))
_OWN = ("aten", "prims", "mkldnn", "halfstep", "quantized", "inductor")  # namespaces of torch and of this library
_VIEWS = frozenset(("detach", "_unsafe_view", "view", "alias", "lift_fresh", "_reshape_alias", "split_with_sizes"))


def class_of(event: Event) -> Class:
    """The kind of work an op is. A copy between two floating formats is a cast."""
    base = event.base.rstrip("_")
    if is_product(event) or base.startswith(("convolution", "_scaled_dot_product")) or "_rnn_layer" in base:
        return "products"
    if base in _CASTS and _changes_format(event):
        return "casts"
    if event.name.split(".", 1)[0] not in _OWN:
        return "custom"
    if event.is_view or base in _VIEWS:
        return "views"
    if "layer_norm" in base or "batch_norm" in base or "group_norm" in base or "rms_norm" in base:
        return "norms"
    if "softmax" in base or "loss" in base or "cross_entropy" in base:
        return "softmax and losses"
    if base.lstrip("_").startswith(_LOOKUPS):
        return "lookups"
    if base.lstrip("_").removeprefix("linalg_vector_") in _SUMS:
        return "sums"
    if base in _COPIES or base.endswith("_like") or base == "_to_copy":
        return "copies"
    return "elementwise"


def _changes_format(event: Event) -> bool:
    given = event.inputs[-1] if event.base.rstrip("_") == "copy" else event.inputs[0]
    made = event.inputs[0] if event.base.rstrip("_") == "copy" else event.outputs[0]
    return given.is_floating_point() and made.is_floating_point() and given.dtype != made.dtype


def bytes_of(event: Event) -> int:
    """Bytes of the tensors that an op reads and writes, each counted once; 0 for views, which touch no memory."""
    if class_of(event) == "views":
        return 0
    tensors = {(t.data_ptr(), t.nbytes): t.nbytes for t in (*event.inputs, *event.outputs) if not t.is_meta and t.layout == torch.strided}
    return sum(tensors.values())


def flops_of(event: Event) -> int:
    """Operations of a product (a multiplication and an addition are two); 0 for anything else."""
    if event.base in ("convolution", "convolution_backward"):
        return _convolution(event)
    formula = flop_registry.get(getattr(event.func, "overloadpacket", None))
    if formula is not None and event.outputs:
        out = event.outputs[0] if len(event.outputs) == 1 else event.outputs
        return int(formula(*event.args, **{k: v for k, v in event.kwargs.items() if k != "out"}, out_val=out))
    if event.base.startswith("_scaled_dot_product"):
        return _attention(event)
    return 0


def _convolution(event: Event) -> int:
    """Each place of the smaller picture meets each weight; backward once for each of the two gradients that are wanted."""
    backward = event.base.endswith("_backward")
    above, x, weight = (event.args[0], *event.args[1:3]) if backward else (event.outputs[0], *event.args[:2])
    transposed, wanted = (event.args[7], sum(event.args[10][:2])) if backward else (event.args[6], 1)
    places = x if transposed else above
    return int(2 * wanted * places.shape[0] * places.shape[2:].numel() * weight.numel())


def _attention(event: Event) -> int:
    """Two products of the scores' size forward, five backward."""
    backward = event.base.endswith("_backward")
    q, k = event.inputs[backward : 2 + backward]
    scores = q.shape[:-1].numel() * k.shape[-2]
    return (10 if backward else 4) * scores * q.shape[-1]
