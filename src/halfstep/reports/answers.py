"""The first screen: did it train, were steps lost, was anything near its limit, what to do. Pure functions of a history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfstep.diagnostics.explanations import WHY
from halfstep.reports.document import Answer, Answers
from halfstep.reports.history import History
from halfstep.reports.numbers import count, number, scale, sentence, share
from halfstep.reports.series import Series, marks

NOISE = 3.0  # standard errors that two ends of a curve must be apart
FEW, TREND = 20, 2.8  # records below which the order of all of them is looked at, and the standard deviations of Kendall's S that make a trend
PART = 0.05  # of the records at either end that are compared
LOST_FEW = 0.01  # share of lost steps that is worth a look and no more
UNDERFLOW, STALLED = 0.1, 0.1  # shares from which on they are said


def answers(run: History) -> Answers:
    """The four questions for one run."""
    trained, lost, near = did_it_train(run), were_steps_lost(run), near_its_limit(run)
    return Answers(run.name, (trained, lost, near), what_to_do(run, trained, lost, near))


def did_it_train(run: History) -> Answer:
    """Whether the loss came down, by more than its noise, and stayed finite."""
    question, series = "Did it train?", run.loss
    good = series.finite
    evaluated = _evaluated(run)
    ended = run.events_of("diverged")
    if not len(series):
        return Answer(question, "unknown", "Not known.", f"The records have no loss. {evaluated}".strip())
    if not len(good):
        return Answer(question, "bad", "No: the loss was never finite.", f"{count(len(series), 'record')}, none of them finite.")
    last = marks(series)
    if not np.isfinite(series.values[-1]):
        return Answer(question, "bad", f"No: the loss is {_kind(series)} at the end.", f"From step {number(last[-1].first)} on. {evaluated}".strip())
    if ended:
        return Answer(question, "bad", "No: the run ended with DivergedError.", sentence(ended[-1].text))
    first, final, error = _ends(good)
    margin = max(NOISE * error, 0.002 * abs(first))
    path = f"from {number(first)} to {number(final)}"
    if len(good) < 2:
        return Answer(
            question, "unknown", "Not known: one record of the loss.", f"It is {number(final)} at step {number(good.steps[-1])}. {evaluated}"
        )
    trend = _trend(good)
    if len(good) < FEW and not trend * (final - first) > 0 and float(np.ptp(good.values)) > 0.002 * abs(first):
        told = f"It went {path} in {count(run.steps, 'step')}, which may be noise. {evaluated}"
        return Answer(question, "unknown", f"Not known: {len(good)} records of the loss show no trend.", told.strip())
    if final < first - margin:
        told = f"The loss fell {path} in {count(run.steps, 'step')}. {evaluated}"
        lowest = float(np.min([np.median(p) for p in np.array_split(good.values, min(20, len(good)))]))
        if final - lowest > max(NOISE * error, (0.1 if len(good) >= FEW else 0.5) * (first - lowest)):
            return Answer(question, "watch", f"At first: the loss rose again to {number(final)}.", f"{told} Lowest part: {number(lowest)}.")
        if series.bad:
            return Answer(question, "watch", f"Yes, with {count(series.bad, 'record')} that {_is(series.bad)} not finite.", told)
        how = " (medians of the first and the last 5 % of the records)" if len(good) >= FEW else ""
        detail = f"In {count(run.steps, 'step')}{how}. {evaluated}"
        return Answer(question, "good", f"Yes: the loss fell {path}.", detail.strip())
    if final > first + margin:
        return Answer(question, "bad", "No: the loss rose.", f"It went {path} in {count(run.steps, 'step')}. {evaluated}".strip())
    told = f"It went {path} in {count(run.steps, 'step')}, which is within its noise. {evaluated}"
    return Answer(question, "bad", "No: the loss is flat.", told.strip())


def _is(n: int) -> str:
    return "is" if n == 1 else "are"


def _kind(series: Series) -> str:
    value = series.values[-1]
    return "NaN" if np.isnan(value) else "inf"


def _ends(good: Series) -> tuple[float, float, float]:
    """(median of the first part, median of the last part, standard error of their difference), from the differences of neighbours.

    Larger by 6 / records, since the spread is itself taken from few; 0 below FEW, where `_trend` tells noise from a trend.
    """
    k = max(1, int(len(good) * PART))
    head, tail = float(np.median(good.values[:k])), float(np.median(good.values[-k:]))
    if len(good) < FEW:
        return head, tail, 0.0
    steps = np.diff(good.values[len(good) // 2 :])
    spread = 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / np.sqrt(2)
    return head, tail, spread * float(np.sqrt(2 / k)) * (1 + 6 / len(good))


def _trend(good: Series) -> float:
    """Kendall's S of the values over its standard deviation under noise, 0 where that is no trend: 1 in 200 sequences of noise has one, of
    6 records 1 in 360, of fewer none.
    """
    n = len(good)
    if not 5 < n < FEW:
        return 0.0
    later = np.sign(good.values[None, :] - good.values[:, None])
    score = float(np.triu(later, 1).sum()) / float(np.sqrt(n * (n - 1) * (2 * n + 5) / 18))
    return score if abs(score) >= TREND else 0.0


def _evaluated(run: History) -> str:
    series = run.evaluation
    good = series.finite
    if not len(series):
        return ""
    if not np.isfinite(series.values[-1]):
        return f"The last evaluation is {_kind(series)}."
    best = int(good.values.argmin())
    where = "at the end" if float(good.steps[-1]) >= run.steps else f"at step {number(good.steps[-1])}, the last one"
    told = f"Evaluation: {number(good.values[-1])} {where}"
    if len(good) > 2 and good.values[-1] > good.values[best] * 1.01 + 1e-12:
        told += f", lowest {number(good.values[best])} at step {number(good.steps[best])}: it has risen since"
    return f"{told}."


def were_steps_lost(run: History) -> Answer:
    """How many steps were not applied, why, and what was to blame."""
    question, lost, again = "Were steps lost?", run.lost, run.replayed
    replayed = (
        f" {count(again, 'step')} {'was' if again == 1 else 'were'} run again at a lower loss scale, so that nothing was lost." if again else ""
    )
    if not run.steps and not lost:
        return Answer(question, "unknown", "Not known.", "The records tell of no steps.")
    if not lost and not run.counted:
        return Answer(question, "unknown", "Not known.", "The records do not tell which steps were applied (halfstep.diagnostics.Recorder does).")
    if not lost:
        return Answer(question, "good", "No.", f"All {count(run.steps, 'step')} were applied.{replayed}")
    reasons = Counter(str(m.get("reason")) for m in run.refused if m.get("reason") != "partly")
    listed = ", ".join(f"{n:,} {why}" for why, n in reasons.most_common())
    told = f"{count(lost, 'step')} of {lost + run.steps:,}" + (f" ({listed})." if listed else ".")
    blamed = Counter(name for name in _blamed(run))
    if blamed:
        told += f" Most often to blame: {', '.join(name for name, _ in blamed.most_common(2))}."
    part = lost / (lost + run.steps)
    return Answer(question, "watch" if part <= LOST_FEW else "bad", f"Yes: {share(part)} of them.", told + replayed)


def _blamed(run: History) -> list[str]:
    """The first culprit of each lost step."""
    told = [event.culprits[0] for event in run.events_of("skipped") if event.culprits]
    if told:
        return told
    lists: list[Any] = [m.get("culprits") for m in run.refused]
    return [str(names[0]) for names in lists if isinstance(names, list) and names]


def near_its_limit(run: History) -> Answer:
    """What came close to, or beyond, what its format holds."""
    question = "Was anything near its limit?"
    bad, watch, seen = _limits(run)
    if bad:
        return Answer(question, "bad", "Yes, and beyond it.", " ".join([*bad, *watch]))
    if watch:
        return Answer(question, "watch", "Yes.", " ".join(watch))
    if not seen:
        return Answer(question, "unknown", "Not known.", "The records hold no samples of layers and no events (record_every= of TrainingArguments).")
    return Answer(question, "good", "No.", "No output, gradient or weight that was looked at came within a factor of 2 of its format's limit.")


def _limits(run: History) -> tuple[list[str], list[str], bool]:
    """(what went beyond a limit, what came near one, whether anything was looked at)."""
    bad, watch = [], []
    for event in run.events_of("pinned", "nonfinite-loss"):
        bad.append(sentence(event.text))
    pinned = [name for m in run.windows if isinstance(m.get("pinned"), list) for name in m["pinned"]]
    if not bad and pinned:
        bad.append(f"Held in fp32, because 16 bits do not hold them: {', '.join(map(str, pinned))}.")
    close = run.events_of("close")
    near = [str(m["near"]) for m in run.windows if m.get("near")]
    if close:
        watch.append(sentence(close[-1].text))
    elif near:
        watch.append(f"Within a factor of 2 of a limit, {count(len(near), 'record')}: {near[-1]}.")
    for view in run.views:
        if view.nonfinite:
            name, step = view.nonfinite
            bad.append(f"{view.kind.capitalize()} of {name or 'the model'} are not finite at step {number(step)}.")
        value, name, step = view.worst
        if view.measure == "overflow" and value > 0:
            watch.append(f"{share(value)} of the {view.kind} of {name or 'the model'} are at or near {view.format}'s limit (step {number(step)}).")
    for key, most, what in (
        ("underflow", UNDERFLOW, "of the scaled gradients keep fewer bits than fp16 has"),
        ("stalled", STALLED, "of the updates round away"),
    ):
        series = run.first_of((key,)).finite
        if len(series) and series.values[-1] > most:
            watch.append(f"{share(series.values[-1])} {what}.")
    floor = run.scale.finite
    if run.is_scaled and len(floor) and floor.values[-1] <= 1:
        watch.append(f"The loss scale has fallen to {scale(floor.values[-1])}.")
    seen = bool(run.records.layers or run.records.events or any("closest_output" in m or "largest_gradient" in m for m in run.windows))
    return list(dict.fromkeys(bad)), list(dict.fromkeys(watch)), seen


def what_to_do(run: History, trained: Answer, lost: Answer, near: Answer) -> tuple[str, ...]:
    """Advice, most urgent first."""
    told: list[str] = []
    told += [sentence(event.text) for event in run.events_of("note") if "the run failed" in event.text][-1:]
    for event in run.events_of("diverged")[-1:]:
        told.append(sentence(event.why or event.text))
    if trained.state == "bad" and ("NaN" in trained.answer or "never finite" in trained.answer or "inf" in trained.answer):
        told.append("Find where it began: the first event below that names a culprit, then halfstep.trace(model, batch) on that batch.")
    elif trained.state == "bad" and "flat" in trained.answer:
        told.append("Ask where the loss is stuck: halfstep compare runs the same steps in fp32; the stalled updates below tell whether weights move.")
    elif trained.state in ("bad", "watch") and "rose" in trained.answer:
        told.append("Lower the learning rate or warm up longer; halfstep compare tells whether fp32 does the same.")
    if "risen since" in trained.detail:
        told.append("The evaluation is past its best: load_best_model_at_end=True keeps the best weights, fewer epochs save the time.")
    if run.loss.bad:
        told.append("Look at the steps whose loss is not finite (marks in the chart below): halfstep.trace(model, batch) names the place.")
    told += _about_steps(run, lost)
    unguarded = run.events_of("nonfinite-loss")[-1:] if lost.state not in ("watch", "bad") else []
    for event in [*unguarded, *run.events_of("pinned")[-1:], *run.events_of("close")[-1:]]:
        if event.why:
            told.append(event.why)
    told += _about_numbers(run)
    if not told and "unknown" in (trained.state, lost.state):
        told.append(
            "The records hold too little to tell: log more often (logging_steps=); in a loop of your own halfstep.diagnostics.Recorder does it."
        )
    elif not told:
        told.append("Nothing: the records show no fault.")
    return tuple(dict.fromkeys(told))


def _about_steps(run: History, lost: Answer) -> list[str]:
    if lost.state not in ("watch", "bad"):
        return []
    reasons = {str(m.get("reason")) for m in run.refused}
    config: Mapping[str, Any] = run.records.config
    if "forward-overflow" in reasons and config.get("heal") != "pin":
        return ['Hold the module that overflows in fp32: heal="pin", or fp32=MODULE in the precision.']
    if "nonfinite-loss" in reasons:
        return ["A loss that is not finite in fp32 either comes from the data or a formula: halfstep.trace(model, batch) names the place."]
    if config.get("on_overflow") != "replay":
        return ['Have overflowing steps run again instead of dropped: on_overflow="replay" (the Trainer\'s default).']
    return ["See the events below: each lost step names what was not finite."]


def _about_numbers(run: History) -> list[str]:
    told = []
    stalled, underflow = (run.first_of((key,)).finite for key in ("stalled", "underflow"))
    if len(stalled) and stalled.values[-1] > STALLED:
        told.append("Updates round away: give 16-bit weights masters (weights=split, or a *-lean precision), or raise the learning rate.")
    if len(underflow) and underflow.values[-1] > UNDERFLOW:
        told.append("Gradients underflow fp16: scale=dynamic raises the loss scale, halfstep plan finds a start; bf16 needs none.")
    ratio, than = run.records.audit.get("measured"), run.records.audit.get("baseline")
    if isinstance(ratio, int | float) and ratio > 1 and than == "fp32":
        told.append(f"A step takes {number(ratio)} of fp32's time here: the audit below says why.")
    floor = run.scale.finite
    if run.is_scaled and len(floor) and floor.values[-1] <= 1:
        told.append("A loss scale of 1 keeps no gradient from underflow: find what overflows (halfstep.trace), clip (max_grad_norm), or use bf16.")
    return told + _about_limits(run)


def _about_limits(run: History) -> list[str]:
    """What to do about samples near a limit or beyond it. Names of gradients and weights are those of parameters, and modules are held."""
    told = []
    if any(view.nonfinite for view in run.views):
        told.append("Find the op whose values are not finite: halfstep.trace(model, batch) on a batch of that step.")
    if any(event.why for event in run.events_of("pinned", "close")):
        return told  # which is what to do
    if any(m.get("near") for m in run.windows):
        told.append(WHY["close"])
    for view in sorted((v for v in run.views if v.measure == "overflow" and v.worst[0] > 0), key=lambda v: -v.worst[0]):
        name = view.worst[1] if view.kind == "outputs" else view.worst[1].rpartition(".")[0]
        if view.format != "fp16":
            told.append(
                f"No format reaches further than {view.format}: lower the learning rate, clip, or scale down what {name or 'the model'} computes."
            )
        elif view.kind == "gradients":
            told.append("Gradients near fp16's limit are those that the loss scale has multiplied: scale=dynamic lowers it by itself.")
        else:
            told.append(f"As a precaution hold {name or 'the model'} in fp32 (fp32={name or '*'} in the precision), or use bf16, with fp32's range.")
    return list(dict.fromkeys(told))
