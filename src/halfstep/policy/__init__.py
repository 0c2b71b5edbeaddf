"""Precision policies: values only, no modules and no devices. What counts bytes is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from halfstep.policy.parse import chosen as chosen
from halfstep.policy.parse import from_flags as from_flags
from halfstep.policy.parse import parse as parse
from halfstep.policy.parse import power_of_two as power_of_two
from halfstep.policy.policy import AUTO as AUTO
from halfstep.policy.policy import DTYPES as DTYPES
from halfstep.policy.policy import LARGEST_SCALE as LARGEST_SCALE
from halfstep.policy.policy import PRESETS as PRESETS
from halfstep.policy.policy import LossScale as LossScale
from halfstep.policy.policy import Policy as Policy
from halfstep.policy.products import families_of as families_of
from halfstep.policy.products import products_text as products_text
from halfstep.policy.resolve import RULES as RULES
from halfstep.policy.resolve import ModelFacts as ModelFacts
from halfstep.policy.resolve import Resolution as Resolution
from halfstep.policy.resolve import resolve as resolve
from halfstep.policy.rules import select as select

if TYPE_CHECKING:
    from halfstep.policy.choice import Choice as Choice
    from halfstep.policy.choice import ModelSize as ModelSize
    from halfstep.policy.choice import recommend as recommend
    from halfstep.policy.memory import COUNTERS as COUNTERS
    from halfstep.policy.memory import ROLES as ROLES
    from halfstep.policy.memory import STEP as STEP
    from halfstep.policy.memory import Bytes as Bytes
    from halfstep.policy.memory import Footprint as Footprint
    from halfstep.policy.memory import Role as Role
    from halfstep.policy.memory import bytes_per_parameter as bytes_per_parameter
    from halfstep.policy.memory import model_bytes as model_bytes
    from halfstep.policy.memory import name_of as name_of
    from halfstep.policy.memory import roles_of as roles_of
    from halfstep.policy.memory import tensor_bytes as tensor_bytes
    from halfstep.policy.tables import preset_table as preset_table

_WHERE = {
    "Bytes": "halfstep.policy.memory",
    "Choice": "halfstep.policy.choice",
    "Footprint": "halfstep.policy.memory",
    "ModelSize": "halfstep.policy.choice",
    "COUNTERS": "halfstep.policy.memory",
    "ROLES": "halfstep.policy.memory",
    "STEP": "halfstep.policy.memory",
    "Role": "halfstep.policy.memory",
    "bytes_per_parameter": "halfstep.policy.memory",
    "model_bytes": "halfstep.policy.memory",
    "name_of": "halfstep.policy.memory",
    "preset_table": "halfstep.policy.tables",
    "recommend": "halfstep.policy.choice",
    "roles_of": "halfstep.policy.memory",
    "tensor_bytes": "halfstep.policy.memory",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'halfstep.policy' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_WHERE[name]), name)
    return value
