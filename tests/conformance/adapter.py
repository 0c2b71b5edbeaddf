"""What a library must give to be held against the records, what a record is, and how one is carried out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Door = Literal["loop", "accelerator", "trainer"]
Status = Literal["right", "wrong", "not offered"]


class NotOffered(Exception):  # noqa: N818  an answer, not a fault
    """The library has no such thing: the record says nothing about it."""


@dataclass(frozen=True)
class Refusal:
    """An error that a user can act on: what is wrong, and what to do."""

    cause: str
    remedy: str


class Run(Protocol):
    """A training loop as the library's manual writes it, around one model and its optimizers."""

    model: nn.Module

    def forward(self, *inputs: Tensor) -> Tensor:
        """The model's output, computed in the run's dtype."""

    def backward(self, loss: Tensor) -> None:
        """Backward pass of one (micro-)batch."""

    def clip(self, max_norm: float) -> float:
        """Clip all gradients; returns their true norm."""

    def step(self) -> list[bool | None]:
        """Step every optimizer, let scale and schedule follow, clear the gradients. Returns what the caller is told of each (None: nothing)."""


class Average(Protocol):
    """A running average of a model's weights."""

    def update(self) -> Any:
        """Take the weights as they are now into the average."""

    def applied(self) -> AbstractContextManager[Any]:
        """A block in which the model has the averages for its weights."""


