"""The loops of the manuals, around an autocast block and a scaler or around an accelerator, and a mean that a trainer logs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.adapter import Library
from conformance.tools import F16


class LoopRun:
    """The loop of the manual through the first door: autocast, scale, clip, step, update, schedule."""

    def __init__(self, library: Library, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any, dtype: torch.dtype) -> None:
        self.library, self.model, self.optimizers, self.dtype = library, model, list(optimizers), dtype
        self.scaler = library.scaler(1024.0, enabled=dtype is F16)
        library.watch(self.scaler, model, *optimizers)
        self.scheduler = None if scheduler is None else library.follow(self.scaler, scheduler)

    def forward(self, *inputs: Tensor) -> Tensor:
        narrow = self.dtype is not torch.float32
        with self.library.autocast(self.dtype if narrow else None, enabled=narrow):
            return self.model(*inputs)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip(self, max_norm: float) -> float:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def step(self) -> list[bool | None]:
        said = [self.library.told(self.scaler.step(o)) for o in self.optimizers]
        self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return said


class AcceleratorRun:
    """The loop of the manual through the second door."""

    def __init__(self, library: Library, accelerator: Any, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any) -> None:
        self.library, self.accelerator = library, accelerator
        schedules = [] if scheduler is None else [scheduler]
        ready = accelerator.prepare(model, *optimizers, *schedules)
        self.model, self.optimizers = ready[0], ready[1 : 1 + len(optimizers)]
        self.scheduler = ready[-1] if schedules else None

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, max_norm: float) -> float:
        return float(self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm))

    def step(self) -> list[bool | None]:
        said = [self.library.told(o.step()) for o in self.optimizers]
        if self.scheduler is not None:
            self.scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return said


class _Losses(nn.Module):
    """A model whose losses are given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> dict[str, Tensor]:
        return {"loss": value.mean() + 0 * self.weight.sum().to(value.dtype)}


def mean_by_trainer(library: Library, values: Iterable[Tensor]) -> float:
    """The mean of losses that a library's trainer logs after them."""
    rows = [{"value": value.detach()} for value in values]
    settings = {"logging_steps": len(rows), "max_steps": len(rows), "per_device_train_batch_size": 1}
    with tempfile.TemporaryDirectory() as folder:
        trainer = library.trainer(_Losses(), rows, folder, **settings)
        trainer.train()
    return float(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
