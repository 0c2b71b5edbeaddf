"""Accelerate's loop and the Trainer of Transformers, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.adapter import Door, Run
from conformance.libraries.bare import Bare, not_offered
from conformance.loops import AcceleratorRun, mean_by_trainer
from conformance.stock import Stock
from conformance.tools import BF16, F16, F32

NO_SCALE = "Accelerate scales no losses on a CPU: its fp16 there is fp32"
OWNER = "the Trainer owns the loop: backward, clip and step are its own"
PRECISIONS = {BF16: "bf16", F32: "no"}


class _Loop:
    """What stands in an Accelerate loop where another has its scaler: prepared optimizers. On a CPU, backward() is the loss's own."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self._ready: dict[int, Any] = {}

    def prepared(self, thing: Any) -> Any:
        known = self._ready.get(id(thing))
        if known is None:
            known = self._ready[id(thing)] = (thing, self.accelerator.prepare(thing))
        return known[1]

    def scale(self, loss: Any) -> Any:
        return loss

    def unscale_(self, optimizer: Optimizer) -> None:
        self.accelerator.unscale_gradients(self.prepared(optimizer))

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        ready = self.prepared(optimizer)
        ready.step(closure)
        return not ready.step_was_skipped

    def update(self, new_scale: float | None = None) -> None:
        if new_scale is not None:
            not_offered(NO_SCALE)

    def get_scale(self) -> float:
        not_offered(NO_SCALE)

    def is_enabled(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is no state."""


class Accelerate(Bare):
    """The loop of Accelerate's manual."""

    title, package = "Accelerate", "accelerate"
    door: Door = "accelerator"

    def autocast(self, dtype: torch.dtype | None = None, enabled: bool = True, device: str = "cpu") -> Any:
        from accelerate.utils import AutocastKwargs  # type: ignore[import-untyped]

        if device != "cpu":
            not_offered("Accelerate's block is of its accelerator's device")
        if not enabled:
            return self.accelerator("bf16").autocast(AutocastKwargs(enabled=False))
        if dtype is None:
            not_offered("Accelerate's block has the dtype of its accelerator")
        if dtype not in (F16, *PRECISIONS) or dtype is F32:
            not_offered(f"Accelerate has no block of {dtype}")
        if dtype is F16:
            not_offered("Accelerate's fp16 is fp32 on a CPU: its block does nothing")
        return self.accelerator(PRECISIONS[dtype]).autocast()

    def scaler(self, init_scale: float = 65536.0, enabled: bool = True, device: str | None = "cpu", **settings: Any) -> Any:
        if enabled:
            not_offered(NO_SCALE)
        return _Loop(self.accelerator("no"))

    def told(self, answer: Any) -> bool | None:
        return answer if isinstance(answer, bool) else None

    def clip(self, scaler: Any, optimizer: Optimizer, parameters: Iterable[Tensor], max_norm: float) -> float:
        return float(scaler.accelerator.clip_grad_norm_(list(parameters), max_norm))

    def follow(self, scaler: Any, scheduler: Any) -> Any:
        scaler.prepared(scheduler.optimizer)
        return scaler.prepared(scheduler)

    def after_step(self, scaler: Any, optimizer: Optimizer, function: Callable[[], Any]) -> Callable[[], None]:
        def applied() -> None:
            if not scaler.prepared(optimizer).step_was_skipped:
                function()

        return applied

    def run(self, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any = None, dtype: torch.dtype = F16) -> Run:
        if dtype not in PRECISIONS:
            not_offered(NO_SCALE)
        return AcceleratorRun(self, self.accelerator(PRECISIONS[dtype]), model, optimizers, scheduler)

    def accelerator(self, mixed_precision: str, **settings: Any) -> Any:
        return Stock("accelerator").accelerator(mixed_precision, **settings)

    def cast_model(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        return self.accelerator("no").prepare(model.to(dtype))  # type: ignore[no-any-return]

    def plain(self, tensor: Tensor) -> Tensor:
        from accelerate.utils import convert_to_fp32

        return convert_to_fp32(tensor)  # type: ignore[no-any-return]

    def save(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        accelerator = self.accelerator("no")
        accelerator.prepare(model, optimizer)
        accelerator.save_state(folder)

    def load(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        accelerator = self.accelerator("no")
        accelerator.prepare(model, optimizer)
        accelerator.load_state(folder)

    def reset(self) -> None:
        Stock().reset()


class Transformers(Bare):
    """The Trainer, which owns the loop."""

    title, package = "the Trainer", "transformers"
    door: Door = "trainer"

    def autocast(self, dtype: torch.dtype | None = None, enabled: bool = True, device: str = "cpu") -> Any:
        not_offered("the Trainer has no block: it runs the model's forward pass in 16 bits")

    def scaler(self, init_scale: float = 65536.0, enabled: bool = True, device: str | None = "cpu", **settings: Any) -> Any:
        not_offered(OWNER)

    def run(self, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any = None, dtype: torch.dtype = F16) -> Run:
        not_offered(OWNER)

    def masters(self, optimizer: Optimizer) -> Optimizer:
        not_offered(OWNER)

    def cast_model(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        not_offered("the Trainer takes a model in the dtype it has")

    def plain(self, tensor: Tensor) -> Tensor:
        from transformers.trainer_pt_utils import nested_numpify

        return torch.from_numpy(nested_numpify(tensor))  # type: ignore[no-untyped-call]

    def trainer(self, model: nn.Module, rows: Sequence[dict[str, Any]], folder: str, **arguments: Any) -> Any:
        return Stock("trainer").trainer(model, rows, folder, **arguments)

    def mean_of(self, values: Iterable[Tensor]) -> float:
        return mean_by_trainer(self, values)

    def reset(self) -> None:
        Stock().reset()
