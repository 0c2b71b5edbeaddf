"""`memory`: what a training step will take, by kind and at its peak, before anything is allocated; and `measure`, what one took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp import bound_policy
from halfstep.amp.rehearsal import random_states
from halfstep.diagnostics.blocks import TEMPORARY
from halfstep.diagnostics.memory_plan import KINDS, LARGEST, MemoryPlan, Phase, Saving
from halfstep.diagnostics.twin import model_of
from halfstep.diagnostics.walking import Step, Walked, walk_through
from halfstep.errors import ConfigError, HalfstepError
from halfstep.hardware import default_device, probe
from halfstep.policy import Policy, from_flags, resolve


def memory(
    model: Any,
    batch: Any,
    *,
    precision: str | Policy | None = None,
    optimizer: Any = "AdamW",
    loss: Callable[..., Tensor] | None = None,
    accumulate: int = 1,
    released: bool = False,
    measured: bool = False,
    savings: bool = True,
) -> MemoryPlan:
    """Tell what a training step takes, in bytes: `print(halfstep.memory(model, batch, precision="bf16-mixed"))`. Nothing is allocated for it.

    The step is walked through on shapes: its forward pass, backward pass and optimizer step with the decisions that a run would take (which weights
    go to 16 bits, which products are rounded and run in fp32, what is kept for the backward pass), and every block of memory is counted.

    model: an nn.Module, also on the meta device or prepared already; a function of no arguments that makes one; or a configuration of transformers.
    batch: as the model takes it: a mapping goes to model(**batch), a tuple or list to model(*batch), anything else to model(batch). It may be on the
        meta device; the numbers of whole numbers and truths (tokens, masks) are looked at where they are there.
    precision: text or Policy; default: that which the model is bound to, else fp32. optimizer: a name, a class, a function of parameters, or the
        optimizer itself. loss: f(outputs) or f(outputs, batch); default: the outputs if they are one number, or their `loss`.
    accumulate: micro-batches of a step, each as `batch`. released: gradients are released inside the backward pass.
    measured: run one real step (of a copy of the model) instead and count what it allocates: for models that decide by numbers what to do.
    savings: also tell what the peak would be with 16-bit weights, gradient checkpointing and 8-bit activations; three more walks.

    Activation checkpointing, `chunk_loss` and pins that are set on the model are followed; a model in evaluation mode is looked at in training
    mode. Time: some 0.1 ms an op. The model is left as it was.
    Raises ConfigError for a model that decides by numbers what to do, with the remedy, and for arguments that cannot be; PolicyError for a precision
    that cannot work.
    """
    if measured:
        return measure(model, batch, precision=precision, optimizer=optimizer, loss=loss, accumulate=accumulate, released=released)
    made = model_of(model)
    _check(made, accumulate)
    device = _device(made)
    step = Step(made, batch, _policy(made, precision, device), device, loss, optimizer, accumulate, released)
    plan = _planned(step)
    return replace(plan, savings=_savings(step, plan)) if savings else plan


def measure(
    model: Any,
    batch: Any,
    *,
    precision: str | Policy | None = None,
    optimizer: Any = "AdamW",
    loss: Callable[..., Tensor] | None = None,
    accumulate: int = 1,
    released: bool = False,
) -> MemoryPlan:
    """Run real training steps of a copy of the model and count what the last allocates, by kind: what `memory` predicts. Arguments as there.

    On a CPU every allocation of torch's is seen (by its profiler), on a GPU the allocator's own counts are read. Memory: that of the step, and the
    model once more. Weights, random states and everything else of the model are afterwards what they were.
    """
    from halfstep.diagnostics.measuring import run

    put_back = random_states()
    try:
        made = model_of(model, filled=True)
        _check(made, accumulate)
        device = _device(made)
        return run(Step(made, batch, _policy(made, precision, device), device, loss, optimizer, accumulate, released))
    finally:
        put_back()


def _check(model: nn.Module, accumulate: Any) -> None:
    if type(accumulate) is not int or accumulate < 1:
        raise ConfigError(f"accumulate={accumulate!r} micro-batches make no step", "Use a whole number of 1 or more.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has no parameter that is trained", "Set requires_grad=True on those to train.")


def _device(model: nn.Module) -> torch.device:
    """Where the model stands, and for one on the meta device where it would be trained."""
    found = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return default_device() if found.type == "meta" else found


def _policy(model: nn.Module, precision: str | Policy | None, device: torch.device) -> Policy:
    already = bound_policy(model)
    if precision is None:
        return already if already is not None else Policy()
    policy = resolve(from_flags(precision=precision), probe(device)).policy
    if policy.is_auto:
        raise ConfigError("precision='auto' is chosen when a model is prepared", "Name one: halfstep doctor says which suits this device.")
    if already is not None and already != policy:
        raise ConfigError(f"the model is bound to {already}, and precision={str(policy)!r} was asked for", "Leave precision= out.")
    return policy


def _planned(step: Step) -> MemoryPlan:
    walked = walk_through(step)
    return plan_of(walked, about(step, walked, "predicted for the"))


def about(step: Step, walked: Walked, how: str) -> str:
    """What was looked at, and how, as one line for people."""
    line = f"{type(step.model).__name__} under {step.policy} with {walked.optimizer}, batch {shapes(step.batch)}"
    line += f", {step.accumulate} micro-batches" if step.accumulate > 1 else ""
    return f"{line}{', gradients released' if step.released else ''}; {how} {step.device.type.upper()}"


def plan_of(walked: Walked, said: str, measured: bool = False, notes: tuple[str, ...] = ()) -> MemoryPlan:
    """The plan that a timeline gives."""
    line, kept_at = walked.timeline, walked.forward[-1][1]
    peak = line.peak(walked.begin, walked.end)
    forward = any(begin <= peak.at <= end for begin, end in walked.forward)
    phase: Phase = "forward pass" if forward else "backward pass" if peak.at <= walked.backward else "optimizer's step"
    phase = phase if walked.phased else ""
    ticks = {"gradients": walked.backward, "casts": kept_at, "activations": kept_at}
    found = {kind: line.of_kind(kind, ticks.get(kind, walked.begin)) for kind in KINDS if kind != TEMPORARY}
    modules = tuple(list(line.by_module("activations", kept_at).items())[:LARGEST])
    return MemoryPlan(
        **found,  # type: ignore[arg-type]
        temporary=peak.kinds.get(TEMPORARY, 0),
        peak=peak.bytes,
        at_peak={kind: peak.kinds[kind] for kind in KINDS if kind in peak.kinds},
        phase=phase,
        modules=modules if any(name for name, _ in modules) else (),
        measured=measured,
        about=said,
        notes=notes,
    )


def _savings(step: Step, plan: MemoryPlan) -> tuple[Saving, ...]:
    """The peak under other settings, each by itself; those that the model cannot have are left out."""
    policy, found = step.policy, []
    others: list[tuple[str, Step]] = []
    if policy.weights == "fp32" and bound_policy(step.model) is None:
        form = policy.autocast if policy.autocast != "fp32" else "bf16"
        lean = resolve(from_flags(precision=f"{form}-lean"), probe(step.device)).policy
        others.append((f"precision={form}-lean", replace(step, policy=lean)))
    if not step.recompute:
        others.append(("gradient_checkpointing=True", replace(step, recompute=True)))
    if policy.activations == "full" and bound_policy(step.model) is None:
        others.append(("activations=int8 in the precision", replace(step, policy=replace(policy, activations="int8"))))
    if not step.released and step.accumulate == 1:
        others.append(("gradient_release", replace(step, released=True)))
    for setting, other in others:
        try:
            peak = _planned(other).peak
        except HalfstepError:
            continue
        if peak < plan.peak:
            found.append(Saving(setting, peak))
    return tuple(sorted(found, key=lambda s: s.peak))


def shapes(batch: Any) -> str:
    """A batch as people write it: `input_ids [8, 512]`."""
    if isinstance(batch, Tensor):
        return str(list(batch.shape))
    if isinstance(batch, Mapping):
        return ", ".join(f"{k} {shapes(v)}" for k, v in batch.items() if isinstance(v, Tensor | Mapping | tuple | list))
    if isinstance(batch, tuple | list):
        return ", ".join(shapes(v) for v in batch if isinstance(v, Tensor | Mapping | tuple | list))
    return type(batch).__name__
