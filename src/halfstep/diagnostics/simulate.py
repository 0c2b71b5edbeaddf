"""`simulate`: run a model as if its numbers were in another format, on any device, and say what that breaks."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from halfstep.amp import bound_policy
from halfstep.amp.as_written import as_written
from halfstep.amp.mode import OPENED, opened
from halfstep.amp.ops import LOW, every_form, inexact
from halfstep.errors import ConfigError, suggest
from halfstep.numerics import FORMATS, Format, format_named, nearest, ulp
from halfstep.tracing.observe import quiet

WHAT = ("inputs", "weights", "outputs", "gradients")
PRODUCTS = frozenset(every_form((*LOW, "bilinear", "dot", "vdot", "inner", "tensordot")))
# where a weight that is no operand of a product is read: norms, tables, arithmetic
READERS = frozenset((*inexact(), *every_form(("embedding", "embedding_bag", "index_select", "__getitem__", "where")))) - PRODUCTS - OPENED
LARGEST = FORMATS["fp32"].largest
SHOWN = 8  # modules in the text of a simulation


def simulate(
    model: nn.Module,
    fmt: str | Format,
    *,
    modules: str | Iterable[str] = "*",
    what: Iterable[str] = WHAT,
) -> Simulation:
    """Run `model` as if its numbers were in another format, from now until `remove()`; also a block: `with simulate(model, "e4m3") as seen: ...`.

    fmt: "fp16", "bf16", "tf32", "e4m3", "e5m2", any "eXmY" such as "e6m9" (`halfstep.numerics.format_named`), or a `Format`.
    modules: name patterns, in a list or with | between them; a module stands for all that is inside it. "*": the whole model.
    what: any of "inputs" (of products: linear, matmul, convolution, attention, recurrent), "weights" (parameters, wherever a product, a norm, a
        table or arithmetic reads them), "outputs" (of products and of modules) and "gradients" (those of everything that is rounded, on their way
        back).

    Numbers are fp32 and stay so: each is rounded to the nearest number of the format (ties to even, subnormals kept), beyond the largest it becomes
    inf, or the largest where the format has no inf; nothing is scaled. Products multiply and sum in fp32. The gradient passes a rounding as it is,
    but for its own. So a product has the numbers of 16-bit hardware that accumulates in fp32 (the order of sums may differ), and what lies between
    products (a residual sum, the steps of a softmax written by hand) is fp32 up to the output of its module.

    `print(seen)` says what broke: modules with numbers that overflowed or became 0, worst first. Memory: one rounded copy of each operand and output.
    Weights, hooks and attributes are after `remove()` what they were. Compiled models run as written meanwhile. fp64 tensors are left alone.
    Raises ConfigError for a format or pattern that is none, for weights that are not fp32, and for a model under a 16-bit precision or autocast.
    """
    form = format_named(fmt) if isinstance(fmt, str) else fmt
    if not isinstance(model, nn.Module):
        raise ConfigError(f"simulate was given a {type(model).__name__} in the place of the model", "Pass the nn.Module first, then the format.")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    chosen = tuple(dict.fromkeys(what if not isinstance(what, str) else (what,)))
    for one in chosen:
        if one not in WHAT:
            raise ConfigError(f"what={one!r} is nothing that can be rounded", suggest(one, WHAT))
    if not chosen:
        raise ConfigError("what=() rounds nothing", f"Name some of {', '.join(WHAT)}.")
    policy = bound_policy(model)
    if policy is not None and (policy.is_mixed or policy.whole):
        raise ConfigError(f"the model is bound to {policy}, which rounds by itself", "Simulate an fp32 model: remove() the binding, or pass a copy.")
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.dtype != torch.float32:
            raise ConfigError(f"{name} is {p.dtype}, and a format is simulated on fp32 numbers", "Pass model.float(), or a copy of it.")
    return Simulation(model, form, _inside(model, modules), frozenset(chosen))


@dataclass(frozen=True)
class Rounded:
    """What rounding has done to one kind of number of one module.

    module, kind: path and type of the module. what: "inputs", "weights", "outputs" or "gradients". numbers: how many were rounded.
    overflow: share beyond the largest of the format. underflow: share that was not 0 and became 0. error: the norm of what rounding changed, of the
    numbers that stayed finite, over their norm.
    """

    module: str
    kind: str
    what: str
    numbers: int
    overflow: float
    underflow: float
    error: float

    @property
    def broke(self) -> bool:
        """Whether any number overflowed or became 0."""
        return self.overflow > 0 or self.underflow > 0

    @property
    def named(self) -> str:
        """The module as words."""
        return f"{self.module} ({self.kind})" if self.module else f"the model ({self.kind})"


class Simulation:
    """A format that a model runs in: a handle with `remove()`, a block, and what it has seen."""

    def __init__(self, model: nn.Module, fmt: Format, names: dict[int, tuple[str, str]], what: frozenset[str]) -> None:
        self.format, self.what = fmt, what
        self._names = names
        self._sums: dict[tuple[str, str, str], Tensor] = {}
        self._within = threading.local()
        self._mode = _Rounding(self)
        self._hooks: list[Any] = []
        as_written.__enter__()  # for the whole process, so it must end with the model of a handle that is forgotten too
        self._end = weakref.finalize(model, as_written.__exit__)
        self._end.atexit = False
        for part in model.modules():
            if id(part) in names:
                self._hooks.append(part.register_forward_pre_hook(self._enter, prepend=True))
                self._hooks.append(part.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Let the model run in its own format again. What was seen stays."""
        self._end()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def seen(self) -> tuple[Rounded, ...]:
        """What was rounded, worst first: by the share that overflowed, that became 0, by the error."""
        found = [_read(key, sums) for key, sums in self._sums.items()]
        return tuple(sorted(found, key=lambda r: (-r.overflow, -r.underflow, -r.error)))

    @property
    def broken(self) -> tuple[Rounded, ...]:
        """Of these, those with numbers that overflowed or became 0."""
        return tuple(r for r in self.seen if r.broke)

    def __str__(self) -> str:
        seen, broken, form = self.seen, self.broken, self.format
        if not seen:
            return f"{form.name}: nothing was rounded yet"
        modules = len({r.module for r in seen})
        if not broken:
            worst = max(seen, key=lambda r: r.error)
            return f"{form.name}: nothing overflowed or became 0 in {modules} modules; largest error {worst.error:.2g}, {worst.what} of {worst.named}"
        lines = [f"{form.name}: {len({r.module for r in broken})} of {modules} modules have numbers that overflowed or became 0"]
        over = f"are beyond {form.largest:g}" + ("" if form.infinite else " and became it")
        for r in broken[:SHOWN]:
            parts = [f"{r.overflow:.2%} {over}"] * (r.overflow > 0) + [f"{r.underflow:.2%} became 0"] * (r.underflow > 0)
            lines.append(f"  {r.named}, {r.what}: {', '.join(parts)}; error {r.error:.2g}")
        if len(broken) > SHOWN:
            lines.append(f"  and {len(broken) - SHOWN} more")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values: {"format", "largest", "modules": [{"module", "kind", "what", "numbers", "overflow", "underflow", "error"}]}."""
        return {"format": self.format.name, "largest": self.format.largest, "modules": [vars(r) for r in self.seen]}

    @property
    def _stack(self) -> list[nn.Module]:
        """The modules whose forward passes this thread is in."""
        try:
            return self._within.stack  # type: ignore[no-any-return]
        except AttributeError:
            self._within.stack = made = list[nn.Module]()
            return made

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._stack:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        stack = self._stack
        if not stack or stack[-1] is not module:  # another hook has raised before ours ran
            return None
        try:
            return self.rounded(output, "outputs") if "outputs" in self.what or "gradients" in self.what else None
        finally:
            stack.pop()
            if not stack:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def rounded(self, value: Any, what: str) -> Any:
        """`value` with the fp32 and 16-bit tensors in it rounded, those that were not just now."""
        return tree_map_only(Tensor, lambda t: self._round(t, what), value)

    def _round(self, t: Tensor, what: str) -> Tensor:
        if not t.is_floating_point() or t.dtype == torch.float64 or getattr(t, "halfstep_rounded", None) == (id(self), t._version):
            return t
        forward, backward = what in self.what, "gradients" in self.what
        if not forward and not backward:
            return t
        name = self._names[id(self._stack[-1])]
        result: Tensor = _Round.apply(t, self, name, what if forward else "", backward)  # type: ignore[no-untyped-call]
        result.halfstep_rounded = (id(self), result._version)  # type: ignore[attr-defined]
        return result

    def nearest(self, x: Tensor, name: tuple[str, str], what: str) -> Tensor:
        """`x` rounded, and counted under a module's name."""
        form, one = self.format, x.new_ones((), dtype=torch.float32)
        with quiet():
            wide = x.detach().float()
            made = nearest(wide, form)
            counts = _counts(wide, made, form)
            known = self._sums.get((*name, what))
            self._sums[(*name, what)] = counts if known is None else known + counts.to(known.device)
            over = made.isinf() & wide.isfinite()
            kept = ~made.isfinite() & ~over  # inf and NaN that were there before
            made = torch.where(over, torch.copysign(one * form.largest, wide), torch.where(kept, 0 * one, made))
            factor = torch.where(over, one * LARGEST, one)
        # what a trace sees of a rounding: a product that overflows where the format does, and what was not finite before
        return torch.where(kept, x.detach(), (made * factor).to(x.dtype))


