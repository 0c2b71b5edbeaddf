"""Where nothing is scaled nobody listens to gradients: they are compared with how they were, and everything is told as if somebody had listened."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Accelerator
from halfstep.amp import GradScaler
from halfstep.errors import HalfstepError
from halfstep.step import StepEngine
from halfstep.step.marks import Ledger


@contextmanager
def listening(wanted: bool) -> Iterator[None]:
    """wanted: hooks on all parameters from the moment a loss is scaled, as under a loss scale, and every graph is walked; else as it is."""
    look = Ledger.look

    def listen_too(self: Ledger, owners: Any, listen: bool = True) -> None:
        look(self, owners, True)

    def walk_and_listen(self: StepEngine, loss: Tensor) -> Any:
        found = self.state.watch.look(loss)
        look(self.state.ledger, self.state.everybody())
        return found

    if not wanted:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "look", listen_too)
        patch.setattr(StepEngine, "_reached", walk_and_listen)
        yield


class Run:
    """Two modules with an optimizer each, one behind the other, and what is done with them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)
        self.of_a: torch.optim.Optimizer = torch.optim.SGD(self.a.parameters(), lr=0.01, momentum=0.9)
        self.of_b: torch.optim.Optimizer = torch.optim.AdamW(self.b.parameters(), lr=0.01)
        self.scaler = GradScaler(enabled=False)
        for item in (self.a, self.b, self.of_a, self.of_b):
            self.scaler.watch(item)
        self.scaled: list[Tensor] = []
        self.told: list[Any] = []

    def loss(self, kind: str) -> Tensor:
        x = torch.randn(4, 3)
        made: dict[str, Callable[[], Tensor]] = {
            "a": lambda: self.a(x).square().mean(),
            "b": lambda: self.b(x).square().mean(),
            "ab": lambda: self.b(self.a(x)).square().mean(),
            "bias only": lambda: (self.a.bias * x).sum(),
            "nan": lambda: self.b(self.a(x)).mean() * float("nan"),
            "nan, gradients fine": lambda: self.b(self.a(x)).mean() + float("nan"),
        }
        return made[kind]()

    def do(self, verb: str, what: str, number: int) -> None:
        torch.manual_seed(1000 + number)
        of = {"a": self.of_a, "b": self.of_b}
        while self.scaled and verb in ("step", "clip", "unscale"):  # whoever scales a loss runs its backward pass before that
            self.scaled.pop(0).backward()
        held = [p for p in (self.a if what == "a" else self.b).parameters() if p.grad is not None] if what in of else []
        if verb == "scale":
            self.scaled.append(self.scaler.scale(self.loss(what)))
        elif verb == "backward" and self.scaled:
            self.scaled.pop(0).backward()
        elif verb == "backward, kept" and self.scaled:
            self.scaled[0].backward(retain_graph=True)
        elif verb == "backward of two" and len(self.scaled) > 1:
            (self.scaled.pop(0) * 0.5 + self.scaled.pop(0)).backward()
        elif verb == "plain backward":
            self.loss(what).backward()
        elif verb == "clear":
            of[what].zero_grad()
        elif verb == "zero":
            of[what].zero_grad(set_to_none=False)
        elif verb == "edit":
            for p in held:
                p.grad.mul_(0.5)
        elif verb == "replace":
            for p in held:
                p.grad = p.grad.clone()
        elif verb == "clip":
            self.scaler.clip_grad_norm_([*self.a.parameters(), *self.b.parameters()], 0.1)
        elif verb == "unscale":
            self.scaler.unscale_(of[what])
        elif verb == "step":
            r = self.scaler.step(of[what])
            self.told.append((what, r.reason, r.loss_tensor if r.loss_tensor is None else float(r.loss_tensor), r.grad_norm, r.clipped))
            self.scaler.update()

    def all_of(self, sequence: list[tuple[str, str]]) -> tuple[Any, list[Tensor]]:
        for number, (verb, what) in enumerate(sequence):
            try:
                self.do(verb, what, number)
            except (RuntimeError, HalfstepError) as error:
                self.told.append((verb, what, type(error).__name__, str(error)[:80]))
        return repr(self.told), [p.detach().clone() for p in (*self.a.parameters(), *self.b.parameters())]


LOSSES = ("a", "b", "ab", "bias only", "nan", "nan, gradients fine")
LOOSE = (
    [("scale", kind) for kind in LOSSES]
    + [("backward", "")] * 6
    + [("backward, kept", ""), ("backward of two", ""), ("clip", "")]
    + [(verb, part) for verb in ("clear", "zero", "edit", "replace", "step", "step", "unscale") for part in "ab"]
)


