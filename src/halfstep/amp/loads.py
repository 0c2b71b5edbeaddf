"""What is loaded into 16-bit weights: torch copies into the 16 bits, and the rest of an fp32 value belongs into the master."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp.ops import HALF
from halfstep.optim import attach, detach, master_of

_loading = threading.local()


def follow_loads(module: nn.Module, p: Tensor) -> None:
    """See to it that fp32 values loaded into a 16-bit weight become its master in full, through each of the modules that have it."""
    for part in module.modules():
        if any(q is p for q in part._parameters.values()):
            _follow_loads_of(part)


def _follow_loads_of(part: nn.Module) -> None:
    if not any(getattr(hook, "hook", None) is _before_load for hook in part._load_state_dict_pre_hooks.values()):
        part.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
        part.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]


def leave_loads(part: nn.Module, *others: Callable[..., None]) -> None:
    """Take these hooks off a module, and others by what they call."""
    for hooks in (part._load_state_dict_pre_hooks, part._load_state_dict_post_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in (_before_load, _after_load, *others)]:
            del hooks[key]


def _before_load(part: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    found = {}
    for name, p in part._parameters.items():
        value, master = state_dict.get(prefix + name), master_of(p) if p is not None else None
        if p is not None and master is not None and isinstance(value, Tensor) and value.shape == p.shape:
            found[name] = (value, master.storage.name, p.dtype)
    if not hasattr(_loading, "values"):
        _loading.values = {}
    _loading.values[id(part)] = found


@torch.no_grad()
def _after_load(part: nn.Module, *_: Any) -> None:
    for name, (value, storage, dtype) in getattr(_loading, "values", {}).pop(id(part), {}).items():
        p = part._parameters[name]
        assert p is not None
        if master_of(p) is None and p.dtype == torch.float32:  # assign=True: the parameter is the loaded one
            attach(p, storage, dtype)
        master = master_of(p)
        if master is None:
            continue
        if value.dtype in HALF:
            master.refresh()
            continue
        if storage == "plain" and not p.requires_grad and not torch.equal(value.to(p.device, dtype).float(), value.to(p.device, torch.float32)):
            detach(p)  # frozen, and held in 16 bits because they held it exactly
            p.copy_(value)
        else:
            master.write(value)
