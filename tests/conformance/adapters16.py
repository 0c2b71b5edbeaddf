"""Adapters and other small parts that are trained in 16 bits beside a frozen base (kind C)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from conformance.adapter import Library, Record, collector
from conformance.tools import BF16, F16, F32, copies, finite, near, read, same

RECORDS: list[Record] = []
record = collector(RECORDS, "C")

UNSCALED = "ValueError: Attempting to unscale FP16 gradients; no parameter is named"
MASTERS = ("lora_b.weight", "float32")


class _Adapted(nn.Module):
    """A frozen layer and two small factors beside it, as LoRA has them: base(x) + b(a(x)). With inputs of 1 a(x) is 1."""

    def __init__(self, base: torch.dtype, a: torch.dtype, b: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4, bias=False).to(base).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(4, 2, bias=False).to(a), nn.Linear(2, 4, bias=False).to(b)
        nn.init.constant_(self.lora_a.weight, 0.25)
        nn.init.ones_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))  # type: ignore[no-any-return]


Change = Callable[[nn.Module], None]


def _trained(library: Library, net: nn.Module, optimizer: Optimizer, dtype: torch.dtype, steps: int, before_step: Change | None = None) -> None:
    """The loop of a script for adapters: autocast, and a scaler under fp16."""
    scaler = library.scaler(1024.0, enabled=dtype is F16)
    library.watch(scaler, net, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        with library.autocast(dtype):
            loss = net(torch.ones(2, 4)).float().mean()
        scaler.scale(loss).backward()
        if before_step is not None:
            scaler.unscale_(optimizer)
            before_step(net)
        scaler.step(optimizer)
        scaler.update()


def _only_b(dtype: torch.dtype) -> tuple[_Adapted, list[nn.Parameter]]:
    """A model in which only the second factor is trained: its gradient is 1/4 in every element."""
    net = _Adapted(dtype, dtype, dtype)
    net.lora_a.requires_grad_(False)
    return net, list(net.lora_b.parameters())


def _small(dtype: torch.dtype, today: str) -> None:
    name = "fp16" if dtype is F16 else "bf16"

    @record(
        f"small-steps-of-a-{name}-adapter",
        f"an adapter in {name}, whose base is too, at a learning rate of 1e-3: twenty updates of 2.5e-4",
        today=today,
        right="0.995, or a refusal that names the adapter's weight and says float32",
        check=lambda v: near(v, 0.995, 1e-4),
        refused=MASTERS,
        refs=("case 23",),
    )
    def small(library: Library) -> Any:
        net, trained = _only_b(dtype)
        _trained(library, net, library.masters(SGD(trained, lr=1e-3)), dtype, 20)
        return read(library.full(trained[0]))[0]


_small(F16, UNSCALED)
_small(BF16, "1.0: each update is under half the spacing of bf16, and nothing is said")


@record(
    "factors-of-two-dtypes",
    "one factor of an adapter is fp16, the other fp32 (only what was loaded was cast): both in one optimizer",
    today=UNSCALED,
    right="both are where an fp32 run has them, to 1e-3, or a refusal that names the fp16 one and says float32",
    check=lambda v: near(v["got"], v["wanted"], 1e-3),
    refused=("lora_a.weight", "float32"),
    refs=("case 23",),
)
def two_dtypes(library: Library) -> Any:
    net, wide = _Adapted(F16, F16, F32), _Adapted(F32, F32, F32)
    trained, reference = ([p for p in n.parameters() if p.requires_grad] for n in (net, wide))
    plain = SGD(reference, lr=0.1)
    for _ in range(3):
        plain.zero_grad()
        wide(torch.ones(2, 4)).mean().backward()
        plain.step()
    _trained(library, net, library.masters(SGD(trained, lr=0.1)), F16, 3)
    return {"got": read(*(library.full(p) for p in trained)), "wanted": read(*reference)}


@record(
    "fp16-adapter-through-the-accelerator",
    "a frozen fp16 base and an fp16 adapter through an accelerator with mixed_precision='fp16'",
    today="stops with an error about dtypes (on a GPU: about unscaling), at a learning rate whose updates fp16 would lose anyway",
    right="0.995, or a refusal that names the weight and says float32",
    check=lambda v: near(v, 0.995, 1e-4),
    refused=MASTERS,
    refs=("case 23", "F15"),
    doors=("accelerator",),
)
def through_the_accelerator(library: Library) -> Any:
    net, trained = _only_b(F16)
    accelerator = library.accelerator("fp16")
    model, optimizer = accelerator.prepare(net, SGD(trained, lr=1e-3))
    for _ in range(20):
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()
    return read(library.full(trained[0]))[0]


@record(
    "unfrozen-fp16-base",
    "an fp32 adapter on a frozen fp16 base; then the base is unfrozen and given to the optimizer",
    today=UNSCALED,
    right="the base moves by lr x gradient = 0.025, or a refusal that names it and says float32",
    check=lambda v: near(v, 0.025, 1e-3),
    refused=("base.weight", "float32"),
    refs=("case 23",),
)
def unfrozen_base(library: Library) -> Any:
    net = _Adapted(F16, F32, F32)
    optimizer = library.masters(SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
    _trained(library, net, optimizer, F16, 1)
    net.base.requires_grad_(True)
    before = library.full(net.base.weight).clone()
    optimizer.add_param_group({"params": list(net.base.parameters())})
    _trained(library, net, optimizer, F16, 1)
    return float((before - library.full(net.base.weight)).float().mean())


class _Tokens(nn.Module):
    """An embedding before a frozen head. The gradient of the row of token 0 is 1, made of as many small ones as the token stands in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 4), nn.Linear(4, 1, bias=False).requires_grad_(False)
        nn.init.ones_(self.head.weight)
        nn.init.zeros_(self.tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids)).float().mean()  # type: ignore[no-any-return]


