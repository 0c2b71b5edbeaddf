"""One training run by each library, on the same data in the same order, and what each of them logged of it."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

import halfstep

STEPS = 50
SMALL = {"max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
QUIET: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}


@dataclass(frozen=True)
class Job:
    """What is trained on what: a model to copy, samples (dicts) in the order of training, the collator and how a Trainer is made."""

    model: nn.Module
    train: list[Any]
    valid: list[Any]
    collator: Any = None
    trainer: dict[str, Any] | None = None  # arguments of both Trainers


@dataclass(frozen=True)
class Run:
    """What a run came to."""

    logged: list[dict[str, Any]]  # of the training steps, in order
    evaluated: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    trainer: Any

    def column(self, name: str) -> list[float]:
        return [record[name] for record in self.logged]


def in_order(base: type) -> type:
    """A Trainer that reads its training data from front to back: the two libraries shuffle each in its own way."""

    class InOrder(base):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            batch = self.args.per_device_train_batch_size
            return DataLoader(self.train_dataset, batch_size=batch, collate_fn=self.data_collator, drop_last=self.args.dataloader_drop_last)

    return InOrder


def counting_tokens(model: nn.Module) -> bool:
    """Whether the model's own loss is divided by the number of tokens of a window that it is given."""
    return hasattr(model, "lm_head")


def run(library: Any, job: Job, folder: Path, settings: dict[str, Any], told: bool = True) -> Run:
    """Train a copy of the job's model with `library.Trainer` under `settings` (fields of `TrainingArguments`).

    told: transformers is told where a model's loss is a mean over the micro-batch.
    """
    args = library.TrainingArguments(output_dir=str(folder / library.__name__), **QUIET | settings)
    model = copy.deepcopy(job.model)
    with warnings.catch_warnings():
        if library is transformers:  # notes of its own, about pinned memory and old names, are not what is compared
            warnings.simplefilter("ignore")
        given = {"data_collator": job.collator, "train_dataset": job.train, "eval_dataset": job.valid} | (job.trainer or {})
        trainer = in_order(library.Trainer)(model=model, args=args, **given)
        divided = counting_tokens(model) or "compute_loss_func" in given or settings.get("label_smoothing_factor")
        if told and library is transformers and not divided:
            trainer.loss_is_scaled_for_ga = False  # or it adds up the losses of a window, believing that the model has divided them
        trainer.train()
    history = trainer.state.log_history
    logged = [record for record in history if "loss" in record]
    evaluated = [record for record in history if "eval_loss" in record]
    return Run(logged, evaluated, {name: p.detach().clone() for name, p in model.named_parameters()}, trainer)


def both(job: Job, folder: Path, **settings: Any) -> tuple[Run, Run]:
    """The run of halfstep and that of transformers."""
    settings = SMALL | settings
    return run(halfstep, job, folder, settings), run(transformers, job, folder, settings)


def gap(one: list[float], other: list[float]) -> float:
    """The largest difference between two columns, relative where the numbers are above 1. NaN counts as infinite."""
    assert len(one) == len(other), (len(one), len(other))
    gaps = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(one, other, strict=True)]
    return max((g if g == g else float("inf") for g in gaps), default=float("inf"))
