"""What 16 bits cost where they should save: copies of weights that are kept, and casts that are made again (kind O)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from conformance.adapter import Library, NotOffered, Record, collector
from conformance.tools import BF16, F32

RECORDS: list[Record] = []
record = collector(RECORDS, "O")


def _forward(library: Library, net: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """The net under the library's leanest mixed precision after its first call, else in a block."""
    try:
        lean = library.lean(net, BF16)
    except NotOffered:
        return library.autocast(BF16)(net.forward)  # type: ignore[no-any-return]
    lean(inputs)
    return lean


def _kept(net: nn.Module, forward: Callable[[], Tensor]) -> dict[str, Any]:
    """The bytes that a forward pass keeps for the backward pass beside the weights themselves, each piece of memory once."""
    own, kept = {p.untyped_storage().data_ptr() for p in net.parameters()}, {}

    def pack(t: Tensor) -> Tensor:
        place = t.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = t.untyped_storage()  # held, so that its address is not used again
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()
    return {"bytes": sum(s.nbytes() for s in kept.values()), "dtype": out.dtype}


def _deep() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])


@record(
    "small-batch-and-wide-layers",
    "bytes kept for the backward pass by four layers of 64 x 64 on a batch of 2, against those of fp32",
    today="13 times as many as in fp32: the 16-bit copy of each weight is kept on top of the weight",
    right="not more than in fp32: the library's leanest mixed precision keeps the weights themselves in 16 bits",
    check=lambda v: 0 < v["bytes"] <= v["fp32"],
    refs=("case 65",),
)
def small_batch(library: Library) -> Any:
    net, inputs = _deep(), torch.randn(2, 64)
    wide = _kept(net, lambda: net(inputs))["bytes"]
    forward = _forward(library, net, inputs)
    return _kept(net, lambda: forward(inputs)) | {"fp32": wide}


class _Loop(nn.Module):
    """A layer that is called eight times, as recurrent and weight-shared models do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = self.cell(x)
        return x


@record(
    "one-layer-called-eight-times",
    "bytes kept for the backward pass by one layer that is called eight times, against those of fp32",
    today="three times as many as in fp32: a copy of the weight is kept",
    right="not more than in fp32",
    check=lambda v: 0 < v["bytes"] <= v["fp32"],
    refs=("case 65",),
)
def one_layer(library: Library) -> Any:
    net, inputs = _Loop(), torch.randn(2, 64)
    wide = _kept(net, lambda: net(inputs))["bytes"]
    forward = _forward(library, net, inputs)
    return _kept(net, lambda: forward(inputs)) | {"fp32": wide}


@record(
    "one-layer-called-eight-times-in-a-block",
    "the same with fp32 weights in a block: how many copies of the weight are kept?",
    today="right: one, by the cache that goes stale",
    right="bf16 products, and at most one copy beside the activations",
    check=lambda v: v["dtype"] is BF16 and v["bytes"] <= 64 * 64 * 2 + 8 * 2 * 64 * 4,
    refs=("case 65", "case 56"),
    stock="right",
    pending="each call keeps a copy of its own",
)
def one_layer_in_a_block(library: Library) -> Any:
    net, inputs = _Loop(), torch.randn(2, 64)
    with library.autocast(BF16):
        return _kept(net, lambda: net(inputs))


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts how often a parameter, or a view of one, is converted from fp32 to 16 bits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own, self.count = {p.untyped_storage().data_ptr() for p in net.parameters()}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype is BF16:
            self.count += any(isinstance(a, Tensor) and a.dtype is F32 and a.untyped_storage().data_ptr() in self.own for a in args)
        return out


def _recast(name: str, title: str, today: str, run: Callable[[Callable[[Tensor], Tensor], Tensor], None]) -> None:
    @record(
        f"weights-cast-again-{name}",
        f"how often three weights are cast from fp32 to bf16 in {title}",
        today=today,
        right="never: the weights are 16-bit, with what they lack beside them",
        check=lambda casts: casts == 0,
        refs=("case 65",),
    )
    def recast(library: Library) -> Any:
        net, inputs = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)]), torch.randn(2, 32)
        forward = _forward(library, net, inputs)
        with _Casts(net) as seen:
            run(forward, inputs)
        return seen.count


def _accumulate(forward: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    for _ in range(4):
        forward(inputs).float().sum().backward()  # type: ignore[no-untyped-call]


def _again(forward: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    checkpoint(forward, inputs, use_reentrant=False).float().sum().backward()


def _decode(forward: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    with torch.no_grad():
        for _ in range(8):
            forward(inputs)


_recast("in-a-window", "a window of four micro-batches", "twelve times: the cache ends with each block", _accumulate)
_recast("in-a-recompute", "one step with activation checkpointing", "six times", _again)
_recast("in-decoding", "eight tokens of generation", "24 times", _decode)
