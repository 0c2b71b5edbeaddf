"""What `plan`, `compare` and `audit` look at: the small GPT that `halfstep train` trains, or a model of the user's, named as a Python target."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader

from halfstep.checkpoint import seed_everything
from halfstep.errors import ConfigError
from halfstep.hardware import default_device

if TYPE_CHECKING:
    from halfstep.trainer import TrainingArguments

RETURNS = "It returns (model, batches), (model, batches, loss), or a mapping with model, batches and, if you like, loss and optimizer."
KEYS = ("model", "batches", "loss", "optimizer")


@dataclass(frozen=True)
class Subject:
    """A model, its batches, and what belongs to them.

    loss: f(outputs) or f(outputs, batch) gives the scalar loss; None where the model's outputs hold it. optimizer: f(parameters) gives the
    optimizer; None for AdamW. settings: those of `halfstep train`, {} for a target.
    """

    name: str
    model: nn.Module
    batches: list[Any]
    loss: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def from_target(target: str, count: int, seed: int = 0) -> Subject:
    """The subject that FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION makes. A function that takes `seed` is given it; random states are seeded too.

    count: the batches that are kept, fewer where there are fewer. Raises ConfigError for a target that is not there or gives something else.
    """
    function = _function(target)
    seed_everything(seed)
    takes = inspect.signature(function).parameters
    made = function(seed=seed) if "seed" in takes else function()
    if isinstance(made, Mapping):
        unknown = sorted(set(made) - set(KEYS))
        if unknown or not {"model", "batches"} <= set(made):
            raise ConfigError(f"{target} gave a mapping with {', '.join(map(str, made)) or 'nothing'}", RETURNS)
        parts = dict(made)
    elif isinstance(made, tuple) and len(made) in (2, 3):
        parts = dict(zip(KEYS, made, strict=False))
    else:
        raise ConfigError(f"{target} gave a {type(made).__name__}", RETURNS)
    if not isinstance(parts["model"], nn.Module):
        raise ConfigError(f"{target} gave a {type(parts['model']).__name__} for its model", "Give an nn.Module.")
    for key in ("loss", "optimizer"):
        if parts.get(key) is not None and not callable(parts[key]):
            raise ConfigError(f"{target} gave a {type(parts[key]).__name__} for {key}", "Give a function: loss(outputs), optimizer(parameters).")
    batches = list(islice(parts["batches"], count))
    if not batches:
        raise ConfigError(f"{target} gave no batches", "Give at least one; a DataLoader or a list.")
    return Subject(target, parts["model"], batches, parts.get("loss"), parts.get("optimizer"))


def from_training(argv: Sequence[str], count: int, seed: int | None = None) -> Subject:
    """The small GPT and `count` batches of its text, as `halfstep train` with these options would begin; a short epoch is followed by the next.

    They are on the device that it would train on.
    """
    from halfstep.cli.train import configure, fields_of
    from halfstep.demo import GPT, GPTConfig, read, split

    settings, _ = configure(list(argv))
    shape = GPTConfig(**fields_of(GPTConfig, settings))
    train_set, _ = split(read(settings["text"]), shape.block_size)
    seed_everything(settings["seed"] if seed is None else seed)
    model, device = GPT(shape), default_device(settings["use_cpu"])
    loader: DataLoader[Any] = DataLoader(train_set, batch_size=settings["per_device_train_batch_size"], shuffle=True)
    batches = [{name: t.to(device) for name, t in batch.items()} for batch in islice(_again(loader), count)]
    return Subject("the small GPT of halfstep train", model.to(device), batches, settings=settings)


def subject_of(target: str | None, rest: Sequence[str], count: int) -> Subject:
    """What `plan` and `audit` look at: the target, or the small GPT with the options in `rest` and the optimizer of `halfstep train`."""
    from halfstep.trainer.optimizers import make_optimizer

    if count < 1:
        raise ConfigError(f"--batches {count}", "Use 1 or more.")
    if target is not None:
        if rest:
            raise ConfigError(f"{rest[0]} belongs to halfstep train, and --target names a model of yours", "Leave one of them out.")
        return from_target(target, count)
    found = from_training(rest, count)
    args = training_arguments(found.settings)
    return replace(found, optimizer=lambda parameters: make_optimizer(nn.ParameterList(parameters), args))


def training_arguments(settings: Mapping[str, Any]) -> TrainingArguments:
    """The arguments among the settings of `halfstep train`."""
    from halfstep.cli.train import fields_of
    from halfstep.trainer import TrainingArguments

    return TrainingArguments(**fields_of(TrainingArguments, settings))


def _again(loader: DataLoader[Any]) -> Any:
    for _ in cycle((None,)):
        yield from loader


def _function(target: str) -> Callable[..., Any]:
    where, sign, name = target.rpartition(":")
    if not sign or not where or not name:
        raise ConfigError(f"{target!r} is no target", "Write FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION.")
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise ConfigError(f"there is no file {where}", "Name it as seen from this folder: script.py:make.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{where} cannot be imported", "Name a Python file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # so that its classes can be found again, by pickles and by dataclasses
        sys.path.insert(0, str(path.resolve().parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.resolve().parent))
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not where.startswith(error.name):
                raise
            raise ConfigError(f"there is no module {where}", "Name one that can be imported from this folder, or FILE.py:FUNCTION.") from error
        finally:
            sys.path.remove("")
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        raise ConfigError(f"{where} has no function {name}", "Name one that makes the model and its batches. " + RETURNS)
    return function
