"""Weights for use elsewhere: a model alone as safetensors, from a live model or put together from a checkpoint."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from halfstep.checkpoint.store import load
from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim import STORAGES, master_of
from halfstep.policy import DTYPES

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write_model(model: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write a model with the weights `state` into `folder`: by its own `save_pretrained` where it has one, else as model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    own: Any = getattr(model, "save_pretrained", None)
    if own is None:
        write_weights(folder, state)
    elif _takes_state(own):
        own(folder, state_dict=dict(state))
        _set_dtype(folder / CONFIG, state)
    elif any(master_of(p) is not None for p in model.parameters()):
        raise ConfigError(
            f"the save_pretrained of this {type(model).__name__} takes no state_dict=, and would write its 16-bit weights without their masters",
            "Give it a state_dict argument, or write Accelerator.get_state_dict(model) yourself.",
        )
    else:
        own(folder)


def _takes_state(method: Any) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(p.name == "state_dict" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def write_weights(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write tensors as model.safetensors. One that stands under several names (tied weights) is written once, under the first."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        where = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and where in seen:
            continue
        seen.add(where)
        kept[name] = tensor.detach().cpu().contiguous()
    save_file({name: t.clone() if t.untyped_storage().nbytes() != t.nbytes else t for name, t in kept.items()}, folder / WEIGHTS, {"format": "pt"})


def export(checkpoint: str | Path, output: str | Path, dtype: str = "fp32") -> Path:
    """Write the model of a checkpoint folder as safetensors in `dtype` ("fp32", "bf16" or "fp16"), which `from_pretrained` loads.

    Every weight is its fp32 master, rounded once to nearest. Integer tensors stay as they are. For a transformers model its config.json is written
    beside it. Raises CheckpointError for a folder that holds no model, ConfigError for an unknown dtype, an output that holds
    another model, and weights that `dtype` cannot hold.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not known", f"Use one of {', '.join(DTYPES)}.")
    target = Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} {'is not empty' if target.is_dir() else 'is a file'}", "Name a new folder.")
    loaded = load(checkpoint)
    facts = loaded.about.get("models", {}).get("model")
    if facts is None or "model" not in loaded.parts:
        raise CheckpointError(f"checkpoint {loaded.folder} holds no model", "Name a folder that Accelerator.save_state or Trainer wrote.")
    state: dict[str, Tensor] = {}
    by_weight: dict[int, Tensor] = {}
    for name, weight in loaded.parts["model"].items():
        if not isinstance(weight, Tensor):
            continue
        if id(weight) not in by_weight:
            by_weight[id(weight)] = _rounded(name, _full(weight, facts["masters"].get(name), loaded.parts), DTYPES[dtype])
        state[name] = by_weight[id(weight)]
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_weights(target, state)
        if facts.get("config"):
            (target / CONFIG).write_text(facts["config"])
            _set_dtype(target / CONFIG, state)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{target} cannot be written: {error}", "Free some space, or name another folder.") from error
    return target


def _full(weight: Tensor, place: list[Any] | None, parts: Mapping[str, Any]) -> Tensor:
    """The fp32 master of a saved weight, which stands at `place` in the checkpoint; without one the weight itself."""
    if place is None:
        return weight
    entry: Any = parts
    for key in place:
        entry = entry[key]
    return STORAGES[entry["storage"]].read(weight, entry.get("residual"))


def _rounded(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    if not values.is_floating_point():
        return values
    narrow = values.to(dtype)
    if not bool(torch.isfinite(narrow).all()) and bool(torch.isfinite(values).all()):
        raise ConfigError(
            f"{name} has values up to {float(values.abs().max()):g}, which {dtype} cannot hold".replace("torch.", ""), "Use --dtype bf16 or fp32."
        )
    return narrow


def _set_dtype(config: Path, state: Mapping[str, Tensor]) -> None:
    """Let a transformers configuration say the dtype that all floating weights have, so that they are loaded in it."""
    found = {t.dtype for t in state.values() if t.is_floating_point()}
    if len(found) == 1 and config.exists():
        data = json.loads(config.read_text())
        data.pop("torch_dtype", None)
        config.write_text(json.dumps(data | {"dtype": str(found.pop()).removeprefix("torch.")}, indent=2, sort_keys=True) + "\n")
