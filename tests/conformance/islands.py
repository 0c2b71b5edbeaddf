"""fp32 islands, the weight cache, nesting, decorators, threads, recompute (kind J)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.adapter import Library, Record, collector
from conformance.tools import BF16, F16, F32, dtype_here, near

RECORDS: list[Record] = []
record = collector(RECORDS, "J")


@record(
    "island-of-an-fp16-value",
    "autocast(enabled=False) around (x * 600).pow(2).mean() with x in fp16",
    today="the value stays fp16 and its square is inf",
    right="finite and fp32",
    check=lambda v: v[0] and v[1] is F32,
    refs=("case 63",),
)
def island(library: Library) -> Any:
    layer, inputs = nn.Linear(64, 64), torch.randn(2, 64)
    with torch.no_grad(), library.autocast(F16):
        h = layer(inputs) * 600
        with library.autocast(enabled=False):
            result = h.pow(2).mean(-1)
    return bool(result.isfinite().all()), result.dtype


@record(
    "island-multiplying-by-itself",
    "the same written as h * h",
    today="inf",
    right="finite and fp32",
    check=lambda v: v[0] and v[1] is F32,
    refs=("case 63",),
)
def island_product(library: Library) -> Any:
    layer, inputs = nn.Linear(64, 64), torch.randn(2, 64)
    with torch.no_grad(), library.autocast(F16):
        h = layer(inputs) * 600
        with library.autocast(enabled=False):
            result = (h * h).mean(-1)
    return bool(result.isfinite().all()), result.dtype


@record(
    "island-with-a-layer",
    "a linear layer with fp32 weights on an fp16 value inside autocast(enabled=False)",
    today="RuntimeError: mat1 and mat2 must have the same dtype, without the layer's name",
    right="an fp32 result, equal to the layer on the widened value",
    check=lambda v: v["dtype"] is F32 and v["equal"],
    refused=("float",),
    refs=("case 63",),
)
def island_layer(library: Library) -> Any:
    first, head = nn.Linear(8, 8), nn.Linear(8, 2)
    with torch.no_grad(), library.autocast(F16):
        h = first(torch.randn(3, 8))
        with library.autocast(enabled=False):
            result = head(h)
    return {"dtype": result.dtype, "equal": torch.equal(result, head(h.float()))}


@record(
    "island-gradients",
    "gradients through an island: h.pow(2).sum() of an fp16 value of 300",
    today="the square is inf, and so is the loss",
    right="a finite loss, and the gradient 2 x 300",
    check=lambda v: v["loss"] and near(v["gradient"], 600.0, 1e-3),
    refs=("case 63",),
)
def island_gradients(library: Library) -> Any:
    layer = nn.Linear(1, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, 300.0)
    with library.autocast(F16):
        h = layer(torch.ones(1, 1))
        with library.autocast(enabled=False):
            loss = h.pow(2).sum()
    loss.backward()
    assert layer.bias.grad is not None
    return {"loss": bool(loss.isfinite()), "gradient": float(layer.bias.grad)}


@record(
    "disabled-at-the-top",
    "autocast(enabled=False) with nothing around it",
    today="right",
    right="fp32 stays fp32, fp16 stays fp16; a block after it is bf16",
    check=lambda v: v == [F32, F16, BF16],
    refs=("case 63",),
    stock="right",
)
def disabled_at_top(library: Library) -> Any:
    with library.autocast(enabled=False):
        seen = [dtype_here(), (torch.ones(2, dtype=F16) * 2).dtype]
    with library.autocast(BF16):
        return [*seen, dtype_here()]


@record(
    "nested-dtypes",
    "bf16 inside fp16 inside bf16, and out again",
    today="right",
    right="bf16, fp16, bf16, fp16, bf16, fp32 on the way in and out",
    check=lambda v: v == [BF16, F16, BF16, F16, BF16, F32],
    stock="right",
)
def nested_dtypes(library: Library) -> Any:
    seen = []
    with library.autocast(BF16):
        seen.append(dtype_here())
        with library.autocast(F16):
            seen.append(dtype_here())
            with library.autocast(BF16):
                seen.append(dtype_here())
            seen.append(dtype_here())
        seen.append(dtype_here())
    return [*seen, dtype_here()]


@record(
    "enabled-inside-disabled",
    "an enabled block inside a disabled one inside an enabled one",
    today="right",
    right="bf16, fp32, bf16, fp32, bf16 and fp32 after all",
    check=lambda v: v == [BF16, F32, BF16, F32, BF16, F32],
    stock="right",
)
def enabled_inside_disabled(library: Library) -> Any:
    seen = []
    with library.autocast(BF16):
        seen.append(dtype_here())
        with library.autocast(enabled=False):
            seen.append(dtype_here())
            with library.autocast(BF16):
                seen.append(dtype_here())
            seen.append(dtype_here())
        seen.append(dtype_here())
    return [*seen, dtype_here()]


@record(
    "one-block-entered-inside-itself",
    "one autocast object, kept and entered again inside itself (a helper that shares it)",
    today="the object forgets the outer state: autocast stays on after both blocks",
    right="bf16 inside, fp32 after",
    check=lambda v: v == [BF16, BF16, F32],
)
def block_inside_itself(library: Library) -> Any:
    block, seen = library.autocast(BF16), []
    try:
        with block:
            with block:
                seen.append(dtype_here())
            seen.append(dtype_here())
        return [*seen, dtype_here()]
    finally:
        _switch_off()


@record(
    "decorated-recursion",
    "a decorated function that calls itself (a tree, a U-Net block)",
    today="the decorator shares one block between the calls: autocast stays on after the outermost one",
    right="bf16 in each call, fp32 after",
    check=lambda v: v == [BF16, BF16, BF16, F32],
)
def decorated_recursion(library: Library) -> Any:
    seen = []

    @library.autocast(BF16)  # type: ignore[untyped-decorator]
    def walk(depth: int) -> None:
        seen.append(dtype_here())
        if depth:
            walk(depth - 1)

    try:
        walk(2)
        return [*seen, dtype_here()]
    finally:
        _switch_off()


def _switch_off() -> None:
    """Put back what a faulty block left on, for the records that come after."""
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()


@record(
    "decorator",
    "a decorated function, called twice",
    today="right",
    right="bf16 in each call, fp32 after",
    check=lambda v: v == [BF16, BF16, F32],
    stock="right",
)
def decorator(library: Library) -> Any:
    @library.autocast(BF16)  # type: ignore[untyped-decorator]
    def product() -> torch.dtype:
        return dtype_here()

    return [product(), product(), dtype_here()]


@record(
    "decorated-generator",
    "a decorated generator function (a sampler, a data pipeline)",
    today="the block closes before the body runs: fp32, without a word",
    right="bf16 in the body and fp32 for the code that reads from it, or a refusal",
    check=lambda v: v == [BF16, F32, BF16, F32],
    refused=("generator",),
)
def decorated_generator(library: Library) -> Any:
    @library.autocast(BF16)  # type: ignore[untyped-decorator]
    def samples() -> Any:
        yield dtype_here()
        yield dtype_here()

    seen = []
    for inside in samples():
        seen += [inside, dtype_here()]
    return seen


@record(
    "decorated-coroutine",
    "a decorated async function",
    today="the block closes before the body runs: fp32, without a word",
    right="bf16 in the body, or a refusal",
    check=lambda v: v == [BF16, F32],
    refused=("async",),
)
def decorated_coroutine(library: Library) -> Any:
    import asyncio

    @library.autocast(BF16)  # type: ignore[untyped-decorator]
    async def answer() -> torch.dtype:
        return dtype_here()

    return [asyncio.run(answer()), dtype_here()]


@record(
    "an-error-inside-a-block",
    "an exception leaves two nested blocks",
    today="right",
    right="bf16 inside, fp32 after",
    check=lambda v: v == [BF16, F32],
    stock="right",
)
def error_inside(library: Library) -> Any:
    seen = []
    try:
        with library.autocast(F16), library.autocast(BF16):
            seen.append(dtype_here())
            int("planted")
    except ValueError:
        return [*seen, dtype_here()]
