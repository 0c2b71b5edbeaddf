"""What a checkpoint says of the run that wrote it, and whether another run may go on from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from halfstep.amp import layout, pin, pins, unpin
from halfstep.checkpoint import Loaded
from halfstep.errors import CheckpointError
from halfstep.optim import adopt, master_of, saved_master
from halfstep.policy import Policy


def _places(model: nn.Module, optimizers: Sequence[Any]) -> dict[str, list[Any]]:
    """Where the optimizers' states hold the masters of a model's weights: the way through a checkpoint's parts, by name of the weight."""
    named, found = {id(p): name for name, p in model.named_parameters()}, dict[str, list[Any]]()
    for i, optimizer in enumerate(optimizers):
        part = "optimizer" if i == 0 else f"optimizer_{i}"
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if id(p) in named and master_of(p) is not None:
                found[named[id(p)]] = [part, "masters", number]
    return found


def masters_beside(models: Mapping[str, nn.Module], optimizers: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """The masters that no optimizer's state has (weights that nobody trains), by model and name."""
    found = {}
    for name, model in models.items():
        known = _places(model, optimizers)
        own = {key: saved for key, p in model.named_parameters() if key not in known and (saved := saved_master(p)) is not None}
        if any("residual" in saved for saved in own.values()):
            found[name] = own
    return found


def adopt_all(model: nn.Module, masters: Mapping[str, Any]) -> None:
    """Put saved masters beside the weights of a model, whose state was loaded."""
    named = dict(model.named_parameters())
    for name, saved in masters.items():
        adopt(named[name], saved)


def pin_as_saved(model: nn.Module, saved: Sequence[Mapping[str, Any]]) -> None:
    """Hold those modules in fp32 that the run which saved the model held so, and no others."""
    wanted = {one["module"]: one for one in saved}
    unpin(model, [p.module for p in pins(model) if p.module not in wanted])
    held = {p.module for p in pins(model)}
    for name, one in wanted.items():
        if name not in held:
            pin(model, name, one["why"], one["step"])


def facts_to_export(part: str, model: nn.Module, optimizers: Sequence[Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader of a checkpoint needs to put a model's weights together.

    Which are 16-bit and the dtype each was loaded in, where the master of each is, the model's configuration, and the modules pinned to fp32.
    """
    places = {name: ["masters", part, name] for name in beside.get(part, {})} | _places(model, optimizers)
    config: Any = getattr(model, "config", None)
    text = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else None
    return {"layout": layout(model), "masters": places, "config": text, "pins": [asdict(p) for p in pins(model)]}


def kinds_of(parts: Mapping[str, Any]) -> dict[str, str]:
    """The class of each part of a run that goes into a checkpoint; for prepared objects that of the object inside."""
    inner = {name: _inside(item) if hasattr(item, "param_groups") else getattr(item, "scheduler", item) for name, item in parts.items()}
    return {name: type(item).__name__ for name, item in inner.items()}


def _inside(optimizer: Any) -> Any:
    """The optimizer that a prepared or wrapped one was made from."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def refuse_state(loaded: Loaded, parts: Mapping[str, Any], policy: Policy) -> None:
    """Raise CheckpointError, naming the first difference, unless the checkpoint fits these models, optimizers and policy."""
    where = f"checkpoint {loaded.folder}"
    saved = loaded.about.get("policy")
    if saved != str(policy):
        raise CheckpointError(
            f"{where} was made under precision {saved}, and this run has {policy}",
            f"Resume with the same precision, {saved} (precision='auto' chooses another here); to change it, start a new run from the weights in "
            "model.safetensors.",
        )
    own, always = {"scaler", "random", "masters", "watch", "loaders"}, {"scaler", "random"}
    if missing := ", ".join(sorted(always - set(loaded.parts))):
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
            _refuse_model(where, item, loaded.parts[name], loaded.about.get("models", {}).get(name, {}).get("layout"))
        elif hasattr(item, "param_groups"):
            saved_sizes = [len(g["params"]) for g in loaded.parts[name]["param_groups"]]
            sizes = [len(g["params"]) for g in item.param_groups]
            if saved_sizes != sizes:
                raise CheckpointError(
                    f"{where} has an optimizer with groups of {saved_sizes} parameters, and this run's has {sizes}",
                    "Build the optimizer as the run that saved it did.",
                )


def _refuse_model(where: str, model: nn.Module, state: Mapping[str, Any], saved: Mapping[str, Any] | None) -> None:
    mine, here = model.state_dict(), layout(model)
    there = saved or {"16bit": [], "loaded": {}}
    if bool(here["loaded"]) != bool(there["loaded"]):  # only one of the runs keeps weights in 16 bits, because of what its model was loaded in
        dtype = Counter(there["loaded"].values()).most_common(1)[0][0] if there["loaded"] else "float32"
        raise CheckpointError(
            f"{where} is of a run whose model was loaded in {dtype}, and this run's was loaded in another dtype",
            f"Load the model with dtype=torch.{dtype}.",
        )
    narrow = _with_tied(model, {*here["16bit"], *there["16bit"]})  # these become what the checkpoint has
    for key in [*mine, *state]:
        if key not in state or key not in mine:
            whose = "the checkpoint lacks" if key in mine else "the model lacks"
            raise CheckpointError(f"{where} is of another model: {whose} {key!r}", "Build the model as the run that saved it did.")
        ours, theirs = mine[key], state[key]
        if isinstance(ours, torch.Tensor) and (ours.shape != theirs.shape or (ours.dtype != theirs.dtype and key not in narrow)):
            raise CheckpointError(
                f"{where} is of another model: {key!r} is {theirs.dtype} {tuple(theirs.shape)} there and {ours.dtype} {tuple(ours.shape)} here",
                "Build the model as the run that saved it did.",
            )


def _with_tied(model: nn.Module, names: set[str]) -> set[str]:
    """These parameters under all their names: a state has a tied one (a table and the head) once for each."""
    named = list(model.named_parameters(remove_duplicate=False))
    these = {id(p) for name, p in named if name in names}
    return names | {name for name, p in named if id(p) in these}
