"""Weights as they stand: not finite, close to the limit, in 16 bits with nothing beside them; and copies of them that are out of date."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from halfstep.numerics import FORMATS
from halfstep.optim import master_of
from halfstep.tracing.findings import HALF, Fault, Finding, Place, number, range_of, short
from halfstep.tracing.observe import Event
from halfstep.tracing.tags import Tags, memory

# what a tensor beside a weight is called that is meant to have other values
_APART = ("ema", "avg", "average", "shadow", "teacher", "target", "old", "prev", "init", "momentum", "exp_")
_NEAR = 0.5  # a stale copy differs from its weight by less than this share of its norm


class Weights:
    """Looks at parameters and buffers before a run, and in it at casts of weights that outlive a change of the weight.

    compute: the 16-bit format that products run in, when it is known: wider weights that it cannot hold are reported. "masters" is about trainable
    16-bit weights without a master of halfstep's (`halfstep.optim.master_of`); it is one finding for the whole model.
    Cost before a run: two passes over the weights, and a copy of the largest one.
    """

    def __init__(self, compute: torch.dtype | None = None) -> None:
        self.compute = compute
        self._found: list[Finding] = []
        self._run: dict[tuple[str, str], Finding] = {}
        self._owned: dict[int, tuple[str, nn.Parameter]] = {}  # parameters by their memory
        self._casts: Tags[tuple[str, nn.Parameter, int]] = Tags()

    def begin(self, model: nn.Module) -> None:
        """Look at every parameter, buffer and 16-bit copy that modules hold."""
        self._found, bare = [], list[tuple[str, nn.Module, Tensor]]()
        seen: set[int] = set()
        for name, part in model.named_modules():
            for own, t in (*part._parameters.items(), *part._buffers.items()):
                if not _is_plain(t) or id(t) in seen:
                    continue
                seen.add(id(t))
                trained = isinstance(t, nn.Parameter)
                self._values(name, part, own, t, trained)
                if trained and t.requires_grad and t.dtype in HALF and master_of(t) is None:
                    bare.append((f"{name}.{own}" if name else own, part, t))
                if isinstance(t, nn.Parameter):
                    self._owned[memory(t)] = (f"{name}.{own}" if name else own, t)
            self._stale_copies(name, part)
        if bare:
            self._masters(bare)

    def see(self, event: Event) -> None:
        """Look at one op: a cast of a parameter, the use of an old one, an average that is kept in 16 bits."""
        self._casts.follow(event)
        if event.backward or not event.inputs:
            return
        base = event.base.removeprefix("_foreach_")
        if base == "_to_copy" and event.outputs and event.outputs[0].dtype in HALF:
            owner = self._owned.get(memory(event.inputs[0]))
            if owner is not None:
                self._casts.put(event.outputs[0], (*owner, owner[1]._version))
            return
        if base in ("mul_", "lerp_"):
            self._average(event, base)
        if len(self._casts):
            for t in event.inputs:
                known = self._casts.get(t)
                if known is not None and known[1]._version != known[2]:
                    self._used(event, t, *known)

    def findings(self) -> list[Finding]:
        """What the weights showed before the run, then what was seen in it."""
        return [*self._found, *self._run.values()]

    def _values(self, name: str, part: nn.Module, own: str, t: Tensor, trained: bool) -> None:
        values = t.detach()
        place = Place(name, type(part).__name__, own)
        bad = ~values.isfinite() if trained else values.isnan() | (values == torch.inf)  # -inf in a buffer is a mask
        if bool(bad.any()):
            count, what = int(bad.sum()), "weights" if trained else "values"
            text = f"{own} has {count} non-finite {what} of {t.numel()}"
            remedy = "Load the last good checkpoint; the step that wrote them was taken on non-finite gradients or states."
            self._found.append(Finding("weights", place, text, remedy, output=range_of(t)))
            return
        form = FORMATS["fp16"]
        if not trained or not t.numel() or not (t.dtype == torch.float16 or self.compute == torch.float16):
            return
        top = float(values.abs().amax())
        if top > form.largest:
            text = f"{own} reaches {number(top)}, and fp16, in which its products run, ends at {number(form.largest)}"
            self._found.append(Finding("overflow", place, text, f"Hold the module in fp32 (fp32={name or own}), or use bf16.", output=range_of(t)))
        elif top * 2 >= form.largest:
            text = f"{own} reaches {number(top)}, {top / form.largest:.0%} of fp16's limit of {number(form.largest)}"
            self._found.append(Finding("near", place, text, f"Hold the module in fp32 (fp32={name or own}), or use bf16.", output=range_of(t)))

    def _masters(self, bare: list[tuple[str, nn.Module, Tensor]]) -> None:
        name, part, first = bare[0]
        module, _, own = name.rpartition(".")
        steps = 1 / FORMATS[short(first.dtype)].epsilon * 2
        what = (
            f"{len(bare)} trainable {short(first.dtype)} weight{'s have' if len(bare) > 1 else ' has'} nothing beside "
            f"{'them' if len(bare) > 1 else 'it'} (first: {name}): an update below 1/{number(steps)} of a weight rounds away"
        )
        remedy = "Prepare the model (bf16-mixed, bf16-lean or bf16-true) or wrap the optimizer (halfstep.optim.wrap): the weights then get masters."
        self._found.append(Finding("masters", Place(module, type(part).__name__, own), what, remedy, output=range_of(first)))

    def _stale_copies(self, name: str, part: nn.Module) -> None:
        parameters = {own: p for own, p in part._parameters.items() if _is_plain(p)}
        if not parameters:
            return
        for own, copy in _copies(part):
            if any(word in own.lower() for word in _APART) or f"{own}_v" in parameters or f"{own}_orig" in parameters:
                continue
            for of, p in parameters.items():
                if p is not None and memory(p) != memory(copy) and _is_stale(copy, p.detach()):
                    what = f"{own} is a {short(copy.dtype)} copy of {of} from before {of} changed"
                    remedy = f"Cast {of} where it is used ({of}.to(dtype)), and keep no copy."
                    self._found.append(Finding("stale", Place(name, type(part).__name__, own), what, remedy, (range_of(p),), range_of(copy)))
                    break

    def _used(self, event: Event, copy: Tensor, name: str, p: nn.Parameter, version: int) -> None:
        """A cast is used whose parameter was written to since."""
        if copy.shape == p.shape and torch.equal(copy, p.detach().to(copy.dtype)):
            return
        what = f"a {short(copy.dtype)} cast of {name} is used that was made before the weight changed ({p._version - version} writes ago)"
        remedy = "Open the autocast block anew for each step, or switch its cache off (halfstep.amp.autocast keeps none)."
        self._keep("stale", event, what, remedy, name)

    def _average(self, event: Event, base: str) -> None:
        """A running average, or a decay, whose steps round away in 16 bits."""
        factor = event.args[1] if len(event.args) > 1 and base == "mul_" else event.args[2] if len(event.args) > 2 else None
        kept = event.inputs[0]
        if kept.dtype not in HALF or kept.dim() == 0 or isinstance(factor, bool) or not isinstance(factor, int | float):
            return
        share, form = 1 - factor if base == "mul_" else factor, FORMATS[short(kept.dtype)]
        if 0 < share <= 4 * form.epsilon:
            what = (
                f"an average or decay of {factor:.10g} is kept in {form.name}: steps below {form.epsilon / 2:.2g} of a value round away, and it stops"
            )
            self._keep("masters", event, what, "Keep averages and states in fp32 (halfstep.ema does).", event.base)

    def _keep(self, fault: Fault, event: Event, what: str, remedy: str, key: str) -> None:
        finding = Finding(fault, event.place, what, remedy, tuple(range_of(t) for t in event.inputs[:2]), at=event.index)
        self._run.setdefault((event.place.source, key), finding)


def _is_plain(t: Tensor | None) -> bool:
    return t is not None and t.is_floating_point() and not t.is_meta and t.layout == torch.strided and not torch.nn.parameter.is_lazy(t)


def _copies(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The 16-bit tensors that a module holds beside its parameters: buffers and attributes, in containers too."""
    for own, value in (*part._buffers.items(), *part.__dict__.items()):
        held = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) and own[:1] != "_" else (value,)
        for t in held:
            if isinstance(t, Tensor) and not isinstance(t, nn.Parameter) and t.dtype in HALF and _is_plain(t) and t.dim():
                yield own, t


def _is_stale(copy: Tensor, p: Tensor) -> bool:
    """Whether `copy` has the values `p` had a while ago: near, and not those it has."""
    turned = p.dim() == 2 and copy.shape == p.mT.shape and (copy.shape != p.shape or not torch.equal(copy, p.to(copy.dtype)))
    if copy.shape != p.shape and not turned:
        return False
    for now in (p, p.mT) if p.dim() == 2 else (p,):
        if copy.shape == now.shape and torch.equal(copy, now.to(copy.dtype)):
            return False
    return any(
        copy.shape == now.shape and float((copy.float() - now.float()).norm()) < _NEAR * float(now.float().norm())
        for now in ((p, p.mT) if p.dim() == 2 else (p,))
    )
