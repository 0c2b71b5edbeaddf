"""The files of a run's records, as they are written: line by line while it goes on, within a limit of size, and cut back when it is resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep.checkpoint import replace
from halfstep.diagnostics.reading import AUDIT, ENVIRONMENT, EVENTS, LAYERS, MEMORY, METRICS, Broken, lines_of
from halfstep.diagnostics.records import LayerSample, RunEvent
from halfstep.errors import CheckpointError

FILES = (EVENTS, LAYERS, ENVIRONMENT, MEMORY, AUDIT)  # beside metrics.jsonl
OF_THE_PROCESS = ("checkpoint", "interrupted", "resumed")  # kinds of events that a run has or has not as it is stopped
LAYERS_LIMIT, EVENTS_LIMIT = 6_000_000, 2_000_000  # bytes


class RunWriter:
    """Writes records into a folder, which is made. A line is whole on the disk's side of Python when a method returns.

    every: steps between samples, as asked for. layers.jsonl is thinned at 6 MB: every second of the sampled steps stays, and `stride` tells how many
    times rarer than asked for steps are to be sampled from then on. events.jsonl ends at 2 MB, with a note; `events` counts its lines, but for those
    about checkpoints, interrupts and resumes: a resumed run has the count of one that never stopped.
    Raises CheckpointError when the disk does not take something.
    """

    def __init__(self, folder: str | Path, every: int = 1, layers_limit: int = LAYERS_LIMIT, events_limit: int = EVENTS_LIMIT) -> None:
        self.folder, self.every = Path(folder), every
        self.events, self.stride = 0, 1
        self._layers_limit, self._events_limit = layers_limit, events_limit

    def go_on(self, events: int | None = None, step: int | None = None) -> None:
        """Go on in files that are there, as of a checkpoint of `step` with `events` events before it: later ones are dropped, and later samples.

        None: nothing is dropped (step), or the events up to the step are kept (events).
        """
        values = [v for _, v in lines_of(self.folder / EVENTS) if isinstance(v, dict)]
        kept, self.events = [], 0
        for v in values:
            counts = v.get("kind") not in OF_THE_PROCESS
            early = step is None or v.get("step", 0) <= step
            if early if events is None or not counts else self.events < events:
                kept.append(v)
                self.events += counts
        if len(kept) < len(values):
            self._rewrite(self.folder / EVENTS, kept)
        layers = [v for _, v in lines_of(self.folder / LAYERS) if isinstance(v, dict)]
        if step is not None and any(v.get("step", 0) > step for v in layers):
            layers = [v for v in layers if v.get("step", 0) <= step]
            self._rewrite(self.folder / LAYERS, layers)
        self.stride = max([v.get("stride", 1) for v in layers], default=1)
        for name in (EVENTS, LAYERS, METRICS):
            self._mend(self.folder / name)

    def _mend(self, path: Path) -> None:
        """Take off a last line that a kill has cut."""
        if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._rewrite(path, [v for _, v in lines_of(path) if not isinstance(v, Broken)])

    def metrics(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        self._append(METRICS, [json.dumps(record)])

    def event(self, event: RunEvent) -> None:
        """A line of events.jsonl, unless that is full."""
        size = _size(self.folder / EVENTS)
        if size >= self._events_limit:
            return
        line = json.dumps(event.as_dict())
        if size + len(line) >= self._events_limit:
            said = f"the list of events ends here, at {self._events_limit / 1e6:g} MB"
            line = json.dumps(RunEvent(event.step, "note", said, "metrics.jsonl still has the counts of what happens.", time=event.time).as_dict())
            line += " " * max(0, self._events_limit - size - len(line))  # full from now on
        self._append(EVENTS, [line])
        self.events += event.kind not in OF_THE_PROCESS

    def layers(self, samples: Sequence[LayerSample]) -> bool:
        """Lines of layers.jsonl. Whether the file was thinned, and `stride` has grown."""
        self._append(LAYERS, [json.dumps(self._as_line(sample)) for sample in samples])
        if _size(self.folder / LAYERS) < self._layers_limit:
            return False
        self.stride *= 2
        values = [v for _, v in lines_of(self.folder / LAYERS) if isinstance(v, dict) and self.is_due(v["step"])]
        self._rewrite(self.folder / LAYERS, [v | {"stride": self.stride} for v in values])
        return True

    def is_due(self, step: int) -> bool:
        """Whether the step of that number is sampled: the first, and every N-th. It depends on nothing else, so a resumed run samples the same."""
        return self.every > 0 and (step == 1 or step % (self.every * self.stride) == 0)

    def _as_line(self, sample: LayerSample) -> dict[str, Any]:
        return sample.as_dict() | ({"stride": self.stride} if self.stride > 1 else {})

    def document(self, name: str, values: Mapping[str, Any]) -> None:
        """A small file, whole or not at all."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace(self.folder / name, json.dumps(values, indent=1) + "\n")
        except OSError as error:
            raise self._error(self.folder / name, error) from error

    def _append(self, name: str, lines: Iterable[str]) -> None:
        path = self.folder / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise self._error(path, error) from error

    def _rewrite(self, path: Path, values: Iterable[Mapping[str, Any]]) -> None:
        try:
            replace(path, "".join(json.dumps(v) + "\n" for v in values))
        except OSError as error:
            raise self._error(path, error) from error

    def _error(self, path: Path, error: OSError) -> CheckpointError:
        said = error.strerror or os.strerror(error.errno or 0)
        return CheckpointError(f"{path} could not be written: {said}", "Free some space, then resume from the last checkpoint.")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
