"""What a row found, as plain values for JSON. The file: {"format", "rows": {name: record}}, every record with its own machine, versions and day."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite.method import Claim, Excluded, Taken, best, ratios, spread

FORMAT = 1
QUIET = 0.05  # how far A/A may be from 1


def row_of(taken: Sequence[Taken], excluded: Sequence[Excluded], claims: Sequence[Claim]) -> dict[str, Any]:
    """Numbers of every contender, ratios of the claims, A/A."""
    by_name = {t.name: t for t in taken}
    ours = next(t for t in taken if t.role == "ours")
    twin = next((t for t in taken if t.role == "twin"), None)
    fastest = best(taken)
    own = min((t for t in taken if t.role == "ours"), key=lambda t: statistics.median(t.known))
    again = compared(twin, ours) if twin is not None else None
    return {
        "contenders": [measured(t, ours) for t in taken],
        "not_run": [{"name": e.name, "reason": e.reason} for e in excluded],
        "best": None if fastest is None else compared(own, fastest),
        "claims": [claim_of(c, by_name, fastest) for c in claims],
        "again": again,
        "counts": again is not None and abs(again["ratio"] - 1) <= QUIET,
    }


def measured(taken: Taken, ours: Taken) -> dict[str, Any]:
    """One contender: median, quartiles, floor, rounds, losses, and how long the first of ours takes relative to it."""
    low, high = spread(taken.known)
    return {
        "name": taken.name,
        "role": taken.role,
        "median": statistics.median(taken.known),
        "quartiles": [low, high],
        "rounds": len(taken.known),
        "first_only": taken.first_only,
        "floor": taken.floor,
        "losses": taken.losses,
        "ours_to_it": None if taken is ours else compared(ours, taken)["ratio"],
    }


def compared(one: Taken, other: Taken) -> dict[str, Any]:
    """The median of the ratios within rounds, its quartiles and their number."""
    found = ratios(one, other)
    return {"of": one.name, "to": other.name, "ratio": statistics.median(found), "quartiles": list(spread(found)), "rounds": len(found)}


def claim_of(claim: Claim, taken: dict[str, Taken], fastest: Taken | None) -> dict[str, Any]:
    """A claim with what was measured; met is None when its opponent was not run."""
    target = {"ours": claim.ours, "against": claim.against, "reach": claim.reach, "stretch": claim.stretch}
    other = fastest if claim.against == "best peer" else taken.get(claim.against)
    if other is None or claim.ours not in taken:
        return target | {"ratio": None, "met": None}
    found = compared(taken[claim.ours], other)
    return target | found | {"met": 0 < found["ratio"] <= claim.reach}  # a slope that noise has turned negative is no proof


def rounded(value: Any) -> Any:
    """Four significant digits are all that a time has."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def read(path: Path) -> dict[str, Any]:
    """The file of results, or an empty one."""
    if not path.exists():
        return {"format": FORMAT, "rows": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} has format {found.get('format')}, and this is the program for format {FORMAT}: remove the file and measure again")
    return found


def files(folder: Path) -> list[Path]:
    """The files of results there, one for each kind of CPU."""
    return sorted(folder.glob("cpu-*.json"))


def place(folder: Path, record: dict[str, Any]) -> Path:
    """The file that a row belongs to, by the kind of CPU it was measured on."""
    return folder / f"cpu-{record['machine']['level'].lower().replace('+', '-')}.json"


def merged(found: dict[str, Any], rows: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """The results with these rows put in the place of older ones, in the order of the table."""
    every = found["rows"] | rows
    return {"format": FORMAT, "rows": {name: every[name] for name in order if name in every}}


def write(path: Path, results: dict[str, Any]) -> None:
    """As JSON that differs in few lines when few numbers do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(results), indent=1) + "\n")


def today() -> str:
    """The day, UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
