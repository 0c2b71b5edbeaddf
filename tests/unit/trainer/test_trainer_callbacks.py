"""Callbacks: what they are given, what they may ask for, and when; and the Ctrl-C that a run answers."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep import Trainer, TrainerCallback, TrainerControl, TrainingArguments
from halfstep.checkpoint import checkpoints
from halfstep.trainer import TrainingInterrupted
from halfstep.trainer.interrupt import Interrupt


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.layer(x).squeeze(-1), labels)}


DATA = [{"x": torch.tensor([float(i), 1.0]), "labels": float(i)} for i in range(8)]
EVENTS = sorted(name for name in vars(TrainerCallback) if name.startswith("on_"))


def trainer(place: Path, *callbacks: object, **settings) -> Trainer:
    defaults = {"output_dir": str(place / "run"), "use_cpu": True, "disable_tqdm": True, "max_steps": 4, "save_strategy": "no", "logging_steps": 100}
    args = TrainingArguments(**{**defaults, "per_device_train_batch_size": 2, "learning_rate": 0.01, **settings})
    return Trainer(Regression(), args, train_dataset=DATA, eval_dataset=DATA[:3], callbacks=callbacks)


def on(**actions) -> TrainerCallback:
    """A callback with these events."""

    def method(act):
        return lambda self, args, state, control, **kwargs: act(state, control, kwargs)

    return type("Acts", (TrainerCallback,), {f"on_{name}": method(act) for name, act in actions.items()})()


class Recorder(TrainerCallback):
    """The names of all events, in order, with their keywords."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.given: dict[str, set[str]] = {}


def _record(name: str):
    def method(self, args, state, control, **kwargs) -> None:
        self.events.append(name)
        self.given.setdefault(name, set()).update(k for k, v in kwargs.items() if v is not None)

    return method


for _name in EVENTS:
    setattr(Recorder, _name, _record(_name))


def test_the_events_of_a_run_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer(tmp_path, recorder, max_steps=2, gradient_accumulation_steps=2, logging_steps=1).train()
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log"]
    assert recorder.events == ["on_init_end", "on_train_begin", "on_epoch_begin", *step, *step, "on_epoch_end", "on_log", "on_train_end"]


def test_every_event_is_met_and_given_what_belongs_to_it(tmp_path: Path) -> None:
    recorder, hook = Recorder(), []
    spoil = on(
        step_begin=lambda s, c, k: hook.append(k["model"].layer.weight.register_hook(lambda g: g * float("inf") if s.attempted == 1 else g)),
        pre_optimizer_step=lambda s, c, k: hook.pop().remove(),
    )
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1}
    made = trainer(tmp_path, recorder, spoil, gradient_accumulation_steps=2, **settings)
    made.train()
    made.predict(DATA)
    assert set(recorder.given) == set(EVENTS)
    for name in EVENTS[: EVENTS.index("on_init_end")]:
        assert {"model", "resolution", "device"} <= recorder.given[name]
    for name in ("on_step_begin", "on_step_end", "on_log", "on_save", "on_train_begin"):
        assert {"optimizer", "lr_scheduler", "train_dataloader"} <= recorder.given[name]
    assert "step_result" in recorder.given["on_step_end"] & recorder.given["on_step_skipped"] & recorder.given["on_optimizer_step"]
    assert "logs" in recorder.given["on_log"]
    assert "metrics" in recorder.given["on_evaluate"] & recorder.given["on_predict"]


def test_state_and_control_say_where_the_run_is(tmp_path: Path) -> None:
    seen: list[tuple] = []
    trainer(tmp_path, on(step_end=lambda s, c, k: seen.append((s.global_step, s.epoch, s.max_steps, c.should_training_stop))), max_steps=6).train()
    assert seen == [(n, n / 4, 6, n == 6) for n in range(1, 7)]


def test_a_callback_may_stop_the_run(tmp_path: Path) -> None:
    made = trainer(tmp_path, on(step_end=lambda s, c, k: setattr(c, "should_training_stop", s.global_step == 2)), save_strategy="steps")
    assert made.train().global_step == 2
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-2"]


def test_a_callback_may_end_a_pass(tmp_path: Path) -> None:
    begins: list[int] = []
    stop = on(epoch_begin=lambda s, c, k: begins.append(s.global_step), step_end=lambda s, c, k: setattr(c, "should_epoch_stop", True))
    assert trainer(tmp_path, stop).train().global_step == 4
    assert begins == [0, 1, 2, 3]


