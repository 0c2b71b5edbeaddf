"""`audit` as a whole: on models in any state, which it leaves as they were. What a clock says is never compared."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from audited import CPU, Net, Pictures, batch
from torch import nn

from halfstep import Audit, audit
from halfstep.amp import autocast, bind, pin
from halfstep.cli.main import main
from halfstep.diagnostics.audit_times import clock_for
from halfstep.errors import ConfigError
from halfstep.policy import parse


class Noisy(Pictures):
    """What a look could change: running statistics, dropout, a counter in Python, a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.drop, self.sums = 0, nn.Dropout(0.5), torch.zeros(3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sums += x.detach().mean((0, 2, 3))
        return super().forward(self.drop(x), labels)


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 8, 8), torch.randint(0, 8, (2,))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-lean", pytest.param("bf16-true", marks=pytest.mark.slow), None])
def test_everything_is_left_as_it_was(precision: str | None) -> None:
    model, given = Noisy(), pictures()
    given[0].requires_grad_()
    given[0].grad = beside = torch.ones_like(given[0])
    model.head.weight.grad = gradient = torch.ones(8, 8)
    before = {name: (t.data_ptr(), t.dtype, t.clone()) for name, t in model.state_dict().items()}
    random = torch.get_rng_state()
    found = audit(model, given, precision=precision, rounds=1)
    assert found.backward
    assert torch.equal(random, torch.get_rng_state())
    assert (model.calls, model.training, "forward" in model.__dict__) == (0, True, False)
    assert torch.equal(model.sums, torch.zeros(3))
    assert model.head.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(8, 8))
    assert given[0].grad is beside
    assert torch.equal(beside, torch.ones_like(beside))
    assert model.stem.weight.grad is None
    for name, t in model.state_dict().items():
        place, dtype, values = before[name]
        assert (t.data_ptr(), t.dtype) == (place, dtype)
        assert torch.equal(t, values), name


def plain(found: Audit) -> dict[str, Any]:
    return json.loads(json.dumps(found.as_dict(), allow_nan=False))  # type: ignore[no-any-return]


def test_a_precision_is_held_against_the_model_as_it_is() -> None:
    found = audit(Net(), batch(), precision="bf16-mixed", rounds=2)
    assert (found.precision, found.baseline, found.predicted_from, found.suggested) == ("bf16-mixed", "fp32", "fp32", "")
    assert min(found.step, found.other, found.measured, found.predicted) > 0
    assert str(found).splitlines()[0] == found.answer
    assert found.answer.startswith(
        f"bf16-mixed takes {found.measured:.2f} of fp32's step here (predicted {found.predicted:.2f}); 100% of product flops"
    )
    kept = plain(found)
    assert kept["answer"] == found.answer
    assert kept["product_flops"].keys() <= {"bf16", "bf16 emulated"}
    columns = "module op direction dtype_in dtype_out class calls seconds share bytes flops why"
    assert set(columns.split()) <= kept["rows"][0].keys()
    assert sum(c["seconds"] for c in kept["classes"]) == pytest.approx(sum(r["seconds"] for r in kept["rows"]))
    assert sum(r["share"] for r in kept["rows"]) + kept["outside"] == pytest.approx(1)


def test_a_model_that_is_not_in_fp32_is_held_against_how_it_is_and_predicted_against_fp32() -> None:
    found = audit(nn.Linear(32, 32).bfloat16(), batch()[0].bfloat16(), precision="bf16-mixed", loss=lambda y: y.float().sum(), rounds=1)
    assert found.baseline == "the model as it is"
    said = f"bf16-mixed takes {found.measured:.2f} of the step of the model as it is here, {found.predicted:.2f} of what fp32 would (predicted); "
    assert found.answer.startswith(said)
    assert found.predicted > 0


def test_a_model_without_products_has_no_share_of_their_flops() -> None:
    found = audit(nn.Identity(), batch()[0], precision="bf16-mixed", rounds=1)
    assert found.answer.startswith(
        f"bf16-mixed takes {found.measured:.2f} of the step of the model as it is here; no product whose flops are known ran"
    )


def test_where_nothing_is_in_16_bits_it_says_what_would_be() -> None:
    found = audit(Net(), batch(), rounds=1)
    assert (found.precision, found.baseline, found.measured) == ("fp32", "", 0.0)
    assert found.suggested in ("bf16-mixed", "fp16-mixed")
    assert found.answer.startswith(f"nothing runs in 16 bits here; {found.suggested} would take ")
    assert plain(found)["measured"] is None


def test_a_bound_model_is_held_against_itself_in_fp32_and_stays_bound() -> None:
    model = Net()
    bind(model, parse("bf16-mixed,products=native"), CPU)
    pin(model, "last")
    forward = model.forward
    found = audit(model, batch(), rounds=1)
    assert (found.baseline, found.predicted_from) == ("fp32", "fp32")
    assert model.forward == forward
    held = [r for r in found.rows if r.why == "rule"]
    assert {(r.module, r.origin) for r in held if r.cls == "products"} == {("last", "last")}
    assert 0 < found.product_flops["fp32"] < 0.5


