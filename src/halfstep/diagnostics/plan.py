"""`plan`: before a run, which precision a model can stand on this device, which of its modules have to stay in fp32, and what it costs and gains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, get_args

from torch import Tensor, nn

from halfstep.amp import bound_policy
from halfstep.amp.sizes import families_in, model_facts
from halfstep.diagnostics.plan_advice import LOSS_WITHIN, Advice, Decision, Target, advise, choose, gains
from halfstep.diagnostics.plan_bytes import Counted, counted_for, whole_step
from halfstep.diagnostics.plan_rules import GROWTH, find_held, held_for_error, measure_reach, suspects
from halfstep.diagnostics.plan_runs import Outcome, Task, gradient_errors, passes, running, scale_for, timed
from halfstep.diagnostics.plan_text import share
from halfstep.diagnostics.plan_values import Values
from halfstep.diagnostics.planned import Held, Off, Plan, Tried, policy_of
from halfstep.diagnostics.under import device_of, refuse_lazy
from halfstep.errors import ConfigError, HalfstepError, suggest
from halfstep.hardware import measured_rates, probe
from halfstep.policy import Policy, parse, resolve, select
from halfstep.tracing.reach import Reach

CANDIDATES = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-lean", "fp16-lean")
Precision = str | Policy


def plan(
    model: nn.Module,
    batches: Any,
    *,
    precision: Precision | Sequence[Precision] | None = None,
    optimizer: Any = "AdamW",
    loss: Callable[..., Tensor] | None = None,
    target: Target = "speed",
    count: int = 4,
    rounds: int = 5,
) -> Plan:
    """Which precision to train a model in, which modules must stay in fp32, at which loss scale to begin: `print(halfstep.plan(model, batches))`.

    batches: a DataLoader, a list, any iterable; the first `count` are used. A mapping goes to model(**batch), a tuple or list to model(*batch),
        anything else to model(batch). They must be on the model's device.
    precision: one to plan for, or several to choose from. Default: fp32, and bf16 and fp16 each as `*-mixed` and `*-lean`.
    optimizer: whose states are counted: a name, a class, an instance, or a function of the parameters.
    loss: f(outputs) or f(outputs, batch) gives the scalar loss. Default: the outputs if they are one number, or their `loss`; without one there is no
        backward pass, and loss scale and gradients stay unknown.
    target: "speed", or "memory" for the precision that takes the least.
    rounds: of timing, in turns; 0 for none.

    In fp32 every value of the forward passes is measured; a module is held where a value that the precision would have in 16 bits comes within a
    factor of 4 of the format's limit, where a constant or a table does not fit, and where outputs are off out of proportion. So the modules are known
    before anything has overflowed. All precisions see the same batches and random states, in training mode.

    Weights, gradients, buffers, random states and modes are afterwards what they were. Time: some ten forward and backward passes a precision, a few
    of them watched op by op. Raises ConfigError for wrong arguments, for a model that is bound to a policy, and where no precision can be used.
    """
    wanted = _wanted(precision)
    alone = len(wanted) == 1
    task = Task(_checked(model), _batches(batches, count), loss)
    _check(target, rounds)
    counted = counted_for(optimizer, task.model)
    device = probe(device_of(task.model))
    reach, values, reference = _reference(task)
    tried = [_try(task, p, reach, values, reference, alone, counted) for p in wanted]
    if not any(t.precision == "fp32" for t in tried):  # to compare with, where the model could be trained in it
        fp32 = _try(task, parse("fp32"), reach, values, reference, False, counted)
        tried = [fp32, *tried] if fp32.usable else tried
    tried = _timed(task, tried, rounds)
    advice = advise(device, measured_rates(device.device), families_in(task.model))
    decision = _decide(tried, advice, device.memory_bytes, target, alone)
    chosen = decision.chosen
    return Plan(
        precision=chosen.precision,
        held=chosen.held,
        scale=chosen.scale,
        reasons=decision.reasons,
        notes=tuple(dict.fromkeys((*chosen.unheld, *reference.notes, *_notes(reference, tried)))),
        tried=tuple(tried),
        ranges=values.ranges,
        growth=GROWTH,
        model=type(task.model).__name__,
        batches=len(task.batches),
        backward=reference.backward,
        machine=device.as_dict(),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _wanted(precision: Any) -> list[Policy]:
    """The policies to be tried, each once."""
    several = isinstance(precision, Iterable) and not isinstance(precision, str)
    given = CANDIDATES if precision is None else list(precision) if several else [precision]
    if not given:
        raise ConfigError("precision=[] leaves nothing to plan for", "Name one or more, or leave it out.")
    return list({str(p): p for p in map(parse, given)}.values())


def _checked(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"plan was given a {type(model).__name__} in the place of the model", "Pass the nn.Module first, then the batches.")
    found: nn.Module = getattr(model, "_orig_mod", model)  # of torch.compile
    refuse_lazy(found)
    already = bound_policy(found)
    if already is not None:
        raise ConfigError(
            f"this {type(found).__name__} is prepared under {already}, and a plan looks at it under several",
            "Plan before prepare(), or pass the model that was not prepared.",
        )
    return found


def _batches(batches: Any, count: int) -> list[Any]:
    """The first of the batches. A mapping or a tensor is one batch and not several."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"count={count!r}", "Use 1 or more batches.")
    if isinstance(batches, Mapping | Tensor | str | bytes) or not isinstance(batches, Iterable):
        raise ConfigError(f"batches is a {type(batches).__name__}, and several batches were expected", "Pass a DataLoader or a list: [batch].")
    found = list(islice(batches, count))
    if not found:
        raise ConfigError("batches holds none", "Pass at least one.")
    return found