def _new_tokens(dtype: torch.dtype, today: str) -> None:
    name = "fp16" if dtype is F16 else "bf16"
    fields: dict[str, Any] = {"check": lambda v: near(v, -0.5, 1e-3), "refused": ("tokens.weight", "float32"), "refs": ("case 23", "case 42")}
    right = "the row moves by lr x 1 = 0.5, or a refusal that names it and says float32"
    title = f"the embedding of a frozen {name} model is trained for new tokens; one of them stands 4096 times in a batch"

    @record(f"new-tokens-in-a-{name}-embedding", title, today=today, right=right, **fields)
    def new_tokens(library: Library) -> Any:
        net = _Tokens().to(dtype)
        optimizer, scaler = library.masters(SGD(net.tokens.parameters(), lr=0.5)), library.scaler(16.0, enabled=dtype is F16)
        library.watch(scaler, net, optimizer)
        with library.autocast(dtype):
            loss = net(torch.zeros(4096, dtype=torch.long))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        return read(library.full(net.tokens.weight))[0]

    @record(
        f"new-tokens-in-a-{name}-embedding-through-the-accelerator", f"{title}, through an accelerator", today=today, right=right,
        doors=("accelerator",), **fields,
    )  # fmt: skip
    def prepared_tokens(library: Library) -> Any:
        net, accelerator = _Tokens().to(dtype), library.accelerator(name)
        model, optimizer = accelerator.prepare(net, SGD(net.tokens.parameters(), lr=0.5))
        accelerator.backward(model(torch.zeros(4096, dtype=torch.long)))
        optimizer.step()
        return read(library.full(net.tokens.weight))[0]


_new_tokens(F16, UNSCALED)
_new_tokens(BF16, "it moves by 0.03: the sum of the gradients stops at 1/16, and nothing is said")


