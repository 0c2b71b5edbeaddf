"""From the records of runs to the document of their report: which sections there are, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfstep.diagnostics.records import RunRecords
from halfstep.reports import curves, facts, layers
from halfstep.reports.answers import answers
from halfstep.reports.document import Answers, Block, Document, EventLine, Events, Section, Table, Text
from halfstep.reports.history import History, named
from halfstep.reports.numbers import count, number, size

EVENTS = 1500  # on a page, in all runs together
RARE = ("diverged", "nonfinite-loss", "pinned", "interrupted", "resumed", "skipped", "replayed", "close")  # shown before others when there are more
TITLES = {
    "loss": "Loss",
    "scale": "Loss scale",
    "norm": "Gradient norm",
    "stalled": "Stalled updates and underflow",
    "rate": "Learning rate",
    "speed": "Speed",
}


def document(records: Sequence[RunRecords]) -> Document:
    """The report of one or more runs, the first one first in every chart."""
    runs = named(records)
    told = [answers(run) for run in runs]
    sections = [Section("answers", "In short" if len(runs) > 1 else "", tuple(told))]
    if len(runs) > 1:
        sections.append(Section("runs", "The runs compared", (_overview(runs, told), *facts.differences(runs))))
    drawn = {chart.name: chart for chart in curves.charts(runs)}
    sections += [Section(name, TITLES[name], (drawn[name],)) for name in ("loss", "scale", "norm") if name in drawn]
    sections += _each(runs, "layers", "Layers: under- and overflow", lambda run, name: _chart_of(run, name))
    sections += [Section(name, TITLES[name], (drawn[name],)) for name in ("stalled", "rate", "speed") if name in drawn]
    sections += _each(runs, "memory", "Memory", facts.memory)
    sections += _each(runs, "audit", "Which op ran in which format", lambda run, _: facts.audit(run))
    sections.append(Section("events", "Events", (events(runs),)))
    sections += _each(runs, "plan", "Plan and rules", lambda run, _: facts.plan(run))
    sections += _each(runs, "environment", "Environment", lambda run, _: facts.environment(run))
    sections += _each(runs, "configuration", "Configuration", lambda run, _: facts.configuration(run))
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.records.notes]
    if notes:
        sections.append(Section("notes", "What could not be read", (Text(tuple(notes)),)))
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    return Document(title, _lead(runs), tuple(run.name for run in runs), tuple(sections))


def _chart_of(run: History, name: str) -> list[Block]:
    found = layers.chart(run, name, "Layers and steps")
    return [] if found is None else [found]


def _each(runs: Sequence[History], name: str, title: str, make: Any) -> list[Section]:
    """One section for each run that has something to show under it; the name of the run in the title where there are several."""
    made = []
    for i, run in enumerate(runs):
        own = name if len(runs) == 1 else f"{name}-{i + 1}"
        if blocks := make(run, own):
            made.append(Section(own, title if len(runs) == 1 else f"{title}: {run.name}", tuple(blocks)))
    return made


def _lead(runs: Sequence[History]) -> str:
    if len(runs) > 1:
        return "; ".join(f"{run.name}: {run.policy or 'precision not recorded'}, {count(run.steps, 'step')}" for run in runs)
    run, found = runs[0], runs[0].records.environment
    parts = [run.policy]
    if found.model:
        parts.append(f"{found.model}" + (f", {found.parameters:,} parameters" if found.parameters else ""))
    parts += [found.optimizer, str(found.device.get("name", "")) if found.device else "", count(run.steps, "step"), found.time.replace("T", " ")[:16]]
    return " · ".join(part for part in parts if part)


def _overview(runs: Sequence[History], told: Sequence[Answers]) -> Table:
    """The runs side by side."""
    rows = []
    for run, answer in zip(runs, told, strict=True):
        loss, evaluation = run.loss.finite, run.evaluation.finite
        peaks = [v for k, v in run.records.memory.measured.items() if k in facts.WHOLE]
        rows.append(
            (
                run.name,
                run.policy or "–",
                number(run.steps),
                number(float(loss.values[-1])) if len(loss) else "–",
                number(float(evaluation.values.min())) if len(evaluation) else "–",
                number(run.lost),
                number(run.replayed),
                size(max(peaks)) if peaks else "–",
                answer.items[2].answer.rstrip("."),
            )
        )
    head = ("run", "precision", "steps", "last loss", "best evaluation", "lost", "run again", "peak memory", "near a limit")
    return Table("Runs side by side", head, tuple(rows), frozenset(range(2, 8)))


def events(runs: Sequence[History], most: int = EVENTS) -> Events:
    """What happened in all runs, by step; of more than `most` the rare kinds and the newest are kept."""
    lines = [EventLine(run.name, event.step, event.kind, event.text, event.why, event.culprits, event.time) for run in runs for event in _of(run)]
    left_out = max(0, len(lines) - most)
    if left_out:
        rank = {kind: i for i, kind in enumerate(RARE)}
        order = sorted(range(len(lines)), key=lambda i: (rank.get(lines[i].kind, len(RARE)), -i))[:most]
        lines = [lines[i] for i in sorted(order)]
    return Events(tuple(sorted(lines, key=lambda line: line.step)), left_out)


def _of(run: History) -> list[Any]:
    """The events of a run; made of its metrics where it kept none."""
    if run.records.events:
        return list(run.records.events)
    found = []
    for record in run.records.metrics:
        step = record["step"] if isinstance(record.get("step"), int) else 0
        if record.get("reason"):
            blamed = record.get("culprits")
            names = tuple(map(str, blamed)) if isinstance(blamed, list) else ()
            what = "was applied in part" if record["reason"] == "partly" else "was not applied"
            found.append(
                EventLine(run.name, step, "skipped", f"A step after step {step} {what}: {record['reason']}.", str(record.get("detail") or ""), names)
            )
        elif isinstance(record.get("pinned"), list):
            why = record.get("why")
            told = " ".join(map(str, why)) if isinstance(why, list) else str(why or "")
            names = tuple(map(str, record["pinned"]))
            found.append(EventLine(run.name, step, "pinned", f"Held in fp32 from here on: {', '.join(names)}.", told, names))
    return found
