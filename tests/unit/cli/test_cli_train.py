"""`halfstep train` from end to end on a small text: what it says, what it writes, and how it goes on."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from halfstep.checkpoint import checkpoints
from halfstep.cli.main import main
from halfstep.demo import GPT, GPTConfig

TEXT = b"the quick brown fox jumps over the lazy dog. " * 30
TINY = "--text text --layers 1 --width 16 --heads 2 --block_size 16 --use_cpu --per_device_train_batch_size 4 --per_device_eval_batch_size 64 "
TINY += "--max_steps 6 --warmup_steps 2 --logging_steps 2 --eval_steps 6 --save_steps 2 --sample_length 8 "


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(TEXT)


@pytest.fixture
def halfstep(capsys: pytest.CaptureFixture[str]):
    """Run a command line; returns status, output and errors."""

    def run(command: str, *more: str) -> tuple[int, str, str]:
        status = main([*command.split(), *more])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return run


def steps(folder: str | Path) -> list[int]:
    return [r["step"] for r in map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines()) if "loss" in r]


def files(folder: str | Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def test_a_run_says_what_it_does_and_what_came_of_it(halfstep) -> None:
    status, out, err = halfstep("train " + TINY)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    count = GPT(GPTConfig(block_size=16, layers=1, heads=2, width=16)).parameters_count
    assert lines[0].startswith("precision bf16-mixed on cpu, bf16 products (")
    assert lines[0].endswith("fp32 weights, loss scale none")
    assert f"model: GPT, {count:,} parameters; text: text, 75 blocks of 16 bytes" in lines
    assert [line[:8] for line in lines if line.startswith("step ") and "/6" in line] == ["step 2/6", "step 4/6", "step 6/6"]
    (report,) = [line for line in lines if line.startswith("evaluation loss ")]
    before, after = float(report.split()[2]), float(report.split()[4])
    assert report == f"evaluation loss {before:.3f} before, {after:.3f} after 6 steps (0 skipped), in nats per byte"
    assert after < before
    assert "\nsample:\nThe " in out
    assert lines[-1] == "run folder: runs/001-bf16-mixed"
    run = Path("runs/001-bf16-mixed")
    records = ["environment.json", "events.jsonl", "layers.jsonl", "memory.json", "metrics.jsonl"]
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "config.yaml", *records]
    assert steps(run) == [2, 4, 6]
    assert load_file(run / "checkpoint-6" / "model.safetensors")["bytes.weight"].shape == (256, 16)


def test_an_evaluation_before_the_run_is_not_taken_for_one_after_it(halfstep) -> None:
    status, out, _ = halfstep("train --eval_strategy no " + TINY.replace("--eval_steps 6 ", ""))
    assert status == 0
    (report,) = [line for line in out.splitlines() if line.startswith("6 steps")]
    assert report.startswith("6 steps (0 skipped); last evaluated after 0: loss ")


def test_the_settings_of_a_run_make_the_same_run_again(halfstep) -> None:
    halfstep("train --precision fp16-mixed --dropout 0.1 --seed 3 " + TINY)
    assert yaml.safe_load(Path("runs/001-fp16-mixed/config.yaml").read_text())["precision"] == "fp16-mixed"
    status, out, _ = halfstep("train runs/001-fp16-mixed/config.yaml --output_dir again")
    assert status == 0
    assert "precision fp16-mixed on cpu" in out
    for name in ("model", "optimizer", "scheduler"):
        first, second = (Path(f, "checkpoint-6", f"{name}.safetensors") for f in ("runs/001-fp16-mixed", "again"))
        assert first.exists() == second.exists()
        assert not first.exists() or first.read_bytes() == second.read_bytes()
    status, _, _ = halfstep("train runs/001-fp16-mixed/config.yaml --output_dir other --seed 4")
    assert (
        load_file("other/checkpoint-6/model.safetensors")["bytes.weight"].ne(load_file("again/checkpoint-6/model.safetensors")["bytes.weight"]).any()
    )


def test_no_evaluation_and_no_sample(halfstep) -> None:
    status, out, _ = halfstep("train " + TINY + "--eval_on_start false --eval_strategy no --eval_steps null --sample_length 0")
    assert status == 0
    assert "evaluation loss" not in out
    assert "sample" not in out


@pytest.mark.parametrize(
    ("content", "argv", "said"),
    [
        (b"", "", "the text text is empty. Name a file with text in it"),
        (b" \n ", "", "the text text is empty"),
        (b"short", "", "the text has 5 bytes, fewer than one block of 16. Use a longer text, or block_size=2 or less"),
        (b"not quite two blocks of it", "", "the text has 26 bytes, fewer than two blocks, one to train on and one to evaluate of 16"),
        (TEXT, "--text nowhere", "the text nowhere cannot be read: No such file or directory. Name a text file"),
        (TEXT, "--per_device_train_batch_size 500 --dataloader_drop_last", "fewer than one batch of 500, and dataloader_drop_last=True"),
    ],
)
def test_texts_that_cannot_be_trained_on_are_refused_and_leave_no_folder_in_the_way(halfstep, content: bytes, argv: str, said: str) -> None:
    Path("text").write_bytes(content)
    status, _, err = halfstep("train " + TINY + argv + " --output_dir run")
    assert status == 1
    assert err.startswith("halfstep: DataError: ")
    assert said in err
    Path("text").write_bytes(TEXT)
    assert halfstep("train " + TINY + "--output_dir run")[0] == 0, "the next try needs no --overwrite"


@pytest.mark.parametrize("argv", ["--tf32", "--precision bf16-mixed,fp32=nosuch", "--lr_scheduler_type constant --warmup_steps 3"])
def test_settings_that_are_refused_late_leave_no_folder_in_the_way_either(halfstep, argv: str) -> None:
    status, _, err = halfstep("train " + TINY + argv + " --output_dir run")
    assert status == 2
    assert err.startswith("halfstep: ")
    assert halfstep("train " + TINY + "--output_dir run")[0] == 0


def test_an_output_folder_that_cannot_be_one_is_explained(halfstep) -> None:
    Path("file").write_text("in the way")
    status, _, err = halfstep("train " + TINY + "--output_dir file")
    assert status in (1, 2)
    assert err.startswith("halfstep: ")
    assert "file" in err
    assert Path("file").read_text() == "in the way"


def test_an_empty_prompt_is_answered_before_or_after_training_but_not_with_a_crash(halfstep) -> None:
    status, out, err = halfstep("train " + TINY, "--prompt", "")
    assert status == 0 or (status in (1, 2) and "prompt" in err and "step " not in out)


def test_a_folder_with_something_in_it_is_refused_then_overwritten_then_resumed(halfstep) -> None:
    run = Path("run")
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    status, _, err = halfstep("train " + TINY + "--output_dir run")
    assert status == 2
    assert "the folder run is not empty. --overwrite removes the run in it and starts anew; another --output_dir keeps both" in err
    assert files(run) == {"run/notes.txt": b"mine"}
    assert halfstep("train " + TINY + "--output_dir run --overwrite")[0] == 0
    before = files(run)
    status, _, err = halfstep("train " + TINY + "--output_dir run")
    assert status == 2
    assert "--resume goes on from checkpoint-6; --overwrite removes the run in it" in err
    assert files(run) == before
    assert halfstep("train " + TINY + "--output_dir run --overwrite --max_steps 2 --eval_steps 2")[0] == 0
    assert [p.name for p in checkpoints(run)] == ["checkpoint-2"]
    assert steps(run) == [2]
    assert (run / "notes.txt").read_text() == "mine"
    assert halfstep("train --resume --output_dir run --max_steps 4")[0] == 0
    assert steps(run) == [2, 4]


def test_a_finished_run_is_resumed_without_a_step(halfstep) -> None:
    _, first, _ = halfstep("train " + TINY)
    before = {k: v for k, v in files("runs/001-bf16-mixed").items() if "checkpoint" in k or "metrics" in k}
    log = "runs/001-bf16-mixed/metrics.jsonl"  # the line that sums up the run comes after its last checkpoint
    before[log] = b"".join(line for line in before[log].splitlines(keepends=True) if b"train_runtime" not in line)
    status, out, _ = halfstep("train --resume")
    assert status == 0
    assert {k: v for k, v in files("runs/001-bf16-mixed").items() if "checkpoint" in k or "metrics" in k} == before
    said = [[line for line in text.splitlines() if line.startswith(("evaluation loss", "The "))] for text in (first, out)]
    assert said[0] == said[1]
    assert "step 2/6" not in out


def test_resuming_takes_the_newest_run_and_its_settings(halfstep) -> None:
    halfstep("train --precision fp32 " + TINY)
    halfstep("train --precision fp16-mixed " + TINY)
    for step in (4, 6):
        shutil.rmtree(f"runs/002-fp16-mixed/checkpoint-{step}")
    status, out, _ = halfstep("train --resume")
    assert status == 0
    assert "precision fp16-mixed on cpu" in out
    assert "run folder: runs/002-fp16-mixed" in out
    assert steps("runs/002-fp16-mixed") == [2, 4, 6]


@pytest.mark.parametrize("change", ["--precision fp16-mixed", "--width 32", "--layers 2", "--optim sgd"])
def test_a_resume_that_does_not_fit_is_refused_and_changes_nothing(halfstep, change: str) -> None:
    halfstep("train " + TINY + "--output_dir run")
    shutil.rmtree("run/checkpoint-6")
    before = files("run")
    status, _, err = halfstep(f"train --resume --output_dir run {change}")
    assert status == 1
    assert err.startswith("halfstep: CheckpointError: checkpoint run/checkpoint-4 ")
    assert files("run") == before
    assert halfstep("train --resume --output_dir run")[0] == 0, "the run can still be resumed as it was"


def test_a_truncated_checkpoint_is_refused_and_an_older_one_can_be_named(halfstep) -> None:
    halfstep("train " + TINY + "--output_dir run")
    broken = Path("run/checkpoint-6/model.safetensors")
    broken.write_bytes(broken.read_bytes()[:100])
    before = files("run")
    status, _, err = halfstep("train --resume --output_dir run")
    assert status == 1
    assert "checkpoint run/checkpoint-6 is truncated: model.safetensors holds 100 bytes of " in err
    assert "Other checkpoints of this run: run/checkpoint-2, run/checkpoint-4." in err
    assert files("run") == before
    status, _, err = halfstep("train --resume --output_dir run --resume_from_checkpoint run/checkpoint-4")
    assert (status, err) == (0, "")
    assert steps("run") == [2, 4, 6]
    assert load_file("run/checkpoint-6/model.safetensors")


def test_a_checkpoint_that_is_named_is_gone_on_from_in_its_own_run(halfstep) -> None:
    halfstep("train --precision fp32 --seed 1 " + TINY)
    halfstep("train --precision fp32 --seed 2 " + TINY)
    before = files("runs/002-fp32")
    status, out, _ = halfstep("train --resume_from_checkpoint runs/001-fp32/checkpoint-4")
    assert status == 0
    assert "run folder: runs/001-fp32" in out
    assert files("runs/002-fp32") == before
    assert yaml.safe_load(Path("runs/001-fp32/config.yaml").read_text())["seed"] == 1
    assert steps("runs/001-fp32") == [2, 4, 6]


def test_a_loss_that_is_never_finite_ends_the_run_with_1(halfstep) -> None:
    status, _, err = halfstep(
        "train " + TINY + "--learning_rate 1e30 --weight_decay 0 --max_steps 60 --max_bad_steps 3 --max_grad_norm 0 --warmup_steps 0"
    )
    assert status == 1
    assert err.startswith("halfstep: DivergedError: 3 steps in a row could not be applied (")
    assert "loss (forward: " in err
    assert "smaller learning rate" in err
