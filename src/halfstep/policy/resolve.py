"""Every compatibility rule in one table: a policy, a device and facts about a model give a plan to run, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from halfstep.errors import PolicyError
from halfstep.hardware import Capabilities
from halfstep.policy.parse import check
from halfstep.policy.policy import Policy


@dataclass(frozen=True)
class ModelFacts:
    """What the rules need to know of a model: its trainable parameters as (name, format), formats as fp32, bf16, fp16, other."""

    trainable: tuple[tuple[str, str], ...] = ()

    def of(self, *formats: str) -> tuple[str, ...]:
        """Names of the trainable parameters in one of `formats`."""
        return tuple(name for name, form in self.trainable if form in formats)


@dataclass(frozen=True)
class Situation:
    """What is decided about: a policy on a device for a model."""

    policy: Policy
    device: Capabilities
    model: ModelFacts


@dataclass(frozen=True)
class Rule:
    """One row: when `applies`, the policy is refused with `cause` and `remedy`, or noted when there is nothing to mend."""

    name: str
    applies: Callable[[Situation], bool]
    cause: Callable[[Situation], str]
    remedy: Callable[[Situation], str]
    refuse: bool = True


@dataclass(frozen=True)
class Resolution:
    """A policy known to run on a device, and what the user should know about it."""

    policy: Policy
    device: Capabilities
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        p = self.policy
        parts = [f"precision {p} on {self.device.device}"]
        if p.is_mixed:
            parts.append(f"{p.autocast} products ({'native' if self.device.is_native(p.autocast) else 'emulated'})")
        parts += ["fp32 weights", f"loss scale {p.scale}"]
        return ", ".join(parts) + "".join(f"\n  note: {note}" for note in self.notes)


def _listed(names: tuple[str, ...]) -> str:
    return f"{len(names)} (the first is {names[0]!r})"


RULES = (
    Rule(
        "tf32-device",
        lambda s: s.policy.tf32 and not s.device.is_native("tf32"),
        lambda s: f"tf32 was asked for, and {s.device.device} ({s.device.name}) has no tf32",
        lambda s: "It needs an NVIDIA GPU of the Ampere generation or newer; leave tf32 out to train in fp32.",
    ),
    Rule(
        "weights-16-bit",
        lambda s: bool(s.model.of("bf16", "fp16")),
        lambda s: (
            f"{_listed(s.model.of('bf16', 'fp16'))} of the {len(s.model.trainable)} trainable parameters are 16-bit, so there is no fp32 master "
            f"weight and small updates would round away under {s.policy.preset}"
        ),
        lambda s: "Load the model with dtype=torch.float32, or call model.float() before training.",
    ),
    Rule(
        "weights-other",
        lambda s: bool(s.model.of("other")),
        lambda s: (
            f"{_listed(s.model.of('other'))} of the {len(s.model.trainable)} trainable parameters are neither fp32 nor 16-bit; autocast skips them"
        ),
        lambda s: "Call model.float() before training.",
    ),
    Rule(
        "emulated-gpu",
        lambda s: s.policy.is_mixed and s.device.kind == "cuda" and not s.device.is_native(s.policy.autocast),
        lambda s: f"{s.device.name} (compute capability {s.device.level}) has no {s.policy.autocast} instructions and imitates them slowly",
        lambda s: f"{'fp16-mixed' if s.device.is_native('fp16') else 'fp32'} is faster here.",
        refuse=False,
    ),
    Rule(
        "emulated-cpu",
        lambda s: s.policy.is_mixed and s.device.kind == "cpu" and not s.device.is_native(s.policy.autocast),
        lambda s: f"this CPU has no {s.policy.autocast} instructions: operands are rounded to it, multiplied in fp32 and the result rounded",
        lambda s: "The numbers are those of 16-bit products with fp32 accumulation; it is not faster than fp32.",
        refuse=False,
    ),
)


def resolve(policy: Policy, device: Capabilities, model: ModelFacts | None = None, rules: Iterable[Rule] = RULES) -> Resolution:
    """Check `policy` against a device and a model. Raises PolicyError with cause and remedy when a rule forbids it."""
    check(policy)
    situation = Situation(policy, device, model or ModelFacts())
    notes = []
    for rule in rules:
        if not rule.applies(situation):
            continue
        if rule.refuse:
            raise PolicyError(rule.cause(situation), rule.remedy(situation))
        notes.append(f"{rule.cause(situation)}. {rule.remedy(situation)}")
    return Resolution(policy, device, tuple(notes))
