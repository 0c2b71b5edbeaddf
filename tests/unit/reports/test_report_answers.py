"""The first screen of planted runs: the state of each answer, its words, and what to do."""

import math
from pathlib import Path

import numpy as np
import pytest
from made_run import write_run

from halfstep.diagnostics.reading import read_run
from halfstep.diagnostics.records import LayerNumbers, LayerSample, RunEvent, RunRecords
from halfstep.reports.answers import answers
from halfstep.reports.history import History, named

REFUSED = {"reason": "overflow", "culprits": ["head.weight (backward: inf)"], "replays": 0, "loss": 2.0, "grad_norm": math.inf, "scale": 32768.0}
LATE = {"step": 200, "kind": "diverged", "text": "50 steps in a row could not be applied.", "why": "Lower the learning rate."}
PINNED = {
    "step": 9,
    "kind": "pinned",
    "text": "blocks.0 is held in fp32.",
    "why": "Keep rules.yaml: the next run begins with it.",
    "culprits": ["blocks.0"],
}
STUCK = {"loss": 1.6, "stalled": 0.8, "underflow": 0.4, "scale": 1.0, "step": 200}

# name: (what write_run is told, {question: (state, words in its answer or detail)}, words in what to do)
RUNS = {
    "healthy": (
        {"samples": 0, "events": [{"step": 200, "kind": "checkpoint", "text": "saved"}]},
        {0: ("good", "the loss fell from"), 1: ("good", "All 200 steps were applied"), 2: ("good", "No.")},
        "Nothing: the records show no fault.",
    ),
    "flat": ({"loss": lambda t: 5.0, "samples": 0}, {0: ("bad", "the loss is flat")}, "halfstep compare"),
    "rising": ({"loss": lambda t: 2 + t, "samples": 0}, {0: ("bad", "the loss rose")}, "Lower the learning rate"),
    "fell and rose": (
        {"loss": lambda t: 2 + 3 * abs(t - 0.5) if t < 0.5 else 2 + 2 * (t - 0.5)},
        {0: ("watch", "rose again")},
        "Lower the learning rate",
    ),
    "nan at the end": (
        {"bad": dict.fromkeys(range(150, 201), math.nan), "samples": 0},
        {0: ("bad", "the loss is NaN at the end")},
        "halfstep.trace",
    ),
    "inf at the end": ({"bad": {200: math.inf}, "samples": 0}, {0: ("bad", "the loss is inf at the end")}, "halfstep.trace"),
    "nan in between": ({"bad": {100: math.nan}, "samples": 0}, {0: ("watch", "1 record that is not finite")}, "not finite"),
    "never finite": ({"bad": dict.fromkeys(range(201), math.nan)}, {0: ("bad", "never finite")}, "halfstep.trace"),
    "diverged": ({"events": [LATE], "samples": 0}, {0: ("bad", "DivergedError")}, "Lower the learning rate."),
    "one lost of 201": (
        {"records": [{**REFUSED, "step": 200, "applied": 200, "skipped": 1}], "config": {"on_overflow": "skip"}, "samples": 0},
        {1: ("watch", "1 overflow"), 0: ("good", "Yes")},
        'on_overflow="replay"',
    ),
    "many lost": (
        {"records": [{**REFUSED, "step": 200, "applied": 200, "skipped": i + 1} for i in range(40)], "samples": 0},
        {1: ("bad", "head.weight")},
        "each lost step names",
    ),
    "failed": ({"events": [{"step": 9, "kind": "note", "text": "the run failed after step 9: OSError: full"}]}, {}, "OSError: full."),
    "pinned": ({"events": [PINNED], "samples": 0}, {2: ("bad", "blocks.0 is held in fp32")}, "Keep rules.yaml"),
    "close to overflow": ({"samples": 10}, {2: ("watch", "blocks.0.mlp.down")}, "fp32=blocks.0.mlp.down"),
    "stalled and underflow": ({"records": [STUCK], "samples": 0}, {2: ("watch", "80 % of the updates round away")}, "weights=split"),
    "a scale of 1": ({"records": [STUCK], "samples": 0}, {2: ("watch", "The loss scale has fallen to 1")}, "scale=dynamic"),
}  # fmt: skip


@pytest.mark.parametrize(("told", "wanted", "todo"), RUNS.values(), ids=RUNS)
def test_the_first_screen_tells_what_was_planted(tmp_path, told, wanted, todo):
    found = answers(named([read_run(write_run(tmp_path / "run", **told))])[0])
    for place, (state, words) in wanted.items():
        item = found.items[place]
        assert (item.state, words in f"{item.answer} {item.detail}") == (state, True), item
    assert found.todo
    assert todo in " ".join(found.todo)
    healthy = [item.state for item in found.items] == ["good"] * 3
    assert ("Nothing" in found.todo[0]) == healthy, "advice where something is wrong, and only there"


def test_an_evaluation_before_the_end_is_told_with_its_step(tmp_path):
    write_run(tmp_path / "run", lines=20, samples=0, records=[{"loss": 1.6, "step": 30}, {"loss": 1.6, "step": 31}])
    found = answers(named([read_run(tmp_path / "run")])[0])
    assert "at step 20, the last one." in found.items[0].detail
    assert "at the end." not in found.items[0].detail


