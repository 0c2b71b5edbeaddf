"""Does stepping in buckets give what stepping at once gives? Tried on tensors of a few elements before an optimizer is trusted with it.

Optimizers that mix parameters (a norm over all of them, a step size found from all gradients) give other numbers when each bucket sees a part.
They are found by three steps on fixed gradients, at once and in buckets, compared bit for bit: weights, states and what is in the groups.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.numerics import Noise
from halfstep.numerics.standins import for_real
from halfstep.optim.buckets import Buckets, loose
from halfstep.optim.codec import Role
from halfstep.optim.copies import PLAIN, bare_step, copied, same

EDGE = 3  # largest dimension of a tensor in the trial
RATE = 1e-3
TENSORS = 6  # of each group
SIZES = (0.3, 3e3, 1e-3)  # of the gradients of each step: a bound on their norm is met, and one on each is not


@dataclass(frozen=True)
class Trial:
    """What was found. splits: buckets give the bits of the whole. reason: why they do not, or why it is not known.

    copies: a copy of the optimizer on stand-ins gives the same as itself. closure: its step evaluates a closure itself. keys: the states
    it keeps in the shape of the weight, in order, and `others`: those in another shape.
    """

    splits: bool
    reason: str = ""
    copies: bool = True
    closure: bool = False
    keys: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


class AsTheyAre:
    """The states of an optimizer that nobody has wrapped."""

    roles: Mapping[str, Role] = {}

    def decoded(self, state: Mapping[str, Any], key: str, p: Tensor) -> Tensor:
        """The state itself."""
        return state[key]  # type: ignore[no-any-return]

    def encode(self, state: dict[str, Any], key: str, values: Tensor, number: int) -> None:
        """Put it back."""
        state[key] = values

    def noise(self, number: int) -> Noise:
        """Of a weight that is stored with noise; nobody has asked for a seed."""
        return Noise(0, number, 0)


def tried(optimizer: Optimizer) -> Trial:
    """Try it. Nothing of the optimizer, its parameters or the random states is changed."""
    with for_real(), _untouched(optimizer), warnings.catch_warnings(), torch.random.fork_rng(devices=_gpus(optimizer)):
        warnings.simplefilter("ignore")
        try:
            whole = _run(optimizer, lambda tiny: None)
        except Exception as error:  # noqa: BLE001  whatever a foreign optimizer raises
            closure = "closure" in f"{type(error).__name__} {error}".lower()
            return Trial(False, f"it could not be tried on small tensors: {_first_line(error)}", closure=closure)
        if not whole.finite:
            return Trial(False, "it could not be tried on small tensors: their weights do not stay finite")
        if not whole.moved:
            return Trial(False, "its weights stay where they are", copies=False)
        splits, reason = _agrees(optimizer, whole, _cuts)
        copies, failed = (True, "") if splits else _agrees(optimizer, whole, lambda tiny: [sum(len(g["params"]) for g in tiny.param_groups)])
        return Trial(splits, failed or reason, copies, False, _keys(whole.tiny, True), _keys(whole.tiny, False))


def tried_singly(optimizer: Optimizer) -> tuple[bool, str]:
    """Whether small tensors, each stepped by a copy of the optimizer of its own, come to the bits of a whole step; if not, why."""
    with _untouched(optimizer), warnings.catch_warnings(), torch.random.fork_rng(devices=_gpus(optimizer)):
        warnings.simplefilter("ignore")
        try:
            whole = _run(optimizer, lambda tiny: None)
        except Exception as error:  # noqa: BLE001  whatever a foreign optimizer raises
            return False, f"it could not be tried: {_first_line(error)}"
        if not whole.finite or not whole.moved:
            return False, "its weights do not stay finite" if whole.moved else "its weights stay where they are"
        return _agrees(optimizer, whole, lambda tiny: range(1, sum(len(g["params"]) for g in tiny.param_groups) + 1))


@dataclass(frozen=True)
class _Outcome:
    """A tiny optimizer after its steps. at_odds: hyper-parameters that its buckets changed in different ways."""

    tiny: Optimizer
    moved: bool
    finite: bool
    at_odds: tuple[str, ...]


def _agrees(optimizer: Optimizer, whole: _Outcome, cuts: Callable[[Optimizer], Sequence[int]]) -> tuple[bool, str]:
    """Whether buckets that end at `cuts` come to the bits of the whole; if not, why."""
    try:
        parts = _run(optimizer, cuts)
    except Exception as error:  # noqa: BLE001
        return False, f"a copy of it fails: {_first_line(error)}"
    agrees = not parts.at_odds and _equal(whole.tiny, parts.tiny)
    return agrees, "" if agrees else "its parameters act on each other"


def _run(optimizer: Optimizer, cuts: Callable[[Optimizer], Sequence[int] | None]) -> _Outcome:
    """A few steps of a tiny optimizer, by itself where `cuts` gives None, else in buckets that end there."""
    torch.default_generator.manual_seed(0)  # not torch.manual_seed, which reaches devices that nobody here uses
    for device in _gpus(optimizer):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    draws = torch.Generator().manual_seed(1)
    tiny = _tiny(optimizer, draws)
    held = [p for group in tiny.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in held]
    ends, at_odds = cuts(tiny), set()
    buckets = None if ends is None else Buckets(tiny, AsTheyAre(), {}, None, ends)
    for size in SIZES:
        for p in held:
            p.grad = _drawn(p, draws) * size if p.requires_grad else None
        if buckets is None:
            bare_step(tiny)(tiny)
        else:
            at_odds |= set(buckets.step(tiny, lambda twin: bare_step(twin)(twin)))
    moved = any(not torch.equal(p, q) for p, q in zip(held, before, strict=True)) or not any(p.requires_grad and p.numel() for p in held)
    return _Outcome(tiny, moved, all(bool(p.isfinite().all()) for p in held), tuple(at_odds))


def _tiny(optimizer: Optimizer, draws: torch.Generator) -> Optimizer:
    """The same optimizer on small fp32 tensors, in their states too where it has begun."""
    small: dict[int, Tensor] = {}
    chosen: set[int] = set()
    for group in optimizer.param_groups:
        chosen |= {id(p) for p in _picked(group["params"])}
        for p in group["params"]:
            shape = [min(n, EDGE) for n in p.shape]
            wide = p.dtype if p.dtype == torch.float64 or p.is_complex() else torch.float32
            empty = torch.zeros(shape, dtype=wide, device=p.device)
            small[id(p)] = torch.nn.Parameter(empty, p.requires_grad) if isinstance(p, torch.nn.Parameter) else empty.requires_grad_(p.requires_grad)
            if id(p) in chosen:
                small[id(p)].data.copy_(_drawn(small[id(p)], draws))
    tiny = copied(optimizer, small, chosen, isolated=True)
    for group in tiny.param_groups:
        rate = group.get("lr")
        if isinstance(rate, (int, float, Tensor)) and float(rate) == 0:  # the first one of a warm-up: nothing would move
            group["lr"] = torch.full_like(rate, RATE) if isinstance(rate, Tensor) else RATE
    tiny.state.update(copy.deepcopy(loose(optimizer), dict(small)))
    for p, state in optimizer.state.items():
        if isinstance(p, Tensor) and id(p) in chosen and state:
            cut = _cut(state, p, small[id(p)])
            if cut is not None:
                tiny.state[small[id(p)]] = cut
    return tiny


def _cut(state: Mapping[str, Any], p: Tensor, small: Tensor) -> dict[str, Any] | None:
    """States of a parameter, cut to the tiny one's shape; None when there is one whose shape has nothing to do with the parameter's."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            if not isinstance(value, PLAIN):
                return None
            found[key] = value
        elif value.numel() == 1 and value.dim() == 0:
            found[key] = value.clone()
        elif value.shape == p.shape:
            part = value[tuple(slice(0, n) for n in small.shape)].clone()
            found[key] = part.to(small.dtype) if part.is_floating_point() else part
        else:
            return None
    return found