def as_listened(sequence: list[tuple[str, str]], seed: int) -> bool:
    with listening(True):
        told, weights = Run(seed).all_of(sequence)
    with listening(False):
        now_told, now = Run(seed).all_of(sequence)
    return told == now_told and all(torch.equal(v, w) for v, w in zip(weights, now, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_random_sequences_are_told_as_if_somebody_had_listened(seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(3):
        sequence = chosen.choices(LOOSE, k=20)
        assert as_listened(sequence, seed), sequence


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_random_sequences_are_told_as_if_somebody_had_listened(seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(20):
        sequence = chosen.choices(LOOSE, k=chosen.randint(6, 40))
        assert as_listened(sequence, seed), sequence


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_of_one_loop_are_told_as_if_somebody_had_listened(seed: int) -> None:
    """Whole steps: micro-batches, then an optimizer or both, cleared one way or the other."""
    chosen = random.Random(seed)
    sequence = []
    for _ in range(8):
        for _ in range(chosen.randint(1, 3)):
            sequence += [("scale", chosen.choice(LOSSES)), ("backward", "")]
        sequence += [("step", "a"), ("step", "b")][chosen.randint(0, 1) :]
        sequence += [(chosen.choice(("clear", "zero")), "a"), (chosen.choice(("clear", "zero", "edit")), "b")]
    assert as_listened(sequence, seed), sequence


@pytest.mark.parametrize(
    "sequence",
    [
        "scale:ab backward zero:b scale:a backward step:b",
        "scale:a backward,:kept zero:a backward step:a",
        "scale:a backward scale:b edit:a backward step:a step:b",
        "scale:nan backward scale:a zero:a backward step:a",
        "scale:a scale:b zero:a backward backward step:a step:b",
    ],
)
def test_gradients_that_are_zeroed_or_edited_before_the_backward_pass_are_not_taken_for_its_own(sequence: str) -> None:
    ops = [("backward, kept", "") if op == "backward,:kept" else (op.partition(":")[0], op.partition(":")[2]) for op in sequence.split()]
    assert as_listened(ops, 0)


def test_nobody_listens_where_nothing_is_scaled() -> None:
    run = Run(0)
    run.all_of([("scale", "ab"), ("backward", ""), ("step", "a"), ("step", "b")])
    assert all(not p._post_accumulate_grad_hooks for p in run.a.parameters())
    scaler, model = GradScaler(init_scale=8.0), nn.Linear(2, 1)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_loss_that_is_told_is_never_that_of_an_earlier_question() -> None:
    """loss_of is remembered: between the same two questions losses, backward passes and clearing come in every order."""
    run = Run(0)
    state = run.scaler._engine.state

    def told() -> list[float | None]:
        found = [state.loss_of(o) for o in (run.of_a, run.of_b)]
        afresh = [state.ledger.loss([p for g in o.param_groups for p in g["params"]], state.record(o).spent_to) for o in (run.of_a, run.of_b)]
        assert [x if x is None else float(x) for x in found] == [x if x is None else float(x) for x in afresh]
        return [x if x is None else round(float(x), 4) for x in found]

    steps = [("scale", "ab"), ("backward", ""), ("scale", "a"), ("backward", ""), ("step", "b"), ("scale", "ab"), ("backward", "")]
    seen = []
    for number, (verb, what) in enumerate(steps):
        run.do(verb, what, number)
        if state.noticed:
            seen.append(told())
    assert len({str(x) for x in seen}) >= 3


def test_losses_of_an_accumulated_step_are_added_up() -> None:
    accelerator = Accelerator(mixed_precision="no", cpu=True)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for i in range(4):
        losses = []
        for _ in range(1 + i):
            loss = model(torch.randn(4, 3)).square().mean()
            losses.append(loss.item())
            accelerator.backward(loss)
        result = optimizer.step()
        optimizer.zero_grad(set_to_none=bool(i % 2))
        assert result.loss == pytest.approx(sum(losses), rel=1e-6)


@pytest.mark.parametrize("enabled", [False, True])
def test_weights_are_let_go(enabled: bool) -> None:
    """A scaler that outlives its model keeps none of its parameters."""
    scaler, model = GradScaler(enabled=enabled, init_scale=8.0), nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler.watch(model)
    for _ in range(3):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weight = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None