@record(
    "norms-trained-in-fp16",
    "only the norms of an fp16 model are trained (modules_to_save, LayerNorm tuning)",
    today=UNSCALED,
    right="the shift moves to -0.005, or a refusal that names it and says float32",
    check=lambda v: near(v, -0.005, 1e-3),
    refused=("norm.bias", "float32"),
    refs=("case 23",),
)
def norms_trained(library: Library) -> Any:
    net = nn.Sequential()
    net.add_module("body", nn.Linear(4, 4).requires_grad_(False))
    net.add_module("norm", norm := nn.LayerNorm(4))
    net.to(F16)
    _trained(library, net, library.masters(SGD(norm.parameters(), lr=1e-3)), F16, 20)
    return read(library.full(norm.bias))[0]


@record(
    "clipped-fp16-adapter",
    "an fp16 adapter with unscale_ and clip_grad_norm_ before each step",
    today=UNSCALED,
    right="a norm of 0.707 clipped to 0.1, so that eight elements move by 0.00354 a step; or a refusal that names the weight and says float32",
    check=lambda v: near(v, 1.0 - 3 * 0.1 / 8**0.5 * 0.1, 1e-3),
    refused=MASTERS,
    refs=("case 23", "case 50"),
)
def clipped(library: Library) -> Any:
    net, trained = _only_b(F16)
    _trained(library, net, library.masters(SGD(trained, lr=0.1)), F16, 3, lambda n: _clip(n.parameters()))
    return read(library.full(trained[0]))[0]


def _clip(parameters: Iterable[Tensor]) -> None:
    clip_grad_norm_(parameters, 0.1)


@record(
    "overflow-in-an-fp16-adapter",
    "the gradient of an fp16 adapter is beyond fp16's range at every loss scale, and then an ordinary one",
    today=UNSCALED,
    right="no weight changes in the bad step, the good one takes 0.025 off; or a refusal that names the weight and says float32",
    check=lambda v: v["kept"] and v["finite"] and near(v["value"], 0.975, 1e-3),
    refused=MASTERS,
    refs=("case 23",),
)
def overflow_in_adapter(library: Library) -> Any:
    net, trained = _only_b(F16)
    optimizer, scaler = library.masters(SGD(trained, lr=0.1)), library.scaler(1024.0)
    library.watch(scaler, net, optimizer)
    kept = False
    for factor in (1e9, 1.0):
        optimizer.zero_grad()
        before = copies([library.full(p) for p in trained])
        with library.autocast(F16):
            loss = (net(torch.ones(2, 4)).float() * factor).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        kept = kept or same(before, [library.full(p) for p in trained])
    return {"kept": kept, "finite": finite(trained), "value": read(library.full(trained[0]))[0]}


@record(
    "decay-of-a-bf16-adapter",
    "weight decay 0.1 at a learning rate of 1e-3 on a bf16 adapter that gets no gradient, 100 steps",
    today="1.0: decay alone never moves a bf16 weight",
    right="0.990, or a refusal that names the weight and says float32",
    check=lambda v: near(v, 0.99005, 1e-4),
    refused=MASTERS,
    refs=("case 23", "case 38"),
)
def decay(library: Library) -> Any:
    w = nn.Parameter(torch.ones(2, 4, dtype=BF16))
    optimizer = library.masters(AdamW([w], lr=1e-3, weight_decay=0.1))
    for _ in range(100):
        w.grad = torch.zeros_like(w)
        optimizer.step()
    return read(library.full(w))[0]


@record(
    "average-of-a-bf16-adapter",
    "an average (decay 0.99) of a bf16 adapter that moves from 1 to 1.005 for good",
    today="the average stays at 1: its own steps are under half the spacing of bf16",
    right="1 + 0.005 x (1 - 0.99^100) = 1.00317, to 1e-4",
    check=lambda v: near(v, 1.00317, 1e-4),
    refs=("case 23",),
)
def average(library: Library) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    model = library.cast_model(layer, BF16)
    optimizer = library.masters(SGD(model.parameters(), lr=0.005))
    mean = library.ema(model, 0.99)
    mean.update()
    layer.weight.grad = torch.full_like(layer.weight, -1.0)
    optimizer.step()
    for _ in range(100):
        mean.update()
    with mean.applied():
        return read(library.full(layer.weight))[0]