def _picked(params: Sequence[Tensor]) -> list[Tensor]:
    """A few parameters of a group: one of each number of dimensions first, then from the front; in their order."""
    seen: dict[int, Tensor] = {}
    for p in params:
        seen.setdefault(p.dim(), p)
    first = [id(p) for p in list(seen.values())[:TENSORS]]
    rest = [id(p) for p in params if id(p) not in first][: TENSORS - len(first)]
    kept = {*first, *rest}
    return [p for p in params if id(p) in kept]


def _cuts(tiny: Optimizer) -> list[int]:
    """Every group is cut in the middle, so that no bucket holds a whole group of several."""
    ends, start = [], 0
    for group in tiny.param_groups:
        size = len(group["params"])
        if size > 1:
            ends.append(start + size // 2)
        elif start:
            ends.append(start)
        start += size
    return sorted({*ends, start})


def _drawn(p: Tensor, draws: torch.Generator) -> Tensor:
    dtype = p.dtype if p.is_floating_point() or p.is_complex() else torch.float32
    return torch.randn(p.shape, generator=draws, dtype=dtype).to(p.device, p.dtype)


def _equal(a: Optimizer, b: Optimizer) -> bool:
    """Whether two tiny optimizers have come to the same bits."""
    for one, other in zip(a.param_groups, b.param_groups, strict=True):
        rest, others = ({k: v for k, v in g.items() if k != "params"} for g in (one, other))
        if not same(rest, others) or not same(list(one["params"]), list(other["params"])):
            return False
        for p, q in zip(one["params"], other["params"], strict=True):
            if not same(dict(a.state.get(p, {})), dict(b.state.get(q, {}))):
                return False
    return same(loose(a), loose(b))


def _keys(tiny: Optimizer, shaped: bool) -> tuple[str, ...]:
    """Names of the states that are tensors in the shape of their weight, or of the other ones."""
    found: dict[str, bool] = {}
    for group in tiny.param_groups:
        for p in group["params"]:
            for key, value in dict(tiny.state.get(p, {})).items():
                like_it = isinstance(value, Tensor) and value.dim() > 0 and value.shape == p.shape and value.dtype == torch.float32
                found[key] = found.get(key, False) or like_it
    return tuple(k for k, v in found.items() if v == shaped)


@contextmanager
def _untouched(optimizer: Optimizer) -> Iterator[None]:
    """Python's and numpy's random states are put back, and a trial that wrote into the real weights is an error."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    versions = [p._version for p in held]
    ours, theirs = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        numpy.random.set_state(theirs)
    if versions != [p._version for p in held]:
        raise ConfigError(
            f"{type(optimizer).__name__} writes into its parameters by a way that a copy of it keeps, so it cannot step fp32 masters",
            "Keep its weights in fp32, or use halfstep.optim.AdamW.",
        )


def _gpus(optimizer: Optimizer) -> list[torch.device]:
    return sorted({p.device for group in optimizer.param_groups for p in group["params"] if p.device.type == "cuda"}, key=str)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
