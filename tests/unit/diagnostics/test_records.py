"""Records of a run: as JSON and back, read from whole, broken, foreign and very long files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from halfstep.diagnostics import read_run
from halfstep.diagnostics.records import Environment, LayerNumbers, LayerSample, MemoryLedger, RunEvent, RunRecords, merged, shortened
from halfstep.errors import DataError
from halfstep.tracking import JSONLinesTracker

NUMBERS = LayerNumbers(1234567, 0.0, 0.25, 0.12, 0.0, math.inf, -3.5)
SAMPLE = LayerSample(100, "gradients", "fp16", {"net.0": NUMBERS, "": NUMBERS._replace(log2max=-math.inf, log2rms=math.nan)}, 1024.0)
EVENT = RunEvent(7, "skipped", "step 7 was skipped", "Its gradients are inf.", ("net.0.weight", "input x"), "2026-11-30T12:00:00+00:00")
ENVIRONMENT = Environment(
    torch="2.13", device={"name": "a CPU"}, processes=2, policy="fp16-mixed", parameters=10, trainable=8, command=("train", "--x")
)
MEMORY = MemoryLedger({"weights": 40, "peak": 100}, {"weights": 40}, "fp16-mixed", "8 x 32")


@pytest.mark.parametrize("record", [SAMPLE, EVENT, ENVIRONMENT, MEMORY, Environment(), MemoryLedger(), RunEvent(0, "note", "x")])
def test_a_record_comes_back_from_json_that_any_reader_takes(record: Any) -> None:
    text = json.dumps(record.as_dict(), allow_nan=False)
    assert repr(type(record).from_dict(json.loads(text))) == repr(record)  # by text: NaN equals nothing


@pytest.mark.parametrize(
    ("number", "short"),
    [(0.0, 0), (3.0, 3), (0.123456, 0.1235), (-12.3456, -12.35), (1e-7, 1e-7), (math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")],
)
def test_numbers_are_shortened_and_not_finite_ones_are_words(number: float, short: Any) -> None:
    assert shortened(number) == short


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def lines(*records: Any) -> str:
    return "".join(json.dumps(r) + "\n" for r in records)


def test_a_whole_folder_is_read(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        metrics_jsonl=lines({"loss": 2.0, "step": 10, "scale": 8.0}, {"loss": math.nan, "step": 20}, {"eval_loss": 1.5, "step": 20, "near": "text"}),
        events_jsonl=lines(EVENT.as_dict()),
        layers_jsonl=lines(SAMPLE.as_dict(), LayerSample(50, "gradients", "fp32", {"b": NUMBERS}).as_dict()),
        environment_json=json.dumps(ENVIRONMENT.as_dict() | {"new": 1}),
        memory_json=json.dumps(MEMORY.as_dict()),
        config_yaml="# settings of a halfstep run\nmax_steps: 20\n",
        audit_json='{"ops": 3}',
        plan_yaml="policy: bf16-mixed\n",
        rules_yaml="fp32: [head]\n",
        other_txt="no record",
    )
    found = read_run(run)
    assert (found.notes, found.events, found.environment, found.memory) == ((), (EVENT,), ENVIRONMENT, MEMORY)
    assert (found.config, found.audit, found.plan, found.rules) == ({"max_steps": 20}, {"ops": 3}, {"policy": "bf16-mixed"}, {"fp32": ["head"]})
    assert [s.step for s in found.sampled("gradients")] == [50, 100]
    assert found.sampled("weights") == ()
    assert list(merged(found.layers)) == ["net.0", "", "b"]
    steps, losses = found.series("loss")
    assert (steps, losses[0], math.isnan(losses[1])) == ((10, 20), 2.0, True)
    assert (found.keys, found.last_step) == (("loss", "step", "scale", "eval_loss"), 100)
    assert str(found).splitlines()[0] == f"{tmp_path.name}: 100 steps, 3 log lines, 1 events, 2 sampled steps"


BROKEN = {
    "cut off": (lines({"step": 1}, {"step": 2}) + '{"step": 3, "lo', 2, "metrics.jsonl: the last line (3) is cut off and was left out"),
    "cut off, whole as JSON": (lines({"step": 1}) + '{"step": 2}', 2, ""),
    "in the middle": (lines({"step": 1}) + "}{\n" + lines({"step": 3}), 2, "metrics.jsonl: 1 line could not be read and were left out (number 2)"),
    "two in one line": ('{"step": 1}\n{"step": 2}, {"step": 3}\n', 1, "metrics.jsonl: 1 line could not be read and were left out (number 2)"),
    "no mapping": ("[1]\n3\n" + lines({"step": 1}), 1, "metrics.jsonl: 2 lines could not be read and were left out (number 1, 2)"),
    "empty": ("", 0, ""),
    "empty lines": ("\n" + lines({"step": 1}) + "\n\n", 1, ""),
    "not UTF-8": (lines({"step": 1}) + "\udcff\udc80\n", 1, "metrics.jsonl: 1 line could not be read and were left out (number 2)"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_lines_are_left_out_and_told(case: str, tmp_path: Path) -> None:
    text, count, note = BROKEN[case]
    (tmp_path / "metrics.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    found = read_run(tmp_path)
    assert (len(found.metrics), found.notes) == (count, (note,) if note else ())


def test_files_of_others_with_our_names_are_left_out_and_told(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        metrics_jsonl=lines({"step": 1}),
        events_jsonl=lines({"event": "click"}, EVENT.as_dict(), EVENT.as_dict() | {"step": math.inf}),
        layers_jsonl=lines({"step": 1, "kind": "weights", "format": "fp32", "layers": {"a": [1, 2]}}),
        environment_json='{"device": 3}',
        memory_json="[]",
        config_yaml="a: [",
        plan_yaml="just text",
    )
    found = read_run(run)
    assert (found.events, found.layers, found.environment, found.memory, found.config, found.plan) == (
        (EVENT,),
        (),
        Environment(),
        MemoryLedger(),
        {},
        {},
    )
    assert sorted(note.split()[0].rstrip(":") for note in found.notes) == [
        "config.yaml", "environment.json", "events.jsonl", "layers.jsonl", "memory.json", "plan.yaml",
    ]  # fmt: skip


def test_an_accelerators_folder_and_a_bare_file_are_read(tmp_path: Path) -> None:
    tracker = JSONLinesTracker("mine", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 3.0}, step=1)
    found = read_run(tmp_path / "mine")
    assert (found.series("loss"), found.config, found.name) == (((1,), (3.0,)), {"lr": 0.1}, "mine")
    alone = write(tmp_path / "b", log_jsonl=lines({"loss": 1.0, "step": 4})) / "log.jsonl"
    assert read_run(alone).series("loss") == ((4,), (1.0,))
    with pytest.raises(DataError, match=r"holds no records of a run.*Name a run in it: .*mine"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="Name the output_dir"):
        read_run(tmp_path / "nowhere")


def test_a_long_run_is_read_whole(tmp_path: Path) -> None:
    """How long it takes: `python benchmarks/report_speed.py`."""
    one = {"loss": 2.1234567, "grad_norm": 1.2345, "lr": 3e-4, "scale": 65536.0, "largest_gradient": {"net.0.weight": 0.5}, "underflow": 0.01}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        begin = json.dumps(one)[:-1]
        file.writelines(f'{begin}, "near": "", "epoch": {k / 1000}, "step": {k}, "applied": {k}, "skipped": 0}}\n' for k in range(20_000))
    found = read_run(tmp_path)
    assert isinstance(found, RunRecords)
    assert [m["step"] for m in found.metrics] == list(range(20_000))
