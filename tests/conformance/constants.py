"""Constants that do not fit 16 bits: masks, eps, clamps (kind B)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer, RMSprop

from conformance.adapter import Library, NotOffered, Record, collector
from conformance.diagnosed import NAMED, Function, Part, Seen, by_hand, first_line, gradient_of_inputs, identity, named, net, numbers, train, whole
from conformance.tools import F16, finite, near

RECORDS: list[Record] = []
record = collector(RECORDS, "B")

MASKED = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
PADDED = torch.tensor([[False, True, True], [True, True, True], [False, False, False]])
ROWS = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


by_hand(
    record,
    "mask-constant-beyond-fp16",
    "attention scores of an fp16 block, masked_fill(mask, -1e9)",
    "RuntimeError: the value cannot be converted to Half without overflow, without a module's name",
    lambda q: (q @ q.t()).masked_fill(MASKED, -1e9).softmax(-1),
    ROWS,
    ("mask",),
    "attend",
    refs=("case 01",),
)
by_hand(
    record,
    "mask-constant-through-where",
    "torch.where(mask, scores, constant) with a constant of -1e9 cast to the scores' dtype, and a row that is all padding",
    "the constant is -inf in fp16: the row of padding is NaN",
    lambda q: torch.where(PADDED, torch.tensor(-1e9).to(q.dtype), q @ q.t()).softmax(-1),
    ROWS,
    ("mask",),
    "attend",
    refs=("case 01",),
)
by_hand(
    record,
    "finfo-min-and-a-row-of-low-scores",
    "torch.finfo(scores.dtype).min added to scores between -20 and -40",
    "the sum rounds to -inf in fp16: softmax of a row of -inf is NaN",
    lambda s: (s + torch.full_like(s, torch.finfo(s.dtype).min)).softmax(-1),
    torch.tensor([[-20.0, -30.0, -40.0]]),
    ("mask",),
    "attend",
    refs=("case 02",),
)
by_hand(
    record,
    "additive-mask-times-a-constant",
    "scores + (1 - mask) * -1e9 with the mask in the scores' dtype, and a row that is all padding",
    "the product is -inf in fp16: the row of padding is NaN",
    lambda s: (s + PADDED.to(s.dtype) * -1e9).softmax(-1),
    ROWS[:, :3].contiguous(),
    ("mask",),
    "attend",
)
by_hand(
    record,
    "mask-argument-of-attention",
    "F.scaled_dot_product_attention with an fp32 mask of 0 and -1e9, and a row that is all padding",
    "the mask is cast to fp16 with its queries, where -1e9 is -inf: the row of padding is NaN or zeros",
    lambda q: F.scaled_dot_product_attention(q[None, None], q[None, None], q[None, None], attn_mask=(PADDED * -1e9)[None, None])[0, 0],
    ROWS,
    ("mask",),
    "attend",
)
by_hand(
    record,
    "padding-before-a-maximum",
    "x.masked_fill(padding, -1e9).amax(-1): pooling over tokens with a constant made for fp32",
    "RuntimeError without a module's name",
    lambda s: s.masked_fill(MASKED, -1e9).amax(-1),
    ROWS[:, :3].contiguous(),
    ("mask",),
    "pool",
)
by_hand(
    record,
    "eps-in-a-division",
    "a / (a + 1e-8) with a = 0",
    "1e-8 is 0 in fp16: 0 / 0 = NaN",
    lambda a: a / (a + 1e-8),
    torch.zeros(1, 2),
    ("eps",),
    "ratio",
    refs=("case 03",),
)
by_hand(
    record,
    "eps-in-a-logarithm",
    "(p + 1e-8).log() with p = 0, an entropy by hand",
    "1e-8 is 0 in fp16: log(0) = -inf",
    lambda p: (p + 1e-8).log(),
    torch.zeros(1, 2),
    ("eps",),
    "entropy",
)
by_hand(
    record,
    "eps-that-only-the-gradient-needs",
    "(x * x + 1e-12).sqrt() with x = 0: a Charbonnier loss",
    "the forward pass is right, and the gradient 0 / 0 = NaN",
    lambda x: (x * x + 1e-12).sqrt(),
    torch.zeros(1, 2),
    ("eps",),
    "edge",
    gradient=True,
)
by_hand(
    record,
    "eps-below-a-clamp",
    "1 / norm.clamp(min=1e-12) of a vector of zeros",
    "clamp(min=0): the inverse is inf, and 0 * inf = NaN",
    lambda x: x * (1 / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)),
    torch.zeros(1, 2),
    ("clamp", "eps"),
    "scale",
)
by_hand(
    record,
    "normalize-a-vector-of-zeros",
    "F.normalize of zeros in an fp16 block, default arguments",
    "the default eps of 1e-12 is 0 in fp16: NaN",
    lambda x: F.normalize(x, dim=1),
    torch.zeros(1, 4),
    (),
    "project",
    refs=("case 04",),
)
by_hand(
    record,
    "cosine-of-a-vector-of-zeros",
    "F.cosine_similarity with a padding vector in an fp16 block",
    "the default eps of 1e-8 is 0 in fp16: NaN",
    lambda x: F.cosine_similarity(x, torch.ones_like(x)),
    torch.zeros(1, 4),
    (),
    "match",
    refs=("case 06",),
)
by_hand(
    record,
    "one-minus-a-probability",
    "log(1 - p) of p = sigmoid(10).clamp(1e-7, 1 - 1e-7), a focal loss by hand",
    "p rounds to 1, and so does the clamp's limit: the loss is inf",
    lambda z: -(1 - torch.sigmoid(z).clamp(1e-7, 1 - 1e-7)).log(),
    torch.full((1, 1), 10.0),
    ("clamp",),
    "focal",
    refs=("case 11",),
)


@record(
    "gradient-of-a-normalized-vector-of-zeros",
    "the backward pass of F.normalize of zeros in an fp16 block, default arguments",
    today="the default eps of 1e-12 is 0 in fp16: the gradient is NaN",
    right=f"a finite gradient, {NAMED} (eps, clamp or overflow, project)",
    check=lambda v: all(map(math.isfinite, v.values)) or v.names(("eps", "clamp", "overflow", "nonfinite"), "project"),
    doors=("loop", "accelerator"),
    refs=("case 04",),
)
def gradient_of_normalize(library: Library) -> Any:
    model = net(lambda x: F.normalize(x, dim=1), 4, "project")
    run = train(library, model)

    def call() -> Tensor:
        return run.forward(torch.zeros(1, 4)).float().sum()

    run.backward(call())
    part = model[1]
    if isinstance(part, Part) and part.met is not F16:
        raise NotOffered(f"fp16 was asked for, and the layers ran in {part.met}")
    gradient = gradient_of_inputs(model)
    return Seen(numbers(gradient), [], "" if finite([gradient]) else first_line(library, run.model, call))


def _fp16_weights(library: Library, make: Callable[[list[nn.Parameter]], Optimizer]) -> list[float]:
    """One step on fp16 weights of 1 with gradients of 1e-4, 0 and 1e-2."""
    w = nn.Parameter(torch.ones(3, dtype=F16))
    optimizer, scaler = library.masters(make([w])), library.scaler(enabled=False)
    library.watch(scaler, optimizer)
    scaler.scale((w * torch.tensor([1e-4, 0.0, 1e-2], dtype=F16)).float().sum()).backward()
    scaler.step(optimizer)
    return numbers(w)


@record(
    "adam-on-fp16-weights",
    "one step of Adam, lr 1e-3, on fp16 weights with gradients of 1e-4, 0 and 1e-2",
    today="the square of the gradient and eps are both 0 in fp16: the weights become NaN or inf",
    right="0.999, 1, 0.999, or a refusal that says to use float32",
    check=lambda v: near(v, [0.999, 1.0, 0.999], 5e-4),
    refused=("float32",),
    refs=("case 15",),
)
def adam_on_fp16(library: Library) -> Any:
    return _fp16_weights(library, lambda ps: Adam(ps, lr=1e-3))


@record(
    "rmsprop-on-fp16-weights",
    "one step of RMSprop, lr 1e-3, on the same weights and gradients",
    today="NaN and inf",
    right="0.99, 1, 0.99, or a refusal that says to use float32",
    check=lambda v: near(v, [0.99, 1.0, 0.99], 1e-3),
    refused=("float32",),
)
def rmsprop_on_fp16(library: Library) -> Any:
    return _fp16_weights(library, lambda ps: RMSprop(ps, lr=1e-3))


class Weighted(nn.Module):
    """A linear layer that changes nothing, and a function after it: a model that can be cast."""

    def __init__(self, width: int, function: Function) -> None:
        super().__init__()
        self.body, self.function = identity(width), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.body(x))


def _in_a_16_bit_model(name: str, call: str, function: Function, place: str) -> None:
    @record(
        name,
        f"{call} of a vector of zeros in a model whose weights are all fp16",
        today="the default eps is 0 in fp16: NaN",
        right=f"zeros, {NAMED} (eps or clamp, {place})",
        check=lambda v: v.right or v.names(("eps", "clamp"), place),
        refs=("case 04" if "normalize" in call else "case 06",),
    )
    def zeros(library: Library) -> Any:
        return whole(library, lambda: named(Weighted(4, function), place), torch.zeros(1, 4, dtype=F16), dtype=F16)


_in_a_16_bit_model("normalize-zeros-in-a-16-bit-model", "F.normalize", lambda x: F.normalize(x, dim=1), "project")
_in_a_16_bit_model("cosine-of-zeros-in-a-16-bit-model", "F.cosine_similarity", lambda x: F.cosine_similarity(x, torch.ones_like(x)), "match")
