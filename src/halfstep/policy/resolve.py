"""Every compatibility rule in one table: a policy, a device and facts about a model give a plan to run, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from halfstep.errors import PolicyError
from halfstep.hardware import FAMILIES, Capabilities
from halfstep.policy.parse import check
from halfstep.policy.policy import Policy, Weights
from halfstep.policy.products import families_of, products_text


@dataclass(frozen=True)
class ModelFacts:
    """What the rules need to know of a model: its trainable parameters as (name, format), formats as fp32, bf16, fp16, other."""

    trainable: tuple[tuple[str, str], ...] = ()

    def of(self, *formats: str) -> tuple[str, ...]:
        """Names of the trainable parameters in one of `formats`."""
        return tuple(name for name, form in self.trainable if form in formats)


@dataclass(frozen=True)
class Situation:
    """What is decided about: a policy on a device for a model. emulated: the families of products that a CPU emulates under it."""

    policy: Policy
    device: Capabilities
    model: ModelFacts
    emulated: tuple[str, ...] = ()


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
    """A policy known to run on a device, and what the user should know about it.

    weights: how the weights that live in 16 bits are stored: the policy's `weights`, or "split" under `*-mixed` for a model loaded in 16 bits.
    emulated: the families of products that run emulated.
    """

    policy: Policy
    device: Capabilities
    notes: tuple[str, ...] = ()
    weights: Weights = "fp32"
    emulated: tuple[str, ...] = ()

    def __str__(self) -> str:
        p = self.policy
        parts = [f"precision {p} on {self.device.device}"]
        if p.autocast != "fp32":
            parts.append(f"{p.autocast} products ({self._how})")
        if self.weights == "plain":
            parts.append(f"{p.autocast} weights{'' if p.whole else ' as loaded'} (nothing beside them)")
        else:
            narrow = f"{'' if p.whole else 'castable '}{p.autocast} weights ({self.weights})"
            parts.append("fp32 weights" if self.weights == "fp32" else narrow)
        if p.states != "fp32":
            parts.append(f"{p.states} optimizer states")
        if p.activations != "full":
            parts.append(f"{p.activations} activations for the backward pass")
        parts.append(f"loss scale {p.scale}")
        return ", ".join(parts) + "".join(f"\n  note: {note}" for note in self.notes)

    @property
    def _how(self) -> str:
        """How products run: on a CPU by the families that are emulated, elsewhere by the device's instructions."""
        if self.device.kind == "cpu":
            return products_text(self.emulated)
        return "native" if self.device.is_native(self.policy.autocast) else "emulated"


def _formats(s: Situation) -> tuple[str, ...]:
    """The 16-bit formats of a model's trainable parameters, the commonest first."""
    return tuple(sorted((f for f in ("bf16", "fp16") if s.model.of(f)), key=lambda f: -len(s.model.of(f))))


def _other(s: Situation) -> str:
    """The 16-bit format that is not the policy's."""
    return "fp16" if s.policy.autocast == "bf16" else "bf16"


def _foreign(s: Situation) -> tuple[str, ...]:
    return s.model.of(_other(s))


def _stored(s: Situation) -> Weights:
    """How the weights that live in 16 bits are stored: a model loaded in the format of its products keeps it, with masters."""
    loaded = s.policy.is_mixed and bool(s.model.of(s.policy.autocast))
    return "split" if s.policy.weights == "fp32" and loaded else s.policy.weights


def _named(families: Sequence[str]) -> str:
    """Families of products in words."""
    return "products" if len(families) == len(FAMILIES) else f"products of {' and '.join(families)}"


def _emulated(policy: Policy, device: Capabilities, measured: Sequence[str] | None) -> tuple[str, ...]:
    """The families of products that a CPU emulates: as the policy says, else as measured, else all where it has no instructions."""
    if device.kind != "cpu" or policy.autocast == "fp32":
        return ()
    asked = families_of(policy.products)
    if asked is None and measured is None:
        return () if device.is_native(policy.autocast) else FAMILIES
    return asked if asked is not None else tuple(measured or ())


