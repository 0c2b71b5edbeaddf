"""Laws of wrapped optimizers, over all of torch.optim and a library of others: fp32 changes no bit, 16-bit weights lose no update."""

import io
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from halfstep import errors
from halfstep.optim import full_values, master_of
from halfstep.optim.wrap import Wrapped, wrap

Make = Callable[[Iterable[Any]], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda ps: optim.AdamW(ps, lr=0.01),
    "adamw-foreach": lambda ps: optim.AdamW(ps, lr=0.01, foreach=True),
    "adamw-fused": lambda ps: optim.AdamW(ps, lr=0.01, fused=True),
    "adam": lambda ps: optim.Adam(ps, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda ps: optim.Adam(ps, lr=0.01, amsgrad=True),
    "nadam": lambda ps: optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: optim.RAdam(ps, lr=0.01),
    "adamax": lambda ps: optim.Adamax(ps, lr=0.01),
    "sgd": lambda ps: optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9),
    "nesterov": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "momentum-fused": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda ps: optim.RMSprop(ps, lr=0.01, momentum=0.9),
    "rmsprop-centered": lambda ps: optim.RMSprop(ps, lr=0.01, centered=True),
    "adagrad": lambda ps: optim.Adagrad(ps, lr=0.01),
    "adadelta": optim.Adadelta,
    "rprop": lambda ps: optim.Rprop(ps, lr=0.01),
    "asgd": lambda ps: optim.ASGD(ps, lr=0.01),
    "adafactor": lambda ps: optim.Adafactor(ps, lr=0.01),
    "muon": lambda ps: optim.Muon(ps, lr=0.01),
}
SHAPES = ((5, 7), (7,), (3, 1, 2), (1,), (), (40, 7), (0, 3), (9,))
TAKES = {"muon": ((5, 7), (40, 7), (9, 2)), "adafactor": [s for s in SHAPES if 0 not in s]}  # matrices only; divides by the number of elements
LIMIT = 900  # bytes of a bucket, so that there are several


def made(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    """Weights that 16 bits hold exactly, as fp32 or in 16 bits."""
    draws = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=draws) for s in shapes]
    return [nn.Parameter(v.bfloat16().float().half().to(dtype)) for v in values]


def feed(held: Iterable[Tensor], step: int, factor: float = 1.0) -> None:
    """Gradients that every format here holds exactly."""
    draws = torch.Generator().manual_seed(1000 + step)
    for p in held:
        gradient = (torch.randn(p.shape, generator=draws) * 0.3).bfloat16().float().half().float()
        p.grad = (gradient * factor).to(p.dtype)


def weights(held: Iterable[Tensor]) -> list[Tensor]:
    return [full_values(p).detach().clone() for p in held]


def pair(name: str, dtype: torch.dtype, **options: Any) -> tuple[list[nn.Parameter], optim.Optimizer, list[nn.Parameter], Wrapped]:
    shapes = TAKES.get(name, SHAPES)
    one, other = made(shapes=shapes), made(dtype, shapes)
    return one, OPTIMIZERS[name](one), other, wrap(OPTIMIZERS[name](other), bucket_bytes=LIMIT, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_weights_in_buckets_come_out_bit_for_bit(name: str) -> None:
    """Factor 1 is the optimizer's own step; another factor goes through buckets, and the gradients of the user are left alone."""
    one, plain, other, wrapped = pair(name, torch.float32)
    for step in range(5):
        factor = (0.5, 1.0, 0.25)[step % 3]
        feed(one, step, factor)
        feed(other, step)
        before = [p.grad.clone() for p in other]
        plain.step()
        wrapped.step(factor=factor)
        for p, g in zip(other, before, strict=True):
            assert torch.equal(p.grad, g)
    assert wrapped.buckets >= 3
    for p, q in zip(one, other, strict=True):
        assert torch.equal(p, q)
        assert plain.state[p].keys() == wrapped.state[q].keys()
        for key, value in plain.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(wrapped.state[q][key])), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_split_weights_follow_fp32_ones(name: str, dtype: torch.dtype) -> None:
    one, plain, other, wrapped = pair(name, dtype, weights="split")
    start = weights(one)
    for step in range(5):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    assert wrapped.buckets >= 3
    largest = max(float(torch.stack((w, p.detach())).abs().max()) for w, p in zip(start, one, strict=True) if w.numel())
    for was, p, q in zip(start, one, other, strict=True):
        assert q.dtype == dtype
        assert torch.equal(q, full_values(q).to(dtype))
        assert q.numel() == 0 or float((p - full_values(q)).detach().abs().max()) <= 2 * 2.0**-23 * largest
        assert q.numel() == 0 or not torch.equal(full_values(q), was)


CLOSE = ("adamw", "adam", "amsgrad", "nadam", "radam", "adamax", "momentum", "nesterov", "rmsprop", "muon")


