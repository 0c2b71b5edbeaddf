"""What does it cost to carry an op policy: by halfstep's function mode, or by kernels of one's own for the AutocastCPU dispatch key?

One training step (forward and backward) of a GPT-2 style model of 23 M parameters on 4 x 128 tokens and of a small convolutional network; all
variants in one process, interleaved, the order rotated every round, medians and ratios; one variant against itself (A/A) says how noisy the
machine was. "emulated" rounds operands and multiplies in fp32, so that the carriers do the same work; with --native torch.autocast alone and its
16-bit kernels are measured too. `per_call_us`: what the mode adds to one call. Run:

    python benchmarks/autocast_mechanism.py [--rounds 7] [--dtype bf16] [--models gpt2 conv] [--native] [--small]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfstep import amp
from halfstep.amp.mode import Applied, Switched
from halfstep.amp.routes import tables
from halfstep.hardware import FAMILIES, doctor
from halfstep.policy import parse

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class GPT(nn.Module):
    """GPT-2's blocks; the head is tied to the embedding."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(width),
                    Attention(width, heads),
                    nn.LayerNorm(width),
                    nn.Linear(width, 4 * width),
                    nn.GELU(),
                    nn.Linear(4 * width, width),
                ]
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of the next tokens."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for norm, attention, norm2, up, act, down in self.blocks:
            x = x + attention(norm(x))
            x = x + down(act(up(norm2(x))))
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Conv(nn.Module):
    """Convolutions, batch norm and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(4):
            layers += [nn.Conv2d(3 if i == 0 else width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The loss against class 0."""
        logits = self.head(self.body(images).mean((-1, -2)))
        return F.cross_entropy(logits, torch.zeros(len(images), dtype=torch.int64))


class Rounded(torch.autograd.Function):
    """x @ w + bias with 16-bit operands and result and fp32 sums: what the kernels below call."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x (rows, in) and w (in, out) in any format to (rows, out) in `dtype`."""
        x16, w16 = x.to(dtype), w.to(dtype)
        ctx.save_for_backward(x16, w16)
        ctx.formats = (x.dtype, w.dtype, None if bias is None else bias.dtype)
        wide = (x16.float(), w16.float())
        return (torch.mm(*wide) if bias is None else torch.addmm(bias.to(dtype).float(), *wide)).to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, rounded as 16-bit kernels round them."""
        x, w = ctx.saved_tensors
        wide = grad.float()
        grad_bias = None if ctx.formats[2] is None else wide.sum(0).to(grad.dtype).to(ctx.formats[2])
        return (wide @ w.float().mT).to(grad.dtype).to(ctx.formats[0]), (x.float().mT @ wide).to(grad.dtype).to(ctx.formats[1]), grad_bias, None


@contextlib.contextmanager
def kernels(dtype: torch.dtype, emulate: bool) -> Iterator[None]:
    """torch.autocast with Python kernels for the AutocastCPU key: products (when emulating) and the fp32 list's ops of these two models.

    They hold for the whole process while they are registered.
    """
    library = torch.library.Library("aten", "IMPL")

    def outside(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args, **kwargs) -> Tensor:
            before = torch.is_autocast_enabled("cpu")
            torch.set_autocast_enabled("cpu", False)
            try:
                return function(*args, **kwargs)
            finally:
                torch.set_autocast_enabled("cpu", before)

        return run

    def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return Rounded.apply(x.flatten(0, -2), w.mT, bias, dtype).unflatten(0, x.shape[:-1])

    def attention(q, k, v, mask=None, dropout=0.0, causal=False, *, scale=None, enable_gqa=False) -> Tensor:
        wide = (t.to(dtype).float() for t in (q, k, v))
        return F.scaled_dot_product_attention(*wide, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa).to(dtype)

    def convolution(x, w, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Tensor:
        wide = (None if t is None else t.to(dtype).float() for t in (x, w, bias))
        return F.conv2d(*wide, stride, padding, dilation, groups).to(dtype)

    def layer_norm(x, shape, weight=None, bias=None, eps=1e-5, cudnn=True) -> Tensor:
        return torch.layer_norm(x.float(), shape, weight, bias, eps, cudnn)

    products = {"linear": linear, "scaled_dot_product_attention": attention, "conv2d": convolution} if emulate else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels of torch are replaced
        for name, function in (products | {"layer_norm": layer_norm}).items():
            library.impl(name, outside(function), "AutocastCPU")
    try:
        with torch.autocast("cpu", dtype, cache_enabled=False):
            yield
    finally:
        library._destroy()


@contextlib.contextmanager
def mode(dtype: torch.dtype, op_list: str, emulate: bool) -> Iterator[None]:
    """halfstep's block with emulation chosen by hand."""
    with Switched("cpu", True, dtype, False), Applied("cpu", tables("cpu", op_list, (), (), FAMILIES if emulate else ())):
        yield


class Bare(TorchFunctionMode):
    """The least that a mode can do."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> object:
        return func(*args, **(kwargs or {}))


class Timed(nn.Module):
    """Says how long a call of its submodule takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> float:
        """Microseconds."""
        return microseconds(lambda: self.inner(x))


