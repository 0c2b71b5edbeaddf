"""Charts over steps: what is drawn, what it shows in words, and its numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.reports.document import Chart, Table
from halfstep.reports.history import RATE, SPEED, History
from halfstep.reports.numbers import count, number, scale, share, spark
from halfstep.reports.series import EMPTY, MARKS, Mark, Series, marks, rounded, rows_of, thinned, trend

PIXELS = 1400  # parts that a series is thinned to, in all runs of a chart together
KINDS = {"nan": "NaN", "inf": "inf", "-inf": "-inf"}
Trace = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How one chart of curves is made.

    curves: the series of a run, the main one first. told: (run, main series) to a sentence. shown: a value as text. hint: a format of plotly for
    the pointer's label. unit: the title of the vertical axis. percent: the values are parts of 1.
    """

    name: str
    title: str
    curves: Callable[[History], Sequence[Series]]
    told: Callable[[History, Series], str]
    shown: Callable[[float | None], str] = number
    unit: str = ""
    axis: str = "linear"
    steps: bool = False
    hint: str = ".5g"
    percent: bool = False


def charts(runs: Sequence[History]) -> list[Chart]:
    """The charts of curves that these runs have numbers for, in the order of the report."""
    made = [_chart(plan, runs) for plan in PLANS]
    return [chart for chart in made if chart is not None]


