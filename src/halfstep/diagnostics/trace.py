"""`trace`: run a batch once more, op by op, forward and backward, and name the fault."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.amp import backward_context, bound_policy, products_of
from halfstep.amp.as_written import as_written
from halfstep.amp.rehearsal import Rehearsal
from halfstep.diagnostics.ranking import ranked
from halfstep.diagnostics.under import device_of, under
from halfstep.errors import ConfigError
from halfstep.optim import MasteredOptimizer
from halfstep.policy import Policy
from halfstep.step.graph import nodes, walk
from halfstep.tracing import Detector, Finding, Observation, Place, Trace
from halfstep.tracing.births import Births
from halfstep.tracing.constants import Constants
from halfstep.tracing.findings import HALF
from halfstep.tracing.handwritten import Handwritten
from halfstep.tracing.mismatch import Mismatch, of_error
from halfstep.tracing.shapes import Shapes
from halfstep.tracing.tables import Tables
from halfstep.tracing.underflow import Underflow
from halfstep.tracing.weights import Weights

Call = Callable[[], Any]
_NOT_FINITE = re.compile(r"\b(nans?|infs?|infinite|infinity|non-?finite|finite|diverged?)\b", re.IGNORECASE)
FIRST_SCALE, LOWER = 65536.0, 16.0  # where a precision with loss scaling begins, and by what it goes down while only the scaled backward overflows


def trace(
    model: nn.Module,
    batch: Any = None,
    *,
    call: Call | None = None,
    loss: Callable[..., Tensor] | None = None,
    precision: str | Policy | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    scale: float | None = None,
    step: int | None = None,
) -> Trace:
    """Run one batch forward and backward, look at every op, and say what is wrong with it: `print(halfstep.trace(model, batch))`.

    batch: a mapping goes to model(**batch), a tuple or list to model(*batch), anything else to model(batch).
    loss: f(outputs) or f(outputs, batch) gives the scalar loss. Default: the outputs if they are one number, or their `loss`; without one there is
        no backward pass.
    call: a function of no arguments that runs your own forward pass and returns the loss or None, in the place of batch and loss. It may run the
        backward pass too. It may be run several times, and must do the same each time.
    precision: text or Policy that the model is bound to for this call; default: as the model is.
    optimizer: tells whether 16-bit weights have masters.
    scale: loss scale of the backward pass. Default: 1; under a precision with loss scaling the largest of 65536, 4096, 256, 16, 1 that the backward
        pass can stand, so that the scale is not blamed.
    step: the number of the optimizer step, to stand in the findings.

    Weights, gradients, buffers, random states and training modes are afterwards what they were. Time: 0.1 to 0.4 ms an op, and
    each is waited for on a GPU. Errors about dtypes become findings; any other is raised as it is, with a note of the module it came from.
    Raises ConfigError for arguments that contradict each other and for a model that is bound to another precision.
    """
    _check(model, batch, call, loss, scale)
    if bound_policy(model) is None:
        model = getattr(model, "_orig_mod", model)  # of torch.compile, which only adds to the names
    with under(model, precision) as policy:
        scales = policy is not None and policy.scale.kind != "none"
        run = _Run(model, batch, call, loss, policy, optimizer, scaled=scales or (scale is not None and scale != 1))
        at = scale if scale is not None else policy.scale.init if policy is not None and scales else 1.0
        found = run.once(at)
        while scale is None and found.only_backward and at > 1:
            at = max(1.0, at / LOWER)
            found = run.once(at)
    if step is None:
        return found.trace
    return replace(found.trace, findings=tuple(replace(f, step=step) for f in found.trace.findings))


def _check(model: nn.Module, batch: Any, call: Call | None, loss: Any, scale: float | None) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"trace was given a {type(model).__name__} in the place of the model", "Pass the nn.Module first, then the batch.")
    if (batch is None) == (call is None):
        raise ConfigError(
            f"trace was given {'both batch and call' if call is not None else 'neither batch nor call'}",
            "Pass the batch that fails, or call=f that runs your own forward pass and returns the loss.",
        )
    for name, given in (("call", call), ("loss", loss)):
        if given is not None and not callable(given):
            raise ConfigError(f"{name}={given!r} is no function", "Pass one that gives the loss.")
    if call is not None and loss is not None:
        raise ConfigError("loss= has no effect beside call=, which returns the loss", "Leave it out.")
    if scale is not None and not scale > 0:
        raise ConfigError(f"scale={scale!r}", "Use the loss scale that the step ran under, a number above 0.")


@dataclass(frozen=True)
class _Found:
    """One run: what it found, and whether the forward pass was right and only the backward pass gave values that are not finite."""

    trace: Trace
    only_backward: bool


@dataclass
class _Run:
    """A traced run that can be repeated at another scale."""

    model: nn.Module
    batch: Any
    call: Call | None
    loss: Callable[..., Tensor] | None
    policy: Policy | None
    optimizer: Any
    scaled: bool

    def once(self, scale: float) -> _Found:
        """Run and look. Leaves no trace on the model."""
        births, mismatch = Births(), Mismatch()
        detectors: list[Detector] = [births, mismatch, Underflow(self.scaled), *static_detectors(self.policy)]
        births.know(named(self.batch))
        seen = Observation(self.model, detectors)
        error: Exception | None = None
        result: Tensor | None = None
        bad_forward = bad_backward = False
        with undone(self.model, (self.batch, self.call, self.loss)), as_written, torch.inference_mode(False), torch.enable_grad():
            try:
                with seen:
                    outputs, result = answered(self.model, self.batch, self.loss, self.call)
                    ends = [result] if result is not None else [*named(outputs).values()]
                    bad_forward = births.blame(ends)
                    went_back = self.call is not None and any(p.grad is not None for p in self.model.parameters())
                    if result is not None and result.requires_grad and not went_back:
                        bad_backward = births.blame(self._backward(result, scale))
                    if self.call is not None:
                        own = [p.grad for p in self.model.parameters() if p.grad is not None]
                        bad_backward = births.blame(own) or bad_backward
            except Exception as raised:  # noqa: BLE001  of the user's code: named, or raised again below
                error = raised
            value = float(result.detach()) if result is not None else None
        findings = [f for d in detectors if d is not mismatch for f in d.findings()]
        if has_masters(self.optimizer):
            findings = [f for f in findings if f.fault != "masters"]
        if error is not None:
            findings += findings_of_error(error, seen, births, mismatch)
        elif (bad_forward or bad_backward) and not births.findings():
            findings.append(_unknown("the loss" if bad_forward else "a gradient", bad_backward and not bad_forward))
        findings += [f for f in births.products.findings() if not births.findings()]
        told = Trace(ranked(findings, births.findings()), value, births.products.closest, "" if error is None else line_of(error), seen.events)
        late = bad_backward and not bad_forward and all(f.place.direction == "backward" for f in births.findings())
        return _Found(told, late and error is None)

    def _backward(self, result: Tensor, scale: float) -> list[Tensor]:
        """The gradients of the leaves that the loss reaches, made without a trace on them."""
        where: AbstractContextManager[Any] = (
            backward_context(self.policy, device_of(self.model), products_of(self.model)) if self.policy is not None else nullcontext()
        )
        leaves = walk(result).leaves
        wide = result.float() if result.dtype in HALF else result
        start = torch.full_like(wide, scale)
        with where:
            if not any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes(result)):
                gradients = torch.autograd.grad(wide, leaves, start, allow_unused=True) if leaves else ()
                return [g for g in gradients if g is not None]
            others = [(t, t.grad) for t in leaves]  # activation checkpointing of the older kind can only add to .grad
            for t, _ in others:
                t.grad = None
            wide.backward(start)  # type: ignore[no-untyped-call]
            made = [t.grad for t in (*self.model.parameters(), *leaves) if t.grad is not None]
            for t, before in others:
                t.grad = before
            return made


def static_detectors(policy: Policy | None = None) -> list[Detector]:
    """The detectors that look at the model as it stands too, for the format that products run in."""
    compute = policy.dtype if policy is not None and policy.autocast != "fp32" else None
    return [Constants(), Tables(), Handwritten(), Weights(compute), Shapes()]


def has_masters(optimizer: Any) -> bool:
    """Whether optimizers hold masters of 16-bit weights: halfstep's do, and those that are given fp32 copies."""
    every = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    inner = [o if isinstance(o, MasteredOptimizer) else getattr(o, "optimizer", o) for o in every]
    return bool(inner) and all(
        isinstance(o, MasteredOptimizer) or all(p.dtype not in HALF for group in o.param_groups for p in group["params"]) for o in inner
    )


