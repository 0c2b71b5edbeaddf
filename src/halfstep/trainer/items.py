"""How many label items a window of micro-batches has, and whether a loss was divided by that number."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100  # the label that losses and metrics leave out

NUMBERS = ("item", "tolist", "__float__", "__int__", "__index__")  # functions that make Python's numbers of a tensor
COPIES = ("__get__", "detach", "clone", "as_subclass")  # and those whose tensors are not computed


class ItemCount(Tensor):
    """A number of label items that notes whether something was computed with it, or it became a Python number.

    A loss that was divided by the items of the whole window must not be divided by its micro-batches too, and one that ignores the number must be;
    many models and functions accept the number and ignore it, so their signatures do not tell. torch.compile follows it without a graph break.
    """

    used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if (isinstance(result, Tensor) and name not in COPIES) or name in NUMBERS:
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, ItemCount):
                    value.used = True
        return result


def noting(count: Any) -> ItemCount | None:
    """`count` as a number that notes its use; None stays None."""
    if count is None:
        return None
    # as a parameter is made and not by as_subclass, which gives a view: a graph that saves it detaches views, and torch refuses to for a subclass
    made: ItemCount = Tensor._make_subclass(ItemCount, count if isinstance(count, Tensor) else torch.as_tensor(count))
    return made


def was_used(count: ItemCount | None) -> bool:
    """Whether something was computed with `count`."""
    return count is not None and count.used


def takes_items(function: Callable[..., Any]) -> bool:
    """Whether a function takes `num_items_in_batch`, by name or among further keywords."""
    parameters = inspect.signature(function).parameters
    return "num_items_in_batch" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def model_takes_items(model: nn.Module) -> bool:
    """Whether a model's forward takes `num_items_in_batch`; one that says `accepts_loss_kwargs` is believed."""
    said = getattr(model, "accepts_loss_kwargs", None)
    return bool(said) if said is not None else takes_items(model.forward)


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model's loss compares the output at each place with the label of the next, so that the first labels are not predicted."""
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    names = [kind.__name__ for kind in type(model).__mro__]
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names) or getattr(model, "loss_type", None) == "ForCausalLM"
    return causal and not encodes


def count_items(batches: Sequence[Mapping[str, Any]], names: Sequence[str], shifted: bool) -> Tensor | None:
    """The number of labels that are not -100 in some batches, a scalar int64 tensor; None where it cannot be told.

    shifted: the first label of each row is not predicted; batches that bring `shift_labels` have them shifted already.
    """
    total: Tensor | None = None
    for batch in batches:
        labels = batch.get("shift_labels")
        if labels is None and len(names) == 1:
            labels = batch.get(names[0])
            labels = labels[..., 1:] if shifted and isinstance(labels, Tensor) and labels.dim() > 1 else labels
        if not isinstance(labels, Tensor) or not labels.dim():
            return None
        counted = labels.ne(IGNORED).count_nonzero()
        total = counted if total is None else total + counted
    return total
