"""Questions that can be asked of a model and of a run: what is wrong with this batch, what may go wrong with this model, what has happened.

The functions that ask them (`halfstep.audit`, `compare`, `memory`, `plan`, `scan`, `simulate`, `trace`) are in the modules of their names, which are
imported when they are used: a training run needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from halfstep.diagnostics.reading import read_run as read_run
from halfstep.diagnostics.recorder import Recorder as Recorder
from halfstep.diagnostics.records import RunRecords as RunRecords

if TYPE_CHECKING:
    from halfstep.diagnostics.audit_record import Audit as Audit
    from halfstep.diagnostics.memory import measure as measure
    from halfstep.diagnostics.memory_plan import MemoryPlan as MemoryPlan
    from halfstep.diagnostics.planned import Plan as Plan

_WHEN_USED = {"Audit": "audit_record", "MemoryPlan": "memory_plan", "Plan": "planned", "measure": "memory"}


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module 'halfstep.diagnostics' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"halfstep.diagnostics.{_WHEN_USED[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED})
