"""Pure functions of tensors: no module, no optimizer, no device query."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from halfstep.numerics.blocks import BLOCK as BLOCK
from halfstep.numerics.blocks import decode as decode
from halfstep.numerics.blocks import encode as encode
from halfstep.numerics.compensated import kahan_join as kahan_join
from halfstep.numerics.compensated import kahan_split as kahan_split
from halfstep.numerics.compensated import two_sum as two_sum
from halfstep.numerics.formats import FORMATS as FORMATS
from halfstep.numerics.formats import Format as Format
from halfstep.numerics.formats import format_named as format_named
from halfstep.numerics.formats import ulp as ulp
from halfstep.numerics.gradients import LARGEST_GRADIENT as LARGEST_GRADIENT
from halfstep.numerics.gradients import clip_factor as clip_factor
from halfstep.numerics.gradients import largest as largest
from halfstep.numerics.gradients import largest_of_each as largest_of_each
from halfstep.numerics.gradients import multiply_ as multiply_
from halfstep.numerics.gradients import norm as norm
from halfstep.numerics.gradients import norms as norms
from halfstep.numerics.gradients import stored as stored
from halfstep.numerics.gradients import subnormal_counts as subnormal_counts
from halfstep.numerics.gradients import subnormal_share as subnormal_share
from halfstep.numerics.gradients import wide_norm as wide_norm
from halfstep.numerics.noise import Noise as Noise
from halfstep.numerics.noise import state_noise as state_noise
from halfstep.numerics.residual import join as join
from halfstep.numerics.residual import split as split
from halfstep.numerics.rounding import cast as cast
from halfstep.numerics.rounding import nearest as nearest
from halfstep.numerics.rounding import stochastic as stochastic
from halfstep.numerics.tables import COUNTS as COUNTS
from halfstep.numerics.tables import TableLoss as TableLoss
from halfstep.numerics.tables import different as different
from halfstep.numerics.tables import table_loss as table_loss
from halfstep.numerics.updates import AdamWStep as AdamWStep
from halfstep.numerics.updates import LionStep as LionStep
from halfstep.numerics.updates import Settings as Settings
from halfstep.numerics.updates import SGDStep as SGDStep
from halfstep.numerics.updates import adamw_ as adamw_
from halfstep.numerics.updates import adamw_scalars as adamw_scalars
from halfstep.numerics.updates import average_ as average_
from halfstep.numerics.updates import lion_ as lion_
from halfstep.numerics.updates import lion_scalars as lion_scalars
from halfstep.numerics.updates import sgd_ as sgd_
from halfstep.numerics.updates import sgd_scalars as sgd_scalars

if TYPE_CHECKING:
    from halfstep.numerics.error import Error as Error
    from halfstep.numerics.error import error as error
    from halfstep.numerics.occupancy import Occupancy as Occupancy
    from halfstep.numerics.occupancy import occupancy as occupancy

_WHEN_USED = ("Error", "error", "Occupancy", "occupancy")  # what few programs ask for


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module 'halfstep.numerics' has no attribute {name!r}")
    for own in _WHEN_USED:  # all of them at once: importing a module would put it in the place of its function
        globals()[own] = getattr(importlib.import_module(f"halfstep.numerics.{own.lower()}"), own)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED})
