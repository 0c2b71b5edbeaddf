"""Where a run stands: its environment, and the bytes of the tensors that it holds."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp import bound_policy
from halfstep.diagnostics.records import Environment
from halfstep.diagnostics.under import device_of
from halfstep.hardware import probe
from halfstep.optim import master_of


def now() -> str:
    """The time as ISO 8601 text, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment_of(model: nn.Module, optimizer: Any = None, resolution: Any = None, processes: int = 1) -> Environment:
    """What a run with this model is started in. optimizer: also one that was wrapped or prepared. resolution: that of an accelerator, if any."""
    bound = bound_policy(model)
    policy = str(resolution.policy) if resolution is not None else "" if bound is None else str(bound)
    innermost, parameters = inner(optimizer), list(model.parameters())
    return Environment(
        time=now(),
        halfstep=version(),
        torch=torch.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        device=probe(device_of(model)).as_dict(),
        processes=processes,
        policy=policy,
        optimizer="" if innermost is None else type(innermost).__name__,
        model=type(model).__name__,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        route=", ".join(resolution.emulated) if resolution is not None else "",
        command=tuple(sys.argv),
    )


def version() -> str:
    """The version of halfstep."""
    return str(sys.modules["halfstep"].__version__)


def inner(optimizer: Any) -> Any:
    """The optimizer that an accelerator has prepared, or a wrap holds, itself."""
    while (held := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = held
    return optimizer


def bytes_of(model: nn.Module, optimizers: Iterable[Any] = ()) -> dict[str, int]:
    """Bytes of what is there now: weights, residuals of 16-bit weights, gradients, optimizer states, buffers; and the most that was taken so far.

    Each tensor counts once. "process peak": on a GPU the largest amount that torch has held there, else the resident memory of the process.
    """
    held = list(model.parameters())
    masters = [m for p in held if (m := master_of(p)) is not None]
    kept = [s for o in optimizers if o is not None for s in o.state.values() if isinstance(s, dict)]
    states = [t for s in kept for t in s.values() if isinstance(t, Tensor)]
    found = {
        "weights": _bytes(held),
        "residuals": _bytes(m.residual for m in masters if m.residual is not None),
        "gradients": _bytes(p.grad for p in held if p.grad is not None),
        "states": _bytes(states),
        "buffers": _bytes(model.buffers()),
    }
    return found | {"process peak": peak(device_of(model))}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in {id(t): t for t in tensors}.values())


def peak(device: torch.device) -> int:
    """The most bytes that this process has held on `device` so far; on a CPU, all of it. 0 where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return 0
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
