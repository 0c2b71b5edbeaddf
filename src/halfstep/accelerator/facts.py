"""What the accelerator must know of a model before it trains it, and of an optimizer before it steps."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from halfstep.amp import is_kept
from halfstep.amp.sizes import FORMATS
from halfstep.amp.sizes import model_facts as model_facts
from halfstep.errors import ConfigError
from halfstep.optim import master_of


def _fits_16_bits(p: torch.Tensor, most: int = 4096) -> bool:
    """Whether the values of a tensor, 4096 of them at most, are numbers of fp16 or of bf16. Constant ones tell nothing and count as such."""
    if p.device.type == "meta" or torch.nn.parameter.is_lazy(p):
        return True
    values = p.detach().reshape(-1)[:most]
    return any(torch.equal(values.to(dtype).float(), values) for dtype in (torch.float16, torch.bfloat16))


class Memory:
    """The memory that a tensor lies in, known apart from any that comes later: an address alone may be given out again, to what was cast and back."""

    __slots__ = ("_storage",)

    def __init__(self, t: torch.Tensor) -> None:
        self._storage = StorageWeakRef(t.untyped_storage())  # type: ignore[no-untyped-call]

    def holds(self, t: torch.Tensor) -> bool:
        """Whether `t` lies in it."""
        return bool(t.untyped_storage()._cdata == self._storage.cdata)


class Signature:
    """What the parameters of a model were when it was prepared: format and device of each, by name."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = {name: (p.dtype, p.device) for name, p in model.named_parameters()}
        self.known = {id(p): ref(p) for p in model.parameters()}  # weakly: an address may be used again
        lazy = torch.nn.parameter.is_lazy
        self.places = {name: Memory(p) for name, p in model.named_parameters() if p.dtype == torch.float32 and not lazy(p)}
        self.sixteen = {name: _fits_16_bits(p) for name, p in model.named_parameters() if name in self.places}  # as they were loaded
        self.structure: list[
            tuple[nn.Module, dict[str, Any], dict[str, Any]]
        ] = []  # parts, with the tables of what is in them, at the last whole look
        self.contents: list[Any] = []  # of these tables
        self.parameters: list[nn.Parameter] = []  # that have memory
        self.memory: list[Memory] = []  # of these
        self.dtypes: list[torch.dtype] = []

    def take_down(self, model: nn.Module) -> None:
        """Remember how the model is made and where its parameters lie, so that `is_as_it_was` can tell."""
        self.structure = [(m, m._modules, m._parameters) for m in model.modules()]
        self.contents = self._contents()
        self.parameters = [p for p in model.parameters() if not torch.nn.parameter.is_lazy(p)]
        self.memory, self.dtypes = [Memory(p) for p in self.parameters], [p.dtype for p in self.parameters]

    def _contents(self) -> list[Any]:
        return [item for _, modules, parameters in self.structure for table in (modules, parameters) for item in (*table.values(), table)]

    def is_as_it_was(self) -> bool:
        """Whether the same parameters stand in the same parts, in the same memory and dtype: then there is nothing new to refuse."""
        if False in [part._modules is modules and part._parameters is parameters for part, modules, parameters in self.structure]:
            return False
        now = self._contents()
        if len(now) != len(self.contents) or not all(map(is_, now, self.contents)) or [p.dtype for p in self.parameters] != self.dtypes:
            return False
        return bool(self.structure) and False not in [place.holds(p) for p, place in zip(self.parameters, self.memory, strict=True)]


def refuse_changed(model: nn.Module, signature: Signature, optimizers: Sequence[Any]) -> bool:
    """Raise ConfigError when parameters were cast, moved or added since the model was prepared, unless an optimizer has the new ones.

    Returns whether the model was changed in a way that is allowed.
    """
    if signature.is_as_it_was():
        return False
    known = bool(signature.structure)
    _refuse_changed(model, signature, optimizers)
    signature.take_down(model)
    return known


