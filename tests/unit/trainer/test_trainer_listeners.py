"""Who is called at an event: every callback that does something there, however it has come by its method."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import Trainer, TrainerCallback, TrainingArguments
from halfstep.trainer.callbacks import CallbackList
from halfstep.trainer.state import TrainerControl


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.norm, self.last = nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.last(self.norm(self.drop(torch.relu(self.first(x))))) - labels).square().mean()}


def samples(count: int = 16) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=made), "labels": torch.randn(1, generator=made)} for _ in range(count)]


def trainer(folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    given = {"max_steps": 4, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 2, **settings}
    return Trainer(Net(), TrainingArguments(output_dir=str(folder / "run"), **given), train_dataset=samples(), callbacks=callbacks)


def ran(folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    """Made and run at once: the seed is set when it is made."""
    made = trainer(folder, *callbacks, **settings)
    made.train()
    return made


class Duck:
    """No base, one event."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.heard.append("on_step_end")


class Answers:
    """No base, every event by `__getattr__`."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: self.heard.append(name)


class AnswersFirst(TrainerCallback):
    """Every event by `__getattribute__`, before the methods of the base."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        heard = object.__getattribute__(self, "heard") if name.startswith("on_") else None
        return object.__getattribute__(self, name) if heard is None else lambda *_, **__: heard.append(name)


class Static(TrainerCallback):
    heard: list[str] = []  # noqa: RUF012  looked at through the class

    @staticmethod
    def on_step_end(*_: Any, **__: Any) -> None:
        Static.heard.append("on_step_end")


class OfClass(TrainerCallback):
    heard: list[str] = []  # noqa: RUF012

    @classmethod
    def on_step_end(cls, *_: Any, **__: Any) -> None:
        cls.heard.append("on_step_end")


class Child(Duck, TrainerCallback):
    """A mixin before the base."""


class Hidden(TrainerCallback):
    """Its child takes the event away again."""

    heard: list[str] = []  # noqa: RUF012

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.heard.append("on_step_end")


class Silent(Hidden):
    on_step_end = None  # type: ignore[assignment]


@pytest.mark.parametrize("make", [Duck, Answers, AnswersFirst, Static, OfClass, Child, Hidden])
def test_a_method_is_called_however_it_is_defined(make: Any, tmp_path: Path) -> None:
    callback = make()
    callback.heard.clear()
    trainer(tmp_path, callback).train()
    assert callback.heard.count("on_step_end") == 4


def test_an_event_that_is_taken_away_is_not_called(tmp_path: Path) -> None:
    Hidden.heard.clear()
    trainer(tmp_path, Silent()).train()
    assert not Hidden.heard


def test_a_method_put_on_an_instance_is_called_also_when_it_comes_in_mid_run(tmp_path: Path) -> None:
    heard: list[int] = []

    class Late(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                self.on_step_begin = lambda args, state, control, **kwargs: heard.append(state.global_step)  # type: ignore[method-assign]

    trainer(tmp_path, Late()).train()
    assert heard == [2, 3]


def test_a_method_put_on_a_class_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(TrainerCallback):
        pass

    heard: list[int] = []
    run = trainer(tmp_path, Plain())
    monkeypatch.setattr(Plain, "on_step_end", lambda self, args, state, control, **kwargs: heard.append(state.global_step), raising=False)
    run.train()
    assert heard == [1, 2, 3, 4]


def test_a_method_put_on_the_base_of_all_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(TrainerCallback):
        pass

    heard: list[Any] = []
    monkeypatch.setattr(TrainerCallback, "on_epoch_begin", lambda self, args, state, control, **kwargs: heard.append(type(self)))
    trainer(tmp_path, Plain()).train()
    assert Plain in heard


@pytest.mark.parametrize(("make", "listens"), [(TrainerCallback, False), (Duck, False), (Silent, False), (Answers, True), (AnswersFirst, True)])
def test_only_those_that_do_something_listen(make: Any, listens: bool) -> None:
    assert CallbackList([make()]).listens("on_pre_optimizer_step") == listens
    assert not CallbackList([make()]).listens("__missing__")


@pytest.mark.parametrize("make", [TrainerCallback, Duck])
def test_a_callback_that_does_not_look_at_gradients_changes_no_bit(make: Any, tmp_path: Path) -> None:
    with_it, without = ran(tmp_path / "a", make()), ran(tmp_path / "b")
    assert with_it._clips_late
    assert without._clips_late
    assert all(torch.equal(p, q) for p, q in zip(with_it.model.parameters(), without.model.parameters(), strict=True))


def test_a_callback_that_looks_at_gradients_sees_clipped_ones(tmp_path: Path) -> None:
    norms: list[float] = []

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))

    looked, plain = ran(tmp_path / "a", Looks(), max_grad_norm=0.01), ran(tmp_path / "b", max_grad_norm=0.01)
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)
    for p, q in zip(looked.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", ["method", "instance"])
def test_a_control_that_is_returned_replaces_the_one_given(make: str, tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        pass

    def stop(args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        return TrainerControl(should_training_stop=state.global_step == 2)

    callback = Stops()
    if make == "instance":
        callback.on_step_end = stop  # type: ignore[method-assign]
    else:
        Stops.on_step_end = lambda self, *args, **kwargs: stop(*args, **kwargs)  # type: ignore[method-assign]
    run = trainer(tmp_path, callback)
    run.train()
    assert run.state.global_step == 2


@pytest.mark.parametrize("part", ["", "drop", "norm"])
def test_evaluation_mode_set_by_a_callback_is_undone_at_the_next_training_step(part: str, tmp_path: Path) -> None:
    modes: list[bool] = []

    class Evaluates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            modes.append(all(m.training for m in model.modules()))
            model.get_submodule(part).eval()

    changed, plain = ran(tmp_path / "a", Evaluates()), ran(tmp_path / "b")
    assert modes == [True] * 4
    assert all(torch.equal(v, w) for v, w in zip(changed.model.state_dict().values(), plain.model.state_dict().values(), strict=True))
