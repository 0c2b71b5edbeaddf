"""`halfstep.report` and `halfstep report`: one file, whole, escaped, small, and what is refused."""

import io
import json
import math
import re
import sys

import pytest
from made_run import EVENTS, FINDING, write_run
from rich.console import Console

import halfstep
from halfstep.cli.main import main
from halfstep.diagnostics.reading import read_run
from halfstep.errors import ConfigError, DataError, MissingExtraError
from halfstep.reports.content import document
from halfstep.reports.html import embedded
from halfstep.reports.markdown import markdown
from halfstep.reports.terminal import show

needs_extra = pytest.mark.skipif(
    any(__import__("importlib.util", fromlist=["util"]).find_spec(name) is None for name in ("plotly", "jinja2")),
    reason="reports in HTML need plotly and jinja2: pip install 'halfstep[report]'",
)
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"quoted\" 'text' {{ 7 * 7 }} [a](http://x)\x1b[31m"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", events=EVENTS)


@pytest.fixture
def other(tmp_path):
    bad = {50: math.nan, 51: math.nan, 120: math.inf}
    return write_run(tmp_path / "other", policy="bf16-mixed", seed=1, bad=bad, config={"learning_rate": 1e-3}, events=EVENTS[:2])


def on_terminal(*runs):
    console = Console(file=io.StringIO(), width=140, highlight=False, markup=False)
    show(document([read_run(run) for run in runs]), console)
    return console.file.getvalue()


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.S)[1])


@needs_extra
def test_the_page_is_one_file_with_every_section(run):
    path = halfstep.report(run)
    page = path.read_text()
    assert path == run / "report.html"
    sections = re.findall(r'<section id="([\w-]+)"', page)
    assert sections == [
        "answers", "loss", "scale", "norm", "layers", "stalled", "rate", "memory", "audit", "events", "environment", "configuration",
    ]  # fmt: skip
    assert len(page) < 2_500_000
    assert page.count('id="plotly"') == 1
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:,)[^"']*["']""", page), "nothing is loaded from anywhere"
    assert list(data_of(page)["charts"]) == ["loss", "scale", "norm", "layers", "stalled", "rate", "memory"]
    assert FINDING["remedy"] in page
    assert "All 200 steps were applied" in page


@needs_extra
def test_every_figure_is_one_that_plotly_knows(run, other):
    from plotly.graph_objects import Figure

    for name, chart in data_of(halfstep.report(run, other).read_text())["charts"].items():
        if "views" not in chart:
            figure = Figure({"data": chart["data"], "layout": chart["layout"]})  # raises for a property that plotly does not have
            assert len(figure.data) >= 2, name


@needs_extra
def test_what_is_not_finite_is_a_mark_and_no_number(other):
    traces = data_of(halfstep.report(other).read_text())["charts"]["loss"]["data"]
    line = next(t for t in traces if t["meta"]["role"] == "line")
    assert [x for x, y in zip(line["x"], line["y"], strict=True) if y is None] == [50, 120], "the line is interrupted"
    assert not {50, 51, 120} & {x for x, y in zip(line["x"], line["y"], strict=True) if y is not None}
    marked = {t["meta"]["kind"]: t for t in traces if t["meta"]["role"] == "bad"}
    assert marked["nan"]["x"] == [50, 51, None]
    assert marked["nan"]["text"][0] == "training loss is NaN at steps 50 to 51 (2 records)"
    assert marked["inf"]["x"] == [120, None]


@needs_extra
def test_text_of_a_run_is_never_markup(tmp_path):
    events = [{"step": 1, "kind": "note", "text": EVIL, "why": EVIL, "culprits": [EVIL]}]
    sample = {"step": 1, "scale": 1.0, "kind": "outputs", "format": "fp16", "layers": {EVIL: [1, 0, 0.5, 0, 0.5, 1, 1]}}
    run = write_run(tmp_path / "<b>run", policy=EVIL, events=events, config={"note": EVIL, EVIL.replace(":", ""): 1}, lines=20)
    (run / "layers.jsonl").write_text(json.dumps(sample) + "\n")
    page = halfstep.report(run).read_text()
    for markup in ("<script>alert", "<img src=x", "<b>run", "49 "):
        assert markup not in page
    assert "&lt;b&gt;run" in page
    assert data_of(page)["charts"]["layers"]["views"][0]["y"] == [EVIL], "and it is all there"
    assert page.count("<script") == page.count("</script>") == 3
    text = markdown(document([read_run(run)]))
    assert not re.search(r"(?<!\\)<(script|img|b)", text)
    assert "[a](http" not in text
    assert "\x1b" not in on_terminal(run)


def test_json_in_a_script_ends_no_script_and_takes_no_nan():
    assert embedded({"a": "</script><!-- & \u2028"}) == '{"a":"\\u003c/script\\u003e\\u003c!-- \\u0026 \\u2028"}'
    with pytest.raises(ValueError, match="JSON"):
        embedded([math.nan])


@needs_extra
def test_runs_are_compared(run, other):
    page = halfstep.report(run, other, output=run.parent / "both.html").read_text()
    found = document([read_run(run), read_run(other)])
    runs = next(section for section in found.sections if section.name == "runs")
    assert {row[0]: row[1:] for row in runs.blocks[1].rows} == {
        "precision": ("fp16-mixed", "bf16-mixed"),
        "learning_rate": ("0.003", "0.001"),
        "seed": ("0", "1"),
    }
    assert [t["name"] for t in data_of(page)["charts"]["loss"]["data"] if t["meta"]["role"] == "line"] == [
        "run: training loss", "run: evaluation loss", "other: training loss", "other: evaluation loss",
    ]  # fmt: skip
    assert {"layers-1", "layers-2", "memory-1", "memory-2"} <= {section.name for section in found.sections}


@needs_extra
def test_a_metrics_file_alone_gives_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"loss": 3 - i / 10, "step": i}) + "\n" for i in range(20)) + '{"loss": 1.')
    page = halfstep.report(tmp_path / "metrics.jsonl").read_text()
    assert "the loss fell from" in page
    assert "the last line (21) is cut off" in page


