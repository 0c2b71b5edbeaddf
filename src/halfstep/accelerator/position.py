"""Where a run stands in its data: how the pass over a loader began, so that a resumed run can enter it at the very next batch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from halfstep.checkpoint import capture, restore

logger = logging.getLogger("halfstep")


class EpochStart:
    """The random states in which a pass over a data loader began: of the process, and of the generators that the loader draws from."""

    def __init__(self) -> None:
        self._random: dict[str, Any] = {}
        self._generators: list[torch.Tensor] = []  # their states then
        self._drawn_from: list[torch.Generator] = []
        self._waiting: list[torch.Tensor] = []  # states of the generators when the checkpoint was saved that a run goes on from

    def begin(self, loader: Any) -> None:
        """A pass over `loader` begins now."""
        self._drawn_from = _generators(loader)
        if len(self._waiting) == len(self._drawn_from):
            _set(self._drawn_from, self._waiting)
        self._waiting = []
        self._random, self._generators = capture(), [g.get_state() for g in self._drawn_from]

    def again(self, loader: Any, batches: int, ahead: int = 0) -> Iterator[Any]:
        """The pass once more, read past its first `batches`; the random states of the process are then those of now.

        ahead: batches after them that had been read by now.
        """
        self._drawn_from, self._waiting = _generators(loader), []
        if len(self._generators) == len(self._drawn_from):
            _set(self._drawn_from, self._generators)
        now = capture()
        restore(self._random or now)
        iterator: Iterator[Any] = iter(loader)
        seeded = None
        for i in range(batches):
            next(iterator, None)
            seeded = torch.get_rng_state() if i == 0 else seeded
        if isinstance(getattr(loader, "dataset", None), IterableDataset) and seeded is not None and not torch.equal(seeded, torch.get_rng_state()):
            logger.warning(
                "the iterable dataset draws from torch's own random generator while it is read, between the numbers that the model draws: "
                "the batches from here on may differ from those of a run that never stopped. Give the dataset a generator of its own."
            )
        held = list(itertools.islice(iterator, ahead))
        restore(now)
        return itertools.chain(held, iterator)

    def state_dict(self) -> dict[str, Any]:
        """The random states at the beginning, and those of the generators now; empty before any pass."""
        if not self._random:
            return {}
        return {"random": self._random, "generators": self._generators, "now": [g.get_state() for g in self._drawn_from]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved beginning; checkpoints of version 1 have the random states of the process alone."""
        self._random = state if "python" in state else state.get("random", {})
        self._generators, self._waiting = list(state.get("generators", [])), list(state.get("now", []))


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, each once; torch's default one belongs to the process."""
    batches = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {id(g): g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)}
    return [g for g in found.values() if g is not torch.default_generator]


def _set(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