STATES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "cast by hand": lambda: (nn.Linear(32, 1).bfloat16(), {"batch": batch()[0].bfloat16(), "loss": lambda y: y.float().sum()}),
    "torch's autocast": lambda: _in_call(lambda: torch.autocast("cpu", torch.bfloat16)),
    "halfstep's autocast": lambda: _in_call(lambda: autocast("cpu", torch.bfloat16)),
    "lean and bound": lambda: (_bound("bf16-lean,products=native"), {"batch": batch()}),
}


def _in_call(block: Callable[[], Any]) -> tuple[nn.Module, dict[str, Any]]:
    model, given = Net(), batch()

    def call() -> torch.Tensor:
        with block():
            return model(*given)  # type: ignore[no-any-return]

    return model, {"call": call}


def _bound(precision: str) -> nn.Module:
    model = Net()
    bind(model, parse(precision), CPU)
    model(*batch()).backward()
    return model


@pytest.mark.parametrize("state", STATES)
def test_a_model_in_another_state_is_held_against_fp32_by_prediction(state: str) -> None:
    model, arguments = STATES[state]()
    found = audit(model, rounds=1, **arguments)
    assert (found.baseline, found.measured, found.predicted_from) == ("", 0.0, "the ops that ran")
    assert found.predicted > 0
    assert "fp32 was not run" in found.answer
    assert sum(share for name, share in found.product_flops.items() if name.startswith("bf16")) == pytest.approx(1)


def test_without_a_loss_the_forward_pass_alone_is_told() -> None:
    found = audit(nn.Linear(32, 32), batch()[0], precision="bf16-mixed", rounds=1)
    assert not found.backward
    assert "forward only" in str(found)
    assert {r.direction for r in found.rows} == {"forward"}


def test_a_call_that_runs_its_own_backward_pass_is_not_run_back_twice() -> None:
    model, given = Net(), batch()

    def call() -> torch.Tensor:
        loss = model(*given)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    found = audit(model, call=call, rounds=1)
    assert found.backward
    assert all(p.grad is None for p in model.parameters())
    assert sum(r.calls for r in found.rows if r.op == "nll_loss_backward") == 1


def test_a_compiled_model_is_looked_at_as_it_was_written() -> None:
    model = Net()
    wrapped = copy.copy(model)
    wrapped.__dict__["_orig_mod"] = model
    assert audit(wrapped, batch(), precision="bf16-mixed", rounds=1).model == "Net"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no batch": ({}, "neither batch nor call"),
    "both": ({"batch": 1, "call": lambda: None}, "both batch and call"),
    "loss beside call": ({"call": lambda: None, "loss": F.mse_loss}, "no effect beside call="),
    "no function": ({"batch": 1, "loss": 3}, "loss=3 is no function"),
    "no rounds": ({"batch": 1, "rounds": 0}, "rounds=0"),
    "True rounds": ({"batch": 1, "rounds": True}, "rounds=True"),
    "another precision": ({"batch": batch(), "precision": "fp16-mixed"}, "bound to bf16-mixed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str) -> None:
    arguments, words = REFUSED[name]
    model = Net()
    if name == "another precision":
        bind(model, parse("bf16-mixed"), CPU)
    with pytest.raises(ConfigError, match=words):
        audit(model, **arguments)


@pytest.mark.parametrize("precision", ["bf16-mixed", None])
def test_weights_in_fp64_are_refused_with_a_precision_and_without(precision: str | None) -> None:
    with pytest.raises(ConfigError, match="in fp64"):
        audit(nn.Linear(4, 4).double(), torch.ones(2, 4).double(), precision=precision, rounds=1)


def test_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="in the place of the model"):
        audit([], 1)  # type: ignore[arg-type]


def test_one_thread_is_timed_by_its_own_time_and_several_by_the_clock() -> None:
    import time

    assert torch.get_num_threads() == 1
    assert clock_for(CPU) is time.thread_time
    assert clock_for(torch.device("cuda")) is time.perf_counter


TARGET = """
import torch
from torch import nn

def make(seed):
    return nn.Linear(16, 16), [torch.ones(8, 16)], lambda y: y.square().mean()
"""


def test_the_command_takes_a_target_and_gives_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "audited_target.py"
    file.write_text(TARGET)
    assert main(["audit", "--target", f"{file}:make", "--precision", "bf16-mixed", "--rounds", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["precision"], told["baseline"], told["model"]) == ("bf16-mixed", "fp32", "Linear")


def test_the_command_looks_at_the_demo_in_the_precision_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "1", "--width", "16", "--heads", "1", "--block_size", "8", "--use_cpu", "true"]
    assert main(["audit", "--rounds", "1", *sizes]) == 0
    out = capsys.readouterr().out
    assert out.startswith("bf16-mixed takes ")
    assert "kind of op" in out
    assert main(["audit", "--target", "x.py:f", "--layers", "2"]) == 2
