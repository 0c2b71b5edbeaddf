"""Clipping that acts on unscaled gradients, whoever calls it and whenever."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep import numerics
from halfstep.errors import ConfigError
from halfstep.step.judging import make_unscaled
from halfstep.step.marks import gradients, marks, parameters
from halfstep.step.state import Loose, StepState


def clip(state: StepState, chosen: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clip the gradients of `chosen` parameters to `max_norm`, unscaling first what is still scaled. Returns the norm before clipping.

    When a gradient is bad nothing is changed, and the norm is that of the bad ones: inf, NaN, or very large.
    """
    if not max_norm >= 0:
        raise ConfigError(f"max_norm={max_norm} is no norm", "Use a number of 0 or more.")
    known = {id(p): p for p in chosen}
    grads = [p.grad for p in known.values() if p.grad is not None]
    if not grads:
        return torch.zeros(())
    owners = state.owners(known)
    owned = {id(p) for owner in owners for p in parameters(owner)}
    strangers = [p for i, p in known.items() if i not in owned and p.grad is not None]
    if strangers:
        state.loose.append(Loose(strangers))
        owners.append(state.loose[-1])
    for owner in owners:
        make_unscaled(state, owner)
    records = [state.record(owner) for owner in owners]
    grads = [p.grad for p in known.values() if p.grad is not None]  # a replay has made new ones
    pairs = zip(owners, records, strict=True)
    spoilt = [(o, r.verdict) for o, r in pairs if r.verdict and not r.verdict.fit and (state.waits(o) or r.judged(gradients(o)))]
    if spoilt:  # their steps will be refused; what another optimizer will use is clipped among itself
        refused = {id(p) for o, _ in spoilt for p in parameters(o)}
        clip(state, [p for i, p in known.items() if i not in refused], max_norm, norm_type)
        sizes = [v.norm for _, v in spoilt]
        return torch.tensor(next((n for n in sizes if math.isnan(n)), max(sizes)), device=grads[0].device)
    later = any(r.evidence for r in records)
    if later and norm_type == 2.0:
        total, sign = _clip_on_device(grads, max_norm)
        clipped = False  # known when the verdict is read
        for record in records:
            record.signs.append(sign)
    elif norm_type == 2.0:
        fresh = len(records) == 1 and records[0].verdict is not None and not records[0].clipped and records[0].judged(grads)
        total = _clip_by_norm(grads, max_norm, records[0].verdict.norm if fresh and records[0].verdict else None)
        clipped = numerics.clip_factor(float(total), max_norm) < 1.0
    else:
        total = torch.nn.utils.clip_grad_norm_(list(known.values()), max_norm, norm_type)
        clipped = not later and numerics.clip_factor(float(total), max_norm) < 1.0
    for owner, record in zip(owners, records, strict=True):
        record.clipped = record.clipped or clipped
        record.marks = marks(gradients(owner))
        state.ledger.use(parameters(owner))
    return total


def _clip_by_norm(grads: list[Tensor], max_norm: float, measured: float | None) -> Tensor:
    values = [numerics.stored(g) for g in grads]
    total = torch.tensor(measured, device=grads[0].device) if measured is not None else numerics.norm(values, grads[0].device)
    if not math.isfinite(float(total)):  # no gradient is bad: only the squares overflowed
        total = numerics.wide_norm(values, grads[0].device).float()
    numerics.multiply_(grads, numerics.clip_factor(float(total), max_norm))
    return total


def _clip_on_device(grads: list[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
    """The same arithmetic without reading the norm, and whether it clipped; a norm that is not finite clips nothing, the step will be refused."""
    total = numerics.norm([numerics.stored(g) for g in grads], grads[0].device)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    numerics.multiply_(grads, torch.where(torch.isfinite(total), factor, 1.0))
    return total, torch.isfinite(total) & (factor < 1.0)
