"""An override that nothing calls is said, with what is called instead; one that is called is not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import halfstep
from halfstep.trainer.hooks import UNHEARD


def made(kind: type[halfstep.Trainer], folder: Path) -> halfstep.Trainer:
    args = halfstep.TrainingArguments(output_dir=str(folder), max_steps=1, use_cpu=True)
    return kind(model=nn.Linear(2, 1), args=args, train_dataset=[{"input": 0}])


@pytest.mark.parametrize("name", UNHEARD)
def test_a_method_that_nothing_calls_is_said(name: str, tmp_path: Path):
    kind = type("Mine", (halfstep.Trainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.warns(UserWarning, match=f"Mine overrides {name}, which halfstep.Trainer does not call: "):
        made(kind, tmp_path)
    assert not hasattr(halfstep.Trainer, name)


def test_methods_that_are_called_are_taken_in_silence(tmp_path: Path):
    class Mine(halfstep.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

        def _get_train_sampler(self, *args: Any) -> Any:
            return None

        def helper(self) -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(Mine, tmp_path)


def test_the_names_are_transformers():
    theirs = pytest.importorskip("transformers").Trainer
    older = {"_rotate_checkpoints", "get_optimizer_cls_and_kwargs"}  # of transformers 4
    assert {name for name in UNHEARD if not hasattr(theirs, name)} <= older


def test_none_of_our_own_methods_is_overridden_by_a_subclass_written_for_transformers():
    theirs = pytest.importorskip("transformers").Trainer
    own = {name for kind in halfstep.Trainer.__mro__[:-1] for name in vars(kind) if name.startswith("_") and not name.startswith("__")}
    assert own & vars(theirs).keys() == {"_get_train_sampler", "_get_eval_sampler", "_prepare_inputs"}  # called as transformers calls them
