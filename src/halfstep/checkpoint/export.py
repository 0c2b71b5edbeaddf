"""Weights for use elsewhere: a model alone as safetensors, from a live model or put together from a checkpoint."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from halfstep.checkpoint.files import make_folder, replace, sync, write, write_error
from halfstep.checkpoint.store import Loaded, load
from halfstep.checkpoint.tensors import pieces
from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim import STORAGES, master_of
from halfstep.policy import DTYPES

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
SHARD = "10GB"  # of the largest file
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?(?:i?[bB])?)")
UNITS = {"": 1, "B": 1} | {f"{p}{u}": size for i, p in enumerate("KMGT", 1) for u, size in (("B", 1000**i), ("IB", 1024**i), ("", 1000**i))}


def write_model(model: nn.Module, folder: Path, state: Mapping[str, Tensor], max_shard_size: int | str = SHARD) -> None:
    """Write a model with the weights `state` into `folder`: by its own `save_pretrained` where it has one, else as model.safetensors.

    max_shard_size: bytes, or text such as "5GB": more become several files with an index, which transformers reads too.
    Raises CheckpointError when the disk does not take it.
    """
    largest = size_of(max_shard_size)
    own: Any = getattr(model, "save_pretrained", None)
    try:
        make_folder(folder)
        if own is None:
            write_weights(folder, state, largest)
        elif _takes(own, "state_dict"):
            own(folder, state_dict=dict(state), **({"max_shard_size": max_shard_size} if _takes(own, "max_shard_size") else {}))
            _set_dtype(folder / CONFIG, state)
        elif any(master_of(p) is not None for p in model.parameters()):
            raise ConfigError(
                f"the save_pretrained of this {type(model).__name__} takes no state_dict=, and would write its 16-bit weights without their masters",
                "Give it a state_dict argument, or write Accelerator.get_state_dict(model) yourself.",
            )
        else:
            own(folder)
    except SafetensorError as error:
        raise CheckpointError(f"the model could not be written to {folder}: {error}", "Free some space, or choose another folder.") from error
    except OSError as error:
        needed = sum(t.numel() * t.element_size() for t in state.values())
        raise write_error(f"the model in {folder}", folder, error, needed) from error


def size_of(text: int | str) -> int:
    """A number of bytes, also from text: "500MB", "5GB" (powers of 1000), "5GiB" (of 1024). Raises ConfigError for anything else, and for 0."""
    found = SIZE.fullmatch(str(text).strip()) if not isinstance(text, bool) else None
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if size < 1:
        raise ConfigError(f"max_shard_size={text!r}", "Use a number of bytes, or text such as '500MB', '5GB' or '5GiB'.")
    return size


def _takes(method: Any, name: str) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def write_weights(folder: Path, state: Mapping[str, Tensor], largest: int) -> None:
    """Write tensors as model.safetensors, or as several files of at most `largest` bytes (one tensor may have more) with an index.

    A tensor that stands under several names (tied weights) is written once, under the first. Each file is whole or not there, and those of
    an earlier model go when all new ones are there.
    """
    shards = _shards(_each_once(state), largest)
    names = [WEIGHTS] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        partial = folder / f".{name}.partial"
        partial.unlink(missing_ok=True)
        try:
            write(partial, pieces(tensors))
            os.replace(partial, folder / name)
        finally:
            partial.unlink(missing_ok=True)
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for tensors in shards for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": {k: n for n, tensors in zip(names, shards, strict=True) for k in tensors}}
        replace(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        names.append(INDEX)
    for old in folder.iterdir():
        if (old.name in (WEIGHTS, INDEX) or PART.fullmatch(old.name)) and old.name not in names:
            old.unlink()
    sync(folder)


def _each_once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        where = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if not tensor.numel() or where not in seen:
            kept[name] = tensor.detach()
        seen.add(where)
    return kept


def _shards(state: Mapping[str, Tensor], largest: int) -> list[dict[str, Tensor]]:
    """The tensors in their order, in as few groups as their order allows."""
    shards: list[dict[str, Tensor]] = [{}]
    room = largest
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = largest
        shards[-1][name] = tensor
        room -= size
    return shards


def export(checkpoint: str | Path, output: str | Path, dtype: str = "fp32", max_shard_size: int | str = SHARD, weights: str = "trained") -> Path:
    """Write the model of a checkpoint folder as safetensors in `dtype` ("fp32", "bf16" or "fp16"), which `from_pretrained` loads.

    max_shard_size: as in `write_model`. weights: "trained", or "average" for the average of them that the checkpoint holds (`halfstep.ema`).

    Every weight is its fp32 master, or its fp32 average, rounded once to nearest. Integer tensors stay as they are. For a transformers model its
    config.json is written beside it. Raises CheckpointError for a folder that holds no model, ConfigError for an unknown dtype, an output that holds
    another model, and weights that `dtype` cannot hold.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not known", f"Use one of {', '.join(DTYPES)}.")
    if weights not in ("trained", "average"):
        raise ConfigError(f"weights={weights!r} is not known", "Use trained or average.")
    largest, target = size_of(max_shard_size), Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} {'is not empty' if target.is_dir() else 'is a file'}", "Name a new folder.")
    loaded = load(checkpoint)
    facts = loaded.about.get("models", {}).get("model")
    if facts is None or "model" not in loaded.parts:
        raise CheckpointError(f"checkpoint {loaded.folder} holds no model", "Name a folder that Accelerator.save_state or Trainer wrote.")
    state: dict[str, Tensor] = {}
    by_weight: dict[int, Tensor] = {}
    if weights == "average":
        by_weight = {id(loaded.parts["model"][name]): _rounded(name, value, DTYPES[dtype]) for name, value in _averages(loaded).items()}
    for name, weight in loaded.parts["model"].items():
        if not isinstance(weight, Tensor):
            continue
        if id(weight) not in by_weight:
            by_weight[id(weight)] = _rounded(name, _full(weight, facts["masters"].get(name), loaded.parts), DTYPES[dtype])
        state[name] = by_weight[id(weight)]
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_weights(target, state, largest)
        if facts.get("config"):
            (target / CONFIG).write_text(facts["config"])
            _set_dtype(target / CONFIG, state)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}", "Free some space, or name another folder.") from error
    return target


def _averages(loaded: Loaded) -> dict[str, Tensor]:
    """The averages of the weights and buffers of the model of a checkpoint, by name. Raises CheckpointError unless it holds one such average."""
    kinds = loaded.about.get("kinds", {})
    parts = [loaded.parts[part] for part, kind in kinds.items() if kind == "EMA"]
    found: list[dict[str, Tensor]] = [one["averages"] | one.get("buffers", {}) for one in parts if one["averages"]]
    own = [values for values in found if values.keys() <= loaded.parts["model"].keys()]
    if len(own) != 1:
        raise CheckpointError(
            f"checkpoint {loaded.folder} holds {len(own)} averages of its model",
            "Train with ema_decay, or register one halfstep.ema of it for checkpointing; weights=trained gives the trained weights.",
        )
    return own[0]


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
