"""The states of FusedAdamW are torch's: they are copied, saved, and go from the one to the other, and each step counts once."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_cases import counts, equal, fill, same, torchs, weights
from torch import nn

from halfstep.errors import CheckpointError, ConfigError
from halfstep.optim import FusedAdamW


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_a_copy_goes_on_like_the_original(way: str) -> None:
    a = weights()
    ours = FusedAdamW([{"params": a[:3]}, {"params": a[3:], "lr": 0.2}])
    for i, out in enumerate([(), (1, 4), ()]):
        fill(a, i, left_out=out)
        ours.step()
    if way == "deepcopy":
        copied, twin = copy.deepcopy((ours, a))
    elif way == "pickle":
        copied, twin = pickle.loads(pickle.dumps((ours, a)))  # noqa: S301  our own bytes
    else:
        twin = [nn.Parameter(p.detach().clone()) for p in a]
        copied = FusedAdamW([{"params": twin[:3]}, {"params": twin[3:]}])
        copied.load_state_dict(through_a_file(ours.state_dict()))
    for i in range(3):
        for params, optimizer in ((a, ours), (twin, copied)):
            fill(params, 10 + i, left_out=(i,))
            optimizer.step()
        same(ours, a, copied, twin)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("through", [copy.deepcopy, through_a_file, lambda state: state], ids=["copied", "saved", "as it is"])
def test_its_state_goes_to_torchs_adamw_and_every_step_counts_once(through: Callable[[Any], Any], kind: dict[str, Any]) -> None:
    a = weights()
    ours = FusedAdamW(a, lr=0.1)
    for i in range(3):
        fill(a, i)
        ours.step()
    b = [nn.Parameter(p.detach().clone()) for p in a]
    theirs = torch.optim.AdamW(b, lr=0.1, **kind)
    state = through(ours.state_dict())
    theirs.load_state_dict({**state, "param_groups": [{**group, "fused": None, **kind} for group in state["param_groups"]]})
    for i in range(2):
        fill(b, 10 + i)
        theirs.step()
    assert counts(theirs, b) == [5.0] * len(b)


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_the_state_of_torchs_adamw_is_gone_on_with(kind: dict[str, Any]) -> None:
    a = weights()
    theirs = torch.optim.AdamW(a, lr=0.1, **kind)
    for i, out in enumerate([(), (2,), ()]):
        fill(a, i, left_out=out)
        theirs.step()
    b, c = [nn.Parameter(p.detach().clone()) for p in a], [nn.Parameter(p.detach().clone()) for p in a]
    ours, reference = FusedAdamW(b, lr=0.7), torchs(c, lr=0.7)
    state = copy.deepcopy(theirs.state_dict())
    state["param_groups"][0] |= {"fused": True, "foreach": None}
    ours.load_state_dict(copy.deepcopy(state))
    reference.load_state_dict(copy.deepcopy(state))
    for i in range(3):
        for params, optimizer in ((b, ours), (c, reference)):
            fill(params, 10 + i, left_out=(i,))
            optimizer.step()
        same(ours, b, reference, c)


def test_amsgrad_is_not_left_out_in_silence() -> None:
    a, b = weights(), weights()
    theirs, ours = torchs(a, amsgrad=True), FusedAdamW(b[:3])
    fill(a, 0)
    theirs.step()
    with pytest.raises(CheckpointError, match="amsgrad"):
        FusedAdamW(weights()).load_state_dict(theirs.state_dict())
    ours.add_param_group({"params": b[3:], "amsgrad": True})
    fill(b, 0)
    before = [p.detach().clone() for p in b]
    with pytest.raises(ConfigError, match="amsgrad"):
        ours.step()
    assert equal(b, before)
