"""What modules give in a run: the range of their outputs and output gradients, and how far they are from those of another run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from halfstep.amp.locate import floats
from halfstep.diagnostics.planned import Range, Span
from halfstep.numerics import FORMATS, stored
from halfstep.tracing.observe import quiet

SAMPLED = 1 << 16  # elements of one tensor that are kept to be compared, evenly spread
INPUTS = 3  # tensors among a module's inputs that are compared
_FP16, _BF16 = FORMATS["fp16"], FORMATS["bf16"]


@dataclass
class Seen:
    """Counts over the values of tensors, as they come by."""

    largest: float = 0.0
    least: float = math.inf
    counts: list[float] = field(default_factory=lambda: [0.0] * 7)  # all, not finite, not 0, and of these below and beyond fp16 and bf16

    def add(self, t: Tensor) -> None:
        """Count the values of one floating tensor. Temporary memory: about 8 bytes per element."""
        values = stored(t.detach()).float().abs()
        finite = values.isfinite()
        known = torch.where(finite, values, 0.0)
        some = known > 0
        tests = [
            (~finite).sum(),
            some.sum(),
            (some & (known < _FP16.smallest_normal)).sum(),
            (known > _FP16.largest).sum(),
            (some & (known < _BF16.smallest_normal)).sum(),
            (known > _BF16.largest).sum(),
        ]
        found = torch.stack([*tests, known.amax(), torch.where(some, known, math.inf).amin()]).double().tolist()
        self.counts = [a + b for a, b in zip(self.counts, [float(values.numel()), *found[:6]], strict=True)]
        self.largest, self.least = max(self.largest, found[6]), min(self.least, found[7])

    @property
    def span(self) -> Span:
        """The counts as shares."""
        every, nonfinite, some = self.counts[:3]
        fp16_under, fp16_over, bf16_under, bf16_over = (count / max(some, 1.0) for count in self.counts[3:])
        least = self.least if math.isfinite(self.least) else 0.0
        return Span(self.largest, least, fp16_under, fp16_over, bf16_under, bf16_over, nonfinite / max(every, 1.0))


@dataclass(frozen=True)
class Errors:
    """Relative errors of one module in one call: of the worst of its inputs, and of the worst of its outputs."""

    inputs: float
    outputs: float


Sample = tuple[list[Tensor], list[Tensor]]  # of the inputs, of the outputs


class Values:
    """The block in which the modules of a model are looked at as they are called.

    reference: those of another run, to compare with; without one, ranges are measured and samples kept. `begin` says that a batch begins; samples are
    of the first. Memory: up to 256 KiB for each input and output of a module.
    """

    def __init__(self, model: nn.Module, reference: Values | None = None) -> None:
        self.reference = reference
        self.names = {id(part): (name, type(part).__name__) for name, part in model.named_modules()}
        self.outputs: dict[str, Seen] = {}
        self.gradients: dict[str, Seen] = {}
        self.samples: dict[tuple[str, int], Sample] = {}
        self.errors: dict[str, Errors] = {}
        self._calls: Counter[str] = Counter()
        self._batch = -1
        self._hook: Any = None

    def begin(self) -> None:
        """The next batch begins."""
        self._batch += 1
        self._calls.clear()

    def __enter__(self) -> Values:
        self._hook = hooks.register_module_forward_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hook.remove()
        hooks._global_forward_hooks_with_kwargs.pop(self._hook.id, None)  # which torch forgets, and its compiler then warns of hooks

    def _look(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        known = self.names.get(id(module))
        if known is None:
            return
        name = known[0]
        call = self._calls[name]
        self._calls[name] += 1
        with quiet():
            made = [t for t in floats(output) if t.layout == torch.strided and not t.is_meta]
            if self.reference is None:
                for t in made:
                    self.outputs.setdefault(name, Seen()).add(t)
            if self._batch == 0:
                given = [t for t in floats([*args, *kwargs.values()]) if t.layout == torch.strided][:INPUTS]
                self._compare((name, call), ([*map(sample, given)], [*map(sample, made)]))
        if self.reference is None:
            for t in made:
                if t.requires_grad:
                    t.register_hook(self._gradient_of(name))  # type: ignore[no-untyped-call]

    def _gradient_of(self, name: str) -> Any:
        def look(gradient: Tensor) -> None:
            with quiet():
                if gradient.layout == torch.strided and gradient.numel():
                    self.gradients.setdefault(name, Seen()).add(gradient)

        return look

    def _compare(self, key: tuple[str, int], found: Sample) -> None:
        if self.reference is None:
            self.samples[key] = found
            return
        wanted = self.reference.samples.get(key)
        if wanted is None:
            return
        inputs, outputs = (max((off(a, b) for a, b in zip(x, y, strict=False)), default=0.0) for x, y in zip(found, wanted, strict=True))
        before = self.errors.get(key[0])
        if before is None or outputs > before.outputs:
            self.errors[key[0]] = Errors(inputs, outputs)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """What was measured, in the order of the model."""
        return tuple(
            Range(name, kind, self.outputs[name].span, self.gradients[name].span if name in self.gradients else None)
            for name, kind in self.names.values()
            if name in self.outputs
        )

    @property
    def largest_gradient(self) -> float:
        """The largest magnitude in the gradients of all outputs."""
        return max((seen.largest for seen in self.gradients.values()), default=0.0)


def sample(t: Tensor) -> Tensor:
    """At most SAMPLED elements of a tensor, evenly spread, as fp32."""
    flat = stored(t.detach()).reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLED))].float().clone()


def off(x: Tensor, reference: Tensor) -> float:
    """The norm of the difference over that of the reference, in fp64; inf where only one of them is finite somewhere, 0 where both are alike."""
    if x.shape != reference.shape:
        return math.inf
    got, wanted = x.double(), reference.double().to(x.device)
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    if bool(same.all()):
        return 0.0
    difference = torch.where(same, 0.0, got - wanted)
    if not bool(difference.isfinite().all()):
        return math.inf
    size = float(torch.linalg.vector_norm(torch.where(wanted.isfinite(), wanted, 0.0)))
    return float(torch.linalg.vector_norm(difference)) / size if size else math.inf