def _refuse_changed(model: nn.Module, signature: Signature, optimizers: Sequence[Any]) -> None:
    for name, p in model.named_parameters():
        before = signature.parts.get(name)
        if signature.known.get(id(p), lambda: None)() is not p:
            if p.requires_grad and p.grad is not None and not _has(optimizers, p):
                raise ConfigError(
                    f"{name} was {'added to' if before is None else 'replaced in'} the model after prepare(), and no prepared optimizer updates it",
                    "Change the model first and prepare it then, or prepare an optimizer that has the new parameters too.",
                )
            signature.parts[name] = before = (p.dtype, p.device)
            signature.known[id(p)] = ref(p)
        if before is None:
            continue
        if before[0] != p.dtype and (master_of(p) is not None or (p.dtype == torch.float32 and not is_kept(model, name))):
            signature.parts[name] = before = (p.dtype, before[1])  # halfstep's own doing, or a master joined with its weight
        if before[0] != p.dtype:
            raise ConfigError(
                f"{name} was {_text(before[0])} when the model was prepared and is {_text(p.dtype)} now: it was cast from outside",
                "Leave the dtypes to the precision, and prepare the model anew after such a cast; for a copy in another dtype use "
                "copy.deepcopy(accelerator.unwrap_model(model)).",
            )
        place = signature.places.get(name)
        if p.dtype == torch.float32 and not (place is not None and place.holds(p)):  # its memory is another, as after any cast
            signature.places[name] = Memory(p)
            if not signature.sixteen.get(name, True) and _fits_16_bits(p):
                raise ConfigError(
                    f"all values of weight {name} have been rounded to 16 bits since the last step: the model was cast there and back (model.half())",
                    "Load the last checkpoint. For a copy in 16 bits use accelerator.get_state_dict(model), or "
                    "copy.deepcopy(accelerator.unwrap_model(model)).half().",
                )
        if before[1] != p.device:
            raise ConfigError(f"{name} was on {before[1]} when the model was prepared and is on {p.device} now", "Move the model before prepare().")


def refuse_loss(loss: Any, models: Sequence[nn.Module], with_gradient: bool) -> None:
    """Raise ConfigError for a loss that nothing can be trained with, and say which models are to blame; a good one passes at once."""
    if not isinstance(loss, torch.Tensor) or (loss.requires_grad and (with_gradient or loss.numel() == 1)):
        return
    if loss.requires_grad:
        raise ConfigError(f"the loss has shape {tuple(loss.shape)}, and a backward pass begins at one number", "Reduce it: loss.mean().")
    blamed = [text for model in models if (text := _untrainable(model))]
    why = "; ".join(blamed) or "it was computed from detached tensors, or under torch.no_grad()"
    raise ConfigError(f"the loss has no graph, so it cannot train anything: {why}", "Compute it from outputs of a model with parameters to train.")


def _untrainable(model: nn.Module) -> str:
    """Why no loss can come from a model; empty for one that can be trained."""
    count = sum(1 for _ in model.parameters())
    if any(p.requires_grad for p in model.parameters()):
        return ""
    name = type(model).__name__
    return f"all {count} parameters of {name} are frozen (requires_grad=False)" if count else f"{name} has no parameters"


def refuse_unfilled(model: nn.Module) -> None:
    """Raise ConfigError for a model whose parameters have no values: on the meta device, and lazy ones before the first batch."""
    for name, p in model.named_parameters():
        if torch.nn.parameter.is_lazy(p):
            raise ConfigError(
                f"{name} has no shape yet: it is a lazy parameter, which the first batch gives one",
                "Call the model once on a batch before prepare() (or before the Trainer is made).",
            )
        if p.is_meta:
            raise ConfigError(f"{name} is on the meta device: it has a shape and no values", "Load the weights before prepare().")


def refuse_elsewhere(model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError for a model that is not on the device, where it is to be left where it is."""
    for name, p in model.named_parameters():
        if p.device.type != device.type or (p.device.index is not None and device.index is not None and p.device.index != device.index):
            raise ConfigError(
                f"{name} is on {p.device}, the accelerator trains on {device}, and device_placement=False leaves it there",
                "Call model.to(accelerator.device) before prepare(), or leave device_placement out.",
            )


def refuse_orphans(optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
    """Raise ConfigError for an optimizer whose parameters look like a model's and are not: it was made before they were replaced."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(p) for model in models for p in model.parameters()}
    lost = [p for p in own if id(p) not in known]
    if not lost:
        return
    mine = {id(p) for p in own}
    for model in models if len(lost) < len(own) else ():
        for name, theirs in model.named_parameters():
            if theirs.requires_grad and id(theirs) not in mine and theirs.shape == lost[0].shape:
                raise ConfigError(_orphan(name, lost[0], theirs), "Make the optimizer from model.parameters() after the last such change.")
    if len(lost) < len(own):
        return
    for model in models:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if [p.shape for _, p in named] == [p.shape for p in own]:
            name, theirs = named[0]
            raise ConfigError(_orphan(name, own[0], theirs), "Make the optimizer from model.parameters() after the last such change.")


def _orphan(name: str, ours: nn.Parameter, theirs: nn.Parameter) -> str:
    return (
        f"the optimizer has a {_text(ours.dtype)} tensor on {ours.device} for {name}, and the model's own is another, "
        f"{_text(theirs.dtype)} on {theirs.device}: it was made before the model's parameters were replaced (moved, cast or copied)"
    )


def _has(optimizers: Sequence[Any], parameter: nn.Parameter) -> bool:
    return any(p is parameter for o in optimizers for group in o.param_groups for p in group["params"])


def _text(dtype: torch.dtype) -> str:
    return FORMATS.get(dtype, str(dtype).removeprefix("torch."))
