"""A model of shapes: the modules of a model, with fake tensors in the place of its weights and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.diagnostics.ledger import KNOWN, Ledger
from halfstep.errors import ConfigError
from halfstep.numerics.standins import STANDS_FOR, is_shape

MEASURED = "Pass measured=True, which runs one real step instead."


def model_of(given: Any, filled: bool = False) -> nn.Module:
    """The module itself, or the one that a function of no arguments or a configuration of transformers makes; on the meta device unless `filled`."""
    if isinstance(given, nn.Module):
        return given
    with torch.device("cpu" if filled else "meta"):
        if hasattr(given, "model_type") and hasattr(given, "to_dict"):
            return _from_config(given)
        made = given() if callable(given) else None
    if not isinstance(made, nn.Module):
        what = f"a function that gave a {type(made).__name__}" if callable(given) else f"a {type(given).__name__}"
        raise ConfigError(f"memory was given {what} in the place of the model", "Pass an nn.Module, a function that makes one, or a configuration.")
    return made


def _from_config(config: Any) -> nn.Module:
    """The model that a configuration of transformers names, or a causal language model of it."""
    import transformers

    named = (getattr(config, "architectures", None) or [None])[0]
    found = getattr(transformers, named, None) if named else None
    try:
        made = found(config) if found is not None else transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigError(
            f"a {type(config).__name__} does not say which model it is of, and there is no causal language model of it",
            "Pass a function instead: lambda: transformers.AutoModelForSequenceClassification.from_config(config).",
        ) from error
    assert isinstance(made, nn.Module)
    return made


def twin_of(model: nn.Module, device: torch.device, fake: FakeTensorMode) -> nn.Module:
    """A copy of a model whose weights are fake tensors on `device`. Small buffers of whole numbers have their numbers, if they have any.

    To be called inside the fake mode. Raises ConfigError for lazy parameters and for a model that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if torch.nn.parameter.is_lazy(p):
            raise ConfigError(f"{name} has no shape yet: it is a lazy parameter", "Call the model once on a batch before.")
        if id(p) not in memo:
            memo[id(p)] = nn.Parameter(shape_of(p, device, fake), p.requires_grad)
            setattr(memo[id(p)], STANDS_FOR, p)
    for b in model.buffers():
        if id(b) not in memo:
            known = b.numel() <= KNOWN and not is_shape(b) and b.device == device and not (b.is_floating_point() or b.is_complex())
            memo[id(b)] = _copy(b) if known else shape_of(b, device, fake)
            setattr(memo[id(b)], STANDS_FOR, b)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise uncopied(model, error) from error


def uncopied(model: nn.Module, error: Exception) -> ConfigError:
    """That a model cannot be copied, with the remedy."""
    return ConfigError(
        f"this {type(model).__name__} cannot be copied ({type(error).__name__}: {error})",
        "Let its parts be copied (copy.deepcopy): locks, open files and iterators cannot, nor activations that it keeps; detach() those.",
    )


def shape_of(t: Tensor, device: torch.device, fake: FakeTensorMode) -> Tensor:
    """A fake tensor on `device` that lies as `t` does."""
    with fake:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)


def _copy(t: Tensor) -> Tensor:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return t.detach().clone()


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with its tensors changed; mappings become dicts, anything that is no container stays."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, change) for v in value))
    return type(value)(mapped(v, change) for v in value) if isinstance(value, list | tuple) else value


def batch_of_shapes(batch: Any, device: torch.device, fake: FakeTensorMode) -> Any:
    """A batch in which floating tensors are fake, and whole numbers and truths are what they are."""

    def change(t: Tensor) -> Tensor:
        if t.is_floating_point() or t.is_complex() or is_shape(t) or t.device != device:
            return shape_of(t, device, fake).requires_grad_(t.requires_grad)
        return _copy(t)

    return mapped(batch, change)


@contextmanager
def modules_told(model: nn.Module, ledger: Ledger) -> Any:
    """Inside, the ledger is told which module of a twin runs."""

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: ledger.modules.append(name)

    def leave(*_: Any) -> None:
        if ledger.modules:
            ledger.modules.pop()

    handles = []
    for name, part in model.named_modules():
        handles += [part.register_forward_pre_hook(enter(name)), part.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