def microseconds(call: Callable[[], object], repeat: int = 1500) -> float:
    """Processor time of one call: the least of many, which other processes disturb least."""
    found = []
    for _ in range(40):
        begun = time.process_time()
        for _ in range(repeat):
            call()
        found.append((time.process_time() - begun) / repeat * 1e6)
    return min(found)


def per_call(dtype: torch.dtype) -> dict[str, float]:
    """What one call pays, in microseconds, on tensors of one element."""
    x, half = torch.ones(1), torch.ones(1, dtype=dtype)
    calls = {"left alone: x.neg()": (x.neg, x.neg), "attribute: x.shape": (lambda: x.shape, lambda: x.shape)}
    calls["cast: half.exp(), against half.float().exp()"] = (half.exp, lambda: half.float().exp())
    found = {}
    for name, (ours, torchs) in calls.items():
        with torch.autocast("cpu", dtype, cache_enabled=False):
            base = microseconds(torchs)
        with mode(dtype, "cuda", True):
            found[name] = round(microseconds(ours) - base, 2)
    plain, bound = Timed(), Timed()
    amp.bind(bound, parse("bf16-mixed"), torch.device("cpu"))
    found["submodule of a bound model"] = round(bound(x) - plain(x), 2)
    block = microseconds(lambda: amp.autocast("cpu", dtype).__enter__().__exit__(None, None, None), 200)
    found["a whole block, entered and left"] = round(block, 2)
    outside = microseconds(x.neg)
    with Bare():
        found["a mode that does nothing: x.neg()"] = round(microseconds(x.neg) - outside, 2)
    return found


def step(model: nn.Module, batch: Tensor, block: contextlib.AbstractContextManager) -> tuple[float, float]:
    """Seconds of one step by the clock, and of processor time (over all threads), which a busy machine changes less."""
    model.zero_grad()
    begun, used = time.perf_counter(), time.process_time()
    with block:
        loss = model(batch)
    loss.backward()
    return time.perf_counter() - begun, time.process_time() - used


def variants(dtype: torch.dtype, native: bool) -> dict[str, Callable[[], contextlib.AbstractContextManager]]:
    """Blocks by name; the first is what ratios are taken to."""

    def torchs() -> contextlib.AbstractContextManager:
        return torch.autocast("cpu", dtype, cache_enabled=False)

    emulated = {
        "emulated, mode, CPU list": lambda: mode(dtype, "device", True),
        "emulated, mode, CPU list again (A/A)": lambda: mode(dtype, "device", True),
        "emulated, mode, CUDA list": lambda: mode(dtype, "cuda", True),
        "emulated, AutocastCPU kernels": lambda: kernels(dtype, True),
    }
    with_torch = {
        "torch.autocast": torchs,
        "torch.autocast again (A/A)": torchs,
        "native, mode, CUDA list": lambda: mode(dtype, "cuda", False),
        "native, AutocastCPU kernels": lambda: kernels(dtype, False),
    }
    return {"fp32": contextlib.nullcontext} | emulated | (with_torch if native else {})


def _ms(found: list[tuple[float, float]], clock: int) -> float:
    return round(1e3 * statistics.median(pair[clock] for pair in found), 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--models", nargs="+", choices=["gpt2", "conv"], default=["gpt2", "conv"])
    parser.add_argument("--small", action="store_true", help="two layers of width 64: for a test of this script")
    parser.add_argument("--native", action="store_true", help="torch's own 16-bit kernels too: minutes on a CPU without the instructions")
    options = parser.parse_args()
    dtype = DTYPES[options.dtype]
    torch.manual_seed(0)
    gpt = GPT(64, 2, 2, 100) if options.small else GPT(384, 6, 6, 32000)
    made = {
        "gpt2": (gpt, torch.randint(0, 100, (4, 128))),
        "conv": (Conv(8 if options.small else 32), torch.randn(4 if options.small else 16, 3, 32, 32)),
    }
    results = {}
    for name in options.models:
        model, batch = made[name]
        blocks = variants(dtype, options.native)
        times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in blocks}
        for round_ in range(options.rounds + 1):
            order = list(blocks)
            for variant in order[round_ % len(order) :] + order[: round_ % len(order)]:
                seconds = step(model, batch, blocks[variant]())
                if round_:  # the first round warms up
                    times[variant].append(seconds)
        bases = {"mode_cpu_list": times["emulated, mode, CPU list"]} | ({"torch": times["torch.autocast"]} if options.native else {})
        rows = {variant: {"ms": _ms(found, 0), "cpu_ms": _ms(found, 1)} for variant, found in times.items()}
        for variant, found in times.items():
            for against, base in bases.items():
                rows[variant][f"ratio_to_{against}"] = round(_ms(found, 0) / _ms(base, 0), 3)
                rows[variant][f"cpu_ratio_to_{against}"] = round(_ms(found, 1) / _ms(base, 1), 3)
        results[name] = {"parameters": sum(p.numel() for p in model.parameters()), "rows": rows}
    facts = {"machine": doctor("cpu").as_dict(), "threads": torch.get_num_threads(), "rounds": options.rounds, "dtype": options.dtype}
    print(json.dumps(facts | {"per_call_us": per_call(dtype), "models": results}, indent=1))


if __name__ == "__main__":
    main()
