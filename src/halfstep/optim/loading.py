"""From a saved state to this run's: states into its format, masters beside the weights that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import CheckpointError
from halfstep.numerics import BLOCK
from halfstep.optim.codec import SCALE, Codec, Role, codec_of, parts_of, put
from halfstep.optim.foreign import named
from halfstep.optim.masters import HALF, attach, digest, dtype_name, master_of
from halfstep.optim.storage import STORAGES

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CODES = {"first": torch.int8, "second": torch.uint8}
AGAIN = "Build the model and the optimizer as the run that saved it did."


def widened(saved: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """The state of a weight from an optimizer that knew no masters: what is in 16 bits only because the weight was goes on in fp32."""
    wide = p.dtype in (*HALF, torch.float32)
    return {key: value.float() if wide and isinstance(value, Tensor) and value.dtype in HALF else value for key, value in saved.items()}


def converted(saved: Mapping[str, Any], p: Tensor, number: int, roles: Mapping[str, Role], codec: Codec) -> dict[str, Any]:
    """The saved states of one parameter in the format `codec`, on the parameter's device. Raises CheckpointError where that would round.

    States of fp64 and complex weights are in the weight's own dtype, under every codec.
    """
    state: dict[str, Any] = {}
    for key, value in saved.items():
        if key.endswith(SCALE) and key.removesuffix(SCALE) in saved and key.removesuffix(SCALE) in roles:
            continue
        if not isinstance(value, Tensor) or key not in roles:
            state[key] = _moved(key, value, p)
            continue
        parts, role = {end: t.to(p.device).clone() for end, t in parts_of(saved, key).items()}, roles[key]
        own = p.dtype not in (*HALF, torch.float32)
        known = codec_of(saved, key)
        if not (_is_of(value, p) and SCALE not in parts if own else known is not None and _fits(parts, p, role)):
            raise CheckpointError(f"the saved {key} of parameter {number} is {named(value)}, and the parameter is {named(p)}", AGAIN)
        if own:
            parts[""] = parts[""].to(p.dtype)
        elif known is not None and known.name != codec.name:
            values = known.decode(parts, role, p.shape)
            parts = codec.encode(values, role, None)
            if not torch.equal(codec.decode(parts, role, p.shape), values):
                raise CheckpointError(
                    f"the saved {key} of parameter {number} is in {known.name}, and {codec.name} would round it",
                    f"Go on with states={known.name}, or start new states.",
                )
        if parts[""].shape == p.shape and parts[""].stride() != p.stride():
            parts[""] = torch.empty_like(p, dtype=parts[""].dtype).copy_(parts[""])
        put(state, key, parts)
    return state


def check_master(number: int, p: Tensor | None, entry: Mapping[str, Any], wanted: str | None) -> None:
    """Raise CheckpointError unless a saved master is whole and fits parameter `number`, in the storage `wanted` or that of the master it has."""
    residual, dtype = entry.get("residual"), DTYPES.get(str(entry.get("dtype")))
    storage = STORAGES.get(str(entry.get("storage")))
    if p is None or storage is None or dtype is None or storage.name == "fp32" or not isinstance(entry.get("digest"), int):
        raise CheckpointError(f"the saved master of parameter {number} is damaged, or of a parameter that is not here", AGAIN)
    expected = storage.residual_dtype(dtype)
    found = (None, None) if residual is None else (residual.dtype, residual.shape)
    if found != ((None, None) if expected is None else (expected, p.shape)):
        raise CheckpointError(
            f"the saved master of parameter {number} ({storage.name}) has a residual of {found[0]} {tuple(found[1] or ())}, and one of "
            f"{expected} {tuple(p.shape)} would fit",
            AGAIN,
        )
    master = master_of(p)
    wanted = master.storage.name if master is not None else wanted
    if p.dtype in HALF and p.dtype != dtype:
        raise CheckpointError(
            f"the saved master of parameter {number} is of a {dtype_name(dtype)} weight, and the weight is {dtype_name(p.dtype)} here",
            "Use the same 16-bit format.",
        )
    if wanted not in (None, "fp32", storage.name) and storage.name not in ("stochastic", "plain") and (storage.name, wanted) != ("split24", "split"):
        raise CheckpointError(
            f"the saved master of parameter {number} is {storage.name}, and {wanted} would round it",
            f"Go on with weights={storage.name}, or start from the weights in model.safetensors.",
        )


def saved_master(p: Tensor) -> dict[str, Any] | None:
    """What a checkpoint keeps of the master of a weight: storage, residual, and a digest of the 16 bits they belong to. None without a master."""
    master = master_of(p)
    if master is None:
        return None
    master.follow()
    entry: dict[str, Any] = {"storage": master.storage.name, "dtype": dtype_name(p.dtype), "digest": digest(p)}
    return entry if master.residual is None else entry | {"residual": master.residual}


@torch.no_grad()
def adopt(p: Tensor, saved: Mapping[str, Any], wanted: str | None = None) -> bool:
    """Put a master of `saved_master` beside the weight that it belongs to, in the storage `wanted`; False when that is another weight now."""
    dtype = DTYPES[saved["dtype"]]
    storage, residual = STORAGES[saved["storage"]], saved.get("residual")
    weight = p.detach().to(dtype)
    if digest(weight) != saved["digest"] or not torch.equal(weight.to(p.dtype), p.detach()):
        return False
    if residual is None:
        return True
    if p.dtype in HALF and p.dtype != dtype:
        return False
    values = storage.read(weight, residual.to(p.device))
    master = master_of(p)
    if master is None and p.dtype in HALF:
        master = attach(p, wanted or storage.name)
    if master is None:
        p.copy_(values)
    elif (storage.name, master.storage.name) == ("split24", "split"):  # the weight keeps its bits, which need not be the nearest ones
        master.put(residual.to(torch.int16) << 8)
    elif master.storage.name == storage.name:
        master.put(residual)
    else:
        return False  # load_state_dict lets no other pair through; a master was attached since
    return True


def _fits(parts: Mapping[str, Tensor], p: Tensor, role: Role) -> bool:
    """Whether an encoded state has as many elements as its parameter, and as many scales as these have blocks."""
    if SCALE in parts:
        if parts[""].dtype != CODES[role] or parts[SCALE].dtype != torch.float32:
            return False
        return parts[""].numel() == p.numel() and parts[SCALE].numel() == -(-p.numel() // BLOCK)
    return parts[""].shape == p.shape


def _is_of(value: Tensor, p: Tensor) -> bool:
    """Whether a state is one of a weight as wide as `p`, or of a narrower one of its kind: real or complex."""
    number = value.is_complex() if p.is_complex() else value.is_floating_point()
    return number and value.shape == p.shape and torch.promote_types(value.dtype, p.dtype) == p.dtype


def _moved(key: str, value: Any, p: Tensor) -> Any:
    """A saved value on the device of its parameter; counters stay where they were."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if key == "step" else value.to(p.device).clone()
