"""In what order findings are told: a constant that caused a NaN before the NaN."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfstep.tracing import SEVERITY, Finding

CONSTANTS = ("mask", "eps", "clamp")
_EPS_SAVES = ("div", "reciprocal", "rsqrt", "sqrt", "log", "log2", "log10", "pow", "norm", "vector_norm")


def ranked(findings: Iterable[Finding], births: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, most severe first and then earliest; those that halfstep has dealt with last.

    births: the first values that were not finite and that the loss or a gradient descends from. A constant that does not fit its format comes
    before the birth that it caused. One fault of one line is told once.
    """
    rest = [f for f in findings if f not in births]
    causes = {id(f) for f in rest if f.fault in CONSTANTS and not f.fixed and any(caused(f, b) for b in births)}

    def rank(f: Finding) -> tuple[bool, float, int]:
        first = -0.5 + min(SEVERITY.index(b.fault) for b in births) if id(f) in causes else SEVERITY.index(f.fault)
        return f.fixed, first, f.at

    chosen: dict[tuple[str, str, str, str], Finding] = {}
    for f in sorted([*rest, *births], key=rank):
        key = (f.fault, f.place.module, f.place.source, "" if f.place.source else f.what)
        chosen.setdefault(key, f)
    return tuple(chosen.values())


def caused(constant: Finding, birth: Finding) -> bool:
    """Whether a constant that does not fit may have made these values: an earlier one of the same module, where an op needed it."""
    if birth.fault not in ("overflow", "nonfinite", "mask") or birth.place.module != constant.place.module:
        return False
    if birth.place.direction == "forward" and 0 <= birth.at < constant.at:
        return False
    if constant.fault == "mask":
        return birth.place.direction == "forward" or constant.place.source == birth.place.source
    return birth.fault == "nonfinite" and any(op in birth.what or op == birth.place.op for op in _EPS_SAVES)
