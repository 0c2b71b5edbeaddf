"""The controls: what users write today with torch, Accelerate and Transformers, and a careless library that checks nothing.

The first shows that a record's check can fail; the second does it for records that the first gets right.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conformance.adapter import Average, Door, NotOffered, Refusal, Run
from conformance.loops import LoopRun
from conformance.tools import F16


class SwaAverage:
    """torch's average of weights, with a block around it as its manual swaps it in."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self.average.update_parameters(self.model)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        kept = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.average.module.state_dict())
        try:
            yield self.model
        finally:
            self.model.load_state_dict(kept)


class Stock:
    """torch.amp, Accelerate and Transformers as their manuals have them."""

    def __init__(self, door: Door = "loop") -> None:
        self.name, self.door = "stock", door

    def autocast(self, dtype: torch.dtype | None = None, enabled: bool = True, device: str = "cpu") -> Any:
        return torch.autocast(device, dtype=dtype, enabled=enabled)

    def scaler(self, init_scale: float = 65536.0, enabled: bool = True, device: str | None = "cpu", **settings: Any) -> Any:
        named = {} if device is None else {"device": device}
        return torch.amp.GradScaler(**named, init_scale=init_scale, enabled=enabled, **settings)  # type: ignore[arg-type]

    def told(self, answer: Any) -> bool | None:
        return None

    def clip(self, scaler: Any, optimizer: Optimizer, parameters: Iterable[Tensor], max_norm: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    def watch(self, scaler: Any, *things: nn.Module | Optimizer) -> None:
        """Nobody asks."""

    def masters(self, optimizer: Optimizer) -> Optimizer:
        return optimizer  # torch's optimizers take 16-bit weights as they are

    def full(self, parameter: Tensor) -> Tensor:
        return parameter.detach().clone()

    def follow(self, scaler: Any, scheduler: Any) -> Any:
        return scheduler

    def after_step(self, scaler: Any, optimizer: Optimizer, function: Callable[[], Any]) -> Callable[[], None]:
        return function

    def edits(self, scaler: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def run(self, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any = None, dtype: torch.dtype = F16) -> Run:
        if self.door != "loop":
            raise NotOffered("Accelerate scales no losses on a CPU")
        return LoopRun(self, model, optimizers, scheduler, dtype)

    def accelerator(self, mixed_precision: str, **settings: Any) -> Any:
        from accelerate import Accelerator  # type: ignore[import-untyped]
        from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, mixed_precision=mixed_precision, **settings)

    def trainer(self, model: nn.Module, rows: Sequence[dict[str, Any]], folder: str, **arguments: Any) -> Any:
        from transformers import Trainer, TrainingArguments

        _set_imports_apart()
        # a pin_memory warning of the loader on machines without an accelerator is not the matter
        args = TrainingArguments(folder, use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no", dataloader_pin_memory=False, **arguments)
        return Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)

    def trace(self, model: nn.Module | None = None, batch: Any = None, **how: Any) -> str:
        raise NotOffered("torch has no diagnosis of a batch in one call")

    def cast_model(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        return model.to(dtype)

    def ema(self, model: nn.Module, decay: float) -> Average:
        return SwaAverage(model, decay)

    def mean_of(self, values: Iterable[Tensor]) -> float:
        total: Any = 0.0
        count = 0
        for value in values:
            total += value.detach()
            count += 1
        return float(total) / count

    def save(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        parts = [model.state_dict(), optimizer.state_dict(), None if scaler is None else scaler.state_dict()]
        torch.save(parts, Path(folder) / "run.pt")

    def load(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        weights, states, scale = torch.load(Path(folder) / "run.pt", weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        if scaler is not None:
            scaler.load_state_dict(scale)

    def export(self, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        state = {name: value.clone() for name, value in model.to(dtype).state_dict().items()}  # what scripts write: model.half().state_dict()
        model.float()
        return state

    def hold(self, model: nn.Module, dtype: torch.dtype, names: str) -> nn.Module:
        raise NotOffered("torch has no setting that holds a module in fp32")

    def lean(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        raise NotOffered("torch keeps fp32 weights and their casts")

    def plain(self, tensor: Tensor) -> Tensor:
        return tensor

    def reset(self) -> None:
        """Accelerate keeps the precision of its first accelerator for the process."""
        state = sys.modules.get("accelerate.state")
        if state is not None:
            state.AcceleratorState._reset_state(reset_partial_state=True)

    def refusal(self, error: BaseException) -> Refusal | None:
        return None


@functools.cache
def _set_imports_apart() -> None:
    """transformers.Trainer collects garbage at the end of every run, which takes half a second over all that was imported: leave that out of it."""
    gc.collect()
    gc.freeze()


class _CarelessScaler:
    """Multiplies the loss and never looks back."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def scale(self, loss: Any) -> Any:
        return [o * self._scale for o in loss] if isinstance(loss, list) else loss * self._scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Gradients stay as they are."""

    def step(self, optimizer: Optimizer, *args: Any) -> Any:
        return optimizer.step(*args)

    def update(self, new_scale: float | None = None) -> None:
        """The scale stays as it is."""

    def get_scale(self) -> float:
        return self._scale

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is no state."""


class _ScalingOptimizer:
    """Steps through torch's scaler, as Accelerate's does on a GPU."""

    def __init__(self, optimizer: Optimizer, scaler: Any) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class _CarelessAccelerator:
    """Scales losses as Accelerate does on a GPU, casts nothing, accumulates nothing, and looks at nobody's hands."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def prepare(self, *objects: Any) -> Any:
        ready = [_ScalingOptimizer(o, self.scaler) if isinstance(o, Optimizer) else o for o in objects]
        return ready[0] if len(ready) == 1 else ready

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def autocast(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


class Careless(Stock):
    """A library whose blocks cast nothing and whose scaler checks nothing."""

    def __init__(self, door: Door = "loop") -> None:
        super().__init__(door)
        self.name = "careless"

    def autocast(self, dtype: torch.dtype | None = None, enabled: bool = True, device: str = "cpu") -> Any:
        @contextlib.contextmanager
        def nothing() -> Iterator[None]:
            yield

        return nothing()

    def scaler(self, init_scale: float = 65536.0, enabled: bool = True, device: str | None = "cpu", **settings: Any) -> Any:
        return _CarelessScaler(init_scale if enabled else 1.0)

    def accelerator(self, mixed_precision: str, **settings: Any) -> Any:
        return _CarelessAccelerator()
