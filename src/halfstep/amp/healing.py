"""After a bad forward pass: name the module, and hold it in fp32 where that was asked for and helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import nn

from halfstep.amp.locate import Blamed
from halfstep.amp.pins import pin
from halfstep.amp.recall import InputsChanged, Recall
from halfstep.step import Culprit, Explained


@dataclass(frozen=True)
class _Answer:
    """What one rank has found, in plain values: the explanation, and the number of the model, the module and the reason of each that fp32 heals."""

    said: Explained
    found: bool
    heals: tuple[tuple[int, str, str], ...] = ()


def _alone(answer: Any) -> list[Any]:
    return [answer]


class Healer:
    """Looks into the forward passes of watched models when a step turns out bad.

    Cost: a reference to the inputs of the models and a copy of the random states (some microseconds a forward pass); after a bad step, one more
    forward pass without a graph.
    """

    def __init__(self) -> None:
        self.recall = Recall()
        self.share: Callable[[Any], list[Any]] = _alone  # the values of all ranks, in the order of ranks
        self._models: list[ref[nn.Module]] = []
        self._told: tuple[int, int, Explained] | None = None  # of which window, after how many forward passes, and what

    def watch(self, model: nn.Module) -> None:
        """Look into the forward passes of `model` too."""
        self.recall.watch(model)
        if not any(known() is model for known in self._models):
            self._models.append(ref(model))

    def remembered(self) -> int:
        """Which window the forward passes belong to that can be looked into now."""
        return self.recall.window

    def explain(self, heal: bool, step: int) -> Explained:
        """Whom the forward passes since the last step blame. heal: hold those modules in fp32, if that makes all outputs finite.

        Several optimizers that step after one forward pass are told the same.
        """
        if self._told is None or self._told[0] != self.recall.window or self._told[1] != len(self.recall):
            self._told = (self.recall.window, len(self.recall), self._look(heal, step))
        return self._told[2]

    def _look(self, heal: bool, step: int) -> Explained:
        mine = self._search(heal)
        if not heal:  # verdicts may be read at other times on other ranks: nothing is exchanged
            return mine.said
        answers = [answer for answer in self.share(mine) if answer.found]
        if not answers:
            return mine.said
        culprits = dict.fromkeys(culprit for answer in answers for culprit in answer.said.culprits)
        overflow = all(answer.said.overflow for answer in answers)
        details = dict.fromkeys(answer.said.detail for answer in answers)
        pinned = dict[tuple[int, str], str]()
        for number, module, why in (heals for answer in answers if overflow for heals in answer.heals):
            pinned.setdefault((number, module), why)
        for (number, module), why in pinned.items():
            model = self._models[number]()
            if model is not None:
                pin(model, module, why, step)
        return Explained(tuple(culprits), overflow, tuple(module for _, module in pinned), "; ".join(details))

    def _search(self, heal: bool) -> _Answer:
        """Whom the forward passes of this rank blame."""
        if not len(self.recall):
            return _Answer(Explained(detail="" if self.recall.watches else "scaler.watch(model) before training lets the module be named"), False)
        try:
            found = self.recall.blame()
        except InputsChanged as answer:
            return _Answer(Explained(detail=f"the forward pass could not be run again to name the module: {answer}"), False)
        except Exception as error:  # noqa: BLE001  the user's forward method may refuse a second run; that is said, and the step is refused as ever
            return _Answer(Explained(detail=f"the forward pass could not be run again to name the module: {type(error).__name__}: {error}"), False)
        if not found:
            said = "run again, the forward passes of the watched models are finite: it is the loss, or a gradient, that is not"
            return _Answer(Explained(detail=said), False)
        culprits = tuple(Culprit(_called(blamed), "forward", blamed.value) for _, blamed in found)
        overflow = all(blamed.heals for _, blamed in found)
        details = [str(blamed) for _, blamed in found]
        numbers = {id(model): number for number, known in enumerate(self._models) if (model := known()) is not None}
        heals = []
        for model, blamed in found if heal and overflow else ():
            if blamed.module:
                heals.append((numbers[id(model)], blamed.module, str(blamed)))
            else:
                details.append("code of the model's own forward method cannot be held in fp32 by itself: move it into a submodule")
        return _Answer(Explained(culprits, overflow, (), "; ".join(details)), True, tuple(heals))


def _called(blamed: Blamed) -> str:
    if blamed.cause == "data":
        return f"input {blamed.argument}"
    return blamed.module or f"forward of {blamed.kind}"