class Library(Protocol):
    """One library through one of its doors. A method raises NotOffered where the library has nothing of the kind."""

    name: str
    door: Door

    def autocast(self, dtype: torch.dtype | None = None, enabled: bool = True, device: str = "cpu") -> Any:
        """A block (and decorator) that computes in `dtype`."""

    def scaler(self, init_scale: float = 65536.0, enabled: bool = True, device: str | None = "cpu", **settings: Any) -> Any:
        """A loss scaler with the methods of torch.amp.GradScaler."""

    def told(self, answer: Any) -> bool | None:
        """What the return value of a step tells: applied, not applied, or nothing."""

    def clip(self, scaler: Any, optimizer: Optimizer, parameters: Iterable[Tensor], max_norm: float) -> float:
        """Clip by the library's own function, where it has one, straight after the backward pass; returns the norm."""

    def watch(self, scaler: Any, *things: nn.Module | Optimizer) -> None:
        """Tell the scaler what it works for; nothing where a library does not want to know."""

    def masters(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to train 16-bit weights with, made from a plain one, as the library's manual has it."""

    def full(self, parameter: Tensor) -> Tensor:
        """The value that the library keeps of a parameter, which its next step begins at."""

    def follow(self, scaler: Any, scheduler: Any) -> Any:
        """The schedule to call `step()` on once per iteration."""

    def after_step(self, scaler: Any, optimizer: Optimizer, function: Callable[[], Any]) -> Callable[[], None]:
        """Have `function` run after steps. Returns what the loop must call once per iteration."""

    def edits(self, scaler: Any) -> AbstractContextManager[Any]:
        """The block in which gradients may be edited between backward and unscaling."""

    def run(self, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any = None, dtype: torch.dtype = torch.float16) -> Run:
        """The loop of the library's manual, through this door."""

    def accelerator(self, mixed_precision: str, **settings: Any) -> Any:
        """An object with Accelerate's methods, on the CPU."""

    def trainer(self, model: nn.Module, rows: Sequence[dict[str, Any]], folder: str, **arguments: Any) -> Any:
        """An object with the Trainer's methods, its arguments under the names that transformers has."""

    def trace(self, model: nn.Module | None = None, batch: Any = None, **how: Any) -> str:
        """The library's own diagnosis of a failing batch, in one call, as text. how: as for halfstep.trace (call, loss, precision, optimizer)."""

    def cast_model(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        """A model whose weights are all of this 16-bit dtype and can be trained; `model` itself where it is changed in place."""

    def ema(self, model: nn.Module, decay: float) -> Average:
        """A running average of the weights."""

    def mean_of(self, values: Iterable[Tensor]) -> float:
        """The mean of losses as the library reports it, or as its manual has the loop add them up."""

    def save(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        """Write a run that was built by `cast_model`, `masters` and `scaler` (or by nothing) into a folder."""

    def load(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        """Read what `save` wrote into a run that was built in the same way."""

    def export(self, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        """A 16-bit copy of the weights for a file, while the model is being trained."""

    def hold(self, model: nn.Module, dtype: torch.dtype, names: str) -> nn.Module:
        """The model under mixed precision with the modules of pattern `names` in fp32, by a setting and without an edit of the model."""

    def lean(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        """The model under mixed precision in the least memory that still gives the numbers of autocast."""

    def plain(self, tensor: Tensor) -> Tensor:
        """The tensor as it goes to numpy, to a logger or into a file of numbers."""

    def reset(self) -> None:
        """Undo what the library leaves behind in the process; called after every record."""

    def refusal(self, error: BaseException) -> Refusal | None:
        """What an error tells the user to do; None when it is not meant for users."""


@dataclass(frozen=True)
class Record:
    """One fault: how to bring it about, and how to tell whether the result is right.

    kind: D loss scale, E step protocol, F state touched by a bad step, J autocast, A 16-bit weights, N asked for and not applied.
    today: what happens in stock torch (or Accelerate, Transformers for their doors).
    right: the wanted result in words; `check` is the same as a predicate.
    refused: words that a refusal must contain to count as right; None when refusing is no answer.
    stock: how the control comes out: wrong, right (this torch has it right, or never had the fault), or not offered.
    pending: why halfstep does not have it right yet; pending_under: only under this way of finding the loss scale.
    calibrated: only a scale that is found from the gradients can have it right.
    """

    name: str
    kind: str
    title: str
    today: str
    right: str
    action: Callable[[Library], Any]
    check: Callable[[Any], bool]
    refused: tuple[str, ...] | None = None
    stock: Status = "wrong"
    doors: tuple[Door, ...] = ("loop",)
    refs: tuple[str, ...] = ()
    pending: str = ""
    pending_under: Literal["", "follow", "stock"] = ""
    calibrated: bool = False

    @property
    def wrong_in_stock(self) -> bool:
        """Whether the control shows that the check can fail."""
        return self.stock == "wrong"


@dataclass(frozen=True)
class Outcome:
    """How a record came out for a library, and what was seen."""

    status: Status
    seen: str


def carry_out(record: Record, library: Library, quiet: bool = False) -> Outcome:
    """Bring the fault about in `library` and judge the result. quiet: the library's warnings are not the matter here."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        try:
            value = record.action(library)
        except NotOffered as answer:
            return Outcome("not offered", str(answer))
        except Warning:
            raise
        except Exception as error:  # noqa: BLE001  whatever a library raises is its answer
            return _of_error(record, library, error)
        finally:
            library.reset()
    return Outcome("right" if record.check(value) else "wrong", repr(value))


def _of_error(record: Record, library: Library, error: Exception) -> Outcome:
    said = library.refusal(error)
    if said is None or record.refused is None:
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    text = f"{said.cause} {said.remedy}".lower()
    missing = [word for word in record.refused if word.lower() not in text]
    whole = bool(said.cause and said.remedy and not missing)
    return Outcome("right" if whole else "wrong", f"refused: {said.cause} / {said.remedy}" + (f" (does not say {missing})" if missing else ""))


Maker = Callable[[Callable[[Library], Any]], Callable[[Library], Any]]


def collector(into: list[Record], kind: str) -> Callable[..., Maker]:
    """A decorator that adds records of one kind to a list: `@record(name, title, today=..., right=..., check=...)`."""

    def record(name: str, title: str, **fields: Any) -> Maker:
        def make(action: Callable[[Library], Any]) -> Callable[[Library], Any]:
            into.append(Record(**{"name": name, "kind": kind, "title": title, "action": action, **fields}))
            return action

        return make

    return record
