"""Clipping that acts on unscaled gradients, whoever calls it and whenever."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep import numerics
from halfstep.errors import ConfigError
from halfstep.step.judging import make_unscaled
from halfstep.step.marks import gradients, marks, parameters, unchanged
from halfstep.step.record import Record
from halfstep.step.state import Loose, StepState
from halfstep.step.verdict import Verdict


def clip(state: StepState, chosen: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clip the gradients of `chosen` parameters to `max_norm`, unscaling first what is still scaled. Returns the norm before clipping.

    Bad gradients, and what else only a step will use that is refused for them, are left as they are: the norm is then that of the
    bad ones (inf, NaN, or very large), and what other optimizers will use is clipped among itself.
    """
    refuse_norm(max_norm)
    known = {id(p): p for p in chosen}
    if state.releases:
        state.release.refuse_edits(state, known, "clipping")
    state.join_ranks(known.values)
    if all(p.grad is None for p in known.values()):
        return torch.zeros((), dtype=torch.float32)
    owners, records, unfit, refused = _judged(state, known)
    used = [p for i, p in known.items() if i not in refused and p.grad is not None]
    total = _clip_fit(state, owners, records, used, max_norm, norm_type) if used else torch.zeros((), dtype=torch.float32)
    for owner, _ in unfit:
        if isinstance(owner, Loose):
            owner.clip = (max_norm, norm_type)
    spoilt = [p.grad for i, p in known.items() if i in refused and p.grad is not None]
    if not any(bool(numerics.stored(g).any()) for g in spoilt):  # cleared since
        return total
    sizes = [verdict.norm for _, verdict in unfit]
    return torch.tensor(next((n for n in sizes if math.isnan(n)), max(sizes)), device=spoilt[0].device, dtype=torch.float32)


def clip_value(state: StepState, chosen: Iterable[Tensor], value: float) -> None:
    """Clamp the elements of the gradients of `chosen` parameters to [-value, value], unscaling first what is still scaled.

    Bad gradients, and what else only a step will use that is refused for them, are left as they are: a clamped inf would look like a good number.
    """
    if not value >= 0:
        raise ConfigError(f"clip_value={value}", "Use a number of 0 or more.")
    known = {id(p): p for p in chosen}
    if state.releases:
        state.release.refuse_edits(state, known, "clipping")
    if all(p.grad is None for p in known.values()):
        return
    owners, records, _, refused = _judged(state, known)
    grads = [p.grad for i, p in known.items() if i not in refused and p.grad is not None]
    if any(g.is_sparse for g in grads):
        raise ConfigError("clip_grad_value_ was given a sparse gradient", "Use clip_grad_norm_.")
    values = [v for g in grads if (v := numerics.stored(g)).numel()]
    if not values:
        return
    device = values[0].device
    over = torch.stack([n.to(device, torch.float32) for n in torch._foreach_norm(values, float("inf"))]).amax() > value
    clipped = False
    if any(r.evidence for r in records):  # known when the verdict is read
        for record in records:
            record.signs.append(over)
    else:
        clipped = bool(over)
    torch._foreach_clamp_min_(values, -value)
    torch._foreach_clamp_max_(values, value)
    _note(state, owners, records, clipped)


def clip_to(norm: float, max_norm: float) -> float:
    """What gradients of this norm are to be multiplied by. Raises ConfigError when `max_norm` is none."""
    refuse_norm(max_norm)
    return numerics.clip_factor(norm, max_norm)


def refuse_norm(max_norm: float) -> None:
    """Raise ConfigError when `max_norm` is no norm."""
    if not max_norm >= 0:
        raise ConfigError(f"max_norm={max_norm} is no norm", "Use a number of 0 or more.")


def _judged(state: StepState, known: dict[int, Tensor]) -> tuple[list[Any], list[Record], list[tuple[Any, Verdict]], set[int]]:
    """The optimizers that hold these parameters, unscaled: with where they stand, those that will be refused, and the parameters only those hold."""
    owners = _owners(state, known)
    for owner in owners:
        make_unscaled(state, owner)
    records = [state.record(owner) for owner in owners]
    unfit = [(o, r.verdict) for o, r in zip(owners, records, strict=True) if r.verdict is not None and not r.verdict.fit]
    refused = {id(p) for o, _ in unfit for p in parameters(o)} - {id(p) for o in owners if o not in [u for u, _ in unfit] for p in parameters(o)}
    return owners, records, unfit, refused


