"""halfstep: mixed-precision training for PyTorch with a step that tells the truth.

The public names; each is imported when it is first used, so `import halfstep` costs next to nothing.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep import amp as amp
    from halfstep import errors as errors
    from halfstep import optim as optim
    from halfstep.accelerator import Accelerator as Accelerator
    from halfstep.diagnostics.audit import audit as audit
    from halfstep.diagnostics.audit_record import Audit as Audit
    from halfstep.diagnostics.compare import compare as compare
    from halfstep.diagnostics.memory import memory as memory
    from halfstep.diagnostics.memory_plan import MemoryPlan as MemoryPlan
    from halfstep.diagnostics.plan import plan as plan
    from halfstep.diagnostics.planned import Plan as Plan
    from halfstep.diagnostics.scan import scan as scan
    from halfstep.diagnostics.simulate import simulate as simulate
    from halfstep.diagnostics.trace import trace as trace
    from halfstep.hardware import doctor as doctor
    from halfstep.optim import ema as ema
    from halfstep.policy import Policy as Policy
    from halfstep.reports import report as report
    from halfstep.step import StepResult as StepResult
    from halfstep.tracing import Finding as Finding
    from halfstep.tracing import Trace as Trace
    from halfstep.trainer import DefaultFlowCallback as DefaultFlowCallback
    from halfstep.trainer import EarlyStoppingCallback as EarlyStoppingCallback
    from halfstep.trainer import EvalPrediction as EvalPrediction
    from halfstep.trainer import PrinterCallback as PrinterCallback
    from halfstep.trainer import ProgressCallback as ProgressCallback
    from halfstep.trainer import Trainer as Trainer
    from halfstep.trainer import TrainerCallback as TrainerCallback
    from halfstep.trainer import TrainerControl as TrainerControl
    from halfstep.trainer import TrainerState as TrainerState
    from halfstep.trainer import TrainingArguments as TrainingArguments

__version__ = "0.1.0"

_WHERE = {
    "Accelerator": "halfstep.accelerator",
    "Audit": "halfstep.diagnostics",
    "EvalPrediction": "halfstep.trainer",
    "Policy": "halfstep.policy",
    "StepResult": "halfstep.step",
    "DefaultFlowCallback": "halfstep.trainer",
    "EarlyStoppingCallback": "halfstep.trainer",
    "PrinterCallback": "halfstep.trainer",
    "ProgressCallback": "halfstep.trainer",
    "Trainer": "halfstep.trainer",
    "TrainerCallback": "halfstep.trainer",
    "TrainerControl": "halfstep.trainer",
    "TrainerState": "halfstep.trainer",
    "TrainingArguments": "halfstep.trainer",
    "Finding": "halfstep.tracing",
    "Trace": "halfstep.tracing",
    "MemoryPlan": "halfstep.diagnostics",
    "memory": "halfstep.diagnostics.memory",
    "Plan": "halfstep.diagnostics",
    "plan": "halfstep.diagnostics.plan",
    "compare": "halfstep.diagnostics.compare",
    "scan": "halfstep.diagnostics.scan",
    "simulate": "halfstep.diagnostics.simulate",
    "trace": "halfstep.diagnostics.trace",
    "amp": "",
    "audit": "halfstep.diagnostics.audit",
    "doctor": "halfstep.hardware",
    "ema": "halfstep.optim",
    "errors": "",
    "optim": "",
    "report": "halfstep.reports",
}

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        hint = f"; it is halfstep.amp.{name}" if name in ("autocast", "GradScaler") else ""
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}{hint}")
    home, collects = _WHERE[name], gc.isenabled()
    gc.disable()  # modules make no garbage, and to look for some among all of torch's objects takes longer than to import them
    try:
        value = getattr(importlib.import_module(home), name) if home else importlib.import_module(f"halfstep.{name}")
    finally:
        if collects:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