@pytest.mark.parametrize("event", ["step_end", "log", "evaluate"])
def test_a_callback_may_ask_for_a_checkpoint_and_gets_that_of_this_step(tmp_path: Path, event: str) -> None:
    def ask(state, control, kwargs) -> None:
        if state.global_step == 2:
            control.should_save = True

    settings = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer(tmp_path, on(**{event: ask}), **settings).train()
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-2"]


def test_a_callback_may_ask_for_a_record_and_an_evaluation(tmp_path: Path) -> None:
    def ask(state, control, kwargs) -> None:
        control.should_log = state.global_step == 3
        control.should_evaluate = state.global_step == 1

    made = trainer(tmp_path, on(step_end=ask), logging_strategy="no")
    made.train()
    assert [(r["step"], "eval_loss" in r, "train_runtime" in r) for r in made.state.log_history] == [
        (1, True, False),
        (3, False, False),
        (4, False, True),
    ]


def test_a_callback_may_return_a_control_of_its_own(tmp_path: Path) -> None:
    def stop(state, control, kwargs):
        return TrainerControl(should_training_stop=True) if state.global_step == 3 else None

    assert trainer(tmp_path, on(step_end=stop)).train().global_step == 3


def test_a_class_is_made_an_instance_of_and_an_added_one_comes_last(tmp_path: Path) -> None:
    order: list[str] = []

    class First(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs) -> None:
            order.append("first")

    made = trainer(tmp_path, First)
    made.add_callback(on(train_begin=lambda s, c, k: order.append("second")))
    made.train()
    assert order == ["first", "second"]


def test_an_error_in_a_callback_comes_through_and_the_run_is_said_to_end(tmp_path: Path) -> None:
    ended: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def fail(state, control, kwargs) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        trainer(tmp_path, on(step_end=fail, train_end=lambda s, c, k: ended.append(1))).train()
    assert ended == [1]
    assert signal.getsignal(signal.SIGINT) is before


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------------


def ctrl_c(state, control, kwargs) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_without_a_save_strategy_ctrl_c_says_that_nothing_was_saved(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted, match=r"stopped at step 1, nothing was saved .*save_strategy is 'no'") as caught:
        trainer(tmp_path, on(step_end=ctrl_c)).train()
    assert caught.value.checkpoint is None
    assert checkpoints(tmp_path / "run") == []


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    reached: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def twice(state, control, kwargs) -> None:
        ctrl_c(state, control, kwargs)
        reached.append(1)
        ctrl_c(state, control, kwargs)
        reached.append(2)

    with pytest.raises(KeyboardInterrupt) as caught:
        trainer(tmp_path, on(step_begin=twice), save_strategy="steps").train()
    assert not isinstance(caught.value, TrainingInterrupted)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_during_an_evaluation_ends_it_after_the_batch_and_saves(tmp_path: Path) -> None:
    batches: list[int] = []

    def stop(state, control, kwargs) -> None:
        batches.append(state.global_step)
        if state.global_step:
            ctrl_c(state, control, kwargs)

    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1, "save_strategy": "steps"}
    with pytest.raises(TrainingInterrupted) as caught:
        trainer(tmp_path, on(prediction_step=stop), **settings).train()
    assert batches == [2]
    assert caught.value.checkpoint == tmp_path / "run" / "checkpoint-2"


def test_ctrl_c_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted, match=r"stopped at step 0, nothing was saved \(no step was taken"):
        trainer(tmp_path, on(prediction_step=ctrl_c), eval_on_start=True, save_strategy="steps").train()
    assert checkpoints(tmp_path / "run") == []


def test_outside_the_main_thread_signals_are_left_alone(tmp_path: Path) -> None:
    """Python allows handlers in the main thread only; a run in another one must still work."""
    steps: list[int] = []
    made = trainer(tmp_path)
    thread = threading.Thread(target=lambda: steps.append(made.train().global_step))
    thread.start()
    thread.join()
    assert steps == [4]


def test_the_handler_that_was_there_is_put_back() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: called.append(1))
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert called == [1]
    finally:
        signal.signal(signal.SIGINT, before)
