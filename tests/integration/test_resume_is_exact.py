"""A run that was stopped and resumed in a new trainer ends with the bits of one that never stopped."""

import signal
from pathlib import Path

import pytest
import torch
from resumed_runs import STEPS, TEXT, CrashError, StopAt, crash, ctrl_c, outcome, same, trainer
from torch.utils.data import DataLoader, IterableDataset

from halfstep import Trainer
from halfstep.checkpoint import latest
from halfstep.demo.text import Blocks
from halfstep.errors import CheckpointError
from halfstep.trainer import TrainingInterrupted

PRECISIONS = [
    "fp32",
    "bf16-mixed",
    "fp16-mixed,scale=dynamic:65536,scale_window=3,scale_strategy=stock",
    "fp16-mixed",
    "bf16-lean",
    "fp16-lean",
]  # a scale that moves, up and down; residuals and encoded states


def straight(place: Path, **settings) -> dict:
    made = trainer(place, **settings)
    made.train()
    return outcome(made)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory):
    """What a run with these settings comes to that never stops; each is run once."""
    known: dict[str, dict] = {}

    def get(**settings) -> dict:
        key = repr(settings)
        if key not in known:
            known[key] = straight(tmp_path_factory.mktemp("unbroken"), **settings)
        return known[key]

    return get


def resumed(place: Path, **settings) -> dict:
    made = trainer(place, **settings)
    made.train(resume_from_checkpoint=True)
    return outcome(made)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("samples", "where"), [(28, "in the middle of a pass"), (20, "at the end of a pass"), (25, "in a pass with a short last window")]
)
def test_a_crash_and_a_resume_change_no_bit(tmp_path: Path, unbroken, precision: str, samples: int, where: str) -> None:
    expected = unbroken(precision=precision, samples=samples)
    with pytest.raises(CrashError):
        trainer(tmp_path / "b", precision=precision, samples=samples, callbacks=(StopAt(8, crash),)).train()
    assert latest(tmp_path / "b" / "run").name == "checkpoint-5"
    same(resumed(tmp_path / "b", precision=precision, samples=samples), expected)


def test_dropout_and_the_order_of_the_data_matter_so_the_tests_here_can_fail(tmp_path: Path, unbroken) -> None:
    first = unbroken()
    assert straight(tmp_path)["weights"] == first["weights"]
    assert unbroken(seed=1, data_seed=42)["weights"] != first["weights"], "another dropout"
    assert unbroken(data_seed=1)["weights"] != first["weights"], "another order"


def test_the_fp16_runs_above_have_a_scale_that_moves(unbroken) -> None:
    scales = [r["scale"] for r in unbroken(precision=PRECISIONS[2], samples=28)["history"]]
    assert len(set(scales)) > 1


@pytest.mark.parametrize("step", [2, 7, 11])
def test_ctrl_c_saves_and_the_resumed_run_equals_the_unbroken_one(tmp_path: Path, unbroken, step: int) -> None:
    expected = unbroken(precision="bf16-mixed", save_steps=100)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainingInterrupted) as caught:
        trainer(tmp_path / "b", precision="bf16-mixed", save_steps=100, callbacks=(StopAt(step, ctrl_c),)).train()
    assert signal.getsignal(signal.SIGINT) is before
    assert isinstance(caught.value, KeyboardInterrupt)
    assert caught.value.step == step
    assert caught.value.checkpoint == tmp_path / "b" / "run" / f"checkpoint-{step}"
    assert f"stopped at step {step}, saved in {caught.value.checkpoint}" in str(caught.value)
    assert "resume_from_checkpoint=True" in str(caught.value)
    same(resumed(tmp_path / "b", precision="bf16-mixed", save_steps=100), expected)


def test_ctrl_c_at_the_very_last_step_leaves_a_finished_run(tmp_path: Path, unbroken) -> None:
    expected = unbroken()
    with pytest.raises(TrainingInterrupted):
        trainer(tmp_path / "b", callbacks=(StopAt(STEPS, ctrl_c),)).train()
    assert resumed(tmp_path / "b")["weights"] == expected["weights"]


@pytest.mark.parametrize("window", [4, 7])
def test_a_log_record_that_spans_the_checkpoint_is_the_same(tmp_path: Path, unbroken, window: int) -> None:
    settings = {"logging_steps": window, "save_steps": 5}
    expected = unbroken(**settings)
    with pytest.raises(CrashError):
        trainer(tmp_path / "b", **settings, callbacks=(StopAt(6, crash),)).train()
    same(resumed(tmp_path / "b", **settings), expected)


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_evaluations_and_epoch_strategies_go_on_too(tmp_path: Path, unbroken, strategy: str) -> None:
    """Six passes of two steps: saved after passes, or in the middle of them."""
    settings = {"max_steps": -1, "num_train_epochs": 6.0, "samples": 8, "eval_strategy": strategy, "save_strategy": strategy, "eval_on_start": True}
    settings |= {"logging_strategy": "epoch"} | ({"eval_steps": 3, "save_steps": 3} if strategy == "steps" else {})
    expected = unbroken(**settings)
    assert [r["step"] for r in expected["history"] if "eval_loss" in r] == [
        0,
        *range(2 if strategy == "epoch" else 3, 13, 2 if strategy == "epoch" else 3),
    ]
    with pytest.raises(CrashError):
        trainer(tmp_path / "b", **settings, callbacks=(StopAt(7, crash),)).train()
    same(resumed(tmp_path / "b", **settings), expected)


