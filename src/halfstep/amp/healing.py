"""After a bad forward pass: name the module, and hold it in fp32 where that was asked for and helps."""

from __future__ import annotations

from torch import nn

from halfstep.amp.locate import Blamed
from halfstep.amp.pins import pin
from halfstep.amp.recall import InputsChanged, Recall
from halfstep.step import Culprit, Explained


class Healer:
    """Looks into the forward passes of watched models when a step turns out bad.

    Cost: a reference to the inputs of the models and a copy of the random states (some microseconds a forward pass); after a bad step, one more
    forward pass without a graph.
    """

    def __init__(self) -> None:
        self.recall = Recall()
        self._told: tuple[int, int, Explained] | None = None  # of which window, after how many forward passes, and what

    def watch(self, model: nn.Module) -> None:
        """Look into the forward passes of `model` too."""
        self.recall.watch(model)

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
        if not len(self.recall):
            return Explained(detail="" if self.recall.watches else "scaler.watch(model) before training lets the module be named")
        try:
            found = self.recall.blame()
        except InputsChanged as answer:
            return Explained(detail=f"the forward pass could not be run again to name the module: {answer}")
        except Exception as error:  # noqa: BLE001  the user's forward method may refuse a second run; that is said, and the step is refused as ever
            return Explained(detail=f"the forward pass could not be run again to name the module: {type(error).__name__}: {error}")
        if not found:
            return Explained(detail="run again, the forward passes of the watched models are finite: it is the loss, or a gradient, that is not")
        culprits = tuple(Culprit(_called(blamed), "forward", blamed.value) for _, blamed in found)
        overflow = all(blamed.heals for _, blamed in found)
        details = [str(blamed) for _, blamed in found]
        pinned = []
        for model, blamed in found if heal and overflow else ():
            if blamed.module:
                pin(model, blamed.module, str(blamed), step)
                pinned.append(blamed.module)
            else:
                details.append("code of the model's own forward method cannot be held in fp32 by itself: move it into a submodule")
        return Explained(culprits, overflow, tuple(pinned), "; ".join(details))


def _called(blamed: Blamed) -> str:
    if blamed.cause == "data":
        return f"input {blamed.argument}"
    return blamed.module or f"forward of {blamed.kind}"
