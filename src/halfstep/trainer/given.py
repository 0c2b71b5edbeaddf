"""What a trainer is given besides its settings: refused by name where it is of another kind than the argument takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from halfstep.errors import ConfigError, DataError

FUNCTIONS = {  # argument: what it is called with, and what it returns
    "data_collator": "a list of samples to a dict of tensors",
    "model_init": "nothing, or a trial, to a model",
    "compute_loss_func": "(outputs, labels) to a scalar",
    "compute_metrics": "an EvalPrediction to a dict of numbers",
    "preprocess_logits_for_metrics": "(predictions, labels) to what is kept of them",
}
SOURCES = "Give a list, a Dataset or an IterableDataset of mappings."


def check_function(name: str, value: Any) -> None:
    """Refuse an argument that is no function and, for the usual slip, a class where an instance of it was meant."""
    if value is None:
        return
    if isinstance(value, type) and name != "model_init":
        raise ConfigError(f"{name} is {called(value)}", f"Give it an instance, {value.__name__}(...), or a function of {FUNCTIONS[name]}.")
    if not callable(value):
        raise ConfigError(f"{name}={_shown(value)} is {called(value)}", f"Give it a function of {FUNCTIONS[name]}.")


def check_data(name: str, data: Any) -> None:
    """Refuse what no sample can be read from: numbers, texts, classes, dicts of splits, tables of other libraries, loaders, spent iterators."""
    kind = type(data).__name__
    if isinstance(data, type):
        raise DataError(f"{name} is {called(data)}", f"Give it an instance, {data.__name__}(...).")
    if isinstance(data, Mapping) and 0 not in data:
        keys = list(data)
        example = f"{name}=data[{keys[0]!r}]" if keys else SOURCES
        raise DataError(f"{name} is a {kind} with the keys {', '.join(map(str, keys)) or '(none)'}, and no dataset", f"Pass one of them: {example}.")
    if isinstance(data, DataLoader):
        raise DataError(
            f"{name} is a DataLoader, and the Trainer makes its own",
            f"Pass its dataset (loader.dataset), or override get_{'eval' if 'eval' in name else 'train'}_dataloader.",
        )
    if hasattr(data, "iloc"):
        raise DataError(f"{name} is a {kind}, which is read by columns", "Pass data.to_dict('records'), or datasets.Dataset.from_pandas(data).")
    if isinstance(data, Iterator):
        raise DataError(
            f"{name} is a {kind}, which is spent after one pass", "Give a list, a Dataset, or an IterableDataset that starts anew each time."
        )
    if isinstance(data, str | bytes) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise DataError(f"{name} is {_shown(data)}, of which no sample can be read", SOURCES)


def check_evaluation(data: Any) -> None:
    """The same for evaluation data, which may be a dict of names and datasets."""
    if isinstance(data, Mapping):
        if not data:
            raise DataError("eval_dataset is an empty dict", "Leave it out, or give it {NAME: dataset}.")
        for key, one in data.items():
            check_data(f"eval_dataset[{key!r}]", one)
    elif data is not None:
        check_data("eval_dataset", data)


def check_callbacks(callbacks: Any) -> list[Any]:
    """The callbacks as a list. Raises ConfigError for a single one, which transformers' Trainer takes for a list too."""
    if callbacks is None:
        return []
    if not isinstance(callbacks, list | tuple | set | frozenset | Iterator):
        raise ConfigError(f"callbacks is {called(callbacks)} and not a list", "Write callbacks=[...], also for one.")
    return list(callbacks)


def check_optimizers(optimizers: Any, kind_and_settings: Any) -> tuple[Any, Any]:
    """The pair (optimizer, scheduler). Raises ConfigError for anything else, and for a pair of another kind than (class, dict) beside it."""
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        shown = f"has {len(optimizers)} members" if isinstance(optimizers, tuple | list) else f"is {called(optimizers)}"
        raise ConfigError(f"optimizers {shown}", "Give it the pair (optimizer, scheduler); None in it is made by the settings.")
    optimizer, scheduler = optimizers
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the first of optimizers is {called(optimizer)}, and no optimizer", "Give it a torch optimizer over the model's parameters, or None."
        )
    if scheduler is not None and not (callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, type)):
        raise ConfigError(
            f"the second of optimizers is {called(scheduler)}, and no schedule", "Give it a torch.optim.lr_scheduler.LRScheduler, or None."
        )
    given = kind_and_settings
    if given is not None:
        pair = isinstance(given, tuple | list) and len(given) == 2
        if not (pair and isinstance(given[0], type) and issubclass(given[0], Optimizer) and isinstance(given[1], Mapping)):
            shown = f"({', '.join(map(called, given))})" if isinstance(given, tuple | list) else called(given)
            raise ConfigError(f"optimizer_cls_and_kwargs is {shown}", "Give it a class of optimizers and a dict: (torch.optim.AdamW, {'lr': 1e-3}).")
    return optimizer, scheduler


def called(value: Any) -> str:
    """What a value is, in a sentence about it."""
    name = type(value).__name__
    return f"the class {value.__name__}" if isinstance(value, type) else f"a{'n' if name[0] in 'aeioAEIO' else ''} {name}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
