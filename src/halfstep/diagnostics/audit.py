"""`audit`: which op ran in which format, what that costs, and why 16 bits are not faster here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp import bound_policy, forward_context, pins
from halfstep.diagnostics.audit_prices import Prediction, fastest, predict
from halfstep.diagnostics.audit_reasons import LEAST, Facts, Padded, reasons
from halfstep.diagnostics.audit_record import Audit
from halfstep.diagnostics.audit_steps import Steps, without_policy
from halfstep.diagnostics.audit_times import Turns, cost_of_emulation, cost_of_modes, ratio
from halfstep.diagnostics.audit_translate import families, in_fp32, under_policy
from halfstep.diagnostics.audit_why import explained, rows_of
from halfstep.diagnostics.under import device_of, refuse_fp64, refuse_lazy, under
from halfstep.errors import ConfigError
from halfstep.hardware import emulated_families, measured_rates, probe
from halfstep.policy import PRESETS, Policy, from_flags, parse, resolve, select
from halfstep.tracing.findings import HALF, short
from halfstep.tracing.ledger import Op
from halfstep.tracing.shapes import MULTIPLE

ROUNDS = 7
PADDED = 4  # products with odd sizes that are timed with padded ones


def audit(
    model: nn.Module,
    batch: Any = None,
    *,
    precision: str | Policy | None = None,
    call: Callable[[], Any] | None = None,
    loss: Callable[..., Tensor] | None = None,
    rounds: int = ROUNDS,
) -> Audit:
    """Run a step op by op and by the clock, and say why 16 bits are not faster here: `print(halfstep.audit(model, batch, precision="bf16-mixed"))`.

    A step is one forward and backward pass; the optimizer is left out. Works on any model as it is: bound to a precision (prepared), cast by hand, or
    under your own torch.autocast inside `call`. With `precision` a model that is not bound is looked at under it and held against how it is.
    batch: a mapping goes to model(**batch), a tuple or list to model(*batch), anything else to model(batch).
    loss: f(outputs) or f(outputs, batch) gives the scalar loss. Default: the outputs if they are one number, or their `loss`; without one there is
        no backward pass.
    call: a function of no arguments that runs your own forward pass and returns the loss, in the place of batch and loss; may run the backward pass.
    rounds: of whole steps that are timed, both precisions in turns.

    The predicted ratio comes from the ops of one precision: their largest distinct ones are timed alone in both formats, with their own sizes.
    Where nothing runs in 16 bits, it is about the mixed precision whose products are fastest here. A model that is bound to a mixed precision
    with fp32 weights is held against itself in fp32; one with 16-bit weights, or under your own autocast, only by prediction.
    Weights, gradients, buffers, random states and training modes are afterwards what they were. Time: about 25 steps of each precision and 1 to 5 s.
    torch.compile's code is left aside: ops are those of the eager model.
    Raises ConfigError for arguments that contradict each other and for a model that is bound to another precision.
    """
    _check(model, batch, call, loss, rounds)
    refuse_lazy(model)
    if bound_policy(model) is None:
        model = getattr(model, "_orig_mod", model)
    return _Look(model, batch, call, loss, device_of(model), rounds).at(precision)


def _check(model: Any, batch: Any, call: Any, loss: Any, rounds: int) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"audit was given a {type(model).__name__} in the place of the model", "Pass the nn.Module first, then the batch.")
    if (batch is None) == (call is None):
        raise ConfigError(
            f"audit was given {'both batch and call' if call is not None else 'neither batch nor call'}",
            "Pass a batch, or call=f that runs your own forward pass and returns the loss.",
        )
    for name, given in (("call", call), ("loss", loss)):
        if given is not None and not callable(given):
            raise ConfigError(f"{name}={given!r} is no function", "Pass one that gives the loss.")
    if call is not None and loss is not None:
        raise ConfigError("loss= has no effect beside call=, which returns the loss", "Leave it out.")
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise ConfigError(f"rounds={rounds!r}", "Give a whole number of 1 or more.")


@dataclass(frozen=True)
class _Look:
    """What is looked at."""

    model: nn.Module
    batch: Any
    call: Callable[[], Any] | None
    loss: Callable[..., Tensor] | None
    device: torch.device
    rounds: int

    def at(self, precision: str | Policy | None) -> Audit:
        """The audit under `precision`, or of the model as it is."""
        bound = bound_policy(self.model)
        asked = None if precision is None else resolve(from_flags(precision=precision), probe(self.device)).policy
        if bound is not None and asked is not None and asked != bound:
            raise ConfigError(f"the model is bound to {bound}, and precision={str(asked)!r} was asked for", "Leave precision= out, or pass a copy.")
        policy = bound or asked
        refuse_fp64(self.model, policy if policy is not None else parse("bf16-mixed"))
        ours = self._steps(lambda: under(self.model, precision), policy is not None and (policy.is_lean or policy.whole))
        ops = ours.observed()
        theirs = self._baseline(bound, asked)
        before = theirs.observed() if theirs is not None else ()
        clock, other = self._timed(ours, theirs)
        ops = _lasting(ops, clock)
        return self._told(policy, ours, ops, clock, theirs, _lasting(before, other), other)

    def _steps(self, block: Callable[[], Any], warm: bool = False) -> Steps:
        return Steps(self.model, self.batch, self.call, self.loss, self.device, block, warm)

    def _baseline(self, bound: Policy | None, asked: Policy | None) -> Steps | None:
        """What the model is held against: how it is, or itself without its policy; None where that cannot be run."""
        if bound is None:
            return self._steps(nullcontext) if asked is not None else None
        floats = [t.dtype for t in (*self.model.parameters(), *self.model.buffers()) if t.is_floating_point()]
        if not bound.is_mixed or any(d in HALF for d in floats):
            return None

        @contextmanager
        def bare() -> Iterator[None]:
            with without_policy(self.model, bound):
                yield

        return self._steps(bare)

    def _timed(self, ours: Steps, theirs: Steps | None) -> tuple[Turns, Turns | None]:
        """Seconds of whole steps, in turns, the order flipped every round."""
        a: list[float] = []
        b: list[float] = []
        for round_ in range(self.rounds):
            for steps, into in ((ours, a), (theirs, b))[:: 1 if round_ % 2 else -1]:
                if steps is not None:
                    into.append(steps.timed())
        return Turns(tuple(a)), Turns(tuple(b)) if theirs is not None else None

    def _told(
        self, policy: Policy | None, ours: Steps, ops: tuple[Op, ...], clock: Turns, theirs: Steps | None, before: tuple[Op, ...], other: Turns | None
    ) -> Audit:
        facts = probe(self.device)
        formats = [short(t.dtype) for op in ops if op.cls == "products" for t in op.outputs if t.dtype in HALF]
        any_half = [short(t.dtype) for op in ops for t in op.outputs if t.dtype in HALF]
        compute = policy.autocast if policy is not None else max(set(formats or any_half), key=(formats or any_half).count, default="fp32")
        held = self._held(policy)
        suggested = ""
        prediction: Prediction | None = None
        predicted = gain = 0.0
        if theirs is not None and other is not None and _is_fp32(before) and policy is not None and policy.autocast != "fp32":
            prediction = self._under(policy, before, other.median, held)
            predicted, source = prediction.seconds / other.median, "fp32"
            gain = _gain(prediction, inverse=False)
        elif any_half:
            prediction = predict(ops, in_fp32(ops), clock.median, self.device, -self._modes(policy))
            predicted, source = clock.median / prediction.seconds, "the ops that ran"
            gain = _gain(prediction, inverse=True)
        elif _is_fp32(ops):
            there = parse(f"{self._fastest()}-mixed")
            prediction = self._under(there, ops, clock.median, ())
            predicted, source, suggested = prediction.seconds / clock.median, "fp32", str(there)
        else:
            source = ""
        text = str(policy) if policy is not None else compute if any_half else "fp32"
        name = text if policy is not None or not any_half else f"{compute}, as it is"
        work, outside = _work(ops, clock.median, self.device)
        rows = rows_of(work, explained(ops, policy, held, ours.names), compute)
        known = Facts(
            text,
            "fp32" if not any_half else compute,
            facts.name,
            facts.kind,
            facts.native,
            clock.median,
            outside,
            _tf32(self.device),
            gain,
            self._padded(work, clock.median),
        )
        baseline = "" if theirs is None else "fp32" if _is_fp32(before) else "the model as it is"
        measured = ratio(clock, other) if other is not None else 0.0
        return Audit(
            name,
            baseline,
            type(self.model).__name__,
            f"{facts.device} ({facts.name})",
            clock.median,
            other.median if other is not None else 0.0,
            measured,
            predicted,
            source,
            known.outside,
            rows,
            reasons(rows, known),
            len(ops),
            ours.backward,
            suggested,
            self._notes(prediction),
        )

    def _under(self, policy: Policy, before: Sequence[Op], whole: float, held: tuple[str, ...]) -> Prediction:
        """The step of a run in fp32 as it would be under `policy`."""
        emulated = families(policy, emulated_families) if self.device.type == "cpu" else ()
        mixed = policy if policy.is_mixed else PRESETS[f"{policy.autocast}-mixed"]  # the same emulation, of the fp32 operands that it is timed with
        all_emulated = replace(mixed, products="emulated")
        python = cost_of_emulation(lambda: forward_context(all_emulated, self.device)) if emulated else 0.0
        return predict(before, under_policy(before, policy, held, emulated), whole, self.device, self._modes(policy), python)

    def _modes(self, policy: Policy | None) -> float:
        """Seconds that a policy adds to each function of torch."""
        return cost_of_modes(lambda: forward_context(policy, self.device), self.device) if policy is not None else 0.0

    def _held(self, policy: Policy | None) -> tuple[str, ...]:
        names = [name for name, _ in self.model.named_modules()]
        rules = select(names, policy.fp32) if policy is not None and policy.fp32 else ()
        return (*rules, *(pin.module for pin in pins(self.model)))

    def _fastest(self) -> str:
        """The 16-bit format whose products are fastest here."""
        rates = measured_rates(self.device)
        return max(("bf16", "fp16"), key=lambda form: max((row.gain for row in rates.of(form)), default=0.0))

    def _padded(self, ops: Sequence[Op], step: float) -> tuple[Padded, ...]:
        """The slowest 16-bit products with a size that is no multiple of 8, timed as they are and padded."""
        odd: dict[Any, list[Op]] = {}
        for op in ops:
            if op.base in ("mm", "addmm", "bmm") and any(t.dtype in HALF for t in op.floats) and _is_odd(op):
                odd.setdefault((op.name, op.place.module, tuple(t.shape for t in op.inputs)), []).append(op)
        found = []
        for same in sorted(odd.values(), key=lambda group: -sum(o.seconds for o in group))[:PADDED]:
            share = sum(o.seconds for o in same) / step
            if share < LEAST:
                continue
            a, b = [t.shape for t in same[0].floats][-2:]
            wide = [tuple(-(-n // MULTIPLE) * MULTIPLE for n in shape) for shape in (a, b)]
            both = [_product(shapes, same[0].floats[-1].dtype, self.device) for shapes in ((a, b), wide)]
            seconds, padded = fastest(both, self.device)
            found.append(Padded(same[0].place.module, _text(a, b), _text(*wide), seconds, padded, share))
        return tuple(found)

    def _notes(self, prediction: Prediction | None) -> tuple[str, ...]:
        if prediction is None:
            return ()
        return (
            f"predicted from {len(prediction.prices)} distinct ops that were timed alone in both formats ({prediction.covered:.0%} of the ops' time)",
        )


def _lasting(ops: Sequence[Op], clock: Turns | None) -> tuple[Op, ...]:
    """Ops with shares of a step as ops with seconds."""
    return tuple(replace(op, seconds=op.seconds * clock.median) for op in ops) if clock is not None else tuple(ops)


def _is_odd(op: Op) -> bool:
    return any(n % MULTIPLE and n > 1 for t in op.floats[-2:] for n in t.shape[-2:])


def _text(a: Sequence[int], b: Sequence[int]) -> str:
    return " by ".join("x".join(map(str, s)) for s in (a, b))


def _product(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    a, b = (torch.ones(tuple(s), dtype=dtype, device=device) for s in shapes)
    return lambda: torch.matmul(a, b)


def _is_fp32(ops: Sequence[Op]) -> bool:
    return bool(ops) and not any(t.dtype in HALF for op in ops for t in (*op.inputs, *op.outputs))


def _gain(prediction: Prediction, inverse: bool) -> float:
    """How many times as fast as in fp32 the products of a run are in 16 bits, of those that were timed; 0 for none."""
    timed = [p for p in prediction.prices if p.op.cls == "products" and p.there.way == "as it is"]
    here, there = sum(p.here_seconds * p.calls for p in timed), sum(p.there_seconds * p.calls for p in timed)
    if not here or not there:
        return 0.0
    return there / here if inverse else here / there


def _work(ops: Sequence[Op], step: float, device: torch.device) -> tuple[tuple[Op, ...], float]:
    """Ops with the seconds of their work, and the share of the step outside of it, which together are the step.

    What torch takes to call an op counts as outside, by an op on one number. Ops that are timed one by one may take longer than the step.
    """
    x = torch.ones(1, device=device)
    call = fastest([lambda: torch.add(x, x)], device)[0]
    seconds = [max(0.0, op.seconds - call) for op in ops]
    scale = min(1.0, step / sum(seconds)) if any(seconds) else 1.0
    return tuple(replace(op, seconds=s * scale) for op, s in zip(ops, seconds, strict=True)), max(0.0, 1 - sum(seconds) / step)


def _tf32(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.backends.cuda.matmul.allow_tf32)
