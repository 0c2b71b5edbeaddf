"""Reading the records of a run back from its folder: pure functions of files, whoever wrote them and however far they came."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import yaml

from halfstep.diagnostics.records import Environment, LayerSample, MemoryLedger, RunEvent, RunRecords
from halfstep.errors import DataError

METRICS, EVENTS, LAYERS = "metrics.jsonl", "events.jsonl", "layers.jsonl"
ENVIRONMENT, MEMORY, AUDIT = "environment.json", "memory.json", "audit.json"
CONFIGS, PLAN, RULES = ("config.yaml", "config.json"), "plan.yaml", "rules.yaml"
TOGETHER = 1000  # lines that are parsed at one go
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # the last of an infinite step

T = TypeVar("T")


def read_run(folder: str | Path) -> RunRecords:
    """What a run has left in `folder`: one of ours, of an Accelerator's JSON lines, or any with a metrics.jsonl; or the path of such a file.

    Files that are not there are empty in the records. A line or file that is none of ours is left out and told in `notes`; a last line that was cut
    off, by a run that is going on or was killed, too. Raises DataError when there are no records at all.
    """
    place = Path(folder)
    metrics = place if place.is_file() else place / METRICS
    home = metrics.parent
    if not any((home / name).is_file() for name in (METRICS, EVENTS, LAYERS)) and not metrics.is_file():
        raise DataError(f"{place} holds no records of a run: no {METRICS}, {EVENTS} or {LAYERS}", _nearby(place))
    notes: list[str] = []
    config = next(filter(None, (_read_yaml(home / name, notes) for name in CONFIGS)), {})
    followed = config.get("plan", PLAN) is not None  # else the file is of a run that was here before
    return RunRecords(
        folder=home,
        metrics=tuple(_read_lines(metrics, notes, _as_it_is)),
        events=tuple(_read_lines(home / EVENTS, notes, RunEvent.from_dict)),
        layers=tuple(_read_lines(home / LAYERS, notes, LayerSample.from_dict)),
        environment=_made(Environment.from_dict, _read_json(home / ENVIRONMENT, notes), home / ENVIRONMENT, notes, Environment()),
        memory=_made(MemoryLedger.from_dict, _read_json(home / MEMORY, notes), home / MEMORY, notes, MemoryLedger()),
        config=config,
        audit=_read_json(home / AUDIT, notes),
        plan=_read_yaml(home / PLAN, notes) if followed else {},
        rules=_read_yaml(home / RULES, notes),
        notes=tuple(notes),
    )


def _nearby(place: Path) -> str:
    """What to name instead of a folder without records."""
    found = sorted({path.parent for path in place.glob(f"*/{METRICS}")}) if place.is_dir() else []
    if found:
        return f"Name a run in it: {', '.join(map(str, found[:5]))}{' ...' if len(found) > 5 else ''}."
    return "Name the output_dir of a Trainer, the folder that an Accelerator's or a Recorder's files are in, or a metrics.jsonl."


def lines_of(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1 on, value) of each line of a file of JSON lines, a Broken for one that is no JSON. Nothing where there is no file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        number = 0
        while block := list(islice(file, TOGETHER)):
            yield from enumerate(_parsed(block), number + 1)
            number += len(block)


class Broken:
    """Stands for a line that is no JSON."""


def _parsed(block: list[str]) -> list[Any]:
    """The values of lines: all at one go, which is fastest; one by one where that fails, or where a line holds several."""
    try:
        found: list[Any] = json.loads(f"[{','.join(block)}]")
    except ValueError:
        return [_one(line) for line in block]
    return found if len(found) == len(block) else [_one(line) for line in block]


def _one(line: str) -> Any:
    """The value of a line, None for an empty one."""
    try:
        return json.loads(line) if line.strip() else None
    except ValueError:
        return Broken()


def _as_it_is(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    return plain


def _read_lines(path: Path, notes: list[str], make: Callable[[Mapping[str, Any]], T]) -> Iterator[T]:
    """The records of a file of JSON lines."""
    left_out, last = [], 0
    for number, value in lines_of(path):
        last = number
        if value is None:  # an empty line
            continue
        if not isinstance(value, dict):
            left_out.append(number)
            continue
        try:
            record = make(value)
        except UNREADABLE:
            left_out.append(number)
            continue
        yield record
    if left_out and left_out[-1] == last and not path.read_bytes().endswith(b"\n"):
        left_out.pop()
        notes.append(f"{path.name}: the last line ({last}) is cut off and was left out")
    if left_out:
        some = ", ".join(map(str, left_out[:5]))
        notes.append(f"{path.name}: {len(left_out)} line{'s' if len(left_out) > 1 else ''} could not be read and were left out (number {some})")


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    return _read_mapping(path, notes, json.loads)


def _read_yaml(path: Path, notes: list[str]) -> dict[str, Any]:
    return _read_mapping(path, notes, json.loads if path.suffix == ".json" else yaml.safe_load)


def _read_mapping(path: Path, notes: list[str], parse: Callable[[str], Any]) -> dict[str, Any]:
    """The mapping that a file holds; nothing, and a note, where it is something else."""
    if not path.is_file():
        return {}
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} could not be read and was left out: {str(error).splitlines()[0]}")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} holds no mapping and was left out")
        return {}
    return found


def _made(make: Callable[[Mapping[str, Any]], T], plain: Mapping[str, Any], path: Path, notes: list[str], nothing: T) -> T:
    if not plain:
        return nothing
    try:
        return make(plain)
    except UNREADABLE as error:
        notes.append(f"{path.name} could not be read and was left out: {error}")
        return nothing