def _check(target: Any, rounds: Any) -> None:
    if target not in get_args(Target):
        raise ConfigError(f"target={target!r} is not known", suggest(str(target), get_args(Target)))
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 0:
        raise ConfigError(f"rounds={rounds!r}", "Use 0 (no timing) or more.")


def _reference(task: Task) -> tuple[Reach, Values, Outcome]:
    """The runs in fp32: how far values reach, what modules give, loss and gradients."""
    reach, values = measure_reach(task), Values(task.model)
    with running(task, None):
        outcome = passes(task, None, values)
    bad = [name or type(task.model).__name__ for name, seen in values.outputs.items() if seen.span.nonfinite]  # in the order of the run
    if outcome.losses and not all(map(math.isfinite, outcome.losses)):
        where = f"; the first module whose outputs are not finite is {bad[0]}" if bad else ""
        raise ConfigError(f"the loss is not finite in fp32 either{where}", "halfstep.trace(model, batch) names the cause.")
    if not outcome.finite:
        raise ConfigError("gradients are not finite in fp32 either", "halfstep.trace(model, batch) names the cause.")
    if not outcome.losses and "" in values.outputs and values.outputs[""].span.nonfinite:
        outcome.notes.append(f"outputs are not finite in fp32 either, first those of {bad[0]}: such values were not compared")
    return reach, values, outcome


