"""Numbers as people read them, and curves as a line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _plain(value: float) -> float:
    """A number that a float holds; infinite where none does."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def number(value: float | None) -> str:
    """Four significant digits: 2.314, 0.0003, 12,400, 1.2e-07; NaN and inf by name; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    value = _plain(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10_000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{value:.4g}"


def share(value: float | None) -> str:
    """A part of 1 in percent: 0 %, under 0.01 %, 3.2 %, 100 %."""
    if value is None or not math.isfinite(_plain(value)):
        return number(value)
    if 0 < value < 0.0001:
        return "under 0.01 %"
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.3g} %"


def size(value: float | None) -> str:
    """Bytes in the unit that suits them: 1.43 GiB."""
    if value is None or not math.isfinite(_plain(value)):
        return number(value)
    amount, unit = float(value), 0
    while abs(amount) >= 1024 and unit + 1 < len(UNITS):
        amount, unit = amount / 1024, unit + 1
    return f"{int(amount)} B" if unit == 0 else f"{amount:.3g} {UNITS[unit]}" if amount < 1000 else f"{amount:.0f} {UNITS[unit]}"


def scale(value: float | None) -> str:
    """A loss scale: 65,536 (2^16)."""
    if value is None or not math.isfinite(_plain(value)) or value <= 0:
        return number(value)
    power = math.log2(value)
    return f"{number(value)} (2^{int(power)})" if power == int(power) and power > 3 else number(value)


def count(n: int, one: str, many: str = "") -> str:
    """A number with its noun: 1 step, 12,000 steps."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def spark(values: Sequence[float], width: int = 48) -> str:
    """A curve in one line, each character the mean of its part; ✕ where a part holds a value that is not finite; empty without values."""
    n = len(values)
    if not n:
        return ""
    parts = [values[i * n // min(width, n) : (i + 1) * n // min(width, n)] for i in range(min(width, n))]
    means = [sum(p) / len(p) for p in parts]  # NaN and inf spread, which is what marks the part
    finite = [m for m in means if math.isfinite(m)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    step = (high - low) / (len(BLOCKS) - 1)
    return "".join("✕" if not math.isfinite(m) else BLOCKS[round((m - low) / step) if step else 0] for m in means)


def sentence(text: str) -> str:
    """Text with a full stop at its end."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
