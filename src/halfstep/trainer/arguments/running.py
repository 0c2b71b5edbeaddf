"""The settings of a run as a whole: its folder, its batches and how they are read, its checkpoints. Only fields; checks.py checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RunFields:
    """Run: where it goes, how long it is, what it draws its random numbers from.

    Args:
        output_dir: the run folder: config.yaml, metrics.jsonl, checkpoint-STEP.
        overwrite_output_dir: remove an earlier run's files from output_dir first.
        num_train_epochs: passes over the training data, when max_steps is not given.
        max_steps: optimizer steps to apply; -1 means as many as the epochs have.
        seed: of Python's, numpy's and torch's random numbers.
        data_seed: of the order of the training data; seed when not given.
        full_determinism: only operations that give the same bits each time; slower on a GPU. An operation that has no such form is an error.
        resume_from_checkpoint: a checkpoint folder to go on from.
        use_cpu: train on the CPU although there is a GPU.
        disable_tqdm: no progress bar.
    """

    output_dir: str = "trainer_output"
    overwrite_output_dir: bool = False
    num_train_epochs: float = 3.0
    max_steps: int = -1
    seed: int = 42
    data_seed: int | None = None
    full_determinism: bool = False
    resume_from_checkpoint: str | None = None
    use_cpu: bool = False
    disable_tqdm: bool = False


@dataclass(frozen=True)
class BatchFields:
    """Batches: how many samples a step sees, and how they are read.

    Args:
        per_device_train_batch_size: samples per micro-batch.
        per_device_eval_batch_size: samples per evaluation batch.
        gradient_accumulation_steps: micro-batches per optimizer step.
        auto_find_batch_size: halve the batch and begin again when the memory does not suffice.
        train_sampling_strategy: the order of training samples: random; sequential; or group_by_length, batches of about equally long samples.
        length_column_name: the column with the lengths of samples for group_by_length; without that column they are measured.
        remove_unused_columns: leave out columns that the model's forward does not take.
        label_names: the columns that are labels; "labels" when not given.
        dataloader_drop_last: leave out a last, smaller batch.
        dataloader_num_workers: worker processes of the data loaders.
        dataloader_pin_memory: read into pinned memory on a GPU, from which copies do not wait.
        dataloader_persistent_workers: keep the workers between epochs.
        dataloader_prefetch_factor: batches that each worker reads ahead; 2 when not given.
        dataloader_multiprocessing_context: how workers are started: fork, spawn or forkserver; the system's way when not given.
    """

    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    auto_find_batch_size: bool = False
    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] = "random"
    length_column_name: str = "length"
    remove_unused_columns: bool = True
    label_names: list[str] | None = None
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None

    @property
    def group_by_length(self) -> bool:
        """Whether batches are made of samples about as long as each other."""
        return self.train_sampling_strategy == "group_by_length"


@dataclass(frozen=True)
class SavingFields:
    """Saving: when checkpoints are written, and which are kept.

    Args:
        save_strategy: save checkpoints never (no), every save_steps (steps) or after each epoch, and at the end; or when an evaluation was the
            best so far (best).
        save_steps: applied steps between checkpoints; below 1, a share of all steps.
        save_total_limit: keep so many of the newest checkpoints, and the best one where it is known; all when not given.
        load_best_model_at_end: end with the weights of the checkpoint whose evaluation was the best.
    """

    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
