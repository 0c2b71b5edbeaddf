"""Outputs of modules and weights of a model, measured layer by layer for the records of a run; and what was counted as records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor, nn

from halfstep import numerics
from halfstep.amp.sampling import Sampler, apart
from halfstep.diagnostics.records import Kind, LayerNumbers, LayerSample
from halfstep.step.spread import MEASURED, ROW, Spread, joined, rows

KINDS: tuple[str, ...] = get_args(Kind)


class SpreadSampler(Sampler):
    """Measures how the outputs of every submodule spread over their format, in the forward passes in which a `Sampler` finds the largest ones."""

    def take(self, found: dict[Any, Any], name: str, t: Tensor) -> None:
        """Count an output; several of a module (a tuple, or several calls) are joined when they are read."""
        with apart():
            row = rows([t.detach()], [MEASURED[t.dtype]], t.device)
        found.setdefault((name, MEASURED[t.dtype].name), []).append((t.numel(), row))

    def gathered(self, found: dict[Any, Any]) -> Spread:
        """All rows, in one tensor."""
        named = [(name, form, size, row) for (name, form), parts in found.items() for size, row in parts]
        device = named[0][3].device
        with apart():
            values = torch.cat([row.to(device) for *_, row in named])
        return Spread(tuple(n for n, *_ in named), tuple(f for _, f, *_ in named), tuple(size for *_, size, _ in named), values)

    def forget(self) -> None:
        """What was measured belongs to a step that is over."""
        for watched in self._models:
            watched.last = None


def weights_of(model: nn.Module) -> Spread | None:
    """How the trained weights of a model spread over the formats that they are stored in; None without any."""
    held = [(name, numerics.stored(p.detach())) for name, p in model.named_parameters() if p.requires_grad and not p.is_meta]
    known = [(name, t) for name, t in held if t.dtype in MEASURED and type(t) in (Tensor, nn.Parameter)]
    if not known:
        return None
    names, tensors = zip(*known, strict=True)
    formats = [MEASURED[t.dtype] for t in tensors]
    with apart():
        values = rows(tensors, formats, tensors[0].device)
    return Spread(names, tuple(f.name for f in formats), tuple(t.numel() for t in tensors), values)


def read(spreads: Sequence[tuple[str, Spread]], more: Iterable[Tensor] = ()) -> tuple[list[LayerSample], list[list[float]]]:
    """Samples of kinds and spreads of one step, and the numbers of further tensors: all by one read from the device.

    A sample for each kind and format. A name that comes several times in one is joined. Tensors on other devices cost a copy each.
    """
    extra = [t.detach().double().reshape(-1) for t in more]
    parts = [*(s.values.reshape(-1) for _, s in spreads), *extra]
    if not parts:
        return [], []
    device = parts[0].device
    numbers: list[float] = torch.cat([p.to(device) for p in parts]).tolist()
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.numel())
    pieces = [numbers[a:b] for a, b in pairwise(ends)]
    samples = [sample for (kind, spread), piece in zip(spreads, pieces, strict=False) for sample in _samples(kind, spread, piece)]
    return samples, pieces[len(spreads) :]


def _samples(kind: str, spread: Spread, numbers: list[float]) -> list[LayerSample]:
    by_format: dict[str, dict[str, list[int]]] = {}
    for i, (name, form) in enumerate(zip(spread.names, spread.formats, strict=True)):
        by_format.setdefault(form, {}).setdefault(name, []).append(i)
    found = []
    for form, names in by_format.items():
        layers = {
            name: LayerNumbers(*joined([numbers[i * ROW : (i + 1) * ROW] for i in places], [spread.sizes[i] for i in places]))  # type: ignore[arg-type]
            for name, places in names.items()
        }
        found.append(LayerSample(spread.step, kind, form, layers, spread.scale))
    return found