def _native(s: Situation) -> str:
    return _named([family for family in FAMILIES if family not in s.emulated])


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
        "products-device",
        lambda s: s.policy.products != "auto" and s.device.kind != "cpu",
        lambda s: f"products={s.policy.products} has no effect on {s.device.device} ({s.device.name}), whose own kernels run",
        lambda s: "Leave it out; it is for CPUs.",
    ),
    Rule(
        "weights-16-bit",
        lambda s: s.policy.autocast == "fp32" and bool(s.model.of("bf16", "fp16")),
        lambda s: (
            f"{_listed(s.model.of('bf16', 'fp16'))} of the {len(s.model.trainable)} trainable parameters are 16-bit, so there is no fp32 master "
            f"weight and small updates would round away under {s.policy.preset}"
        ),
        lambda s: (
            "Load the model with dtype=torch.float32, or call model.float() before training; to train it as it is loaded use "
            f"{_formats(s)[0]}-mixed, which gives it masters, or {_formats(s)[0]}-lean."
        ),
    ),
    Rule(
        "plain-other-format",
        lambda s: s.policy.is_mixed and s.policy.weights == "plain" and bool(_foreign(s)),
        lambda s: (
            f"{_listed(_foreign(s))} of the {len(s.model.trainable)} trainable parameters were loaded in {_other(s)}, and weights=plain under "
            f"{s.policy.preset} trains weights in {s.policy.autocast} as they are"
        ),
        lambda s: f"Use {_other(s)}-mixed,weights=plain, or load the model in {s.policy.autocast}.",
    ),
    Rule(
        "plain-without-16-bit",
        lambda s: s.policy.is_mixed and s.policy.weights == "plain" and bool(s.model.trainable) and not _formats(s),
        lambda s: f"weights=plain has no effect under {s.policy.preset} with this model: none of its {len(s.model.trainable)} parameters is 16-bit",
        lambda s: f"Leave it out, load the model in {s.policy.autocast}, or use {s.policy.autocast}-true,weights=plain, which casts it.",
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
        lambda s: s.policy.autocast != "fp32" and s.device.kind == "cuda" and not s.device.is_native(s.policy.autocast),
        lambda s: f"{s.device.name} (compute capability {s.device.level}) has no {s.policy.autocast} instructions and imitates them slowly",
        lambda s: f"{'fp16-' + s.policy.preset.partition('-')[2] if s.device.is_native('fp16') else 'fp32'} is faster here.",
        refuse=False,
    ),
    Rule(
        "emulated-cpu",
        lambda s: bool(s.emulated),
        lambda s: f"on this CPU {s.policy.autocast} {_named(s.emulated)} run emulated: operands rounded, multiplied in fp32 and the result rounded",
        lambda s: "The numbers are those of 16-bit products with fp32 accumulation; it is not faster than fp32.",
        refuse=False,
    ),
    Rule(
        "emulated-cpu-whole",
        lambda s: (
            s.policy.whole
            and s.device.kind == "cpu"
            and s.policy.products != "auto"
            and len(s.emulated) < len(FAMILIES)
            and not s.device.is_native(s.policy.autocast)
        ),
        lambda s: f"this CPU has no {s.policy.autocast} instructions, so torch's own kernels, as {_native(s)} run, convert in every op",
        lambda s: (
            f"That may be many times slower than fp32 (halfstep doctor: the rate of native {s.policy.autocast}); without products= the faster way is "
            "taken."
        ),
        refuse=False,
    ),
    Rule(
        "loaded-16-bit",
        lambda s: s.policy.is_mixed and s.policy.weights != "plain" and bool(s.model.of(s.policy.autocast)),
        lambda s: (
            f"{len(s.model.of(s.policy.autocast))} of the {len(s.model.trainable)} trainable parameters were loaded in {s.policy.autocast}: "
            f"castable ones keep it, stored as {_stored(s)}, and the others go up to fp32"
        ),
        lambda s: "The forward pass is that of a model loaded in fp32; weights=plain trains them with nothing beside them.",
        refuse=False,
    ),
    Rule(
        "loaded-other-16-bit",
        lambda s: s.policy.is_mixed and s.policy.weights != "plain" and bool(_foreign(s)),
        lambda s: (
            f"{len(_foreign(s))} of the {len(s.model.trainable)} trainable parameters were loaded in {_other(s)}, and products run in "
            f"{s.policy.autocast}: they go up to fp32" + (f", and castable ones from there to {s.policy.autocast}" if s.policy.is_lean else "")
        ),
        lambda s: f"The forward pass is that of a model loaded in fp32; {_other(s)}-mixed would keep castable weights in {_other(s)}.",
        refuse=False,
    ),
    Rule(
        "plain",
        lambda s: s.policy.weights == "plain",
        lambda s: f"weights=plain: there is nothing beside {s.policy.autocast} weights, so an update of less than half of their last bit is lost",
        lambda s: "weights=split keeps every update for 2 bytes per weight.",
        refuse=False,
    ),
)


def resolve(
    policy: Policy,
    device: Capabilities,
    model: ModelFacts | None = None,
    rules: Iterable[Rule] = RULES,
    emulated: Sequence[str] | None = None,
) -> Resolution:
    """Check `policy` against a device and a model. Raises PolicyError with cause and remedy when a rule forbids it.

    emulated: the families of products that were measured to be faster so on this CPU; without it all count where it has no instructions.
    """
    if policy.is_auto:
        return Resolution(policy, device, ("it is chosen when the model is prepared",))
    check(policy)
    situation = Situation(policy, device, model or ModelFacts(), _emulated(policy, device, emulated))
    notes = []
    for rule in rules:
        if not rule.applies(situation):
            continue
        if rule.refuse:
            raise PolicyError(rule.cause(situation), rule.remedy(situation))
        notes.append(f"{rule.cause(situation)}. {rule.remedy(situation)}")
    return Resolution(policy, device, tuple(notes), _stored(situation), situation.emulated)