def test_markdown_and_terminal_say_the_same(run, other):
    told, shown = markdown(document([read_run(run), read_run(other)])), on_terminal(run, other)
    for words in ("Did it train?", "Were steps lost?", "Was anything near its limit?", "What to do", "Loss scale", "6 %"):
        assert words in told, words
        assert words in shown, words
    assert re.search(r"training loss\s+█▇.*✕", told)
    assert len(re.findall(r"^\| ", told, flags=re.M)) > 50


def test_the_newest_events_are_kept_when_there_are_too_many(tmp_path):
    from halfstep.reports.content import EVENTS as MOST

    events = [{"step": i, "kind": "evaluated", "text": f"number {i}"} for i in range(MOST + 500)]
    events[3] |= {"kind": "pinned"}
    found = next(s.blocks[0] for s in document([read_run(write_run(tmp_path / "run", lines=5, events=events))]).sections if s.name == "events")
    assert (len(found.lines), found.left_out) == (MOST, 500)
    assert found.kinds == {"evaluated": MOST - 1, "pinned": 1}
    assert found.lines[-1].text == f"number {MOST + 499}"


@needs_extra
def test_the_command_writes_and_prints(run, other, capsys):
    assert main(["report", str(run), str(other), "--output", str(run / "both.html")]) == 0
    assert capsys.readouterr().out == f"wrote {run / 'both.html'}\n"
    assert main(["report", str(run), "--format", "markdown"]) == 0
    assert (run / "report.md").read_text().startswith("# run\n")
    capsys.readouterr()
    assert main(["report", str(run), "--format", "markdown", "--output", "-"]) == 0
    assert capsys.readouterr().out == (run / "report.md").read_text()
    assert main(["report", str(run), "--format", "terminal"]) == 0
    assert "Did it train?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda at: halfstep.report(), ConfigError, "needs a run"),
        (lambda at: halfstep.report(at, format="pdf"), ConfigError, "html, markdown"),
        (lambda at: halfstep.report(write_run(at), output=at / "x.pdf"), ConfigError, "no name of a report"),
        (lambda at: halfstep.report(write_run(at), output=at / "x.html", format="markdown"), ConfigError, "does not go with"),
        (lambda at: halfstep.report(write_run(at), output=at, format="markdown"), ConfigError, "is a folder"),
        (lambda at: halfstep.report(at / "nothing", format="markdown"), DataError, "no records"),
        (lambda at: halfstep.report(at, format="markdown"), DataError, "no records"),
    ],
    ids=["no run", "unknown format", "another name", "two formats", "a folder", "no folder", "empty folder"],
)
def test_what_cannot_be_reported_is_refused(tmp_path, call, kind, words):
    with pytest.raises(kind, match=words):
        call(tmp_path)


