"""Saved averages with settings or numbers that no average has: refused before anything changes."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.errors import CheckpointError
from halfstep.optim import EMA

SPOILT: dict[str, Any] = {
    "decay 1.5": {"decay": 1.5},
    "a decay that is no number": {"decay": float("nan")},
    "a warm-up of an hour": {"warmup": "hour"},
    "half an update": {"updates": 1.5},
    "less than none": {"updates": -1},
    "averages in bf16": lambda s: {"averages": {n: t.bfloat16() for n, t in s["averages"].items()}},
    "averages in whole numbers": lambda s: {"averages": {n: t.long() for n, t in s["averages"].items()}},
    "statistics in fp16": lambda s: {"buffers": {n: t.half() for n, t in s["buffers"].items()}},
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_no_average_can_have_is_not_loaded(what: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = EMA(net, 0.5)
    average.update()
    saved = copy.deepcopy(average.state_dict())
    wrong = SPOILT[what](saved) if callable(SPOILT[what]) else SPOILT[what]
    before = {name: t.clone() for name, t in average.values().items()}
    with pytest.raises(CheckpointError) as refused:
        average.load_state_dict(saved | {"decay": 0.25, "updates": 7} | wrong)
    assert refused.value.remedy
    assert (average.decay, average.warmup, average.updates) == (0.5, "none", 1)
    assert all(torch.equal(t, before[name]) and t.dtype == torch.float32 for name, t in average.values().items())
    average.load_state_dict(saved)
