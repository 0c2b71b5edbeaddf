"""What `plan` has found, as frozen values with a text for people and a YAML file for the run that follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from halfstep.checkpoint import replace as write_whole
from halfstep.errors import ConfigError, suggest
from halfstep.policy import Policy, parse

VERSION = 1
HEADER = "# a plan of halfstep: halfstep train --plan FILE, or TrainingArguments(plan=FILE)\n"
_LOADER, _DUMPER = getattr(yaml, "CSafeLoader", yaml.SafeLoader), getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # those in C: ten times as fast
Cause = Literal["range", "constant", "error", "asked"]


@dataclass(frozen=True)
class Span:
    """The values of one module's outputs, or of their gradients, in fp32.

    largest: of the finite magnitudes. least: the smallest that is not 0. Shares of the values that are not 0: fp16_under and bf16_under are below the
    format's smallest normal number, fp16_over and bf16_over beyond its largest. nonfinite: share of all values.
    """

    largest: float
    least: float
    fp16_under: float
    fp16_over: float
    bf16_under: float
    bf16_over: float
    nonfinite: float


@dataclass(frozen=True)
class Range:
    """What one module gives in fp32. gradients: of its outputs, unscaled; None where there was no backward pass."""

    module: str
    kind: str
    outputs: Span
    gradients: Span | None = None


@dataclass(frozen=True)
class Held:
    """A module that has to stay in fp32, and why.

    cause: "range" (values reach beyond the format), "constant" (one that the format does not hold), "error" (its outputs are off out of proportion),
    "asked" (the precision named it). reach: the magnitude in fp32, for "error" the relative error; None where there is no number.
    """

    module: str
    kind: str
    why: str
    cause: Cause = "range"
    reach: float | None = None


@dataclass(frozen=True)
class Off:
    """How far a module is from fp32 under a precision: relative errors (norm of the difference over norm) of outputs and of weight gradients."""

    module: str
    outputs: float
    gradients: float | None = None


@dataclass(frozen=True)
class Tried:
    """One precision, tried.

    held: modules that it needs in fp32. unheld: what it would need and cannot have, in words. scale: the loss scale that the first backward passes
    asked for, None without one. loss: mean over the batches, None where nothing gave one; loss_error, gradient_error: relative to fp32's. off: by
    module. seconds: of a forward and a backward pass, one for each round. predicted, measured: bytes by kind. problem: why it cannot be used, "" if
    it can.
    """

    precision: str
    held: tuple[Held, ...] = ()
    unheld: tuple[str, ...] = ()
    scale: float | None = None
    loss: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    off: tuple[Off, ...] = ()
    seconds: tuple[float, ...] = ()
    predicted: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def usable(self) -> bool:
        """Whether it can be trained in."""
        return not self.problem

    @property
    def policy(self) -> Policy:
        """The precision with the modules that it holds in fp32 and the loss scale that it begins with."""
        return policy_of(self.precision, self.held, self.scale)


def policy_of(precision: str | Policy, held: Sequence[Held], scale: float | None) -> Policy:
    """A policy with modules held in fp32 besides those it names itself, and a dynamic loss scale that begins at `scale`."""
    policy = parse(precision)
    names = dict.fromkeys((*policy.fp32, *(h.module for h in held)))
    policy = replace(policy, fp32=tuple(names) if policy.autocast != "fp32" else ())
    return policy if scale is None or policy.scale.kind != "dynamic" else replace(policy, scale=replace(policy.scale, init=scale))


@dataclass(frozen=True)
class Plan:
    """Which precision a model is to be trained in, which of its modules stay fp32 and why, and what that costs and gains on this machine.

    precision: the policy's text without the modules and the scale found. held: the modules, with reasons. scale: what the loss scale begins with,
    None for none. reasons: sentences, the first says why this precision. notes: what could not be found out or mended. tried: every precision that
    was looked at, fp32 first. ranges: of every module in fp32. growth: how much a value may grow before it leaves the format's range. model, batches,
    backward: what was looked at: the class, how many batches, whether gradients were made. machine: its capabilities. made: when, in ISO form.
    """

    precision: str
    held: tuple[Held, ...] = ()
    scale: float | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    ranges: tuple[Range, ...] = ()
    growth: float = 4.0
    model: str = ""
    batches: int = 0
    backward: bool = True
    machine: Mapping[str, Any] = field(default_factory=dict)
    made: str = ""

    @property
    def policy(self) -> Policy:
        """The policy to train in, with `fp32=` and `scale=`: for Accelerator(precision=), TrainingArguments(precision=) and halfstep.amp.bind."""
        return policy_of(self.precision, self.held, self.scale)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that stay in fp32."""
        return tuple(h.module for h in self.held)

    def candidate(self, precision: str) -> Tried:
        """What was found of one precision. Raises ConfigError for one that was not tried."""
        for one in self.tried:
            if one.precision == precision:
                return one
        raise ConfigError(f"{precision} was not tried", f"Tried were: {', '.join(t.precision for t in self.tried)}.")

    def __str__(self) -> str:
        from halfstep.diagnostics.plan_text import told

        return told(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, which JSON and YAML hold: `fp32` has the modules and reasons, as in a rules.yaml."""
        every = {k: v for k, v in _plain(asdict(self)).items() if k != "held"}
        rules = [{"module": h["module"], "step": None, **{k: v for k, v in h.items() if k != "module"}} for h in _plain(asdict(self))["held"]]
        return {"plan": VERSION, "precision": every.pop("precision"), "fp32": rules, **every}

    def save(self, path: str | Path) -> Path:
        """Write it as YAML, a whole file or none; `rules=` takes the file too. Returns the path."""
        target = Path(path)
        text = yaml.dump(_short(self.as_dict()), Dumper=_DUMPER, sort_keys=False, width=150, default_flow_style=None)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, HEADER + text)
        except OSError as error:
            raise ConfigError(f"the plan cannot be written to {target}: {error.strerror}", "Name another file.") from error
        return target

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote. Raises ConfigError for a file that is not there or is none."""
        try:
            found = yaml.load(Path(path).read_text(), Loader=_LOADER)
        except OSError as error:
            raise ConfigError(f"the plan {path} cannot be read: {error.strerror}", "halfstep plan --output FILE writes one.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"the plan {path} is not YAML: {error}", "halfstep plan --output FILE writes one.") from error
        return cls.from_dict(found, str(path))

    @classmethod
    def from_dict(cls, found: Any, where: str = "this") -> Plan:
        """A plan from what `as_dict` gave. Raises ConfigError for anything else, and for a precision that is none."""
        if not isinstance(found, Mapping) or not isinstance(found.get("precision"), str):
            raise ConfigError(f"{where} is no plan: it has no precision", "halfstep plan --output FILE writes one.")
        if found.get("plan") != VERSION:
            raise ConfigError(
                f"{where} is a plan of version {found.get('plan')!r}, and this halfstep reads {VERSION}", "Make it anew: halfstep plan."
            )
        known = ("plan", "fp32", *(f.name for f in fields(cls) if f.name != "held"))
        for key in found:
            if key not in known:
                raise ConfigError(f"{where} has {key}, which a plan has not", suggest(str(key), known))
        try:
            made = cls(
                precision=found["precision"],
                held=_held(found.get("fp32")),
                scale=found.get("scale"),
                reasons=tuple(found.get("reasons") or ()),
                notes=tuple(found.get("notes") or ()),
                tried=tuple(_tried(one) for one in found.get("tried") or ()),
                ranges=tuple(_range(one) for one in found.get("ranges") or ()),
                **{k: found[k] for k in ("growth", "model", "batches", "backward", "machine", "made") if k in found},
            )
            parse(str(made.policy))
        except ConfigError:
            raise
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ConfigError(f"{where} is no whole plan: {type(error).__name__}: {error}", "Make it anew: halfstep plan.") from error
        if made.scale is not None and made.policy.scale.kind != "dynamic":
            raise ConfigError(f"{where} has scale={made.scale:.0f}, and {made.precision} has no dynamic loss scale", "Take one of them out.")
        return made


def _held(found: Any) -> tuple[Held, ...]:
    rules = [{k: v for k, v in one.items() if k != "step"} for one in found or ()]
    return tuple(Held(**({"kind": "", "why": ""} | one)) for one in rules)


def _range(found: Mapping[str, Any]) -> Range:
    gradients = found.get("gradients")
    return Range(found["module"], found["kind"], Span(**found["outputs"]), None if gradients is None else Span(**gradients))


def _tried(found: Mapping[str, Any]) -> Tried:
    parts = dict(found) | {"held": _held(found.get("held")), "off": tuple(Off(**one) for one in found.get("off") or ())}
    return Tried(**parts | {key: tuple(found.get(key) or ()) for key in ("unheld", "seconds")})


def _plain(value: Any) -> Any:
    """Tuples as lists, mappings as dicts."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> Any:
    """The same with floats of six digits, for a file that people read; a loss scale keeps all of its one."""
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_short(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) and value != 2.0 ** round(_log2(value)) else value


def _log2(value: float) -> float:
    return math.log2(value) if value > 0 else 0.0
