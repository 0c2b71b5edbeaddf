"""Which settings a run must keep when it goes on from a checkpoint, so that it goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfstep.checkpoint import read_manifest
from halfstep.errors import CheckpointError
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.data import is_ours

BATCH = "per_device_train_batch_size"
KEPT = (  # where the batches are, or what the optimizer's and the schedule's saved state holds
    BATCH,
    "gradient_accumulation_steps",
    "dataloader_drop_last",
    "train_sampling_strategy",
    "optim",
    "optim_args",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "ema_decay",
    "ema_warmup",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "warmup_ratio",
)


def settings_to_keep(args: TrainingArguments, loader: Any) -> dict[str, Any]:
    """The settings of a run that goes into each checkpoint's manifest, with the seed of the data's order and the number of samples."""
    found = {name: getattr(args, name) for name in KEPT} | {"data_seed": args.order_seed, "training samples": None}
    return found | {"training samples": len(loader.dataset), BATCH: loader.batch_sampler.batch_size} if is_ours(loader) else found


def refuse_other_settings(folder: Path, now: dict[str, Any]) -> None:
    """Raise CheckpointError, before anything is loaded, when the checkpoint's run had other settings than `now`."""
    then = read_manifest(folder).about.get("arguments", {})
    for name, value in now.items():
        if name in then and then[name] != value:
            raise CheckpointError(
                f"checkpoint {folder} is of a run with {name}={then[name]}, and this run has {name}={value}",
                "Resume with the same; for other settings start a new run from the weights in model.safetensors.",
            )
