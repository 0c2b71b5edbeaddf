"""Optimizers whose 16-bit weights never stop moving, and what they keep: masters, storages, states."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from halfstep.optim.adamw import AdamW as AdamW
from halfstep.optim.averages import EMA as EMA
from halfstep.optim.averages import ema as ema
from halfstep.optim.base import MasteredOptimizer as MasteredOptimizer
from halfstep.optim.choose import with_masters as with_masters
from halfstep.optim.codec import CODECS as CODECS
from halfstep.optim.loading import adopt as adopt
from halfstep.optim.loading import saved_master as saved_master
from halfstep.optim.masters import HALF as HALF
from halfstep.optim.masters import RELEASES as RELEASES
from halfstep.optim.masters import Master as Master
from halfstep.optim.masters import attach as attach
from halfstep.optim.masters import detach as detach
from halfstep.optim.masters import digest as digest
from halfstep.optim.masters import dtype_name as dtype_name
from halfstep.optim.masters import full_values as full_values
from halfstep.optim.masters import keep as keep
from halfstep.optim.masters import master_of as master_of
from halfstep.optim.masters import refresh as refresh
from halfstep.optim.storage import STORAGES as STORAGES
from halfstep.optim.wrap import wrap as wrap

if TYPE_CHECKING:
    from halfstep.optim.fused import FusedAdamW as FusedAdamW
    from halfstep.optim.lion import Lion as Lion
    from halfstep.optim.releasing import Release as Release
    from halfstep.optim.releasing import Released as Released
    from halfstep.optim.releasing import handle_of as handle_of
    from halfstep.optim.releasing import release as release
    from halfstep.optim.sgd import SGD as SGD

_WHEN_USED = {"FusedAdamW": "fused", "Lion": "lion", "SGD": "sgd"} | dict.fromkeys(("Release", "Released", "handle_of", "release"), "releasing")


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module 'halfstep.optim' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"halfstep.optim.{_WHEN_USED[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED})
