"""halfstep, through each of its doors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep
from conformance.adapter import Average, Door, Refusal, Run
from conformance.loops import AcceleratorRun, LoopRun, mean_by_trainer
from conformance.tools import BF16, F16
from halfstep.amp import bound_policy
from halfstep.checkpoint import export
from halfstep.errors import HalfstepError

NAMES = {F16: "fp16", BF16: "bf16", torch.float32: "no"}


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
        return AcceleratorRun(self, self.accelerator(NAMES[dtype]), model, optimizers, scheduler)

    def accelerator(self, mixed_precision: str, **settings: Any) -> Any:
        return halfstep.Accelerator(mixed_precision, cpu=True, **settings)

    def trainer(self, model: nn.Module, rows: Sequence[dict[str, Any]], folder: str, **arguments: Any) -> Any:
        args = halfstep.TrainingArguments(folder, use_cpu=True, disable_tqdm=True, save_strategy="no", **arguments)
        return halfstep.Trainer(model, args, train_dataset=rows, eval_dataset=rows)

    def trace(self, model: nn.Module | None = None, batch: Any = None, **how: Any) -> str:
        return str(halfstep.trace(model, batch, **how))

    def cast_model(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        return self._bound(model, f"{NAMES[dtype]}-true")

    def ema(self, model: nn.Module, decay: float) -> Average:
        return halfstep.ema(model, decay)

    def mean_of(self, values: Iterable[Tensor]) -> float:
        return mean_by_trainer(self, values)

    def save(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        parts = [model.state_dict(), optimizer.state_dict(), None if scaler is None else scaler.state_dict()]
        torch.save(parts, Path(folder) / "run.pt")  # the guide on checkpoints: in a loop of your own

    def load(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        weights, states, scale = torch.load(Path(folder) / "run.pt", weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        if scaler is not None:
            scaler.load_state_dict(scale)

    def export(self, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            end, accelerator = Path(folder), halfstep.Accelerator(precision=bound_policy(model), cpu=True)
            accelerator.prepare(model)
            accelerator.save_state(end / "checkpoint")
            return load_file(export(end / "checkpoint", end / "model", NAMES[dtype]) / "model.safetensors")

    def hold(self, model: nn.Module, dtype: torch.dtype, names: str) -> nn.Module:
        return self._bound(model, f"{NAMES[dtype]}-mixed,fp32={names}")

    def lean(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        return self._bound(model, f"{NAMES[dtype]}-lean")

    def plain(self, tensor: Tensor) -> Tensor:
        return halfstep.amp.upcast(tensor)  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Nothing is kept for the process."""

    def _bound(self, model: nn.Module, precision: str) -> nn.Module:
        return halfstep.Accelerator(precision=precision, cpu=True).prepare(model)  # type: ignore[no-any-return]

    def refusal(self, error: BaseException) -> Refusal | None:
        return Refusal(error.cause, error.remedy) if isinstance(error, HalfstepError) else None