def test_a_run_may_be_stopped_many_times(tmp_path: Path, unbroken) -> None:
    expected = unbroken(precision=PRECISIONS[2], samples=28)
    for step in (1, 2, 6, 9):
        made = trainer(tmp_path / "b", precision=PRECISIONS[2], callbacks=(StopAt(step, ctrl_c),))
        with pytest.raises(TrainingInterrupted):
            made.train(resume_from_checkpoint=step > 1)
    same(resumed(tmp_path / "b", precision=PRECISIONS[2]), expected)


class Stream(IterableDataset):
    def __iter__(self):
        blocks = Blocks(TEXT, 16)
        return (blocks[i] for i in range(28))


class OwnLoader(Trainer):
    """A loader of the user's, in a fixed order."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)


@pytest.mark.parametrize(
    "settings", [{"data": Stream()}, {"kind": OwnLoader}, {"dataloader_num_workers": 1}], ids=["iterable", "own loader", "worker"]
)
def test_other_sources_of_data_go_on_with_the_next_batch(tmp_path: Path, unbroken, settings: dict) -> None:
    expected = unbroken(**settings)
    with pytest.raises(CrashError):
        trainer(tmp_path / "b", **settings, callbacks=(StopAt(8, crash),)).train()
    same(resumed(tmp_path / "b", **settings), expected)


def test_the_arguments_may_name_the_checkpoint(tmp_path: Path, unbroken) -> None:
    expected = unbroken()
    with pytest.raises(CrashError):
        trainer(tmp_path / "b", callbacks=(StopAt(8, crash),)).train()
    made = trainer(tmp_path / "b", resume_from_checkpoint=str(tmp_path / "b" / "run" / "checkpoint-5"))
    made.train()
    same(outcome(made), expected)


def test_a_finished_run_is_resumed_without_a_step_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    expected = straight(tmp_path, lr_scheduler_type="constant", warmup_steps=0)
    same(resumed(tmp_path, lr_scheduler_type="constant", warmup_steps=0), expected)
    longer = trainer(tmp_path, lr_scheduler_type="constant", warmup_steps=0, max_steps=15)
    assert longer.train(resume_from_checkpoint=True).global_step == 15
    assert [r["step"] for r in longer.state.log_history if "loss" in r] == list(range(1, 16))


def test_after_going_back_to_an_older_checkpoint_the_newest_is_that_of_the_new_run(tmp_path: Path) -> None:
    """The checkpoints of the steps that were given up must not come up again."""
    straight(tmp_path, save_steps=2, save_total_limit=10)
    made = trainer(tmp_path, save_steps=100, save_total_limit=10, seed=7, data_seed=42, callbacks=(StopAt(6, ctrl_c),))
    with pytest.raises(TrainingInterrupted) as caught:
        made.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-4")
    assert caught.value.checkpoint.is_dir()
    assert latest(tmp_path / "run") == caught.value.checkpoint


# --- resuming what does not fit -------------------------------------------------------------------------------------------


def files(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def refused(place: Path, **settings) -> CheckpointError:
    """A refusal that leaves every file and every weight as it was."""
    made = trainer(place, **settings)
    before, weights = files(place), [p.clone() for p in made.model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        made.train(resume_from_checkpoint=True)
    assert files(place) == before
    assert all(torch.equal(a, b) for a, b in zip(weights, made.model.parameters(), strict=True))
    return caught.value


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    with pytest.raises(CrashError):
        trainer(tmp_path, precision="bf16-mixed", save_steps=3, callbacks=(StopAt(8, crash),)).train()
    return tmp_path


def test_another_precision_is_refused(stopped: Path) -> None:
    error = refused(stopped, precision="fp16-mixed")
    assert "was made under precision bf16-mixed, and this run has fp16-mixed" in error.cause
    assert "Resume with the same precision" in error.remedy


def test_another_optimizer_is_refused(stopped: Path) -> None:
    assert "optimizer" in refused(stopped, precision="bf16-mixed", optim="sgd").cause


@pytest.mark.parametrize("name", ["model.safetensors", "custom.json", "optimizer.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_and_the_others_are_named(stopped: Path, name: str) -> None:
    newest = stopped / "run" / "checkpoint-6"
    (newest / name).write_bytes((newest / name).read_bytes()[:-7])
    error = refused(stopped, precision="bf16-mixed")
    assert str(newest) in error.cause
    assert name in error.cause
    assert error.remedy == f"Other checkpoints of this run: {stopped / 'run' / 'checkpoint-3'}."
    made = trainer(stopped, precision="bf16-mixed", save_steps=3)
    assert made.train(resume_from_checkpoint=stopped / "run" / "checkpoint-3").global_step == STEPS


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no checkpoint to resume from. Start without resuming, or name another output_dir"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="checkpoint-9 does not exist"):
        trainer(tmp_path).train(resume_from_checkpoint=tmp_path / "checkpoint-9")
    assert not (tmp_path / "run").exists()
