"""Which modules a precision needs in fp32, found before anything overflows: from how far values reach in fp32, and which of them would be 16-bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from halfstep.amp.as_written import as_written
from halfstep.diagnostics.plan_runs import Task, running
from halfstep.diagnostics.plan_values import Errors
from halfstep.diagnostics.planned import Held
from halfstep.numerics import FORMATS
from halfstep.optim.masters import LARGEST_FP16
from halfstep.policy import Policy
from halfstep.tracing import Observation
from halfstep.tracing.constants import Constants
from halfstep.tracing.findings import number
from halfstep.tracing.reach import Narrow, Offence, Reach
from halfstep.tracing.tables import Tables

GROWTH = 4.0  # how much values may grow in training before they leave the range
ROUNDS = 60  # of looking at formats and holding modules; each holds one module or more
SPOILED = ("mask", "eps", "clamp", "table")  # faults of constants that the format does not hold
LARGE, OUT_OF_PROPORTION = 0.05, 16.0  # relative error of outputs, and how many times that of the inputs, from which on a module is suspected


def measure_reach(task: Task) -> Reach:
    """How far every value of the forward passes reaches in fp32. Time: some 50 us an op."""
    reach = Reach()
    with running(task, None):
        _forward(task, [reach], wide=True)
    return reach


def _forward(task: Task, detectors: list[object], wide: bool = False) -> None:
    """Every batch forward, without gradients, op by op before the eyes of detectors."""
    with as_written, torch.inference_mode(False), torch.no_grad():
        task.model.train()
        with Observation(task.model, detectors):  # type: ignore[arg-type]  # those of a plan give no findings
            for number_of_batch in range(len(task.batches)):
                task.forward(number_of_batch, wide)


def find_held(task: Task, policy: Policy, reach: Reach) -> tuple[tuple[Held, ...], tuple[str, ...]]:
    """The modules that a 16-bit policy needs in fp32 on these batches, with reasons; and what would have to be in fp32 and cannot be, in words.

    Only formats are read from runs under the policy, so that values which overflow there hide nothing. First come those that make a value which is
    too large; holding them leaves it in fp32, and what reads it then is looked at again, until nothing is left. Then constants and tables.
    """
    held: dict[str, Held] = {h.module: h for h in _large_weights(task.model, policy)}
    unheld: dict[str, str] = {}
    for _ in range(ROUNDS):
        trial = replace(policy, fp32=tuple(dict.fromkeys((*policy.fp32, *_with_tied(task.model, policy, held)))))
        narrow, constants, tables = Narrow(reach, policy.dtype, GROWTH), Constants(), Tables()
        error = _error_of(task, trial, [narrow, constants, tables])
        found = _chosen(task.model, narrow.offences, policy, held, unheld)
        if not found:
            found = _constants(task.model, constants, tables, held, unheld)
        if not found and error is not None:
            raise error
        if not found:
            break
        held |= {h.module: h for h in found}
    else:
        unheld[""] = f"after {ROUNDS} rounds there were still values beyond the range"
    tied = {
        name: Held(name, _kind(task.model, name), "its weight is that of another module held in fp32") for name in _partners(task.model, policy, held)
    }
    return _outermost(tuple((held | tied).values())), tuple(unheld.values())


def _error_of(task: Task, policy: Policy, detectors: list[object]) -> Exception | None:
    """Look at the forward passes under a policy; what they raise (torch refuses constants that fp16 does not hold), None for nothing."""
    with running(task, policy):
        try:
            _forward(task, detectors)
        except Exception as error:  # noqa: BLE001  of the user's code: raised again, unless a module can be held for it
            return error
    return None


def _chosen(model: nn.Module, offences: Sequence[Offence], policy: Policy, held: dict[str, Held], unheld: dict[str, str]) -> list[Held]:
    """The modules to be held next: of the values that are too large those that do not come of another one, else all."""
    found: dict[str, Held] = {}
    known = {name for name, _ in model.named_modules()}
    for o in [o for o in offences if not o.inherited] or offences:
        target, within = _target(model, o), o.module
        why = _why(o, policy, target != within)
        covered = any(f"{target}.".startswith(f"{name}.") for name in held)
        if target == "" or target not in known or covered:
            where, who = f"{o.source}: " if o.source else "", f"{within or 'the model itself'} ({o.kind})"
            said = f"{where}code of {who} makes {policy.autocast} values by itself: {why}. Compute this line in fp32"
            unheld.setdefault(f"{within} {o.source}", said)
            continue
        before = found.get(target)
        if before is None or (before.reach or 0.0) < o.far.largest:
            found[target] = Held(target, _kind(model, target), why, "range", o.far.largest)
    return list(found.values())


def _target(model: nn.Module, o: Offence) -> str:
    """What is to be held: the module itself; for a sum that it makes of what its parts give, the part, whose fp32 output makes the sum fp32."""
    parts = dict(model.named_modules())
    part = parts.get(o.module)
    if part is None:
        return o.module
    if o.module and (called := _called(model, o.module)) != o.module:
        return called
    composite = any(True for _ in part.children())
    if not composite or o.read or o.op in ("linear", "mm", "bmm", "matmul", "baddbmm", "conv", "einsum", "scaled_dot_product_attention"):
        return o.module
    inside = f"{o.module}." if o.module else ""
    return next((name for name in o.operands if name != o.module and name.startswith(inside) and name in parts), o.module)


def _called(model: nn.Module, name: str) -> str:
    """The module itself, or the attention that reads its weights and never calls it."""
    outer = name.rpartition(".")[0]
    return outer if outer and isinstance(model.get_submodule(outer), nn.MultiheadAttention) else name


def _why(o: Offence, policy: Policy, by_part: bool) -> str:
    """The reason in words, with the numbers."""
    form = FORMATS[policy.autocast]
    read = o.far.given > o.far.made or o.read
    value = o.far.largest
    end = f"{form.name} ends at {form.largest:,.0f}" if form.largest < 1e6 else f"{form.name} ends at {number(form.largest)}"
    if by_part:
        what = f"{o.module or 'the model'} ({o.op}{', ' + o.source if o.source else ''}) makes {number(value)} of its outputs"
    else:
        what = f"{'it reads values up to' if o.read else 'it multiplies values up to' if read else 'outputs reach'} {number(value)}"
    room = "" if value > form.largest else f": a growth by {number(form.largest / value)} overflows, and {GROWTH:g} are allowed for"
    return f"{what}, {end}{room}"


def _constants(model: nn.Module, constants: Constants, tables: Tables, held: dict[str, Held], unheld: dict[str, str]) -> list[Held]:
    """The modules in which a constant or a table does not fit the format."""
    found: dict[str, Held] = {}
    known = dict(model.named_modules())
    for finding, modules in (*constants.modules(), *tables.modules()):
        if finding.fault not in SPOILED or finding.fixed:
            continue
        for name in modules:
            covered = any(f"{name}.".startswith(f"{h}.") for h in held)
            where = f" ({finding.place.source})" if finding.place.source else ""
            why = f"{finding.fault}: {finding.what}{where}"
            if not name or name not in known or covered or type(known[name]).forward is nn.Module.forward:
                unheld.setdefault(f"{name} {finding.what}", f"{name or 'the model itself'}: {why}. {finding.remedy}")
            else:
                found.setdefault(name, Held(name, _kind(model, name), why, "constant"))
    return list(found.values())


def suspects(errors: dict[str, Errors], policy: Policy, held: Sequence[Held]) -> dict[str, Errors]:
    """The modules whose outputs are further from fp32 than what they are given explains; of nested ones the innermost."""
    unit = FORMATS[policy.autocast].epsilon / 2
    names = {h.module for h in held}

    def strange(e: Errors) -> bool:
        return math.isfinite(e.outputs) and e.outputs > LARGE and e.outputs > OUT_OF_PROPORTION * max(e.inputs, unit)

    found = {name: e for name, e in errors.items() if name and strange(e) and not any(f"{name}.".startswith(f"{h}.") for h in names)}
    return {name: e for name, e in found.items() if not any(other.startswith(f"{name}.") for other in found)}


def held_for_error(model: nn.Module, name: str, before: Errors, after: Errors) -> Held:
    """A module that is held because fp32 makes its error smaller."""
    why = (
        f"its outputs are off by {before.outputs:.2g} of their size where its inputs are off by {before.inputs:.2g}; in fp32 they are off by "
        f"{after.outputs:.2g}"
    )
    return Held(name, _kind(model, name), why, "error", before.outputs)


def _kind(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__


def _large_weights(model: nn.Module, policy: Policy) -> list[Held]:
    """The modules whose weights a whole fp16 model cannot hold."""
    if not policy.whole or policy.autocast != "fp16":
        return []
    found = []
    for name, part in model.named_modules():
        own = [p for p in part._parameters.values() if p is not None and p.numel() and not p.is_meta]
        largest = max((float(p.detach().abs().amax()) for p in own), default=0.0)
        if name and largest > LARGEST_FP16:
            who = _called(model, name)
            found.append(Held(who, _kind(model, who), f"weights reach {number(largest)}, and fp16 weights are kept up to 32,768", "range", largest))
    return found


def _partners(model: nn.Module, policy: Policy, held: dict[str, Held]) -> list[str]:
    """Modules of a whole 16-bit model that share a weight with one that is held: both have to be."""
    if not policy.whole:
        return []
    inside = {id(p) for name in held for p in model.get_submodule(name).parameters()}
    sharing = [name for name, part in model.named_modules() if name and any(id(p) in inside for p in part._parameters.values())]
    return [_called(model, name) for name in sharing if not any(f"{name}.".startswith(f"{h}.") for h in held)]


def _with_tied(model: nn.Module, policy: Policy, held: dict[str, Held]) -> tuple[str, ...]:
    return (*held, *_partners(model, policy, held))


def _outermost(held: tuple[Held, ...]) -> tuple[Held, ...]:
    """Without those inside of others."""
    names = [h.module for h in held]
    return tuple(h for h in held if not any(h.module.startswith(f"{other}.") for other in names))