def _chart(plan: Plan, runs: Sequence[History]) -> Chart | None:
    found = [(i, run, [s for s in plan.curves(run) if len(s) > 1]) for i, run in enumerate(runs)]
    found = [entry for entry in found if entry[2]]
    if not found:
        return None
    several = len(runs) > 1
    parts = max(150, PIXELS // len(found))
    traces = [
        trace
        for i, run, curves in found
        for j, series in enumerate(curves)
        for trace in _traces(series, f"{run.name}: {series.name}" if several else series.name, i, j, parts, plan)
    ]
    traces += [trace for i, run, _ in found for trace in _events(run, i, several)] if plan.steps else []
    traces.sort(key=lambda trace: trace["meta"]["role"] in ("bad", "event"))  # marks are drawn over all lines, and read after them
    says = "\n".join(f"{run.name}: {plan.told(run, curves[0])}" if several else plan.told(run, curves[0]) for _, run, curves in found)
    positive = all((series.finite.values > 0).all() for _, _, curves in found for series in curves)
    axis = plan.axis if positive else "linear"  # a logarithmic axis would drop a 0 without a word
    yaxis: Trace = {"title": {"text": plan.unit}, "type": axis}
    if plan.percent:
        yaxis |= {"tickformat": ".3~p", "rangemode": "tozero"}
    if plan.steps and axis == "log":
        yaxis |= _powers_of_two([s for _, _, curves in found for s in curves])
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": yaxis}
    sparks = tuple((f"{run.name} {s.name}" if several else s.name, spark(s.values.tolist())) for _, run, curves in found for s in curves)
    return Chart(
        plan.name,
        plan.title,
        says,
        "lines",
        {"data": traces, "layout": layout},
        _table(plan, found, several),
        sparks,
        can_log=axis == "linear" and positive and not plan.percent,
    )


def _powers_of_two(curves: Sequence[Series]) -> Trace:
    """Ticks for loss scales: at most 8 powers of two."""
    ends = [math.log2(f(s.finite.values)) for s in curves if len(s.finite) for f in (min, max)] or [0.0]
    low, high = math.floor(min(ends)), math.ceil(max(ends))
    powers = range(low, high + 1, max(1, math.ceil((high - low) / 7)))
    return {"tickvals": [2.0**k for k in powers], "ticktext": [f"2<sup>{k}</sup>" for k in powers]}


def _traces(series: Series, name: str, run: int, place: int, parts: int, plan: Plan) -> list[Trace]:
    """The line of a series with gaps where values are not finite, its trend where it is long, and marks for what is not finite."""
    drawn, smooth, bad = thinned(series, parts), trend(series), marks(series)
    x, y = _with_gaps(drawn, bad)
    few = len(series.finite) <= 60
    role = {"run": run, "place": place, "quiet": bool(len(smooth))}
    line: Trace = {"type": "scatter", "mode": "lines+markers" if few else "lines", "name": name, "x": x, "y": y, "meta": role | {"role": "line"}}
    line |= {"hovertemplate": f"%{{y:{plan.hint}}}", "line": {"shape": "hv" if plan.steps else "linear"}}
    made = [line]
    if len(smooth):
        made.append(
            {"type": "scatter", "mode": "lines", "name": f"{name}, median", "x": rounded(smooth.steps, 9), "y": rounded(smooth.values)}
            | {"meta": role | {"role": "trend"}, "hovertemplate": f"%{{y:{plan.hint}}}"}
        )
    return made + [_marked(name, kind, [m for m in bad if m.kind == kind], role) for kind in KINDS if any(m.kind == kind for m in bad)]


def _with_gaps(drawn: Series, bad: Sequence[Mark]) -> tuple[list[Any], list[Any]]:
    """Coordinates of a line that is interrupted wherever a record is not finite."""
    x, y = rounded(drawn.steps, 9), rounded(drawn.values)
    cuts = sorted({mark.first for mark in bad})
    if not cuts:
        return x, y
    out_x: list[Any] = []
    out_y: list[Any] = []
    at = 0
    for step, value in zip(x, y, strict=True):
        if at < len(cuts) and cuts[at] <= step:  # type: ignore[operator]  # steps are finite
            out_x.append(cuts[at])
            out_y.append(None)
            while at < len(cuts) and cuts[at] <= step:  # type: ignore[operator]
                at += 1
        out_x.append(step)
        out_y.append(value)
    return out_x, out_y


def _marked(name: str, kind: str, found: Sequence[Mark], role: Trace) -> Trace:
    """Marks at the foot of a chart, a stroke from the first to the last step of each row of records that are not finite."""
    x: list[Any] = []
    text: list[Any] = []
    for mark in found:
        where = f"step {number(mark.first)}" if mark.first == mark.last else f"steps {number(mark.first)} to {number(mark.last)}"
        told = f"{name} is {KINDS[kind]} at {where}" + (f" ({count(mark.count, 'record')})" if mark.count > 1 else "")
        x += [mark.first, None] if mark.first == mark.last else [mark.first, mark.last, None]
        text += [told, ""] if mark.first == mark.last else [told, told, ""]
    return (
        {"type": "scatter", "mode": "lines+markers", "name": f"{name}: {KINDS[kind]}", "x": x, "y": [None if v is None else 0.04 for v in x]}
        | {"yaxis": "y2", "text": text, "hovertemplate": "%{text}<extra></extra>", "meta": role | {"role": "bad", "kind": kind}}
    )  # fmt: skip


def _events(run: History, place: int, several: bool) -> list[Trace]:
    """Marks for the steps that were lost and those that were run again."""
    made = []
    for kind, what in (("skipped", "lost"), ("replayed", "run again")):
        steps = sorted({event.step for event in run.events_of(kind)})
        if steps:
            kept = steps if len(steps) <= MARKS else steps[:: -(-len(steps) // MARKS)]
            name = f"{run.name}: {what}" if several else what
            trace: Trace = {"type": "scatter", "mode": "markers", "name": name, "x": kept, "y": [0.04 if kind == "skipped" else 0.1] * len(kept)}
            trace |= {"yaxis": "y2", "text": [f"step {step:,} was {what}" for step in kept], "hovertemplate": "%{text}<extra></extra>"}
            made.append(trace | {"meta": {"role": "event", "run": place, "place": kind, "quiet": False, "kind": kind}})
    return made


def _table(plan: Plan, found: Sequence[tuple[int, History, list[Series]]], several: bool) -> Table:
    """The numbers of a chart."""
    head = ("run", "series", "step", "value", "") if several else ("series", "step", "value", "")
    rows = [
        ((run.name,) if several else ()) + (series.name, number(step), plan.shown(value), remark)
        for _, run, curves in found
        for series in curves
        for step, value, remark in rows_of(series, 16 if not several else 6)
    ]
    last = len(head) - 2
    return Table(f"{plan.title}: some of the numbers", head, tuple(rows), frozenset({last - 1, last}), folded=True)


def _renamed(series: Series, name: str) -> Series:
    return Series(name, series.steps, series.values)


def _bad(series: Series) -> str:
    """A sentence on what is not finite; empty where all is."""
    if not series.bad:
        return ""
    rows = marks(series)
    verb = "is" if series.bad == 1 else "are"
    return f" {count(series.bad, 'record')} of {len(series):,} {verb} not finite, the first at step {number(rows[0].first)}."


def _loss_told(run: History, series: Series) -> str:
    good = series.finite
    if not len(good):
        return f"No finite loss in {count(len(series), 'record')}."
    ends = [f"{number(good.values[i])} at step {number(good.steps[i])}" for i in (0, -1)]
    told = f"The loss goes from {ends[0]} to {ends[1]}; lowest {number(good.values.min())}, highest {number(good.values.max())}."
    evaluations = run.evaluation.finite
    if len(evaluations):
        best = int(evaluations.values.argmin())
        told += f" Evaluated {count(len(evaluations), 'time')}: last {number(evaluations.values[-1])}, lowest {number(evaluations.values[best])}"
        told += f" at step {number(evaluations.steps[best])}."
    return told + _bad(series)


def _scale_told(run: History, series: Series) -> str:
    good = series.finite
    if not run.is_scaled:
        return "The loss was not scaled (scale 1 throughout)."
    if not len(good):
        return "No loss scale is finite."
    told = f"The loss scale begins at {scale(good.values[0])} and ends at {scale(good.values[-1])}, between {scale(good.values.min())} and"
    return f"{told} {scale(good.values.max())}. {count(run.lost, 'step')} lost, {count(run.replayed, 'step')} run again at a lower scale."


def _norm_told(run: History, series: Series) -> str:
    good = series.finite
    if not len(good):
        return f"No finite gradient norm in {count(len(series), 'record')}."
    told = f"The norm of the gradients, unscaled and before clipping, is {number(sorted(good.values.tolist())[len(good) // 2])} in the median"
    return f"{told}, {number(good.values.max())} at most (step {number(good.steps[good.values.argmax()])}).{_bad(series)}"


def _shares_told(run: History, series: Series) -> str:
    told = []
    for one in (run.first_of(("stalled",)), run.first_of(("underflow",))):
        if len(one.finite):
            what = "of the updates round away" if one.name == "stalled" else "of the scaled gradients keep fewer bits than fp16 has"
            told.append(f"{share(one.finite.values[-1])} {what} at the end, {share(one.finite.values.max())} at most.")
    return " ".join(told)


def _rate_told(run: History, series: Series) -> str:
    good = series.finite
    if not len(good):
        return "No finite learning rate."
    return f"The learning rate begins at {number(good.values[0])}, reaches {number(good.values.max())} and ends at {number(good.values[-1])}."


def _speed_told(run: History, series: Series) -> str:
    good = series.finite
    return f"{number(sorted(good.values.tolist())[len(good) // 2])} tokens a second in the median." if len(good) else "No finite speed."


PLANS = (
    Plan(
        "loss", "Loss", lambda run: (_renamed(run.loss, "training loss"), _renamed(run.evaluation, "evaluation loss")), _loss_told, unit="loss"
    ),
    Plan(
        "scale", "Loss scale", lambda run: (_renamed(run.scale, "loss scale"),) if run.is_scaled else (EMPTY,), _scale_told, shown=scale,
        unit="loss scale", axis="log", steps=True, hint=",.0f",
    ),
    Plan("norm", "Gradient norm", lambda run: (_renamed(run.norm, "gradient norm"),), _norm_told, unit="norm", axis="log"),
    Plan(
        "stalled", "Stalled updates and underflow",
        lambda run: (_renamed(run.first_of(("stalled",)), "stalled updates"), _renamed(run.first_of(("underflow",)), "underflow of gradients")),
        _shares_told, shown=share, unit="share", hint=".3~p", percent=True,
    ),
    Plan("rate", "Learning rate", lambda run: (_renamed(run.first_of(RATE), "learning rate"),), _rate_told, unit="learning rate"),
    Plan("speed", "Speed", lambda run: (_renamed(run.first_of(SPEED), "tokens a second"),), _speed_told, unit="tokens a second"),
)  # fmt: skip
