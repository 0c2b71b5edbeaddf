"""The step engine: measure, decide, unscale, clip, update the optimizer, update the scale, and say what happened.

All three doors use this one. The order of a step:

    scale(loss).backward()     gradients are now multiplied by the loss scale
    unscale(optimizer)         one pass measures them, a verdict is reached, good ones are divided by the scale
    clip(...)                  acts on unscaled gradients
    step(optimizer)            does what is missing of the above, then updates the weights or does not, and tells
    update()                   the scale follows the verdicts
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep import numerics
from halfstep.errors import ConfigError, DivergedError, StepOrderError
from halfstep.step.result import Reason, StepResult
from halfstep.step.scaling import Scaling
from halfstep.step.verdict import Verdict, judge


@dataclass
class _Record:
    """Where one optimizer stands."""

    verdict: Verdict | None = None  # on the gradients at hand; set when they are unscaled
    marks: tuple[tuple[ref[Tensor], int], ...] = ()  # the gradients that were judged, with their versions
    clipped: bool = False
    stepped: bool = False  # with the gradients at hand
    awaits_update: bool = False  # it stepped, and update() has not been called since
    heard: bool = False  # the verdict has moved the scale, or waits in line to
    losses: int = 0  # how many had been scaled when the verdict was reached
    spent: tuple[tuple[ref[Tensor], int], ...] = ()  # gradients a step was taken with that nobody has cleared or added to

    def forget(self) -> None:
        """The gradients at hand are new."""
        self.verdict, self.marks, self.clipped, self.stepped, self.heard = None, (), False, False, False

    def judged(self, gradients: list[Tensor]) -> bool:
        """Whether the verdict is on just these gradients, unchanged since."""
        return _unchanged(self.marks, gradients)


class StepEngine:
    """Carries out optimizer steps under one loss scale and refuses the bad ones.

    patience: after so many bad steps in a row `step` raises DivergedError.
    A bad step changes neither weights nor optimizer states. The verdict is read to the host once per step.
    """

    def __init__(self, scaling: Scaling, patience: int = 50) -> None:
        if patience < 1:
            raise ConfigError(f"a patience of {patience} steps", "Use 1 or more.")
        self.scaling = scaling
        self.patience = patience
        self.bad_steps = 0  # in a row
        self._made_under: float | None = None  # the scale of the gradients at hand; None before the first loss
        self._loss: Tensor | None = None
        self._losses = 0  # scaled so far
        self._loss_spent = False  # the loss belongs to a step that was taken; the next scale() starts a new sum
        self._unheard: list[Verdict] = []  # verdicts that have not moved the scale yet
        self._records: WeakKeyDictionary[Optimizer, _Record] = WeakKeyDictionary()
        self._names: dict[int, str] = {}

    def name_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Names to call parameters by when their gradients are bad, as `module.named_parameters()` gives them."""
        self._names.update({id(p): name for name, p in named})

    def know(self, optimizer: Optimizer) -> None:
        """Make an optimizer known before its first step, so that `clip` can tell whose gradients it is given."""
        self._record(optimizer)

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, in fp32 at least; the same tensor when there is no scaling."""
        if self._made_under is None or (self._made_under != self.scaling.scale and not self._in_flight()):
            self._made_under = self.scaling.scale
        for optimizer, record in self._records.items():
            if record.stepped:
                record.spent = _marks(_gradients(optimizer))
                record.forget()
            elif record.verdict is not None and self._thrown_away(optimizer, record):
                record.forget()
                self._loss_spent = self._loss_spent or not any(g.any() for o in self._records for g in _gradients(o))
        if self._loss_spent:
            self._loss, self._loss_spent = None, False
        if loss.numel() == 1:
            seen = loss.detach().float().reshape(())
            self._loss = seen if self._loss is None else self._loss + seen.to(self._loss.device)
        self._losses += 1
        if not self.scaling.active:
            return loss
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return wide * self._made_under

    def unscale(self, optimizer: Optimizer) -> Verdict | None:
        """Judge the gradients of `optimizer` and, when they are fit, divide them by the loss scale in place.

        Returns None when it has no gradients. Raises StepOrderError when they were unscaled already.
        """
        record = self._record(optimizer)
        if self.scaling.active and record.verdict is not None and not record.stepped:
            raise StepOrderError(
                "unscale_() was already called on this optimizer since its last step, and twice would divide its gradients by the scale twice",
                "Call it once per step, before clipping.",
            )
        return self._unscale(optimizer, record) if _gradients(optimizer) else None

    def clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of `parameters` to `max_norm`, unscaling those of known optimizers that hold them first.

        Returns their norm before clipping, a scalar tensor. When a gradient is bad nothing is changed, and the norm is that of
        the bad ones: inf, NaN, or very large.
        """
        chosen = {id(p): p for p in parameters}
        owners = [o for o in self._records if any(id(p) in chosen for p in _parameters(o))]
        owned = {id(p) for o in owners for p in _parameters(o)}
        grads = [p.grad for p in chosen.values() if p.grad is not None]
        if not max_norm >= 0:
            raise ConfigError(f"max_norm={max_norm} is no norm", "Use a number of 0 or more.")
        if not grads:
            return torch.zeros(())
        if self.scaling.active and any(i not in owned for i, p in chosen.items() if p.grad is not None):
            raise StepOrderError(
                "these gradients are still multiplied by the loss scale, and their optimizer has not been seen yet",
                "Call unscale_(optimizer) before clipping, or watch(optimizer) once after making it.",
            )
        for owner in owners:
            record, held = self._records[owner], _gradients(owner)
            if record.stepped or not held:
                continue
            if record.verdict is None or self._stale(record, held):
                self._unscale(owner, record)
            else:
                self._judged_again(owner, record, record.verdict)
        verdicts = [v for o in owners if (v := self._records[o].verdict)]
        bad = next((v for v in verdicts if not v.fit), None)
        if bad is not None:
            return torch.tensor(bad.norm, device=grads[0].device)
        if norm_type == 2.0:
            fresh = len(owners) == 1 and bool(verdicts) and not self._records[owners[0]].clipped and self._records[owners[0]].judged(grads)
            values = [numerics.stored(g) for g in grads]
            total = torch.tensor(verdicts[0].norm, device=grads[0].device) if fresh else numerics.norm(values, grads[0].device)
            if not math.isfinite(float(total)):  # no gradient is bad: only the squares overflowed
                total = numerics.wide_norm(values, grads[0].device).float()
            factor = numerics.clip_factor(float(total), max_norm)
            numerics.multiply_(grads, factor)
        else:
            total = torch.nn.utils.clip_grad_norm_(list(chosen.values()), max_norm, norm_type)
            factor = numerics.clip_factor(float(total), max_norm)
        for owner in owners:
            record = self._records[owner]
            record.clipped = record.clipped or factor < 1.0
            record.marks = _marks(_gradients(owner))
        return total

    def rescale(self, factor: float) -> None:
        """Multiply the gradients of all known optimizers, and the loss noted for this step, by `factor`."""
        for optimizer in self._records:
            numerics.multiply_(_gradients(optimizer), factor)
        if self._loss is not None and not self._loss_spent:
            self._loss = self._loss * factor

    def step(self, optimizer: Optimizer) -> StepResult:
        """Update the weights if the gradients and the loss are fit, and say what happened.

        Raises StepOrderError when the order of calls makes the gradients wrong, DivergedError after `patience` bad
        steps in a row.
        """
        record = self._record(optimizer)
        if self.scaling.active and record.awaits_update:
            raise StepOrderError(
                "step() was called twice on one optimizer without update() between", "Call update() once per iteration, after step()."
            )
        if self.scaling.active and record.stepped:
            raise StepOrderError("step() was called twice for one backward pass", "Call scale(loss).backward() before each step().")
        if not _gradients(optimizer):
            self._loss_spent = True
            return self._result(record, "no-gradients")
        if self.scaling.active and self._made_under is None:
            raise StepOrderError(
                "no loss was scaled before step(), so its gradients cannot be unscaled", "Call scale(loss).backward() instead of loss.backward()."
            )
        known = None if self._stale(record, _gradients(optimizer)) else record.verdict
        verdict = self._judged_again(optimizer, record, known) if known else self._unscale(optimizer, record)
        if verdict.fit:
            _refuse_settings(optimizer)
            optimizer.step()
        result = self._result(record, "applied" if verdict.fit else "overflow" if verdict.loss_finite else "nonfinite-loss")
        self._loss_spent = True
        if self.scaling.active:
            record.stepped, record.awaits_update = True, True
            if not record.heard:
                record.heard = True
                self._unheard.append(verdict)
        else:
            record.forget()
        self._count(result)
        return result

    def update(self, new_scale: float | None = None) -> None:
        """Let the scale follow the steps since the last update, or set it. Gradients already made keep their own scale.

        Bad gradients that were unscaled and thrown away without a step count too. After a non-finite loss the scale stays:
        a bad forward pass is not the scale's fault.
        """
        for record in self._records.values():
            record.awaits_update = False
            if record.verdict is not None and not record.verdict.fit and not record.heard:
                record.heard = True
                self._unheard.append(record.verdict)
        verdicts, self._unheard = self._unheard, []
        if new_scale is not None:
            self.scaling.scale = new_scale
        elif verdicts and all(v.loss_finite for v in verdicts):
            self.scaling.update(overflow=any(not v.fit for v in verdicts))

    def _record(self, optimizer: Optimizer) -> _Record:
        return self._records.setdefault(optimizer, _Record())

    def _in_flight(self) -> bool:
        """Whether there are gradients that no optimizer has stepped with: they keep their scale. Before any is known, a loss is a sign of them."""
        if not self._records:
            return self._loss is not None and not self._loss_spent
        return any(
            not r.stepped and not _unchanged(r.spent, g) and any(bool(t.any()) for t in g) for o, r in self._records.items() if (g := _gradients(o))
        )

    def _unscale(self, optimizer: Optimizer, record: _Record) -> Verdict:
        """Judge and unscale gradients, of which there is at least one."""
        grads = _gradients(optimizer)
        scale = self._made_under if self.scaling.active and self._made_under is not None else 1.0
        verdict = judge(grads, scale, self._loss, lambda i: self._name(optimizer, i))
        if verdict.fit:
            numerics.multiply_(grads, 1.0 / scale)
        record.verdict, record.marks, record.clipped, record.heard, record.losses = verdict, _marks(grads), False, False, self._losses
        return verdict

    def _thrown_away(self, optimizer: Optimizer, record: _Record) -> bool:
        """Whether gradients that were judged have been cleared since, without a step: what follows is a new backward pass."""
        grads = _gradients(optimizer)
        return not grads or (not record.judged(grads) and not any(bool(g.any()) for g in grads))

    def _stale(self, record: _Record, gradients: list[Tensor]) -> bool:
        """Without scaling nobody need call scale(): other gradients than the bad ones that were judged are a new backward pass."""
        return not self.scaling.active and record.verdict is not None and not record.verdict.fit and not record.judged(gradients)

    def _judged_again(self, optimizer: Optimizer, record: _Record, verdict: Verdict) -> Verdict:
        """The verdict on unscaled gradients, measured once more if somebody (a clip of the user's) changed them since."""
        grads = _gradients(optimizer)
        if not verdict.fit or record.judged(grads):
            return verdict
        if self.scaling.active and record.losses != self._losses:
            raise StepOrderError(
                "gradients were unscaled and changed after another loss was scaled: a backward pass has added scaled gradients to unscaled ones",
                "Call unscale_() or clip after the last backward pass of a step, and edit gradients before the next loss is scaled.",
            )
        now = judge(grads, 1.0, self._loss, lambda i: self._name(optimizer, i))
        record.clipped = record.clipped or now.norm < verdict.norm
        record.verdict = Verdict(now.fit, verdict.norm if now.fit else now.norm, now.loss_finite, now.culprits)
        return record.verdict

    def _result(self, record: _Record, reason: Reason) -> StepResult:
        scale = self._made_under if self.scaling.active and self._made_under is not None else self.scaling.scale
        verdict = record.verdict
        pending = [*self._unheard, *([verdict] if verdict and not record.heard else [])]
        moves = bool(pending) and all(v.loss_finite for v in pending)
        following = self.scaling.after(overflow=any(not v.fit for v in pending)) if moves else self.scaling.scale
        return StepResult(
            applied=reason == "applied",
            reason=reason,
            grad_norm=verdict.norm if verdict else None,
            clipped=record.clipped,
            scale=scale,
            next_scale=following,
            culprits=verdict.culprits if verdict else (),
            loss_tensor=self._loss,
        )

    def _count(self, result: StepResult) -> None:
        if result.applied:
            self.bad_steps = 0
            return
        self.bad_steps += 1
        if self.bad_steps >= self.patience:
            blamed = ", ".join(str(c) for c in result.culprits) or "unknown"
            raise DivergedError(
                f"{self.bad_steps} steps in a row could not be applied ({result.reason}, loss scale {result.scale:g}); not finite: {blamed}. "
                "None of them changed the weights",
                "Look at the data of this batch and at the first operation that gives inf or NaN in fp32; then try a "
                f"smaller learning rate, or bf16 if the run was fp16. "
                f"The patience of {self.patience} steps is the argument patience= (max_bad_steps= in TrainingArguments).",
                result,
            )

    def _name(self, optimizer: Optimizer, index: int) -> str:
        places = [(g, i, p) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"]) if p.grad is not None]
        g, i, p = places[index]
        given = optimizer.param_groups[g].get("param_names")
        return self._names.get(id(p)) or (given[i] if given else f"param_groups[{g}]['params'][{i}] of shape {tuple(p.shape)}")


def _refuse_settings(optimizer: Optimizer) -> None:
    """A learning rate or weight decay that is inf or NaN would write that into the weights, whatever the gradients."""
    for i, group in enumerate(optimizer.param_groups):
        for name in ("lr", "weight_decay"):
            value = group.get(name, 0.0)
            if isinstance(value, int | float) and not math.isfinite(value):
                raise ConfigError(f"{name} of parameter group {i} is {value}, and a step would write that into the weights", "Look at the schedule.")


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for p in _parameters(optimizer) if p.grad is not None]


def _marks(gradients: list[Tensor]) -> tuple[tuple[ref[Tensor], int], ...]:
    """What tells these gradients, in this state, from others: weak references and versions."""
    return tuple((ref(g), g._version) for g in gradients)


def _unchanged(marks: tuple[tuple[ref[Tensor], int], ...], gradients: list[Tensor]) -> bool:
    """Whether these are the gradients that were marked, in the same state."""
    return len(marks) == len(gradients) and all(m() is g and version == g._version for (m, version), g in zip(marks, gradients, strict=True))
