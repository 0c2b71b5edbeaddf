"""An exponential moving average of weights, in fp32 whatever the weights are stored in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.errors import CheckpointError, ConfigError, StepOrderError, suggest
from halfstep.kernels import averaging_kernels
from halfstep.numerics import average_, stored
from halfstep.optim.masters import HALF, dtype_name, full_values, keep, master_of
from halfstep.optim.rule import as_number

WARMUPS: dict[str, Callable[[int], float]] = {
    "none": lambda n: 1.0,
    "ratio": lambda n: (1 + n) / (10 + n),
    "power": lambda n: 1 - (1 + n) ** (-2 / 3),
}
"""The largest decay after n updates. ratio: TensorFlow's, and diffusers' without its warm-up; power: that of timm and diffusers."""

BUFFERS = ("average", "keep")


class EMA:
    """fp32 averages of the trained weights of `model`: average += (1 - d) * (weight - average) at each `update()`.

    Of a 16-bit weight the fp32 master is averaged: an average in 16 bits would stop moving at decay 0.999. Call `update` after each step that was
    applied, as by `accelerator.on_applied(optimizer, average.update)` or `scaler.on_applied`: a refused step does not move it then, a replayed one
    moves it once. The first update takes the weights as they are; tied weights are averaged once; frozen ones are not, until they are trained.

    decay: d, from 0 to below 1. warmup: d = min(decay, w(n)) after n updates, so that an average forgets where it began: "ratio" is
        w = (1 + n) / (10 + n), "power" w = 1 - (1 + n)^(-2/3), "none" w = 1.
    buffers: "average" the floating buffers that are part of the model's state (running statistics of batch norms belong to the weights they were
        measured with), or "keep" those that the model has. Integers are never averaged.

    Memory: 4 bytes per trained weight and averaged buffer element, fp32 beside 16-bit weights too (an average split in 16 and 16 bits would take as
    much); `applied` copies the weights while it is open. On a CPU with numba an update is one pass: 12 bytes move per weight, no tensor is made.
    Raises ConfigError for other settings. Sources: Polyak and Juditsky, 1992; the warm-ups: TensorFlow's ExponentialMovingAverage, timm's ModelEmaV3.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warmup: str = "none", buffers: str = "average") -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the average is to be of a {type(model).__name__}, which is no torch.nn.Module", "Give it the model.")
        if next(model.parameters(), None) is None:
            raise ConfigError(f"a {type(model).__name__} without parameters has no weights to average", "Give it the model that is trained.")
        _refuse_settings(decay, warmup, buffers)
        inner = getattr(model, "_orig_mod", model)  # a compiled module calls its weights otherwise
        self.model: nn.Module = inner if isinstance(inner, nn.Module) else model
        self.decay, self.warmup, self.buffers, self.updates = float(decay), warmup, buffers, 0
        self.averages: dict[str, Tensor] = {}
        self.buffer_averages: dict[str, Tensor] = {}
        self._open = 0  # blocks of `applied`

    def decay_at(self, updates: int) -> float:
        """The decay of an update that follows so many others."""
        return min(self.decay, WARMUPS[self.warmup](updates))

    def update(self) -> None:
        """Take the weights as they are now into the averages. Raises StepOrderError inside `applied`, whose weights are the averages."""
        if self._open:
            raise StepOrderError("update() was called inside applied(), where the weights are the averages", "Close the block before the next step.")
        share, entries = 1 - self.decay_at(self.updates), []
        with torch.inference_mode(False), torch.no_grad():
            both = (self._weights(), self.averages), (self._statistics(), self.buffer_averages)
            for name, t, averages in [(name, t, averages) for found, averages in both for name, t in found if _fits(name, t, averages)]:
                if averages[name].device != t.device:
                    averages[name] = averages[name].to(t.device)
                entries.append((t, averages[name]))
            for found, averages in both:
                averages.update({name: full_values(t) for name, t in found if name not in averages})
            _follow(entries, share)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """A block in which the model has the averages for its weights; after it weights and masters are what they were, bit for bit.

        Weights that the block puts into 16 bits (the first call of a `*-lean` model), or back, get the values that they had. A block may stand in
        another. Steps taken inside are lost. Memory: a copy of the weights. Raises ConfigError before the first update.
        """
        self._need_one()
        with ExitStack() as stack:
            stack.callback(self._close)
            self._open += 1
            with torch.inference_mode(False), torch.no_grad():
                for t, _ in self._pairs():
                    stack.callback(keep(t))
                self._write()
            yield self.model

    def copy_to_model(self) -> None:
        """Make the averages the weights of the model, masters included, for good. Raises ConfigError before the first update."""
        self._need_one()
        with torch.inference_mode(False), torch.no_grad():
            self._write()

    def values(self) -> dict[str, Tensor]:
        """The averages of weights and buffers by name, fp32 (wider ones as they are)."""
        return self.averages | self.buffer_averages

    def nbytes(self) -> int:
        """Bytes that the averages take."""
        return sum(t.nbytes for t in self.values().values())

    def state_dict(self) -> dict[str, Any]:
        """The averages by name, the settings and the number of updates."""
        about = {"decay": self.decay, "warmup": self.warmup, "updates": self.updates}
        return about | {"averages": dict(self.averages), "buffers": dict(self.buffer_averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises CheckpointError, and changes nothing, when it is of another model, or has what no average can have.

        buffers="keep" leaves saved averages of buffers aside: the model's own stay in use.
        """
        averages, buffers = state_dict.get("averages"), state_dict.get("buffers") or {}
        if averages is None or not {"decay", "updates"} <= state_dict.keys():
            raise CheckpointError("the state holds no averages", "Load what state_dict() of an average gave.")
        again = "Build the model as the run that saved them did."
        weights, statistics = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        trained = {name for name, _ in self._weights()} if averages else set()
        for name in sorted({*averages} - {*weights} | trained - {*averages} | {*buffers} - {*statistics}):
            raise CheckpointError(f"the averages are of another model: {name} is in only one of them", again)
        for name, values, t in [*((n, v, weights[n]) for n, v in averages.items()), *((n, v, statistics[n]) for n, v in buffers.items())]:
            if values.shape != t.shape:
                raise CheckpointError(f"the saved average of {name} is {tuple(values.shape)} and the model's {tuple(t.shape)}", again)
            if values.dtype != (wanted := _format(t)):
                said = f"the saved average of {name} is {dtype_name(values.dtype)}, and one of {dtype_name(wanted)} is kept"
                raise CheckpointError(said, "Save averages as state_dict() gives them: 16 bits do not hold what an average gains in a step.")
        decay, warmup, updates = state_dict["decay"], state_dict.get("warmup", "none"), state_dict["updates"]
        try:
            _refuse_settings(decay, warmup)
        except ConfigError as error:
            raise CheckpointError(f"the averages were saved with {error.cause}", "Use another checkpoint of the run.") from error
        if not 0 <= as_number(updates) < math.inf or as_number(updates) % 1:
            raise CheckpointError(f"the averages were saved after {updates!r} updates", "Use another checkpoint of the run.")
        self.decay, self.warmup, self.updates = float(decay), warmup, int(updates)
        self.averages = {name: _beside(weights[name], values) for name, values in averages.items()}
        kept = buffers if self.buffers == "average" else {}
        self.buffer_averages = {name: _beside(statistics[name], values) for name, values in kept.items()}

    def _weights(self) -> list[tuple[str, Tensor]]:
        """What is averaged: trained weights, and those that were when they were averaged."""
        named = self.model.named_parameters()
        return [(n, p) for n, p in named if (p.requires_grad or n in self.averages) and _is_number(p)]

    def _statistics(self) -> list[tuple[str, Tensor]]:
        """The buffers that are averaged."""
        if self.buffers != "average":
            return []
        parts = ((f"{prefix}." if prefix else "", part) for prefix, part in self.model.named_modules())
        own = ((prefix + n, b) for prefix, part in parts for n, b in part._buffers.items() if n not in part._non_persistent_buffers_set)
        return [(n, b) for n, b in own if b is not None and _is_number(b)]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and buffers that have an average, with it. Others were added since the last update."""
        found = [(t, self.averages[n]) for n, t in self.model.named_parameters() if n in self.averages]
        return found + [(t, self.buffer_averages[n]) for n, t in self.model.named_buffers() if n in self.buffer_averages]

    def _write(self) -> None:
        for t, values in self._pairs():
            master = master_of(t)
            if master is not None:
                master.write(values)
            else:
                t.copy_(values)

    def _need_one(self) -> None:
        if not self.updates:
            raise ConfigError("there is no average yet", "Call update() after a step.")

    def _close(self) -> None:
        self._open -= 1


def ema(model: nn.Module, decay: float = 0.999, *, warmup: str = "none", buffers: str = "average") -> EMA:
    """An `EMA` of the trained weights of `model`."""
    return EMA(model, decay, warmup=warmup, buffers=buffers)


def _refuse_settings(decay: Any, warmup: Any, buffers: Any = BUFFERS[0]) -> None:
    """Raise ConfigError for settings of an average that do not exist."""
    if not 0 <= as_number(decay) < 1:
        raise ConfigError(f"decay={decay!r} is out of range", "Use a number from 0 to below 1, for example 0.999.")
    for name, given, known in (("warmup", warmup, tuple(WARMUPS)), ("buffers", buffers, BUFFERS)):
        if given not in known:
            raise ConfigError(f"{name}={given!r} is not known", suggest(str(given), known))


def _fits(name: str, t: Tensor, averages: Mapping[str, Tensor]) -> bool:
    """Whether there is an average of `name`. Raises ConfigError for one of another shape."""
    if name in averages and averages[name].shape != t.shape:
        raise ConfigError(
            f"{name} had the shape {tuple(averages[name].shape)} at the last update and has {tuple(t.shape)} now",
            "Make a new average after changing the model.",
        )
    return name in averages


def _format(t: Tensor) -> torch.dtype:
    """The dtype that the average of a tensor has."""
    return torch.float32 if t.dtype in HALF else t.dtype


def _is_number(t: Tensor) -> bool:
    return (t.is_floating_point() or t.is_complex()) and not is_lazy(t)


def _beside(t: Tensor, values: Tensor) -> Tensor:
    """A copy of saved `values` on the device of `t` and in its order of memory."""
    return torch.empty_like(t, dtype=values.dtype, requires_grad=False).copy_(values)


def _follow(entries: list[tuple[Tensor, Tensor]], share: float) -> None:
    """Move averages towards the full values: in one pass over those that the compiled kernel takes, one after another over the rest."""
    kernels, together = averaging_kernels(), []
    for t, average in entries:
        values, master = t.detach(), master_of(t)
        if master is not None:
            master.follow()
        storage, residual = ("fp32" if t.dtype == torch.float32 else "plain", None) if master is None else (master.storage.name, master.residual)
        if kernels is not None and kernels.takes(values, storage, residual, average):
            together.append((values, storage, residual, average))
        elif master is None and t.dtype == average.dtype:
            average_(stored(average), stored(values), share)
        else:
            average_(average, full_values(t), share)
    if together:
        assert kernels is not None
        kernels.average(together, share)