def named(value: Any, name: str = "batch") -> dict[str, Tensor]:
    """The floating tensors in a batch or in outputs, by how they are reached: "batch['x']", "batch[0]"."""
    if isinstance(value, Tensor):
        return {name: value} if value.is_floating_point() else {}
    if isinstance(value, Mapping):
        pairs = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, tuple | list):
        pairs = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    elif is_dataclass(value) and not isinstance(value, type):
        pairs = [(f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value)]
    else:
        return {}
    return {key: t for inner, item in pairs for key, t in named(item, inner).items()}


def loss_in(outputs: Any) -> Tensor | None:
    """The loss in what a model gave: one number, or what stands under `loss`; None for none."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.numel() == 1 else None
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple | list) and outputs and isinstance(outputs[0], Tensor) and outputs[0].dim() == 0:
        found = outputs[0]
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def called(model: nn.Module, batch: Any) -> Any:
    """What a model gives for a batch: a mapping goes to model(**batch), a tuple or list to model(*batch), anything else to model(batch).

    Raises ConfigError where its forward does not take that.
    """
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {}) if isinstance(batch, tuple | list) else ((batch,), {})
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        wrong = _misfit(model, args, kwargs)
        if not wrong:
            raise
        raise ConfigError(
            f"the batch, a {type(batch).__name__} of {len(kwargs or args)}, does not fit {type(model).__name__}.forward: {wrong}",
            "Give each batch as the model takes it: (x,), or a mapping by the names of its arguments. Labels that only the loss needs: pass "
            "a module whose forward takes both and gives the loss.",
        ) from error


def _misfit(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why the arguments do not fit a model's forward; "" where they do, or it does not tell what it takes."""
    try:
        inspect.signature(type(model).forward).bind(model, *args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        return ""
    return ""


def answered(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None, call: Call | None = None) -> tuple[Any, Tensor | None]:
    """What a model gives for a batch, or `call` instead, and the loss: that of `loss`, or the one in the outputs; None where there is none."""
    outputs = called(model, batch) if call is None else call()
    return outputs, loss_in(outputs) if loss is None else _given(loss, outputs, batch)


def loss_of(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None) -> Tensor:
    """The loss of a batch, with nothing else of the outputs held. Raises ConfigError where there is none."""
    outputs, found = answered(model, batch, loss)
    if found is None:
        raise ConfigError(f"the model gave a {type(outputs).__name__} with no loss in it", "Pass loss=f with f(outputs, batch) a scalar.")
    return found


def _given(loss: Callable[..., Tensor], outputs: Any, batch: Any) -> Tensor:
    """What a loss function gives."""
    result = loss(outputs, batch) if _takes_two(loss) else loss(outputs)
    if not isinstance(result, Tensor) or result.numel() != 1:
        shape = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise ConfigError(f"loss= gave {shape}, and a backward pass needs one number", "Let it return the mean or the sum.")
    return result


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a loss function wants the batch too."""
    try:
        known = inspect.signature(function).parameters.values()
    except ValueError:  # written in C
        return False
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in known) >= 2


@contextmanager
def undone(model: nn.Module, given: Any, writes: bool = True) -> Iterator[None]:
    """What a run changes is put back: buffers, whatever is written to, attributes, random states, and gradients. writes: see Rehearsal."""
    gradients = [(p, p.grad) for p in model.parameters()]
    for p, _ in gradients:
        p.grad = None
    try:
        with Rehearsal([model], given, writes):
            yield
    finally:
        for p, gradient in gradients:
            takes = p.grad_dtype  # another one when the first call of a bound model has put the weight into 16 bits
            p.grad = gradient if gradient is None or takes in (None, gradient.dtype) else gradient.to(takes)


def findings_of_error(error: Exception, seen: Observation, births: Births, mismatch: Mismatch) -> list[Finding]:
    """The findings for an error of the traced code, which is raised again when there are none."""
    place = seen.error_place(error)
    found = mismatch.finding(error) or of_error(error, place, seen.model)
    if found is not None:
        births.blame([])
        return [found]
    before = births.findings()
    if before and _NOT_FINITE.search(str(error)):
        return []
    error.add_note(f"raised in {place}" + (f"; before that: {str(before[0]).splitlines()[0]}" if before else ""))
    raise error


def _unknown(what: str, backward: bool) -> Finding:
    place = Place(direction="backward" if backward else "forward")
    return Finding(
        "nonfinite", place, f"{what} is not finite, and no op that was seen has made it so", "look for values that leave torch (numpy, C++)"
    )


def line_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