def test_what_is_not_recorded_is_not_known(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"accuracy": 0.5}\n')
    found = answers(named([read_run(tmp_path)])[0])
    assert [item.state for item in found.items] == ["unknown"] * 3


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [read_run(write_run(tmp_path / place / "run", lines=5)) for place in ("a", "b")]
    assert [run.name for run in named(runs)] == ["a/run", "b/run"]
    assert [run.name for run in named(runs[:1])] == ["run"]
    assert [run.name for run in named([runs[0], runs[0]])] == ["run", "run"]


def lines(*losses, keys=("skipped",), steps=None):
    return tuple({"step": step, "loss": loss} | dict.fromkeys(keys, 0) for step, loss in zip(steps or range(1, 1 + len(losses)), losses, strict=True))


# lines of metrics.jsonl, the state of "did it train?", and words of its answer
SHORT = {
    "one": (lines(2.0), "unknown", "one record"),
    "two that fell": (lines(2.0, 1.0), "unknown", "2 records of the loss show no trend"),
    "noise": (lines(2.03, 1.97, 2.1, 1.95, 2.0, 2.12), "unknown", "6 records of the loss show no trend"),
    "noise whose ends fell": (lines(2.2, 1.97, 2.1, 1.95, 2.0, 2.12, 1.8), "unknown", "7 records"),
    "falling": (lines(2.0, 1.5, 1.2, 1.1, 1.05, 1.0), "good", "the loss fell"),
    "rising": (lines(1.0, 1.1, 1.3, 1.2, 1.5, 2.0, 2.2), "bad", "the loss rose"),
    "flat": (lines(2.0, 2.001, 2.0, 2.001), "bad", "flat"),
    "in another order": (lines(1.0, 2.0, 1.8, 1.6, 1.4, 1.2, steps=[6, 1, 2, 3, 4, 5]), "good", "the loss fell from 2 to 1"),
}


@pytest.mark.parametrize(("metrics", "state", "words"), SHORT.values(), ids=SHORT)
def test_few_records_get_a_verdict_only_where_it_is_no_noise(metrics, state, words):
    found = answers(History("run", RunRecords(Path("run"), metrics=metrics)))
    assert (found.items[0].state, words in found.items[0].answer) == (state, True), found.items[0]
    assert ("Nothing" in found.todo[0]) == (state == "good")


def test_noise_rarely_gets_a_verdict():
    made = np.random.default_rng(0)
    told = [History("run", RunRecords(Path("run"), metrics=lines(*made.normal(2, 0.1, n)))) for n in (6, 10, 20, 40) for _ in range(50)]
    assert sum("flat" not in a and "Not known" not in a for a in (answers(run).items[0].answer for run in told)) <= 4


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_records_that_count_no_steps_do_not_say_that_none_was_lost(loss):
    found = answers(History("run", RunRecords(Path("run"), metrics=lines(*[loss] * 5, keys=()))))
    assert (found.items[1].state, found.items[1].answer) == ("unknown", "Not known.")


FELL = tuple({"step": i, "loss": 2 - i / 50, "skipped": 0, "scale": 8.0} for i in range(1, 41))


def sample(kind, form, name, near=0.0, bad=0.0):
    return (LayerSample(1, kind, form, {name: LayerNumbers(10, 0.0, bad, 0.0, near, 1.0, 1.0)}),)


# what a run that fell has besides, and what is to be done about it
LIMITS = {
    "outputs": ({"layers": sample("outputs", "fp16", "a.b", 0.1)}, "As a precaution hold a.b in fp32 (fp32=a.b "),
    "weights, whose module is held": ({"layers": sample("weights", "fp16", "a.b.weight", 0.1)}, "As a precaution hold a.b in fp32 (fp32=a.b "),
    "gradients, which the scale follows": ({"layers": sample("gradients", "fp16", "a.b.weight", 0.1)}, "Gradients near fp16's limit are those"),
    "in bf16": ({"layers": sample("outputs", "bf16", "a.b", 0.1)}, "No format reaches further than bf16: lower the learning rate"),
    "in fp32": ({"layers": sample("weights", "fp32", "a.b.weight", 0.1)}, "No format reaches further than fp32: lower the learning rate"),
    "not finite": ({"layers": sample("outputs", "fp16", "a.b", 0.0, 0.5)}, "Find the op whose values are not finite: halfstep.trace"),
    "near, by the log alone": ({"metrics": tuple(m | {"near": "outputs of a"} for m in FELL)}, "Hold the module in fp32"),
    "a scale of 1": ({"metrics": (*FELL, {"step": 41, "loss": 1.2, "scale": 1.0})}, "A loss scale of 1 keeps no gradient"),
    "a loss that nothing guards": ({"events": (RunEvent(3, "nonfinite-loss", "it is NaN", "Look at the batch."),)}, "Look at the batch."),
    "an evaluation that rose beside a NaN": (
        {"metrics": (*FELL, {"step": 41, "loss": math.nan}, {"step": 42, "loss": 1.1}, *({"step": s, "eval_loss": float(s)} for s in (1, 2, 3)))},
        "Look at the steps whose loss is not finite",
    ),
}


@pytest.mark.parametrize(("told", "todo"), LIMITS.values(), ids=LIMITS)
def test_whatever_is_no_good_answer_has_its_own_advice(told, todo):
    found = answers(History("run", RunRecords(Path("run"), **({"metrics": FELL} | told))))
    assert {item.state for item in found.items} & {"watch", "bad"}
    assert todo in " ".join(found.todo)
    assert "Nothing" not in found.todo[0]