class _Round(torch.autograd.Function):
    """Rounds on the way forward (what: not empty) and the gradient on its way back (backward)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, simulation: Simulation, name: tuple[str, str], what: str, backward: bool) -> Tensor:
        ctx.given = (simulation, name, what, backward)
        return simulation.nearest(x, name, what) if what else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        simulation, name, _, backward = ctx.given
        if backward and grad.dtype != torch.float64:
            grad = _Gradient.apply(grad, simulation, name)  # type: ignore[no-untyped-call]
        return grad, None, None, None, None


class _Gradient(torch.autograd.Function):
    """A rounded gradient, which may be differentiated in its turn."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, simulation: Simulation, name: tuple[str, str]) -> Tensor:
        return simulation.nearest(grad, name, "gradients")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None, None


class _Rounding(TorchFunctionMode):
    """Inside this block products run on rounded operands, and give rounded results."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPENED:
            with self:
                return opened(func)(*args, **kwargs)
        if func in PRODUCTS:
            return self._product(func, args, kwargs)
        if func in READERS and any(isinstance(a, nn.Parameter) for a in (*args, *kwargs.values())):
            return func(*(self._operand(a, False) for a in args), **{k: self._operand(a, False) for k, a in kwargs.items()})
        return func(*args, **kwargs)

    def _product(self, func: Any, args: Any, kwargs: Any) -> Any:
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if first is not None and torch.is_autocast_enabled(first.device.type):
            raise ConfigError("a product of a simulated module ran under autocast, which rounds by itself", "Leave the autocast block out.")
        args = [self._operand(a, True) for a in args]
        kwargs = {k: self._operand(a, True) for k, a in kwargs.items()}
        return self.simulation.rounded(func(*args, **kwargs), "outputs")

    def _operand(self, value: Any, inputs: bool) -> Any:
        """An argument of a function with its parameters rounded, and its other tensors where `inputs`."""
        if isinstance(value, nn.Parameter):
            return self.simulation.rounded(value, "weights")
        if isinstance(value, Tensor):
            return self.simulation.rounded(value, "inputs") if inputs else value
        return type(value)(self._operand(v, inputs) for v in value) if type(value) in (list, tuple) else value


def _inside(model: nn.Module, patterns: str | Iterable[str]) -> dict[int, tuple[str, str]]:
    """Path and type of the modules that patterns name, with all inside them, by id."""
    wanted: Sequence[str] = patterns.split("|") if isinstance(patterns, str) else [*patterns]
    known = dict(model.named_modules())
    hit: list[str] = []
    for pattern in wanted:
        found = [name for name in known if fnmatchcase(name, pattern)]
        if not found:
            names = [name for name in known if name][:50]
            raise ConfigError(f"modules={pattern} matches no module of this model", suggest(pattern, names) if names else "It has no submodules.")
        hit += found
    inner = {name for name in known if any(not top or name == top or name.startswith(f"{top}.") for top in hit)}
    return {id(part): (name, type(part).__name__) for name, part in known.items() if name in inner}


def _counts(x: Tensor, rounded: Tensor, fmt: Format) -> Tensor:
    """[numbers, beyond the largest, became 0, squared change, squared size], the last two of what stays finite; fp64 [5] on the device of `x`."""
    limit = fmt.largest + float(ulp(torch.tensor(fmt.largest), fmt)) / 2  # below it a number rounds to the largest
    over = ((x.abs() >= limit) if fmt.infinite else (x.abs() > limit)) & x.isfinite()
    gone = (x != 0) & (rounded == 0)
    fit = rounded.isfinite() & x.isfinite()
    wide = torch.where(fit, x, 0.0).double()
    off = torch.where(fit, rounded, 0.0).double() - wide
    return torch.stack(
        (torch.full((), x.numel(), device=x.device).double(), over.sum().double(), gone.sum().double(), off.square().sum(), wide.square().sum())
    )


def _read(key: tuple[str, str, str], sums: Tensor) -> Rounded:
    numbers, over, gone, off, size = sums.tolist()
    error = math.sqrt(off / size) if size > 0 else 0.0
    return Rounded(*key, int(numbers), over / max(numbers, 1.0), gone / max(numbers, 1.0), error)