def _owners(state: StepState, known: dict[int, Tensor]) -> list[Any]:
    """The optimizers that hold these parameters; one that was not seen yet gets a stand-in."""
    for loose in [x for x in state.loose if not state.record(x).unscaled]:
        state.dissolve(loose)
    owners = state.owners(known)
    owned = {id(p) for owner in owners for p in parameters(owner)}
    strangers = [p for i, p in known.items() if i not in owned and p.grad is not None]
    if strangers:
        state.loose.append(Loose(strangers))
        owners.append(state.loose[-1])
    return owners


def adopt(state: StepState, optimizer: Optimizer) -> None:
    """Before the first step of an optimizer: take over what was found out by clips that came before it was seen.

    Where a bad gradient, maybe another optimizer's, has kept such a clip from being done, its own gradients are judged and clipped now.
    """
    if not state.loose:
        return
    record, held = state.record(optimizer), [p for p in parameters(optimizer) if p.grad is not None]
    mine = {id(p) for p in held}
    parts = [(x, state.record(x)) for x in state.loose if mine & {id(p) for p in parameters(x)}]
    if record.unscaled or not parts or not all(r.unscaled for _, r in parts):
        return
    if any(r.verdict is not None and not r.verdict.fit for _, r in parts):
        waiting = next((x.clip for x, _ in parts if x.clip is not None), None)
        if waiting is not None:
            clip(state, held, *waiting)
        return
    norms: dict[int, float] = {}
    for loose, known in parts:
        if known.measured is not None:
            ids = [id(p) for p in parameters(loose) if p.grad is not None]
            norms |= zip(ids, (n / known.measured.scale for n in known.measured.norms.tolist()), strict=False)
    if not mine <= norms.keys():
        return
    alone = parts[0][1].verdict if mine == norms.keys() and len(parts) == 1 else None
    record.verdict = alone if alone is not None else Verdict(True, math.hypot(*(norms[i] for i in mine)))
    record.clipped, record.losses = any(r.clipped for _, r in parts), max(r.losses for _, r in parts)
    record.replays, record.heard = max(r.replays for _, r in parts), any(r.heard for _, r in parts)
    record.marks = marks(gradients(optimizer)) if all(unchanged(r.marks, gradients(x)) for x, r in parts) else ()


def _clip_fit(state: StepState, owners: list[Any], records: list[Record], used: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clip unscaled gradients that are fit to be used, or whose verdict is read later."""
    grads = [p.grad for p in used if p.grad is not None]
    later = any(r.evidence for r in records)
    if later and norm_type == 2.0:
        total, sign = _clip_on_device(grads, max_norm)
        clipped = False  # known when the verdict is read
        for record in records:
            record.signs.append(sign)
    elif norm_type == 2.0:
        fresh = len(records) == 1 and records[0].verdict is not None and not records[0].clipped and records[0].judged(grads)
        total, number = _clip_by_norm(grads, max_norm, records[0].verdict.norm if fresh and records[0].verdict else None)
        clipped = numerics.clip_factor(number, max_norm) < 1.0
    else:
        total = torch.nn.utils.clip_grad_norm_(used, max_norm, norm_type)
        clipped = not later and numerics.clip_factor(float(total), max_norm) < 1.0
    _note(state, owners, records, clipped)
    return total


def _note(state: StepState, owners: list[Any], records: list[Record], clipped: bool) -> None:
    """The gradients of these optimizers were changed by a clip, and are still those that were judged."""
    for owner, record in zip(owners, records, strict=True):
        if record.verdict is None or record.verdict.fit:
            record.clipped = record.clipped or clipped
            record.marks = marks(gradients(owner))
            state.ledger.use(parameters(owner))


def _clip_by_norm(grads: list[Tensor], max_norm: float, measured: float | None) -> tuple[Tensor, float]:
    """The norm, as a tensor and as a number."""
    device, values = grads[0].device, [numerics.stored(g) for g in grads]
    total = torch.full((), measured, device=device, dtype=torch.float32) if measured is not None else numerics.norm(values, device)
    number = measured if measured is not None else float(total)
    if not math.isfinite(number):  # no gradient is bad: only the squares overflowed
        total = numerics.wide_norm(values, device).float()
        number = float(total)
    numerics.multiply_(grads, numerics.clip_factor(number, max_norm))
    return total, number


def _clip_on_device(grads: list[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
    """The same arithmetic without reading the norm, and whether it clipped; a norm that is not finite clips nothing, the step will be refused."""
    total = numerics.norm([numerics.stored(g) for g in grads], grads[0].device)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    numerics.multiply_(grads, torch.where(torch.isfinite(total), factor, 1.0))
    return total, torch.isfinite(total) & (factor < 1.0)
