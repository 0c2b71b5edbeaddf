"""Products and copies timed against each other. Nothing here decides anything."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")
WAYS = ("fp32", "native", "emulated")
FAR = 3.0  # one that is so many times slower than the best is not run again
PATIENCE = 0.05  # seconds of CPU time for the rounds of one family
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Race:
    """Operations per second of one product in fp32, in torch's 16-bit kernel and emulated; 0 for one that this torch has no kernel for."""

    rates: tuple[float, float, float]


@dataclass(frozen=True)
class Work:
    """A product: of activations, which are 16-bit, and weights, which are fp32; flops of its forward pass, which are twice as many backward."""

    function: Callable[..., Tensor]
    activations: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    flops: float

    def run(self, way: str, dtype: torch.dtype) -> None:
        """Once forward, as autocast would in this way, and backward."""
        given = [x.to(torch.float32 if way == "fp32" else dtype).requires_grad_() for x in self.activations]
        weights = [w.detach().requires_grad_() for w in self.weights]
        if way == "fp32":
            y = self.function(*given, *weights)
        elif way == "native":
            y = self.function(*given, *(w.to(dtype) for w in weights))
        else:
            y = self.function(*(x.float() for x in given), *(w.to(dtype).float() for w in weights)).to(dtype)
        # a scalar to begin from: torch checks gradients that it is given with sympy, whose import takes 0.6 s
        y.view(-1).dot(torch.ones(y.numel(), dtype=y.dtype, device="cpu")).backward()  # type: ignore[no-untyped-call]


def products(format: str) -> dict[str, Race]:
    """Each family of products in one 16-bit format on the CPU: operations per second of one thread, by its CPU time.

    A small product first, which a way that is far slower than the best does not survive, then one of the size of a small network's.
    """
    return _apart(lambda: {family: _race(DTYPES[format], *make()) for family, make in _WORKS.items()}, threads=1)


def _matmul() -> tuple[Work, Work]:
    def of(rows: int, width: int) -> Work:
        return Work(F.linear, (_normal(rows, width),), (_normal(width, width),), 2.0 * rows * width * width)

    return of(64, 256), of(128, 512)


def _convolution() -> tuple[Work, Work]:
    def of(batch: int, channels: int, side: int) -> Work:
        x, w = _normal(batch, channels, side, side), _normal(channels, channels, 3, 3)
        return Work(lambda x, w: F.conv2d(x, w, padding=1), (x,), (w,), 18.0 * batch * side * side * channels * channels)

    return of(2, 16, 16), of(4, 32, 16)


def _attention() -> tuple[Work, Work]:
    def of(heads: int, tokens: int, width: int) -> Work:
        operands = tuple(_normal(1, heads, tokens, width) for _ in range(3))
        return Work(F.scaled_dot_product_attention, operands, (), 4.0 * heads * tokens * tokens * width)

    return of(2, 64, 64), of(4, 128, 64)


_WORKS: Mapping[str, Callable[[], tuple[Work, Work]]] = {"matmul": _matmul, "convolution": _convolution, "attention": _attention}


def _race(dtype: torch.dtype, small: Work, large: Work) -> Race:
    """Operations per second of each way, by its least time; a way that was dropped keeps what it had in the small product."""
    least = _rounds(WAYS, lambda way: small.run(way, dtype), 2)
    rates = {way: 3.0 * small.flops / seconds for way, seconds in least.items()}
    best = min(least[way] for way in ("native", "emulated") if way in least)
    near = [way for way in WAYS if least.get(way, float("inf")) <= FAR * best]
    least = _rounds(near, lambda way: large.run(way, dtype), 4)
    rates |= {way: 3.0 * large.flops / seconds for way, seconds in least.items()}
    return Race((rates["fp32"], rates.get("native", 0.0), rates["emulated"]))


def _rounds(ways: Sequence[str], run: Callable[[str], None], rounds: int) -> dict[str, float]:
    """Least seconds of CPU time of each way, taken in turns so that all see the same machine. The first round is not counted: kernels are made in it.

    At least one round is counted, and no further one begun when PATIENCE is over. A way without a kernel is missing.
    """
    least: dict[str, float] = {}
    begun = time.thread_time()
    for count in range(rounds):
        for way in ways if count == 0 else [w for w in least if least[w] <= FAR * min(least.values()) or count == 1]:
            before = time.thread_time()
            try:
                run(way)
            except RuntimeError:  # torch: not implemented for 'Half'
                least.pop(way, None)
                continue
            taken = max(time.thread_time() - before, 1e-9)
            least[way] = taken if count <= 1 else min(taken, least[way])
        if count and time.thread_time() - begun > PATIENCE:
            break
    return least


def bandwidth() -> float:
    """Bytes that a copy reads and writes per second, by all threads that torch uses; of 64 MiB, which no cache holds."""
    return _apart(_copies)


def _copies() -> float:
    source = torch.ones(2**24, dtype=torch.float32, device="cpu")
    target = torch.zeros_like(source)
    least = float("inf")
    for _ in range(5):
        before = time.perf_counter()
        target.copy_(source)
        least = min(least, time.perf_counter() - before)
    return 2.0 * source.nbytes / least


def gpu_products(device: torch.device, formats: Sequence[str]) -> tuple[dict[str, float], float]:
    """Operations per second of a square matrix product on a GPU in each format, and bytes that a copy moves there per second.

    tf32 is left out where torch's switches for it were set by their newer names, which say what the older ones cannot.
    """
    return _apart(lambda: _on_gpu(device, formats))


def _on_gpu(device: torch.device, formats: Sequence[str]) -> tuple[dict[str, float], float]:
    side = 4096
    rates: dict[str, float] = {}
    with torch.cuda.device(device):
        for format in formats:
            a = torch.ones(side, side, dtype=DTYPES[format], device=device)
            try:
                before = torch.get_float32_matmul_precision()
            except RuntimeError:
                if format == "tf32":
                    continue
                before = ""
            if before:
                torch.set_float32_matmul_precision("high" if format == "tf32" else "highest")
            try:
                rates[format] = 2.0 * side**3 / _gpu_seconds(lambda a=a: a @ a)  # type: ignore[misc]  # bound now
            finally:
                if before:
                    torch.set_float32_matmul_precision(before)
        source = torch.ones(2**26, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        return rates, 2.0 * source.nbytes / _gpu_seconds(lambda: target.copy_(source))


def _gpu_seconds(run: Callable[[], Any]) -> float:
    """Least seconds of four runs on the current stream, after one that is not counted."""
    run()
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(5)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    return min(float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)) / 1e3


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, device="cpu", generator=_numbers())


def _numbers() -> torch.Generator:
    """Random numbers of our own: measuring does not move those of a run."""
    return torch.Generator(device="cpu").manual_seed(0)


def _apart(work: Callable[[], T], threads: int = 0) -> T:
    """`work()` in a thread of its own, where no autocast, mode, hook or switched-off gradient of the caller's is in force.

    threads: how many torch uses in it; 0 for as many as elsewhere. Other threads keep theirs.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        usual = torch.get_num_threads()
        if threads:
            torch.set_num_threads(threads)
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  handed to the caller below
            errors.append(error)
        finally:
            if threads:
                torch.set_num_threads(usual)  # what threads that begin from now on use

    thread = threading.Thread(target=run, name="halfstep-rates", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
