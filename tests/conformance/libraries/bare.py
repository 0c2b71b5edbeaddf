"""A library that offers nothing, for adapters to fill in, and errors of a library's own as its refusals."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.adapter import Average, Door, NotOffered, Refusal, Run
from conformance.stock import Stock
from conformance.tools import F16


def not_offered(why: str) -> NoReturn:
    """Say that a record cannot be put into the library's words."""
    raise NotOffered(why)


class Bare:
    """Nothing but what users do beside every library: torch's own gradients, weights and dtypes. package: whose errors count as answers."""

    name, package, title = "stock", "", ""
    door: Door = "loop"

    def autocast(self, dtype: torch.dtype | None = None, enabled: bool = True, device: str = "cpu") -> Any:
        not_offered(f"{self.title} has no autocast block")

    def scaler(self, init_scale: float = 65536.0, enabled: bool = True, device: str | None = "cpu", **settings: Any) -> Any:
        not_offered(f"{self.title} has no loss scaler to call")

    def told(self, answer: Any) -> bool | None:
        return None

    def clip(self, scaler: Any, optimizer: Optimizer, parameters: Iterable[Tensor], max_norm: float) -> float:
        not_offered(f"{self.title} has no clipping to call")

    def watch(self, scaler: Any, *things: nn.Module | Optimizer) -> None:
        """Nobody asks."""

    def masters(self, optimizer: Optimizer) -> Optimizer:
        return optimizer

    def full(self, parameter: Tensor) -> Tensor:
        return parameter.detach().clone()

    def follow(self, scaler: Any, scheduler: Any) -> Any:
        return scheduler

    def after_step(self, scaler: Any, optimizer: Optimizer, function: Callable[[], Any]) -> Callable[[], None]:
        return function

    def edits(self, scaler: Any) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def run(self, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any = None, dtype: torch.dtype = F16) -> Run:
        not_offered(f"{self.title} has no loop of the user's")

    def accelerator(self, mixed_precision: str, **settings: Any) -> Any:
        not_offered(f"{self.title} has no accelerator")

    def trainer(self, model: nn.Module, rows: Sequence[dict[str, Any]], folder: str, **arguments: Any) -> Any:
        not_offered(f"{self.title} has no trainer")

    def trace(self, model: nn.Module | None = None, batch: Any = None, **how: Any) -> str:
        not_offered(f"{self.title} has no diagnosis of a batch in one call")

    def cast_model(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        return model.to(dtype)

    def ema(self, model: nn.Module, decay: float) -> Average:
        not_offered(f"{self.title} has no average of weights")

    def mean_of(self, values: Iterable[Tensor]) -> float:
        not_offered(f"{self.title} leaves the mean of the losses to the loop")

    def save(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        not_offered(f"{self.title} saves no loop of the user's")

    def load(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        not_offered(f"{self.title} loads no loop of the user's")

    def export(self, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        not_offered(f"{self.title} writes weights in the dtype they have")

    def hold(self, model: nn.Module, dtype: torch.dtype, names: str) -> nn.Module:
        not_offered(f"{self.title} has no setting that holds a module in fp32")

    def lean(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        not_offered(f"{self.title} keeps fp32 weights and their casts")

    def plain(self, tensor: Tensor) -> Tensor:
        return tensor

    def reset(self) -> None:
        """Nothing to undo."""

    def refusal(self, error: BaseException) -> Refusal | None:
        return own_error(error, self.package)


def own_error(error: BaseException, package: str) -> Refusal | None:
    """An error that the library's Python code, or torch's that it is built on, raises on purpose.

    Its text is both cause and remedy, and records look for their words in it. What an operator says of its tensors is none.
    """
    frames, text = traceback.extract_tb(error.__traceback__), str(error)
    if not frames or not text or not any(f"/{name}/" in frames[-1].filename for name in {package, "torch"}):
        return None
    return Refusal(text, text) if (frames[-1].line or "").startswith(("raise ", "assert ")) else None


class TorchAmp(Stock):
    """The loop of torch's manual: torch.autocast and torch.amp.GradScaler."""

    title = "torch.amp"

    def scaler(self, init_scale: float = 65536.0, enabled: bool = True, device: str | None = "cpu", **settings: Any) -> Any:
        refuse_unknown(settings, self.title)
        return super().scaler(init_scale, enabled, device, **settings)

    def accelerator(self, mixed_precision: str, **settings: Any) -> Any:
        not_offered("torch has no accelerator")

    def trainer(self, model: nn.Module, rows: Sequence[dict[str, Any]], folder: str, **arguments: Any) -> Any:
        not_offered("torch has no trainer")

    def refusal(self, error: BaseException) -> Refusal | None:
        return own_error(error, "torch")


def refuse_unknown(settings: dict[str, Any], title: str) -> None:
    """A setting that torch's scaler does not have cannot be asked for."""
    unknown = settings.keys() - {"growth_factor", "backoff_factor", "growth_interval"}
    if unknown:
        not_offered(f"{title}'s scaler has no {', '.join(sorted(unknown))}")
