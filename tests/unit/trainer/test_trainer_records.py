"""What a trainer's run writes down for its report: files, events, the same after a resume, in TensorBoard, and no bit of the run changed."""

import contextlib
import gc
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Trainer, TrainerCallback, TrainingArguments
from halfstep.diagnostics import read_run
from halfstep.errors import CheckpointError, ConfigError, DivergedError, MissingExtraError
from halfstep.trainer.interrupt import TrainingInterrupted

FILES = ["config.yaml", "environment.json", "events.jsonl", "layers.jsonl", "memory.json", "metrics.jsonl"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x).squeeze(-1) - labels).float().square().mean()}


class InOrder(Trainer):
    """Reads the data as it stands."""

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        loader.batch_sampler.shuffle = False
        return loader


def rows(count: int = 64, bad: set[int] = frozenset()) -> list[dict[str, Tensor]]:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(3))
    return [{"x": x, "labels": torch.tensor(math.nan) if i // 4 in bad else x.sum()} for i, x in enumerate(inputs)]


def trainer(place: Path, bad: set[int] = frozenset(), callbacks: Any = (), **settings: Any) -> Trainer:
    given = {"max_steps": 8, "save_steps": 4, "logging_steps": 2, "record_every": 2, "precision": "fp16-mixed", "learning_rate": 0.01}
    given |= {"output_dir": str(place), "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4} | settings
    torch.manual_seed(0)
    return InOrder(Net(), TrainingArguments(**given), train_dataset=rows(bad=bad), eval_dataset=rows(8), callbacks=callbacks)


def told(place: Path, *without: str) -> list[tuple[int, str, str]]:
    return [(e.step, e.kind, e.text) for e in read_run(place).events if e.kind not in without]


def test_a_run_leaves_records_of_all_that_happened(tmp_path: Path) -> None:
    made = trainer(tmp_path, bad={2}, eval_strategy="steps", eval_steps=8)
    made.train()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == FILES
    run = read_run(tmp_path)
    assert run.notes == ()
    assert [s.step for s in run.sampled("weights")] == [1, 2, 4, 6, 8]
    assert set(run.sampled("gradients")[0].layers) == {n for n, _ in made.model.named_parameters()}
    kinds = [(e.step, e.kind) for e in run.events if e.kind != "scale"]
    assert kinds == [(1, "calibrated"), (3, "nonfinite-loss"), (4, "checkpoint"), (8, "evaluated"), (8, "checkpoint")]
    assert next(e for e in run.events if e.kind == "nonfinite-loss").culprits[:2] == ("input labels", "loss")
    assert (run.environment.model, run.environment.policy, run.environment.processes) == ("Net", "fp16-mixed", 1)
    assert (run.environment.optimizer, run.environment.parameters) == ("FusedAdamW", 57)
    sizes = run.memory.measured
    assert (sizes["weights"], sizes["gradients"], sizes["buffers"], run.memory.batch) == (4 * 57, 4 * 57, 4 * 16 + 8, "4 samples")
    assert run.config["record_every"] == 2


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-lean"])
def test_recording_changes_no_bit_of_a_run(precision: str, tmp_path: Path) -> None:
    ends = []
    for every in (1, 0):
        made = trainer(tmp_path / str(every), bad={3}, precision=precision, record_every=every, save_strategy="no", max_grad_norm=0.1)
        made.train()
        logs = [{k: v for k, v in r.items() if "runtime" not in k and "per_second" not in k} for r in made.state.log_history]
        ends.append((logs, [t.clone() for t in made.model.state_dict().values()], [f.name for f in (tmp_path / str(every)).glob("layers.jsonl")]))
    assert str(ends[0][0]) == str(ends[1][0])
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))
    assert (ends[0][2], ends[1][2]) == (["layers.jsonl"], [])


class Press(TrainerCallback):
    """Ctrl-C, or an error, after a step."""

    def __init__(self, step: int, error: Exception | None = None) -> None:
        self.step, self.error = step, error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and self.error is not None:
            raise self.error
        if state.global_step == self.step:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("ends", ["killed", "interrupted"])
def test_a_resumed_run_has_the_records_of_one_that_never_stopped(ends: str, tmp_path: Path) -> None:
    bad = {1, 5, 7}
    trainer(tmp_path / "whole", bad).train()
    press = Press(6, RuntimeError("the machine is gone") if ends == "killed" else None)
    broken = trainer(tmp_path / "broken", bad, [press])
    with pytest.raises((RuntimeError, TrainingInterrupted)):
        broken.train()
    before = told(tmp_path / "broken")
    assert (
        before[-1][1:]
        == {
            "killed": ("note", "the run failed after step 6: RuntimeError: the machine is gone"),
            "interrupted": ("interrupted", "the run was interrupted after step 6"),
        }[ends]
    )
    with (tmp_path / "broken" / "events.jsonl").open("a") as file:
        file.write('{"step": 7, "kind": "no')
    trainer(tmp_path / "broken", bad).train(resume_from_checkpoint=True)
    own = {(6, "checkpoint", "checkpoint-6 was saved")} if ends == "interrupted" else set()
    assert [e for e in told(tmp_path / "broken", "resumed", "interrupted") if e not in own] == told(tmp_path / "whole")
    assert ("interrupted" in {e[1] for e in told(tmp_path / "broken")}) == (ends == "interrupted")
    assert [e[0] for e in told(tmp_path / "broken") if e[1] == "resumed"] == [6 if ends == "interrupted" else 4]
    assert (tmp_path / "broken" / "layers.jsonl").read_bytes() == (tmp_path / "whole" / "layers.jsonl").read_bytes()
    assert read_run(tmp_path / "broken").notes == ()


def test_a_run_that_diverges_says_so_in_its_records(tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        trainer(tmp_path, bad=set(range(2, 16)), max_bad_steps=3).train()
    events = read_run(tmp_path).events
    assert [(e.step, e.kind) for e in events if e.kind != "scale"] == [(1, "calibrated"), *[(3, "nonfinite-loss")] * 3, (2, "diverged")]
    assert "loss" in events[-1].culprits


def test_overwriting_removes_the_records_and_records_alone_are_a_run(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    for name in FILES:
        if name != "events.jsonl":
            (tmp_path / name).unlink()
    for folder in tmp_path.glob("checkpoint-*"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer(tmp_path).train()
    trainer(tmp_path, record_every=0, save_strategy="no", overwrite_output_dir=True).train()
    assert [e.kind for e in read_run(tmp_path).events if e.kind != "scale"] == ["calibrated"]
    assert not (tmp_path / "layers.jsonl").exists()


def test_a_run_that_has_ended_leaves_no_hooks_of_its_recorder(tmp_path: Path) -> None:
    counts = []
    for every in (0, 1):
        made = trainer(tmp_path / str(every), max_steps=2, save_strategy="no", record_every=every)
        made.train()
        gc.collect()  # accelerators of before
        counts.append([len(m._forward_pre_hooks) + len(m._forward_hooks) for m in made.model.modules()])
        assert not made.accelerator.scaler._engine.state.watching.recorder.due(1)
    assert counts[0] == counts[1]


def test_tensorboard_has_the_same_series_and_the_layers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer(tmp_path, bad={2}, report_to="tensorboard", save_strategy="no").train()
    read = EventAccumulator(str(tmp_path / "runs"), size_guidance={"histograms": 0, "scalars": 0})
    read.Reload()
    scalars, run = set(read.Tags()["scalars"]), read_run(tmp_path)
    assert {f"train/{name}" for name in ("loss", "scale", "grad_norm", "skipped", "replayed", "underflow")} <= scalars
    assert {"memory/weights", "memory/gradients", "memory/states", "memory/process peak"} <= scalars
    assert read.Scalars("memory/weights")[0].value == 4 * 57
    for kind, name in (("gradients", "net.0.weight"), ("outputs", "net.0"), ("weights", "net.3.bias")):
        samples = [(s.step, s.layers[name].log2max) for s in run.sampled(kind) if name in s.layers]
        shown = [(e.step, e.value) for e in read.Scalars(f"{kind}/{name}/log2max")]
        assert [step for step, _ in shown] == [step for step, _ in samples] == [1, 2, 4, 6, 8]
        assert [v for _, v in shown] == pytest.approx([v for _, v in samples], rel=1e-3)
        assert len(read.Histograms(f"{kind}/log2max")) >= 5


@pytest.mark.parametrize("ends", ["by itself", "diverged", "interrupted"])
def test_a_report_is_written_however_the_run_ends(ends: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the package plotly is not installed")
    bad = set(range(2, 16)) if ends == "diverged" else set()
    made = trainer(tmp_path, bad, [Press(2)] if ends == "interrupted" else (), report=True, max_bad_steps=2, max_steps=4, save_strategy="no")
    with contextlib.suppress(DivergedError, TrainingInterrupted):
        made.train()
    page = (tmp_path / "report.html").read_text()
    assert ("diverged" in page, "was interrupted after step 2" in page) == (ends == "diverged", ends == "interrupted")
    memory = read_run(tmp_path).memory
    assert (memory.predicted["weights"], memory.predicted["gradients"]) == (memory.measured["weights"], memory.measured["gradients"])
    assert memory.predicted["peak"] > memory.predicted["weights"]


def test_a_report_without_its_packages_is_refused_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingExtraError("a report needs the package plotly", "pip install 'halfstep[report]'")

    monkeypatch.setattr("halfstep.reports.require", missing)
    with pytest.raises(MissingExtraError, match="plotly"):
        trainer(tmp_path, report=True)
    trainer(tmp_path)


def test_what_stands_in_the_way_of_a_report_does_not_hide_how_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    pytest.importorskip("plotly", reason="the package plotly is not installed")

    def broken(*runs: Any, output: Any) -> None:
        raise CheckpointError("the disk is full", "Free some space.")

    monkeypatch.setattr("halfstep.reports.report", broken)
    with pytest.raises(DivergedError):
        trainer(tmp_path, set(range(16)), report=True, max_bad_steps=2).train()
    assert "the report of" in caplog.text
    assert "the disk is full" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-lean"])
def test_an_audit_is_kept_and_told_and_changes_no_bit(precision: str, tmp_path: Path, capsys: Any) -> None:
    ends = []
    for audits in (True, False):
        made = trainer(tmp_path / str(audits), precision=precision, audit=audits, max_steps=3, save_strategy="no")
        made.train()
        ends.append([t.clone() for t in made.model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    audit = read_run(tmp_path / "True").audit
    assert capsys.readouterr().out == f"{audit['answer']}\n"
    assert audit["precision"] == precision
    assert read_run(tmp_path / "False").audit == {}
    assert (tmp_path / "True" / "layers.jsonl").read_bytes() == (tmp_path / "False" / "layers.jsonl").read_bytes()


def test_a_step_that_cannot_be_audited_is_an_event_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise ConfigError("this model cannot be audited", "Leave it out.")

    monkeypatch.setattr("halfstep.diagnostics.audit.audit", refused)
    trainer(tmp_path, audit=True, max_steps=2, save_strategy="no").train()
    assert (1, "note", "the step was not audited: this model cannot be audited. Leave it out.") in told(tmp_path)
    assert not (tmp_path / "audit.json").exists()


class Counting(Net):
    """Refuses to be called more often than a run of one step does."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.left -= 1
        if self.left < 0:
            raise KeyError("called too often")
        return super().forward(x, labels)


@pytest.mark.parametrize(("asked", "event"), [("report", "the memory of a step was not predicted"), ("audit", "the step was not audited")])
def test_code_that_cannot_be_looked_at_ends_no_run(asked: str, event: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the package plotly is not installed")
    made = trainer(tmp_path, max_steps=1, save_strategy="no", **{asked: True})
    made.model = Counting(most=1)
    made.train()
    assert made.state.global_step == 1
    assert f"{event}: KeyError: 'called too often'" in [text for _, _, text in told(tmp_path)]