def _try(task: Task, policy: Policy, reach: Reach, values: Values, reference: Outcome, alone: bool, counted: Counted) -> Tried:
    """One precision: the modules that it needs in fp32, then all batches with them held. alone: raise a refusal, with its own remedy."""
    name = str(policy)
    try:
        resolve(policy, probe(device_of(task.model)), model_facts(task.model))
        if policy.autocast == "fp32":
            return _of_fp32(task, policy, reference, counted)
        held, unheld = find_held(task, policy, reach)
        asked = _asked(task.model, policy)
        held, outcome, seen = _run(task, policy, held, values, scale_for(values.largest_gradient, policy.scale))
    except HalfstepError as error:
        if alone:
            raise
        return Tried(name, problem=str(error))
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # of the user's code under this precision
        return Tried(name, problem=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    by_module, total = gradient_errors(outcome.gradients, reference.gradients)
    final = policy_of(policy, held, None)
    found = Tried(
        precision=name,
        held=(*(h for h in asked if h.module not in {o.module for o in held}), *held),
        unheld=(*unheld, *outcome.notes),
        scale=outcome.scale if outcome.backward and policy.scale.kind == "dynamic" else None,
        loss=outcome.loss,
        loss_error=_relative(outcome.loss, reference.loss),
        gradient_error=total,
        off=tuple(Off(module, e.outputs, by_module.get(module)) for module, e in seen.errors.items()),
        predicted=whole_step(task.model, final, counted, task.batches[0], task.loss),
        measured=outcome.bytes,
    )
    return replace(found, problem=_problem(found, outcome))


def _run(task: Task, policy: Policy, held: tuple[Held, ...], values: Values, start: float | None) -> tuple[tuple[Held, ...], Outcome, Values]:
    """All batches with the modules held; those whose error is out of proportion are held too, where that helps."""

    def look(some: Sequence[Held]) -> tuple[Outcome, Values]:
        seen, trial = Values(task.model, values), policy_of(policy, some, None)
        with running(task, trial):
            return passes(task, trial, seen, start), seen

    outcome, seen = look(held)
    strange = suspects(seen.errors, policy, held)
    if not strange:
        return held, outcome, seen
    kinds = [Held(name, type(task.model.get_submodule(name)).__name__, "") for name in strange]
    _, again = look((*held, *kinds))
    helped = {name: again.errors[name] for name, e in strange.items() if name in again.errors and again.errors[name].outputs < e.outputs / 2}
    if not helped:
        return held, outcome, seen
    held = (*held, *(held_for_error(task.model, name, strange[name], after) for name, after in helped.items()))
    return held, *look(held)


def _of_fp32(task: Task, policy: Policy, reference: Outcome, counted: Counted) -> Tried:
    bytes_ = whole_step(task.model, policy, counted, task.batches[0], task.loss)
    return Tried(str(policy), loss=reference.loss, loss_error=0.0, predicted=bytes_, measured=reference.bytes)


def _asked(model: nn.Module, policy: Policy) -> tuple[Held, ...]:
    """The modules that the precision itself names."""
    names = select((name for name, _ in model.named_modules()), policy.fp32) if policy.fp32 else ()
    return tuple(Held(name, type(model.get_submodule(name)).__name__, "the precision that was asked for names it", "asked") for name in names)


def _problem(found: Tried, outcome: Outcome) -> str:
    """Why what was tried cannot be trained in; "" when it can."""
    if found.loss is not None and not math.isfinite(found.loss):
        return "the loss is not finite" + (f"; {found.unheld[0]}" if found.unheld else "")
    if not outcome.finite:
        return "gradients are not finite" + (f"; {found.unheld[0]}" if found.unheld else "")
    if found.loss is None and any(not math.isfinite(o.outputs) for o in found.off if not o.module):
        return "outputs are not finite where fp32's are" + (f"; {found.unheld[0]}" if found.unheld else "")
    if found.loss_error is not None and found.loss_error > LOSS_WITHIN:
        return f"the loss is off by {share(found.loss_error)} of fp32's, more than {share(LOSS_WITHIN)}"
    return ""


def _relative(value: float | None, reference: float | None) -> float | None:
    if value is None or reference is None:
        return None
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference and math.isfinite(value) else math.inf


def _timed(task: Task, tried: list[Tried], rounds: int) -> list[Tried]:
    """With the times of those that can be used, fp32 among them to compare with."""
    chosen = [t for t in tried if t.usable]
    policies = [None if t.precision == "fp32" else t.policy for t in chosen]
    if not rounds or not chosen:
        return tried
    seconds = dict(zip((t.precision for t in chosen), timed(task, policies, [t.scale for t in chosen], rounds), strict=True))
    return [replace(t, seconds=seconds.get(t.precision, ())) for t in tried]


def _decide(tried: Sequence[Tried], advice: Advice, memory: int, target: Target, asked: bool) -> Decision:
    """What is taken; a precision that was asked for alone is not exchanged for fp32, which stands beside it to compare."""
    if not asked:
        return choose(tried, advice, memory, target)
    only = tried[-1]
    if not only.usable:
        name = repr(only.precision)
        raise ConfigError(
            f"{only.precision} cannot be planned for: {only.problem}", f"halfstep.trace(model, batch, precision={name}) names the cause."
        )
    fp32 = next((t for t in tried if t.precision == "fp32"), None)
    return Decision(only, (f"it was asked for; the device's format is {advice}", *gains(only, fp32)))


def _notes(reference: Outcome, tried: Sequence[Tried]) -> list[str]:
    """What could not be looked at."""
    if reference.backward:
        unknown = ", ".join(t.precision for t in tried if t.usable and "peak" not in t.predicted)
        why = "halfstep.memory(model, batch, ...) says why; the memory told is that of weights, gradients and states"
        return [f"what a step takes at its peak could not be predicted for {unknown}: {why}"] if unknown else []
    if reference.losses:
        return ["the loss has no graph (all weights are frozen): gradients, loss scale and backward passes were not looked at"]
    return ["there is no loss (pass loss=): forward passes alone were looked at, and the loss scale is left to the run"]
