"""What a run writes down beside its metrics: frozen records, as JSON and back. `read_run` (reading.py) makes them of a folder again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["gradients", "outputs", "weights"]
EventKind = Literal[
    "skipped", "replayed", "scale", "pinned", "close", "nonfinite-loss", "diverged", "checkpoint", "resumed", "interrupted", "evaluated",
    "calibrated", "stalled", "note",
]  # fmt: skip
EVENT_KINDS: tuple[str, ...] = get_args(EventKind)
DIGITS = 4  # of numbers in layers.jsonl


class LayerNumbers(NamedTuple):
    """What was measured on one tensor, or on all tensors of one layer.

    n: elements. zeros, nonfinite: shares of them that are 0, and inf or NaN. underflow: the share of the others whose magnitude is below the
    smallest number of the format that has all its bits; overflow: the share of all that is within a factor of 2 of its largest one, or beyond it and
    finite.
    log2max, log2rms: the largest magnitude and the root mean square, as powers of two: -inf where all is 0, inf or NaN where an element is.
    The shares are those of at most 4096 elements of each tensor, evenly spaced; log2max and log2rms are exact.
    """

    n: int
    zeros: float
    nonfinite: float
    underflow: float
    overflow: float
    log2max: float
    log2rms: float


@dataclass(frozen=True)
class LayerSample:
    """One kind of tensor, layer by layer, in one step.

    step: the number of the step among the applied ones, from 1 on. scale: the loss scale that gradients bear, 1 otherwise.
    format: against which format under- and overflow are meant. layers: by name of module (outputs) or of parameter (gradients, weights).
    """

    step: int
    kind: str
    format: str
    layers: Mapping[str, LayerNumbers]
    scale: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a line of layers.jsonl."""
        layers = {name: [numbers[0], *map(shortened, numbers[1:])] for name, numbers in self.layers.items()}
        return {"step": self.step, "scale": self.scale, "kind": self.kind, "format": self.format, "layers": layers}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> LayerSample:
        """What `as_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        layers = {str(name): LayerNumbers(int(n), *map(float, rest)) for name, (n, *rest) in plain["layers"].items()}
        return cls(int(plain["step"]), str(plain["kind"]), str(plain["format"]), layers, float(plain.get("scale", 1.0)))

    def __str__(self) -> str:
        worst = max(self.layers.items(), key=lambda item: (item[1].nonfinite, item[1].overflow, item[1].underflow), default=None)
        head = f"step {self.step}: {self.kind} of {len(self.layers)} layers in {self.format}"
        if worst is None:
            return head
        name, numbers = worst
        return (
            f"{head}; worst is {name or 'the model'}: {numbers.nonfinite:.2%} not finite, {numbers.overflow:.2%} at the limit, "
            f"{numbers.underflow:.2%} below {self.format}'s full precision"
        )


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run, told for people.

    text: one sentence, what happened. why: what it means and what to do. culprits: names of modules, parameters or inputs. time: ISO 8601.
    """

    step: int
    kind: str
    text: str
    why: str = ""
    culprits: tuple[str, ...] = ()
    time: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a line of events.jsonl."""
        return {"step": self.step, "time": self.time, "kind": self.kind, "text": self.text, "why": self.why, "culprits": list(self.culprits)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> RunEvent:
        """What `as_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        told = {name: str(plain.get(name, "")) for name in ("text", "why", "time")}
        return cls(int(plain["step"]), str(plain["kind"]), culprits=tuple(map(str, plain.get("culprits", ()))), **told)

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}" + (f"\n  {self.why}" if self.why else "")


@dataclass(frozen=True)
class Environment:
    """Where and with what a run was started. Empty texts and zeros where it is not known.

    device: the fields of `halfstep.hardware.Capabilities`. processes: ranks. policy: the precision as text. parameters, trainable: elements.
    route: which products are emulated on a CPU. command: argv.
    """

    time: str = ""
    halfstep: str = ""
    torch: str = ""
    python: str = ""
    platform: str = ""
    device: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 0
    policy: str = ""
    optimizer: str = ""
    model: str = ""
    parameters: int = 0
    trainable: int = 0
    route: str = ""
    command: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for environment.json."""
        return asdict(self) | {"device": dict(self.device), "command": list(self.command)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Environment:
        """What `as_dict` gave; keys that are not known are left out. Raises TypeError or ValueError for values of other kinds."""
        given: dict[str, Any] = {f.name: str(plain.get(f.name) or "") for f in fields(cls) if f.type == "str"}
        given |= {f.name: int(plain.get(f.name) or 0) for f in fields(cls) if f.type == "int"}
        command = plain.get("command") or ()
        return cls(**given, device=dict(plain.get("device") or {}), command=(command,) if isinstance(command, str) else tuple(command))

    def __str__(self) -> str:
        if not self.torch:
            return "environment not recorded"
        where = self.device.get("name", "an unknown device")
        return (
            f"{self.policy or 'an unknown precision'} on {where}, {self.processes} process{'es' if self.processes != 1 else ''}\n"
            f"  {self.model} of {self.parameters:,} parameters, {self.trainable:,} trained by {self.optimizer or 'an unknown optimizer'}\n"
            f"  halfstep {self.halfstep}, torch {self.torch}, Python {self.python}, {self.platform}"
        )


@dataclass(frozen=True)
class MemoryLedger:
    """Bytes by kind: as planned before the run, and as measured after its first applied step. Empty where there was none."""

    measured: Mapping[str, int] = field(default_factory=dict)
    predicted: Mapping[str, int] = field(default_factory=dict)
    policy: str = ""
    batch: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for memory.json."""
        return {"predicted": dict(self.predicted) or None, "measured": dict(self.measured), "policy": self.policy, "batch": self.batch}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> MemoryLedger:
        """What `as_dict` gave. Raises TypeError or ValueError for anything else."""
        parts = [{str(k): int(v) for k, v in (plain.get(which) or {}).items()} for which in ("measured", "predicted")]
        return cls(parts[0], parts[1], str(plain.get("policy", "")), str(plain.get("batch", "")))

    def __str__(self) -> str:
        if not self.measured:
            return "memory not recorded"
        kinds = [*self.measured, *(k for k in self.predicted if k not in self.measured)]
        lasting = sum(v for k, v in self.measured.items() if k not in ("peak", "process peak"))
        rows = [f"  {k}: {_bytes(self.measured, k)} measured, {_bytes(self.predicted, k)} predicted" for k in kinds]
        return "\n".join([f"{lasting / 2**20:,.1f} MiB last from step to step under {self.policy}", *rows])


def _bytes(kinds: Mapping[str, int], kind: str) -> str:
    return f"{kinds[kind]:,} bytes" if kind in kinds else "not"


@dataclass(frozen=True)
class RunRecords:
    """All that a run has left in its folder. What is not there is empty; `notes` says what could not be read.

    metrics: the lines of metrics.jsonl, in order. config: the settings; plan, rules, audit: as in their files.
    """

    folder: Path
    metrics: tuple[Mapping[str, Any], ...] = ()
    events: tuple[RunEvent, ...] = ()
    layers: tuple[LayerSample, ...] = ()
    environment: Environment = field(default_factory=Environment)
    memory: MemoryLedger = field(default_factory=MemoryLedger)
    config: Mapping[str, Any] = field(default_factory=dict)
    audit: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def last_step(self) -> int:
        """The last step that anything tells of; 0 without any."""
        steps = (m["step"] for m in self.metrics if isinstance(m.get("step"), int))
        return max([*steps, *(e.step for e in self.events), *(s.step for s in self.layers)], default=0)

    def series(self, key: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """(steps, values) of the metrics lines that have a number under `key` and a step. NaN and inf are values."""
        found = [(m["step"], m[key]) for m in self.metrics if isinstance(m.get(key), int | float) and isinstance(m.get("step"), int)]
        return tuple(s for s, _ in found), tuple(float(v) for _, v in found)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names under which metrics lines have numbers, in the order of their first appearance."""
        return tuple(dict.fromkeys(key for m in self.metrics for key, value in m.items() if isinstance(value, int | float)))

    def sampled(self, kind: str) -> tuple[LayerSample, ...]:
        """The samples of one kind (gradients, outputs, weights), by step; those of one step in several formats follow each other."""
        return tuple(sorted((s for s in self.layers if s.kind == kind), key=lambda s: s.step))

    def __str__(self) -> str:
        found = f"{len(self.metrics):,} log lines, {len(self.events)} events, {len({s.step for s in self.layers})} sampled steps"
        return "\n".join([f"{self.name}: {self.last_step:,} steps, {found}", *(f"  note: {note}" for note in self.notes)])


def shortened(number: float) -> float | str:
    """A number with 4 significant digits, whole where nothing is lost; inf and NaN as text, which any JSON reader takes."""
    if not math.isfinite(number):
        return str(float(number))
    short = float(f"{number:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def merged(parts: Iterable[LayerSample]) -> dict[str, LayerNumbers]:
    """The layers of several samples of one step as one mapping; a name that was measured in several formats has its first."""
    found: dict[str, LayerNumbers] = {}
    for sample in parts:
        for name, numbers in sample.layers.items():
            found.setdefault(name, numbers)
    return found
