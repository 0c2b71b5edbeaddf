"""States as other optimizers and older runs have left them: taken up with the numbers that they mean, or refused before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.errors import CheckpointError
from halfstep.optim import HALF, SGD, AdamW, FusedAdamW, Lion, full_values, wrap
from halfstep.policy import ROLES

SHAPES = ((6, 5), (7, 3))  # of two dimensions, which Muon asks for
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Muon": {},
}
ALONE = {"Lion": "ours", "SparseAdam": "takes sparse gradients", "LBFGS": "needs a closure, and is refused by wrap"}
STOCK = [name for name in ROLES if name not in ALONE]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draws).to(torch.bfloat16).to(dtype)) for shape in SHAPES]


def give(params: list[nn.Parameter], step: int) -> None:
    draws = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draws).bfloat16().to(p.dtype)


def made(name: str, params: list[nn.Parameter]) -> Any:
    return getattr(torch.optim, name)(params, lr=0.01, **SETTINGS.get(name, {}))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", STOCK)
def test_states_that_were_16_bit_because_the_weights_were_go_on_in_fp32(name: str, dtype: torch.dtype) -> None:
    """Then a step is the one that the optimizer takes on fp32 weights with these states."""
    theirs, mine, wide = parameters(dtype), parameters(dtype), parameters(torch.float32)
    stock = made(name, theirs)
    for step in range(2):
        give(theirs, step)
        stock.step()
    with torch.no_grad():
        for p, q, w in zip(theirs, mine, wide, strict=True):
            q.copy_(p)
            w.copy_(p)
    saved = copy.deepcopy(stock.state_dict())
    narrow = {key for state in saved["state"].values() for key, value in state.items() if isinstance(value, torch.Tensor) and value.dtype in HALF}
    assert narrow >= {key for key in ROLES[name] if key in saved["state"][0]} - {"row_var", "col_var", "variance"}
    wrapped, reference = wrap(made(name, mine)), made(name, wide)
    wrapped.load_state_dict(copy.deepcopy(saved))
    reference.load_state_dict(copy.deepcopy(saved))
    for q, w in zip(mine, wide, strict=True):
        for key, value in reference.state[w].items():
            if isinstance(value, torch.Tensor):
                assert wrapped.state[q][key].dtype == torch.float32, key
                assert torch.equal(wrapped.state[q][key], value), key
    give(mine, 2)
    give(wide, 2)
    wrapped.step()
    reference.step()
    for q, w in zip(mine, wide, strict=True):
        torch.testing.assert_close(full_values(q), w.detach(), rtol=2.0**-22, atol=2.0**-26)


def test_what_an_optimizer_of_the_run_keeps_in_16_bits_by_itself_comes_back_as_it_was() -> None:
    class Narrow(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                last = self.state[p].get("last", torch.zeros_like(p, dtype=torch.bfloat16))
                self.state[p]["last"] = (last.float() * 0.5 + p.grad).bfloat16()
                p.sub_(self.state[p]["last"].float() * 0.1)

    runs = []
    for resumed in (False, True):
        params = parameters(torch.bfloat16)
        wrapped = wrap(Narrow(params))
        for step in range(4):
            if resumed and step == 2:
                saved = copy.deepcopy(wrapped.state_dict())
                wrapped = wrap(Narrow(params))
                wrapped.load_state_dict(saved)
            give(params, step)
            wrapped.step()
        runs.append([full_values(p) for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# --- tensors that are no moments

Params = list[nn.Parameter]
MAKERS: dict[str, Callable[[Params], Any]] = {
    "AdamW": AdamW,
    "AdamW, int8": lambda ps: AdamW(ps, states="int8"),
    "Lion": Lion,
    "SGD": lambda ps: SGD(ps, momentum=0.9),
    "FusedAdamW": FusedAdamW,
    "wrapped AdamW": lambda ps: wrap(torch.optim.AdamW(ps)),
    "wrapped AdamW, int8": lambda ps: wrap(torch.optim.AdamW(ps), states="int8"),
    "wrapped Adagrad": lambda ps: wrap(torch.optim.Adagrad(ps)),
    "wrapped amsgrad": lambda ps: wrap(torch.optim.Adam(ps, amsgrad=True)),
}
KEYS = {"SGD": "momentum_buffer", "wrapped Adagrad": "sum", "wrapped amsgrad": "max_exp_avg_sq"}
FOREIGN: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "int64": lambda t: {"": t.long()},
    "codes without scales": lambda t: {"": t.to(torch.int8)},
    "truth values": lambda t: {"": t > 0},
    "another shape": lambda t: {"": t[:-1]},
    "codes with too many scales": lambda t: {"": t.to(torch.int8), "_scale": torch.ones(9)},
}


@pytest.mark.parametrize("what", [*FOREIGN, "fp64"])
@pytest.mark.parametrize("name", MAKERS)
def test_tensors_that_are_no_state_of_the_weight_are_refused_and_change_nothing(name: str, what: str) -> None:
    if what == "fp64" and name in ("wrapped Adagrad", "wrapped amsgrad"):
        return  # what stays as it is may be as wide as it likes
    p = nn.Parameter(torch.linspace(-1, 1, 200))
    optimizer = MAKERS[name]([p])
    p.grad = torch.ones(200)
    optimizer.step()
    before, saved, key = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict()), KEYS.get(name, "exp_avg")
    state = saved["state"][0]
    state.pop(f"{key}_scale", None)
    values = torch.linspace(-100, 100, 200, dtype=torch.float64)
    state |= {key + end: t for end, t in (FOREIGN[what](values) if what != "fp64" else {"": values}).items()}
    with pytest.raises(CheckpointError, match=rf"saved {key} of parameter 0 is \w+ \(\d+,\), and the parameter is float32 \(200,\)"):
        optimizer.load_state_dict(saved)
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    assert all(torch.equal(now["state"][0][k], v) for k, v in before["state"][0].items())


@pytest.mark.parametrize("make", [AdamW, FusedAdamW])
def test_states_of_narrower_weights_go_on_beside_fp64_and_complex_ones(make: Any) -> None:
    for narrow, wide in ((torch.float32, torch.float64), (torch.bfloat16, torch.float64), (torch.complex64, torch.complex128)):
        p, q = nn.Parameter(torch.ones(5, dtype=narrow)), nn.Parameter(torch.ones(5, dtype=wide))
        stock = torch.optim.AdamW([p])
        p.grad = torch.ones_like(p)
        stock.step()
        optimizer = make([q])
        optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[q][key].dtype == wide
            assert torch.equal(optimizer.state[q][key], stock.state[p][key].to(wide))
        q.grad = torch.ones_like(q)
        optimizer.step()
    real, complex_ = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5, dtype=torch.complex64))
    stock = torch.optim.AdamW([real])
    real.grad = torch.ones(5)
    stock.step()
    with pytest.raises(CheckpointError, match=r"is float32 \(5,\), and the parameter is complex64"):
        make([complex_]).load_state_dict(stock.state_dict())


# --- what is not there yet, and who sees what


@pytest.mark.parametrize("name", MAKERS)
def test_a_parameter_that_has_not_begun_may_have_an_empty_state(name: str) -> None:
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = MAKERS[name]([p, q])
    p.grad, q.grad = torch.ones(3), None if name != "wrapped Adagrad" else torch.ones(3)  # which has begun when it is made
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1] = {}
    if name == "wrapped Adagrad":
        saved["state"][1] = copy.deepcopy(saved["state"][0])
    optimizer.load_state_dict(saved)
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    assert bool((q != 1).all())


@pytest.mark.parametrize("count", [float("nan"), -1.0, "many", torch.ones(2)])
@pytest.mark.parametrize("make", [AdamW, FusedAdamW])
def test_a_count_of_steps_that_is_none_is_refused(make: Any, count: Any) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = make([p])
    p.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = count
    with pytest.raises(CheckpointError, match="saved step of parameter 0 is"):
        optimizer.load_state_dict(saved)
    assert float(optimizer.state[p]["step"]) == 1


@pytest.mark.parametrize("make", [AdamW, FusedAdamW, lambda ps: wrap(torch.optim.AdamW(ps))])
def test_hooks_after_loading_see_the_state_as_it_will_be_used(make: Any) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer, seen = make(params), []
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = 1  # as older optimizers of torch's saved it
    optimizer.register_load_state_dict_post_hook(lambda o: seen.extend(o.state[p]["step"] for p in params))
    optimizer.load_state_dict(saved)
    assert [(type(t), t.dtype, float(t)) for t in seen] == [(torch.Tensor, torch.float32, 1.0)] * 2
    if isinstance(optimizer, FusedAdamW):
        assert seen[0] is seen[1], "those that have taken as many steps share a counter"


def test_hooks_after_loading_see_no_buffer_that_is_not_there() -> None:
    p = nn.Parameter(torch.ones(3))
    stock, optimizer, seen = torch.optim.SGD([p]), SGD([p]), []
    p.grad = torch.ones(3)
    stock.step()
    saved = stock.state_dict()
    saved["state"][0] = {"momentum_buffer": None}
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(dict(o.state[p])))
    optimizer.load_state_dict(saved)
    assert seen == [{}]


@pytest.mark.parametrize("make", [AdamW, FusedAdamW])
def test_hooks_before_loading_may_make_a_state_fit(make: Any) -> None:
    p = nn.Parameter(torch.ones(3))
    stock = torch.optim.AdamW([p], amsgrad=True)
    p.grad = torch.ones(3)
    stock.step()

    def without(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        kept = {n: {k: v for k, v in s.items() if k != "max_exp_avg_sq"} for n, s in state["state"].items()}
        return state | {"state": kept, "param_groups": [group | {"amsgrad": False} for group in state["param_groups"]]}

    optimizer = make([p])
    with pytest.raises(CheckpointError, match="amsgrad=True"):
        optimizer.load_state_dict(stock.state_dict())
    optimizer.register_load_state_dict_pre_hook(without)
    optimizer.load_state_dict(stock.state_dict())
    assert torch.equal(optimizer.state[p]["exp_avg"], stock.state[p]["exp_avg"])


@pytest.mark.parametrize("lacks", ["state", "param_groups"])
@pytest.mark.parametrize("make", [AdamW, FusedAdamW, lambda ps: wrap(torch.optim.AdamW(ps))])
def test_what_is_no_state_of_an_optimizer_is_refused(make: Any, lacks: str) -> None:
    optimizer = make([nn.Parameter(torch.ones(3))])
    saved = optimizer.state_dict()
    del saved[lacks]
    with pytest.raises(CheckpointError, match=r"has state and param_groups, and this one has .*\. Load what its state_dict\(\) gave"):
        optimizer.load_state_dict(saved)
