"""Records that no run of ours writes: of others, cut off, of wrong kinds. A report of them is made all the same, and hides no number."""

import io
import json
import math
import random

import pytest
from rich.console import Console

from halfstep.diagnostics.reading import read_run
from halfstep.reports.content import document
from halfstep.reports.html import embedded
from halfstep.reports.markdown import markdown
from halfstep.reports.terminal import show

VALUES = [0, 1, -1, 1.5, 1e30, -1e30, math.nan, math.inf, -math.inf, "nan", "text", "", None, True, [], {}, [1, "a"], 10**400, -0.0, 2**70]
KEYS = [
    "loss",
    "eval_loss",
    "scale",
    "grad_norm",
    "lr",
    "skipped",
    "replayed",
    "stalled",
    "underflow",
    "near",
    "reason",
    "culprits",
    "pinned",
    "why",
    "step",
]
KINDS = ["skipped", "replayed", "pinned", "close", "nonfinite-loss", "diverged", "note", "unheard of"]
SHARES = [0, 0.5, 1, "nan", "inf", -1]
WHOLES = {
    "environment.json": [{}, {"torch": "x", "device": {"name": 3}}, [1]],
    "memory.json": [{"predicted": None, "measured": {"a": 10**18, "b": 0}}, {"predicted": {"a": "b"}}, {"measured": {"peak": -5}}],
    "audit.json": [{"answer": 3, "findings": [{"share": "x"}, 1], "classes": [{"bytes": 10**400}]}, {"product_flops": {"a": "b"}, "rows": "x"}],
    "plan.yaml": [{"precision": 3, "scale": "x", "reasons": "y", "tried": [{"seconds": ["x", 1.0]}], "fp32": ["a"]}, {"precision": "a", "fp32": 3}],
    "rules.yaml": [{"fp32": "x"}, {"fp32": [{"module": 1}]}],
    "config.yaml": [{"precision": None, "x": [1, {"a": [2]}], "y": {"b": {}}}, {"precision": 3}],
}


def write(folder, draw):
    def lines(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    lines("metrics.jsonl", [{k: draw.choice(VALUES) for k in draw.sample(KEYS, 6)} | {"step": i} for i in range(draw.choice([1, 3, 60]))])
    steps = [0, 3, -3, 10**12]
    lines("events.jsonl", [{"step": draw.choice(steps), "kind": draw.choice(KINDS), "text": draw.choice(["", "<b>"])} for _ in range(5)])
    rows = [{"": [0, 0, *draw.sample(SHARES, 3), "-inf", 1], "a": [5, 0, *draw.sample(SHARES, 3), 1, 1]} for _ in range(4)]
    lines("layers.jsonl", [{"step": i // 2, "kind": draw.choice(["outputs", "x"]), "format": "fp16", "layers": row} for i, row in enumerate(rows)])
    for name, values in WHOLES.items():
        (folder / name).write_text(json.dumps(draw.choice(values)))


@pytest.mark.parametrize("seed", range(20))
def test_a_report_is_made_of_anything(tmp_path, seed):
    write(tmp_path, random.Random(seed))
    made = document([read_run(tmp_path)] * (1 + seed % 2))
    embedded([dict(chart.figure) for chart in made.charts])  # raises for a number that JSON does not have
    assert "Did it train?" in markdown(made)
    console = Console(file=io.StringIO(), width=40)
    show(made, console)
    assert "Did it train?" in console.file.getvalue()


def test_a_share_that_is_none_was_not_measured_and_a_number_too_large_is_infinite(tmp_path):
    rows = [{"step": 1, "kind": "outputs", "format": "fp16", "layers": {"a": [5, 0, 0, 0.5, "inf", 1, 1]}}]
    (tmp_path / "layers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "metrics.jsonl").write_text(f'{{"loss": {10**400}, "step": 1}}\n{{"loss": 2, "step": 2}}\n')
    made = {chart.name: chart for chart in document([read_run(tmp_path)]).charts}
    assert {view["measure"]: view["z"] for view in made["layers"].figure["views"]} == {"underflow": [[0.5]], "overflow": [[None]]}
    assert next(t for t in made["loss"].figure["data"] if t["meta"]["role"] == "bad")["text"][0] == "training loss is inf at step 1"
