"""Precision policies: values only, no modules and no devices."""

from halfstep.policy.parse import from_flags as from_flags
from halfstep.policy.parse import parse as parse
from halfstep.policy.parse import power_of_two as power_of_two
from halfstep.policy.policy import DTYPES as DTYPES
from halfstep.policy.policy import LARGEST_SCALE as LARGEST_SCALE
from halfstep.policy.policy import PRESETS as PRESETS
from halfstep.policy.policy import LossScale as LossScale
from halfstep.policy.policy import Policy as Policy
from halfstep.policy.policy import preset_table as preset_table
from halfstep.policy.resolve import RULES as RULES
from halfstep.policy.resolve import ModelFacts as ModelFacts
from halfstep.policy.resolve import Resolution as Resolution
from halfstep.policy.resolve import resolve as resolve
from halfstep.policy.rules import select as select
