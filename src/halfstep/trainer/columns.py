"""Which columns of the data a model takes, and which of them are labels."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from halfstep.errors import DataError
from halfstep.trainer.data import LABELS

SPANS = ("start_positions", "end_positions")  # the labels of models that answer questions out of a text


def label_names_of(model: nn.Module) -> tuple[str, ...]:
    """The arguments of a model's forward that are labels, in their order; ("labels",) when none says so.

    Those with the word label or labels in their name (`labels`, `next_sentence_label`), and start_positions with end_positions. Not `label` and
    `label_ids`, which collators turn into `labels`.
    """
    names = list(inspect.signature(model.forward).parameters)
    found = [name for name in names if {"label", "labels"} & set(name.split("_")) and (name == "labels" or name not in LABELS)]
    spans = [name for name in SPANS if name in names]
    found += spans if len(spans) == len(SPANS) else []
    return tuple(found) or ("labels",)


def taken_columns(model: nn.Module, labels: Sequence[str]) -> set[str] | None:
    """The names of columns that a model's forward takes, labels under all their names among them; None when it takes any.

    A transformers model names what it takes, and hands on other keywords for its inner parts only: those are no columns.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and not hasattr(model, "main_input_name"):
        return None
    return {p.name for p in parameters} | {*labels, *LABELS}


def is_table(dataset: Any) -> bool:
    """Whether a dataset is a `datasets.Dataset`: a table of named columns that is read by rows."""
    return any(c.__name__ == "Dataset" and c.__module__.startswith("datasets.") for c in type(dataset).__mro__)


def without_unused(dataset: Any, taken: set[str] | None) -> Any:
    """A `datasets.Dataset` without the columns that the model does not take, so that they are not read and decoded; other data as it is.

    Its format stays. One with a transform of its own is left whole, because the transform may read any column; and one of which nothing would be
    left too, which the collator then refuses by name.
    """
    if taken is None or not is_table(dataset) or dataset.format["type"] == "custom":
        return dataset
    unused = [name for name in dataset.column_names if name not in taken]
    return dataset.remove_columns(unused) if 0 < len(unused) < len(dataset.column_names) else dataset


def lengths_of(dataset: Any, column: str, inputs: str = "input_ids") -> list[int]:
    """The length of each sample of a map-style dataset: its `column` where there is one, else how many `inputs` it has.

    Reads the whole dataset once where it is no table. Raises DataError for samples that have neither.
    """
    if is_table(dataset):
        names = dataset.column_names
        if column in names:
            return [int(n) for n in dataset.with_format(None)[column]]
        if inputs in names:
            return [len(ids) for ids in dataset.with_format(None)[inputs]]
        found = ", ".join(names)
    else:
        first = dataset[0]
        keys = list(first) if hasattr(first, "keys") else []
        name = next((key for key in (column, inputs) if key in keys), None)
        if name is not None:
            rows = (dataset[i][name] for i in range(len(dataset)))
            return [int(v) for v in rows] if name == column else [len(v) for v in rows]
        found = ", ".join(map(str, itertools.islice(keys, 20))) or f"samples of type {type(first).__name__}"
    raise DataError(
        f"group_by_length needs the length of each sample, and the data has neither a column {column!r} nor {inputs!r} (it has {found})",
        "Add a column of lengths and name it with length_column_name, or leave group_by_length out.",
    )