def test_the_name_of_the_output_tells_the_format(run, tmp_path):
    assert halfstep.report(run, output=tmp_path / "mine.md").read_text().startswith("# run\n")


def test_a_terminal_has_no_file(run, capsys):
    assert main(["report", str(run), "--format", "terminal", "--output", "x"]) == 2
    assert "--format markdown" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plotly", "jinja2"])
def test_a_missing_extra_is_named_with_the_line_that_installs_it(run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"{name}.*pip install 'halfstep\[report\]'"):
        halfstep.report(run)
    assert halfstep.report(run, format="markdown").exists(), "Markdown needs neither"


def test_the_plan_that_a_run_followed_is_told(tmp_path):
    run = write_run(tmp_path / "run", lines=5, samples=0)
    held = {"module": "blocks.0", "step": None, "why": "outputs reach 3.1e5, fp16 ends at 65,504"}
    tried = [{"precision": "fp16-mixed", "scale": 8192.0, "loss_error": 0.001, "gradient_error": None, "seconds": [0.3, 0.1, 0.2], "problem": ""}]
    plan = {"plan": 1, "precision": "fp16-mixed", "scale": 8192.0, "fp32": [held], "reasons": ["fp16 suits this device"], "tried": tried}
    (run / "plan.yaml").write_text(json.dumps(plan))
    told = markdown(document([read_run(run)]))
    assert "The run followed a plan: fp16-mixed, loss scale from 8,192." in told
    assert "| fp16-mixed | 8,192 | 0.1 % | – | 0.2 |  |" in told
    assert "| blocks.0 | – | outputs reach 3.1e5, fp16 ends at 65,504 |" in told


def test_an_audit_is_told_and_slow_16_bits_are_said_on_the_first_screen(tmp_path):
    run = write_run(tmp_path / "run", lines=5, samples=0)
    audit = json.loads((run / "audit.json").read_text()) | {"baseline": "fp32", "measured": 1.31}
    (run / "audit.json").write_text(
        json.dumps(audit | {"modules": [{"name": "blocks.0", "calls": 3, "share": 0.4, "bytes": 2048, "formats": {"bf16": 1}}]})
    )
    told = markdown(document([read_run(run)]))
    assert "1. A step takes 1.31 of fp32's time here: the audit below says why." in told
    assert "| matmul | 96 | 60 % | 9.77 KiB | bf16 90 %, fp32 10 % |" in told
    assert "| blocks.0 | 3 | 40 % | 2 KiB | bf16 100 % |" in told


def test_lost_steps_are_marked_on_the_scale(tmp_path):
    events = [{"step": 3, "kind": "skipped", "text": "lost"}, {"step": 4, "kind": "replayed", "text": "again"}]
    chart = next(c for c in document([read_run(write_run(tmp_path / "run", events=events))]).charts if c.name == "scale")
    marked = {t["name"]: (t["x"], t["text"]) for t in chart.figure["data"] if t["meta"]["role"] == "event"}
    assert marked == {"lost": ([3], ["step 3 was lost"]), "run again": ([4], ["step 4 was run again"])}
