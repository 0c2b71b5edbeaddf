"""Calls that were written for torch's optimizers: halfstep's take them, or name what does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfstep.errors import ConfigError
from halfstep.optim import SGD, AdamW

STOCK = [
    (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (AdamW, torch.optim.AdamW, {"amsgrad": False, "capturable": False}),
]


@pytest.mark.parametrize(("ours", "torchs", "more"), STOCK, ids=["SGD", "AdamW"])
@pytest.mark.parametrize("how", [{}, {"fused": True}, {"foreach": True}, {"foreach": False, "differentiable": False}], ids=str)
def test_a_call_of_torchs_is_taken_as_it_stands(ours: Any, torchs: Any, more: dict[str, Any], how: dict[str, Any]) -> None:
    results = []
    for make in (ours, torchs):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(5))
        w.grad = torch.randn(5)
        make([w], lr=0.1, **more, **how).step()
        results.append(w.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("key", ["amsgrad", "capturable", "differentiable"])
def test_what_they_do_not_have_is_refused_with_what_does(key: str) -> None:
    with pytest.raises(ConfigError, match=f"AdamW has no {key}=True.*{'wrap' if key == 'amsgrad' else 'Leave it out'}"):
        AdamW([nn.Parameter(torch.ones(2))], **{key: True})


@pytest.mark.parametrize(("ours", "key"), [(AdamW, "amsgrad"), (AdamW, "capturable"), (AdamW, "differentiable"), (SGD, "differentiable")])
def test_nor_is_it_read_over_in_a_group(ours: Any, key: str) -> None:
    optimizer = ours([{"params": [nn.Parameter(torch.ones(2))], key: False}])
    with pytest.raises(ConfigError, match=f"{ours.__name__} has no {key}=True"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], key: True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ConfigError, match=f"{ours.__name__} has no {key}=True"):
        ours([{"params": [nn.Parameter(torch.ones(2))], key: True}])
