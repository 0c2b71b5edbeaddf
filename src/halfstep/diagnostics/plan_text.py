"""A plan as text for people: the answer first, then the modules with their numbers, the reasons, and what was tried."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from halfstep.diagnostics.planned import Plan, Tried
from halfstep.policy import PRESETS

LISTED = 12  # modules that are told one by one


def told(plan: Plan) -> str:
    """The text of a plan."""
    lines = [answer(plan)]
    for h in plan.held[:LISTED]:
        lines.append(f"  {h.module} ({h.kind}): {h.why}" if h.kind else f"  {h.module}: {h.why}")
    if len(plan.held) > LISTED:
        lines.append(f"  and {len(plan.held) - LISTED} more: plan.held has all of them")
    lines += [f"why: {reason}" for reason in plan.reasons]
    lines += [f"note: {note}" for note in plan.notes]
    if plan.tried:
        lines += ["", *_table(plan)]
    return "\n".join(lines)


def answer(plan: Plan) -> str:
    """The first line: precision, scale, and how many modules stay in fp32."""
    base = plan.precision
    if plan.scale is not None:
        base += f" from a loss scale of {plan.scale:.0f}"
    if base.startswith(("fp32", "tf32")):
        return f"train in {base}"
    names = plan.modules
    if not names:
        return f"train in {base}; no module has to stay in fp32"
    shown = f"{names[0]} stays" if len(names) == 1 else f"{len(names)} modules stay"
    return f"train in {base}; {shown} in fp32"


def _table(plan: Plan) -> list[str]:
    """What was tried, a line each."""
    head = ("tried", "fp32 modules", "scale", "loss off by", "gradients off by", "step", "memory")
    reference = next((t for t in plan.tried if t.precision == "fp32"), None)
    rows = [head, *(_row(one, reference) for one in plan.tried)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{t.precision} cannot be used: {t.problem}" for t in plan.tried if not t.usable]
    worst = _worst(plan)
    return lines + ([worst] if worst else [])


def _row(one: Tried, reference: Tried | None) -> tuple[str, ...]:
    scale = "-" if one.scale is None else f"{one.scale:.0f}"
    fp32 = one.precision == "fp32"
    shares = [("-" if e is None or fp32 else share(e)) for e in (one.loss_error, one.gradient_error)]
    base = reference.seconds if reference is not None else ()
    return one.precision, str(len(one.held)) if not fp32 else "all", scale, *shares, times(one.seconds, base), bytes_text(total(one))


def total(one: Tried) -> int:
    """Bytes of a step at its peak, or where that is not known of weights, gradients and states."""
    return one.predicted.get("peak") or sum(one.predicted.values())


def times(seconds: Sequence[float], base: Sequence[float]) -> str:
    """The median of some rounds, and how many times that of fp32."""
    if not seconds:
        return "-"
    text = duration(median(seconds))
    return f"{text} ({ratio(seconds, base):.2f})" if base and seconds is not base and seconds != base else text


def ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of one time over another of the same round."""
    return median(a / b for a, b in zip(seconds, base, strict=True))


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def bytes_text(count: int) -> str:
    """Bytes as a person reads them; "-" for none."""
    if not count:
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def share(value: float) -> str:
    """A share in percent with two digits."""
    return f"{value * 100:.2g} %" if value < 1 else f"{value:.2g} times"


def _worst(plan: Plan) -> str:
    """The module that a plan's precision leaves the furthest from fp32."""
    chosen = next((t for t in plan.tried if t.precision == plan.precision and t.off), None)
    if chosen is None or chosen.precision == PRESETS["fp32"].preset:
        return ""
    worst = max((o for o in chosen.off if o.module), key=lambda o: o.outputs, default=None)
    return "" if worst is None else f"furthest from fp32 under {chosen.precision}: {worst.module}, outputs off by {share(worst.outputs)}"
