"""Layers whose sizes miss the tensor cores' fast path in 16 bits: multiples of 8 are multiplied in blocks, the rest is padded or runs slowly."""

from __future__ import annotations

from torch import nn

from halfstep.tracing.findings import HALF, Finding, Place
from halfstep.tracing.observe import Event

MULTIPLE = 8  # 16-bit elements that a tensor core takes at once. Source: NVIDIA, Matrix Multiplication Background, "Tensor Core Requirements"
_LEAST = 4096  # weights of the smallest layer that is worth a word


class Shapes:
    """Linear and convolution layers with a size that is no multiple of 8; an embedding takes part in no product, but for the head it is tied to.

    Said only where something runs in 16 bits (or `sixteen` says that it will); layers of one type and size are one finding.
    """

    def __init__(self, sixteen: bool = False) -> None:
        self.sixteen = sixteen
        self._odd: dict[tuple[str, str], list[str]] = {}

    def begin(self, model: nn.Module) -> None:
        """Look at the sizes of every layer."""
        self._odd = {}
        tied: set[int] = set()
        for name, part in model.named_modules():
            weight = part._parameters.get("weight")
            if weight is None or nn.parameter.is_lazy(weight) or id(weight) in tied:
                continue
            self.sixteen |= weight.dtype in HALF
            sizes = _sizes(part)
            if sizes:
                tied.add(id(weight))
            odd = [f"{what} {size}" for what, size in sizes if size % MULTIPLE]
            if odd and weight.numel() >= _LEAST:
                self._odd.setdefault((type(part).__name__, " and ".join(odd)), []).append(name)

    def see(self, event: Event) -> None:
        """Note whether anything is 16-bit."""
        self.sixteen = self.sixteen or any(t.dtype in HALF for t in event.outputs)

    def findings(self) -> list[Finding]:
        """One finding for each type of layer and size."""
        if not self.sixteen:
            return []
        found = []
        for (kind, odd), names in self._odd.items():
            others = f" (and in {len(names) - 1} other layers of this size)" if len(names) > 1 else ""
            what = f"{odd} {'are' if ' and ' in odd else 'is'} no multiple of {MULTIPLE}, which the fast 16-bit products of a GPU take{others}"
            size = int(odd.rsplit(" ", 1)[1])
            wide = "64" if size > 4096 else str(MULTIPLE)
            remedy = f"Pad to {_up(size, int(wide))} (a multiple of {wide}): the extra rows cost less than the slow path."
            found.append(Finding("shape", Place(names[0], kind), what, remedy))
        return found


def _sizes(part: nn.Module) -> list[tuple[str, int]]:
    """The sizes of a layer that stand in its products, by their names."""
    if isinstance(part, nn.Linear):
        return [("in_features", part.in_features), ("out_features", part.out_features)]
    nx, nf = getattr(part, "nx", None), getattr(part, "nf", None)
    if type(part).__name__ == "Conv1D" and isinstance(nx, int) and isinstance(nf, int):
        return [("nx", nx), ("nf", nf)]  # of transformers: a linear layer
    if isinstance(part, nn.modules.conv._ConvNd) and part.groups == 1:
        return [("in_channels", part.in_channels if part.in_channels > 4 else MULTIPLE), ("out_channels", part.out_channels)]  # images have 1 to 4
    return []


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
