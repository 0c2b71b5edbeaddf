"""halfstep, through each of its doors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep
from conformance.adapter import Door, Refusal, Run
from conformance.stock import LoopRun
from conformance.tools import BF16, F16
from halfstep.errors import HalfstepError

NAMES = {F16: "fp16", BF16: "bf16", torch.float32: "no"}


class AcceleratorRun:
    """The loop of the manual through the second door."""

    def __init__(self, accelerator: Any, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any) -> None:
        self.accelerator = accelerator
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
        said: list[bool | None] = [bool(o.step()) for o in self.optimizers]
        if self.scheduler is not None:
            self.scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return said


class Halfstep:
    """halfstep under test. strategy: how its loss scale is found, in the loop."""

    def __init__(self, door: Door = "loop", strategy: Literal["follow", "stock"] = "follow") -> None:
        self.name, self.door, self.strategy = "halfstep", door, strategy

    def autocast(self, dtype: torch.dtype | None = None, enabled: bool = True, device: str = "cpu") -> Any:
        return halfstep.amp.autocast(device, dtype, enabled)

    def scaler(self, init_scale: float = 65536.0, enabled: bool = True, device: str | None = "cpu", **settings: Any) -> Any:
        return halfstep.amp.GradScaler(device, init_scale, enabled=enabled, strategy=self.strategy, **settings)

    def told(self, answer: Any) -> bool | None:
        return bool(answer)

    def clip(self, scaler: Any, optimizer: Optimizer, parameters: Iterable[Tensor], max_norm: float) -> float:
        return float(halfstep.amp.clip_grad_norm_(parameters, max_norm))

    def watch(self, scaler: Any, *things: nn.Module | Optimizer) -> None:
        for thing in things:
            scaler.watch(thing)

    def masters(self, optimizer: Optimizer) -> Optimizer:
        return halfstep.optim.wrap(optimizer)

    def full(self, parameter: Tensor) -> Tensor:
        return halfstep.optim.full_values(parameter)

    def follow(self, scaler: Any, scheduler: Any) -> Any:
        return scaler.follow(scheduler)

    def after_step(self, scaler: Any, optimizer: Optimizer, function: Callable[[], Any]) -> Callable[[], None]:
        scaler.on_applied(optimizer, function)
        return lambda: None

    def edits(self, scaler: Any) -> AbstractContextManager[Any]:
        return scaler.edits()  # type: ignore[no-any-return]

    def run(self, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any = None, dtype: torch.dtype = F16) -> Run:
        if self.door == "loop":
            return LoopRun(self, model, optimizers, scheduler, dtype)
        return AcceleratorRun(self.accelerator(NAMES[dtype]), model, optimizers, scheduler)

    def accelerator(self, mixed_precision: str, **settings: Any) -> Any:
        return halfstep.Accelerator(mixed_precision, cpu=True, **settings)

    def trainer(self, model: nn.Module, rows: Sequence[dict[str, Any]], folder: str, **arguments: Any) -> Any:
        args = halfstep.TrainingArguments(folder, use_cpu=True, disable_tqdm=True, save_strategy="no", **arguments)
        return halfstep.Trainer(model, args, train_dataset=rows, eval_dataset=rows)

    def refusal(self, error: BaseException) -> Refusal | None:
        return Refusal(error.cause, error.remedy) if isinstance(error, HalfstepError) else None