@pytest.mark.parametrize("states", ["int8", "bf16"])
@pytest.mark.parametrize("name", CLOSE)
def test_encoded_states_stay_close(name: str, states: str) -> None:
    """The way that weights go differs from that under fp32 states by a small part of its length; all weights and gradients are alike."""
    one, plain, other, wrapped = pair(name, torch.bfloat16, weights="split", states=states)
    start = weights(one)
    for step in range(5):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    way = torch.cat([(p.detach() - w).flatten() for p, w in zip(one, start, strict=True)])
    apart = torch.cat([(p.detach() - full_values(q)).flatten() for p, q in zip(one, other, strict=True)])
    assert 0 < float(apart.norm()) < 0.05 * float(way.norm())
    kept = {value.dtype for value in wrapped.state[other[0]].values() if isinstance(value, Tensor)}
    assert kept & ({torch.int8, torch.uint8} if states == "int8" else {torch.bfloat16})


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("storage", ["split", "split24", "kahan", "stochastic", "plain"])
def test_every_storage_and_codec_resumes_bit_for_bit(storage: str, states: str) -> None:
    def begun() -> tuple[list[nn.Parameter], Wrapped]:
        held = made(torch.bfloat16)
        groups = [{"params": held[:3], "lr": 0.02}, {"params": held[3:]}]
        return held, wrap(optim.AdamW(groups, lr=0.01), weights=storage, states=states, bucket_bytes=LIMIT, seed=3)

    held, whole = begun()
    for step in range(3):
        feed(held, step)
        whole.step()
    buffer = io.BytesIO()
    torch.save({"weights": [p.detach() for p in held], "optimizer": whole.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    again, resumed = begun()
    for p, values in zip(again, saved["weights"], strict=True):
        p.data.copy_(values)
    resumed.load_state_dict(saved["optimizer"])
    for step in range(3, 6):
        for o in (held, again):
            feed(o, step)
        whole.step()
        resumed.step()
    for p, q in zip(held, again, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(full_values(p), full_values(q))
        assert all(torch.equal(v, resumed.state[q][k]) for k, v in whole.state[p].items())
    assert any(master_of(p) is not None for p in again)


def test_the_same_seed_gives_the_same_bits_and_another_one_others() -> None:
    def run(seed: int, limit: int) -> list[Tensor]:
        held = made(torch.bfloat16)
        wrapped = wrap(optim.AdamW(held, lr=0.01), weights="split24", states="int8", seed=seed, bucket_bytes=limit)
        for step in range(4):
            feed(held, step)
            wrapped.step()
        return weights(held)

    first = run(0, LIMIT)
    assert all(torch.equal(a, b) for a, b in zip(first, run(0, 2**20), strict=True))  # the size of a bucket changes nothing
    assert not all(torch.equal(a, b) for a, b in zip(first, run(1, LIMIT), strict=True))


QUICK = ("AdaBelief", "Adan", "CAME", "DAdaptAdam", "Lamb", "Lion", "MADGRAD", "Prodigy", "ScheduleFreeAdamW", "SGDP", "SM3", "Tiger")
LIBRARY_SHAPES = ((5, 7), (7,), (4, 5, 2), (6, 4), (3, 30))


def library_step(cls: type[optim.Optimizer], caplog: pytest.LogCaptureFixture) -> None:
    """Buckets give the bits of the whole, or one bucket is taken and said; what cannot be done is refused by name."""
    try:
        torch.manual_seed(0)
        one = made(shapes=LIBRARY_SHAPES)
        plain = cls(one)  # type: ignore[call-arg]
        torch.manual_seed(0)
        other = made(torch.bfloat16, LIBRARY_SHAPES)
        inner = cls(other)  # type: ignore[call-arg]
        torch.manual_seed(7)
        for step in range(4):
            feed(one, step)
            plain.step()
    except Exception as error:  # noqa: BLE001  whatever it raises: it needs more than weights and gradients, also without a wrap
        pytest.skip(f"{cls.__name__} does not step by itself with default arguments: {type(error).__name__}")
    with caplog.at_level(logging.INFO, "halfstep"):
        try:
            wrapped = wrap(inner, weights="split", bucket_bytes=LIMIT)
        except errors.ConfigError as error:
            assert cls.__name__ in str(error)  # noqa: PT017
            return
        torch.manual_seed(7)
        for step in range(4):
            feed(other, step)
            wrapped.step()
    said = any("over all its parameters at once" in record.getMessage() for record in caplog.records)
    assert said == (wrapped.buckets == 1)
    largest = max(float(p.detach().abs().max()) for p in one)
    for p, q in zip(one, other, strict=True):
        assert float((p - full_values(q)).detach().abs().max()) <= 8 * 2.0**-23 * largest


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_optimizers_of_a_library(name: str, caplog: pytest.LogCaptureFixture) -> None:
    library = pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed: pip install pytorch_optimizer")
    library_step(getattr(library, name), caplog)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_optimizers_of_a_library(caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests) -> None:
    library = pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed: pip install pytorch_optimizer")
    tried = 0
    for cls in library.optimizer.OPTIMIZER_LIST:
        with subtests.test(cls.__name__):
            caplog.clear()
            library_step(cls, caplog)
            tried += 1
    assert tried >= 80
