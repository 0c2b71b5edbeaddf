"""`scan`: before a run, what in a model will not fit the 16-bit format it is going to be trained in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.amp import layout
from halfstep.amp.as_written import as_written
from halfstep.amp.rehearsal import Rehearsal
from halfstep.diagnostics.ranking import ranked
from halfstep.diagnostics.trace import called, findings_of_error, has_masters, line_of, loss_in, named
from halfstep.diagnostics.under import under
from halfstep.errors import ConfigError
from halfstep.optim import master_of
from halfstep.policy import Policy
from halfstep.tracing import Detector, Finding, Observation, Place, Trace
from halfstep.tracing.births import Births
from halfstep.tracing.constants import Constants, eps_fault
from halfstep.tracing.findings import HALF, short
from halfstep.tracing.handwritten import Handwritten
from halfstep.tracing.mismatch import Mismatch
from halfstep.tracing.shapes import Shapes
from halfstep.tracing.tables import Tables, table_fault
from halfstep.tracing.weights import Weights


def scan(
    model: nn.Module,
    batch: Any = None,
    *,
    precision: str | Policy | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> Trace:
    """Say what in a model does not fit 16 bits, before it is trained: `print(halfstep.scan(model, batch, precision="fp16-mixed"))`.

    Found without a batch: weights that are not finite, near the limit or without masters, tables and kept casts in 16 bits, sizes that miss the fast
    path. With one, in one forward pass: eps, mask and clamp constants that vanish or overflow, positions and ids through 16 bits, softmax and norms
    written by hand, overflows and products near the limit.
    batch: a mapping goes to model(**batch), a tuple or list to model(*batch), anything else to model(batch); a few rows are enough.
    precision: text or Policy that the model is bound to for this call; default: as the model is (bound, cast, or under torch.autocast).
    optimizer: tells whether 16-bit weights have masters, and what its eps is.
    What halfstep takes care of by itself (tables that a precision keeps in fp32) is told last, as fixed.

    No gradients are made; weights, buffers and random states are afterwards what they were. Time: well under 1 ms an op; on a GPU each is waited for.
    Raises ConfigError where nothing would be in 16 bits, and for a model that is bound to another precision. Errors about dtypes become findings; any
    other is raised as it is.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"scan was given a {type(model).__name__} in the place of the model", "Pass the nn.Module first, then the batch.")
    with _gradients_aside(model), under(model, precision) as policy:
        if policy is not None and policy.autocast == "fp32":
            raise ConfigError(
                f"precision {policy} has nothing in 16 bits to look at", "Name the one that you want to train in: precision='fp16-mixed'."
            )
        weights, shapes = Weights(policy.dtype if policy is not None else None), Shapes(policy is not None)
        detectors: list[Detector] = [Constants(), Tables(), Handwritten(), weights, shapes]
        findings, born, told = _look(model, detectors) if batch is None else _run(model, batch, detectors)
        if not shapes.sixteen:
            raise ConfigError(
                f"nothing of this {type(model).__name__} is in 16 bits, and no precision was named",
                "Name the one that you want to train in: halfstep.scan(model, batch, precision='fp16-mixed').",
            )
        findings += [*_kept_tables(model, policy), *_eps_of(optimizer)]
        if has_masters(optimizer) or (policy is not None and policy.weights == "plain"):
            findings = [f for f in findings if f.fault != "masters"]
    return replace(told, findings=ranked(findings, born))


@contextmanager
def _gradients_aside(model: nn.Module) -> Iterator[None]:
    """Gradients are taken off for a while: a precision would cast them with their weights."""
    before = [(p, p.grad) for p in model.parameters()]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in before:
            p.grad = gradient


_Looked = tuple[list[Finding], list[Finding], Trace]  # what was found, the first values that were not finite among it, the rest of the trace


def _look(model: nn.Module, detectors: list[Detector]) -> _Looked:
    """What stands in the model."""
    with torch.no_grad():
        for detector in detectors:
            detector.begin(model)
    return [f for d in detectors for f in d.findings()], [], Trace()


def _run(model: nn.Module, batch: Any, detectors: list[Detector]) -> _Looked:
    """What stands in the model, and what one forward pass without gradients shows."""
    births, mismatch = Births(), Mismatch()
    births.know(named(batch))
    seen = Observation(model, [births, mismatch, *detectors])
    error: Exception | None = None
    loss: float | None = None
    with Rehearsal([model], batch), as_written, torch.inference_mode(False), torch.no_grad():
        try:
            with seen:
                outputs = called(model, batch)
                result = loss_in(outputs)
                births.blame([result] if result is not None else [*named(outputs).values()])
                loss = float(result) if result is not None else None
        except Exception as raised:  # noqa: BLE001  of the user's code: named, or raised again by findings_of_error
            error = raised
        findings = [f for d in (births, *detectors) for f in d.findings()]
        if error is not None:
            findings += findings_of_error(error, seen, births, mismatch)
    born = births.findings()
    findings += [] if born else births.products.findings()
    return findings, born, Trace((), loss, births.products.closest, "" if error is None else line_of(error), seen.events)


def _kept_tables(model: nn.Module, policy: Policy | None) -> list[Finding]:
    """Tables that a precision for the whole model has kept in fp32, and that 16 bits would have spoiled."""
    if policy is None or not policy.whole:
        return []
    found, loaded = [], layout(model)["loaded"]
    for name, part in model.named_modules():
        for own, t in part._buffers.items():
            if own.startswith("original_"):  # transformers' second copy of one
                continue
            if t is None or t.dtype != torch.float32 or loaded.get(f"{name}.{own}" if name else own) != "float32" or table_fault(own, t):
                continue
            fault = table_fault(own, t.to(policy.dtype))
            if fault:
                what = f"{own} is kept in fp32; {short(policy.dtype)} would have spoiled it"
                found.append(Finding("table", Place(name, type(part).__name__, own), what, "", fixed=True))
    return found


def _eps_of(optimizer: Any) -> list[Finding]:
    """An eps that is 0 in the format of the 16-bit weights it is used with: torch's optimizers compute in the weight's format."""
    found = []
    for one in [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ()):
        if has_masters(one):
            continue
        for group in one.param_groups:
            eps, formats = group.get("eps"), {p.dtype for p in group["params"] if p.dtype in HALF and p.requires_grad and master_of(p) is None}
            for dtype in formats:
                fault = eps_fault(eps, dtype) if isinstance(eps, float) else ""
                if fault:
                    remedy = "Let the weights have masters (halfstep.optim.wrap): the step is then computed in fp32."
                    found.append(Finding("eps", Place("optimizer", type(one).__name__, "eps"), f"eps={eps:g} {fault}", remedy))
    return found
