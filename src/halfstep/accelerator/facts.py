"""What the accelerator must know of a model before it trains it, and of a checkpoint before it loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.amp import layout
from halfstep.checkpoint import Loaded
from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim import master_of
from halfstep.policy import ModelFacts, Policy

FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def model_facts(model: nn.Module) -> ModelFacts:
    """The trainable parameters of `model` with their formats."""
    return ModelFacts(tuple((name, FORMATS.get(p.dtype, "other")) for name, p in model.named_parameters() if p.requires_grad))


class Signature:
    """What the parameters of a model were when it was prepared: format and device of each, by name."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = {name: (p.dtype, p.device) for name, p in model.named_parameters()}
        self.known = {id(p): ref(p) for p in model.parameters()}  # weakly: an address may be used again


def refuse_changed(model: nn.Module, signature: Signature, optimizers: Sequence[Any]) -> None:
    """Raise ConfigError when parameters were cast, moved or added since the model was prepared, unless an optimizer has the new ones."""
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
        if before[0] != p.dtype and (p.dtype == torch.float32 or master_of(p) is not None):
            signature.parts[name] = before = (p.dtype, before[1])  # halfstep's own doing, or a master joined with its weight
        if before[0] != p.dtype:
            raise ConfigError(
                f"{name} was {_text(before[0])} when the model was prepared and is {_text(p.dtype)} now, so it has no fp32 master weights",
                "Undo it with model.to(torch.float32), or prepare the model anew; for a 16-bit copy use copy.deepcopy(model).half().",
            )
        if before[1] != p.device:
            raise ConfigError(f"{name} was on {before[1]} when the model was prepared and is on {p.device} now", "Move the model before prepare().")


def facts_to_export(model: nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    """What a reader of a checkpoint needs to put a model's weights together.

    Which are 16-bit and the dtype each was loaded in, where the master of each is, and the model's configuration.
    """
    masters: dict[str, list[Any]] = {}
    named = {id(p): name for name, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        part = "optimizer" if i == 0 else f"optimizer_{i}"
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if id(p) in named and master_of(p) is not None:
                masters[named[id(p)]] = [part, number]
    config: Any = getattr(model, "config", None)
    text = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else None
    return {"layout": layout(model), "masters": masters, "config": text}


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


def kinds_of(parts: Mapping[str, Any]) -> dict[str, str]:
    """The class of each part of a run that goes into a checkpoint; for prepared objects that of the object inside."""
    inner = {
        name: getattr(item, "optimizer", item) if hasattr(item, "param_groups") else getattr(item, "scheduler", item) for name, item in parts.items()
    }
    return {name: type(item).__name__ for name, item in inner.items()}


def refuse_state(loaded: Loaded, parts: Mapping[str, Any], policy: Policy) -> None:
    """Raise CheckpointError, naming the first difference, unless the checkpoint fits these models, optimizers and policy."""
    where = f"checkpoint {loaded.folder}"
    saved = loaded.about.get("policy")
    if saved != str(policy):
        raise CheckpointError(
            f"{where} was made under precision {saved}, and this run has {policy}",
            "Resume with the same precision; to change it, start a new run from the weights in model.safetensors.",
        )
    own = {"scaler", "random"}
    if not own <= set(loaded.parts):
        missing = ", ".join(sorted(own - set(loaded.parts)))
        raise CheckpointError(f"{where} lacks {missing}: it was not written by save_state", "Name a folder that save_state wrote.")
    if set(parts) != set(loaded.parts) - own:
        raise CheckpointError(
            f"{where} holds {', '.join(sorted(set(loaded.parts) - own))}, and this run has {', '.join(sorted(parts)) or 'nothing prepared'}",
            "Prepare and register the same kinds of object, in the same order, before loading.",
        )
    saved_kinds, kinds = loaded.about.get("kinds", {}), kinds_of(parts)
    for name, item in parts.items():
        if not isinstance(item, nn.Module) and saved_kinds.get(name) != kinds[name]:
            raise CheckpointError(
                f"{where} has a {saved_kinds.get(name)} as {name}, and this run has a {kinds[name]}", "Build the same as the run that saved it did."
            )
        if isinstance(item, nn.Module):
            _refuse_model(where, item, loaded.parts[name])
        elif hasattr(item, "param_groups"):
            saved_sizes = [len(g["params"]) for g in loaded.parts[name]["param_groups"]]
            sizes = [len(g["params"]) for g in item.param_groups]
            if saved_sizes != sizes:
                raise CheckpointError(
                    f"{where} has an optimizer with groups of {saved_sizes} parameters, and this run's has {sizes}",
                    "Build the optimizer as the run that saved it did.",
                )


def _refuse_model(where: str, model: nn.Module, state: Mapping[str, Any]) -> None:
    mine = model.state_dict()
    for key in [*mine, *state]:
        if key not in state or key not in mine:
            whose = "the checkpoint lacks" if key in mine else "the model lacks"
            raise CheckpointError(f"{where} is of another model: {whose} {key!r}", "Build the model as the run that saved it did.")
        ours, theirs = mine[key], state[key]
        if isinstance(ours, torch.Tensor) and (ours.shape != theirs.shape or ours.dtype != theirs.dtype):
            raise CheckpointError(
                f"{where} is of another model: {key!r} is {theirs.dtype} {tuple(theirs.shape)} there and {ours.dtype} {tuple(ours.shape)} here",
                "Build the model as the run that saved it did.",
            )
