from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.errors import ConfigError
from halfstep.tracing import Event, Finding, Observation


class Log:
    """Notes (op, module, direction) of every event, and what a look at its tensors costs nothing to be seen."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []
        self.sources: set[str] = set()
        self.forward_ops: list[tuple[str, str]] = []
        self.errors: list[tuple[str, BaseException]] = []

    def begin(self, model: nn.Module) -> None:
        self.seen.clear()

    def see(self, event: Event) -> None:
        place = event.place
        self.seen.append((event.op, place.module, place.direction))
        self.sources.add(place.source.partition(":")[0])
        self.forward_ops.append((event.op, event.forward_op))
        if event.error is not None:
            self.errors.append((place.module, event.error))
        for t in event.outputs:
            assert not (t.float() * 2 + 1).requires_grad
            assert t.dim() != 2 or (t.float() @ t.float().T).dtype == torch.float32

    def findings(self) -> list[Finding]:
        return []


class Net(nn.Module):
    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 1)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * 2
        part = lambda v: self.b(v) * 3  # noqa: E731
        x = part(x) if self.again is None else checkpoint(part, x, use_reentrant=self.again)
        return self.c(x).exp().sqrt().sum()


def run(model: nn.Module, x: Tensor, backward: Any = lambda loss: loss.backward()) -> tuple[Log, Observation]:
    log = Log()
    with Observation(model, [log]) as seen:
        backward(model(x))
    return log, seen


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_each_op_stands_in_its_module(dtype: torch.dtype | None) -> None:
    model = Net()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        log, seen = run(model, torch.ones(3, 4))
    forward = [(op, module) for op, module, way in log.seen if way == "forward" and op in ("linear", "gelu", "exp", "mul", "sqrt")]
    assert forward == [("linear", "a"), ("mul", ""), ("linear", "b.0"), ("gelu", "b.1"), ("mul", ""), ("linear", "c"), ("exp", ""), ("sqrt", "")]
    backward = [(op, module) for op, module, way in log.seen if way == "backward" and op in ("mm", "gelu_backward")]
    assert backward == [("mm", "c")] * 2 + [("gelu_backward", "b.1")] + [("mm", "b.0")] * 2 + [("mm", "a")]
    assert log.sources <= {"test_observe.py", ""}
    assert seen.events == len(log.seen)


def test_a_backward_op_knows_its_forward_op() -> None:
    log, _ = run(Net(), torch.ones(3, 4))
    assert ("div", "sqrt") in log.forward_ops
    assert ("mul", "exp") in log.forward_ops
    assert ("mm", "linear") in log.forward_ops


@pytest.mark.parametrize("old", [False, True])
def test_what_is_computed_again_is_forward(old: bool) -> None:
    log, _ = run(Net(again=old), torch.ones(3, 4, requires_grad=True))
    plain, _ = run(Net(), torch.ones(3, 4, requires_grad=True))

    def count(seen: Log, op: str, way: str) -> list[str]:
        return [module for name, module, direction in seen.seen if name == op and direction == way]

    assert count(log, "linear", "forward") == [*count(plain, "linear", "forward"), "b.0"]
    assert count(log, "mm", "backward") == count(plain, "mm", "backward")
    assert count(log, "gelu_backward", "backward") == ["b.1"]


def test_a_backward_pass_that_makes_a_graph_is_backward() -> None:
    def penalty(loss: Tensor) -> None:
        (grad,) = torch.autograd.grad(loss, [x], create_graph=True)
        grad.pow(2).sum().backward()

    x = torch.ones(3, 4, requires_grad=True)
    log, _ = run(Net(), x, penalty)
    assert [module for op, module, way in log.seen if op == "gelu_backward" and way == "backward"] == ["b.1"] * 3
    assert ("pow", "", "forward") in log.seen


def test_a_custom_function_is_placed_both_ways() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.cos()

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Twice.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), Outer())
    log, _ = run(model, torch.ones(2, 4), lambda y: y.sum().backward())
    assert ("sin", "1", "forward") in log.seen
    assert ("cos", "1", "backward") in log.seen


def test_an_error_is_shown_with_its_place_and_raised() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())
    log = Log()
    seen = Observation(model, [log])
    with pytest.raises(RuntimeError, match="dtype") as caught, seen:
        model(torch.ones(2, 4))
    assert [module for module, _ in log.errors] == ["1"]
    assert seen.error_place(caught.value).module == "1"
    assert seen.error_place(caught.value).source.startswith("test_observe.py:")


def test_an_error_that_no_op_raised_has_a_place_too() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("x")

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Picky()))
    seen = Observation(model, [])
    with pytest.raises(KeyError) as caught, seen:
        model(torch.ones(2, 4))
    assert (seen.error_place(caught.value).module, seen.error_place(caught.value).kind) == ("1.0", "Picky")


def test_a_module_that_raised_and_was_forgiven_leaves_the_stack() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.bad(x)
            except RuntimeError:
                x = x.cos()
            return self.good(x)

    log, _ = run(Tries(), torch.ones(2, 4), lambda y: None)
    assert ("cos", "", "forward") in log.seen
    assert ("linear", "good", "forward") in log.seen


def test_only_one_observation_at_a_time_and_the_next_one_works() -> None:
    model = Net()
    with Observation(model, []), pytest.raises(ConfigError, match="inside another"):
        Observation(model, []).__enter__()
    log, _ = run(model, torch.ones(2, 4))
    assert log.seen
    with pytest.raises(ZeroDivisionError), Observation(model, []):
        raise ZeroDivisionError
    assert run(model, torch.ones(2, 4))[0].seen


def test_gradients_and_numbers_are_those_of_a_run_that_is_not_observed() -> None:
    def gradients(observed: bool) -> list[Tensor]:
        model, x = Net(), torch.linspace(-1, 1, 12).reshape(3, 4)
        if observed:
            run(model, x)
        else:
            model(x).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_other_threads_are_left_alone() -> None:
    log, done = Log(), []
    model, other = Net(), Net()

    def work() -> None:
        done.append(float(other(torch.ones(2, 4)).detach()))

    with Observation(model, [log]) as seen:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert done
    assert seen.events == 0
    assert seen.module == ("", "")
