"""The first door: autocast and a gradient scaler for a loop that you write yourself."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from halfstep.amp.autocast import Products as Products
from halfstep.amp.autocast import autocast as autocast
from halfstep.amp.autocast import backward_context as backward_context
from halfstep.amp.autocast import forward_context as forward_context
from halfstep.amp.casting import Binding as Binding
from halfstep.amp.casting import bind as bind
from halfstep.amp.casting import bound_policy as bound_policy
from halfstep.amp.casting import products_of as products_of
from halfstep.amp.casting import upcast as upcast
from halfstep.amp.grad_scaler import GradScaler as GradScaler
from halfstep.amp.grad_scaler import clip_grad_norm_ as clip_grad_norm_
from halfstep.amp.lean import convert as convert
from halfstep.amp.lean import is_kept as is_kept
from halfstep.amp.lean import layout as layout
from halfstep.amp.lean import model_state as model_state
from halfstep.amp.pins import Pin as Pin
from halfstep.amp.pins import Pinned as Pinned
from halfstep.amp.pins import pin as pin
from halfstep.amp.pins import pins as pins
from halfstep.amp.pins import unpin as unpin

if TYPE_CHECKING:
    from halfstep.amp.causal import ChunkedLoss as ChunkedLoss
    from halfstep.amp.causal import chunk_loss as chunk_loss
    from halfstep.amp.linear_loss import linear_cross_entropy as linear_cross_entropy

_WHEN_USED = {"ChunkedLoss": "causal", "chunk_loss": "causal", "linear_cross_entropy": "linear_loss"}


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module 'halfstep.amp' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"halfstep.amp.{_WHEN_USED[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED})
