"""The controls: what users write today with torch, Accelerate and Transformers, and a careless library that checks nothing.

The first shows that a record's check can fail; the second does it for records that the first gets right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.adapter import Door, Library, NotOffered, Refusal, Run
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

        # a pin_memory warning of the loader on machines without an accelerator is not the matter
        args = TrainingArguments(folder, use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no", dataloader_pin_memory=False, **arguments)
        return Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)

    def refusal(self, error: BaseException) -> Refusal | None:
        return None


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
