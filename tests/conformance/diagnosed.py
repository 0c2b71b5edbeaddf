"""What code that somebody wrote by hand gives in 16 bits, and what the library says of it."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from conformance.adapter import Library, NotOffered, Run
from conformance.tools import BF16, F16

Function = Callable[[Tensor], Tensor]
NAMED = "or the first line of the library's diagnosis names the fault and the module"


class Part(nn.Module):
    """A function of 16-bit values that somebody wrote by hand, as a module with a name; it keeps the dtype that it met."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.met = function, torch.float32

    def forward(self, x: Tensor) -> Tensor:
        self.met = x.dtype
        return self.function(x)


@dataclass(frozen=True)
class Seen:
    """What the user's code gave, what fp32 gives, and the first line of the library's diagnosis where they differ and it offers one."""

    values: list[float]
    wanted: list[float]
    said: str
    margin: float = 0.02
    spread: float = 1e-3

    @property
    def right(self) -> bool:
        """Whether the numbers are those of fp32, to the rounding of 16 bits."""
        if len(self.values) != len(self.wanted):
            return False
        return torch.allclose(torch.tensor(self.values), torch.tensor(self.wanted), rtol=self.margin, atol=self.spread)

    def names(self, faults: Sequence[str], place: str) -> bool:
        """Whether the diagnosis begins with one of these faults, in this module."""
        return any(re.match(rf"{fault}\b.*\b{re.escape(place)}\b", self.said) is not None for fault in faults)


def numbers(tensor: Tensor) -> list[float]:
    return [float(v) for v in tensor.detach().float().flatten()]


def first_line(library: Library, model: nn.Module, call: Callable[[], Tensor]) -> str:
    """The first line of what the library says about the call; nothing where it offers no diagnosis."""
    try:
        return library.trace(model, None, call=call).partition("\n")[0]
    except NotOffered:
        return ""


def identity(width: int) -> nn.Linear:
    """A linear layer that changes nothing but the dtype."""
    layer = nn.Linear(width, width)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def net(function: Function, width: int, place: str) -> nn.Sequential:
    """A layer that gives 16-bit values, and after it the function, in a module called `place`."""
    return nn.Sequential(OrderedDict([("body", identity(width)), (place, Part(function))]))


def train(library: Library, model: nn.Module, dtype: torch.dtype = F16) -> Run:
    """The loop of the manual around a model."""
    return library.run(model, [SGD(model.parameters(), lr=0.1)], dtype=dtype)


def seen(library: Library, function: Function, x: Tensor, place: str, gradient: bool = False, dtype: torch.dtype = F16, margin: float = 0.02) -> Seen:
    """The function of 16-bit values under the library, and of the same values in fp32. gradient: with that of the sum of its results."""
    model = net(function, x.shape[-1], place)
    run = train(library, model, dtype)

    def call() -> Tensor:
        return run.forward(x).float().sum()

    exact = x.to(dtype).float().requires_grad_()
    expected = function(exact)
    wanted = numbers(expected)
    if gradient:
        wanted += numbers(torch.autograd.grad(expected.sum(), exact)[0].sum(0))
    values: list[float] = []
    try:
        result = run.forward(x).float()
        values = numbers(result)
        if gradient:
            run.backward(result.sum())
            run.clip(1e9)  # unscales them
            values += numbers(gradient_of_inputs(model))
    except RuntimeError as error:
        if library.refusal(error) is not None:
            raise
    part = model[1]
    if isinstance(part, Part) and part.met is not dtype:
        raise NotOffered(f"{dtype} was asked for, and the layers ran in {part.met}")
    return judged(Seen(values, wanted, "", margin, margin / 20), lambda: first_line(library, run.model, call))


def gradient_of_inputs(model: nn.Module) -> Tensor:
    """The gradient of what the function of `net` was given, summed over the rows: that of the bias before it."""
    bias = next(p for name, p in model.named_parameters() if name.endswith("bias"))
    assert bias.grad is not None
    return bias.grad


def judged(all_of_it: Seen, said: Callable[[], str]) -> Seen:
    """The same with the few numbers that a failing test should show, and with the diagnosis if there is anything to diagnose."""
    values, wanted, margin, spread = all_of_it.values, all_of_it.wanted, all_of_it.margin, all_of_it.spread
    if all_of_it.right:
        return Seen(values[:3], wanted[:3], "", margin, spread)
    pairs = [(v, w) for v, w in zip(values, wanted, strict=False) if not Seen([v], [w], "", margin, spread).right][:3]
    return Seen([v for v, _ in pairs], [w for _, w in pairs] or wanted[:3], said(), margin, spread)


def by_hand(
    record: Callable[..., Any],
    name: str,
    title: str,
    today: str,
    function: Function,
    x: Tensor,
    faults: Sequence[str],
    place: str,
    gradient: bool = False,
    refs: Sequence[str] = (),
) -> None:
    """A record of code that is right in fp32. faults: what a diagnosis may call it; none where the library must get the number right."""

    @record(
        name,
        title,
        today=today,
        right=f"the result of fp32, {NAMED} ({' or '.join(faults)}, {place})" if faults else "the result of fp32",
        check=lambda v: v.right or v.names(faults, place),
        refused=(place,) if faults else None,
        doors=("loop", "accelerator"),
        refs=tuple(refs),
    )
    def written(library: Library) -> Any:
        return seen(library, function, x, place, gradient)


def named(part: nn.Module, name: str) -> nn.Module:
    """A model that is one part with a name."""
    return nn.Sequential(OrderedDict([(name, part)]))


def whole(library: Library, make: Callable[[], nn.Module], *inputs: Tensor, dtype: torch.dtype = BF16, margin: float = 0.02) -> Seen:
    """What a model whose weights are all 16-bit gives, beside its fp32 twin. Inputs are given as they are."""
    wanted = numbers(make()(*(x.float() if x.is_floating_point() else x for x in inputs)))
    model = library.cast_model(make(), dtype)

    def call() -> Tensor:
        return model(*inputs).float().sum()  # type: ignore[no-any-return]

    values: list[float] = []
    try:
        values = numbers(model(*inputs))
    except RuntimeError as error:
        if library.refusal(error) is not None:
            raise
    return judged(Seen(values, wanted, "", margin, margin), lambda: first_line(library, model, call))
