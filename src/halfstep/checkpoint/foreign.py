"""Folders of other libraries: known by the names in them, refused with the way their weights can be used."""

from __future__ import annotations

from pathlib import Path

from halfstep.errors import CheckpointError

OURS = ("scaler.json", "random.json")  # in every checkpoint of ours, also in one whose manifest is gone
MARKS = (  # the first that is there tells whose folder it is
    (("trainer_state.json",), "transformers.Trainer"),
    (("random_states_0.pkl", "scheduler.bin", "sampler.bin", "scaler.pt"), "accelerate"),
    ((".metadata",), "torch.distributed.checkpoint"),
    (("global_step", "zero_to_fp32.py", "latest"), "DeepSpeed"),
    (("hparams.yaml", "last.ckpt"), "Lightning"),
)
WEIGHTS = (  # how weights are read by who knows their format
    (("config.json",), "AutoModel...from_pretrained({folder!r})"),
    (("model.safetensors", "model.safetensors.index.json"), "model.load_state_dict(safetensors.torch.load_file({folder!r} + '/model.safetensors'))"),
    (("pytorch_model.bin",), "model.load_state_dict(torch.load({folder!r} + '/pytorch_model.bin', weights_only=True))"),
)


def refuse_foreign(folder: Path) -> None:
    """Raise CheckpointError for a folder that another library wrote, with how a run begins from the weights in it."""
    whose = next((name for marks, name in MARKS if any((folder / mark).exists() for mark in marks)), None)
    load = next((how for marks, how in WEIGHTS if any((folder / mark).exists() for mark in marks)), None)
    if (whose is None and load is None) or any((folder / name).exists() for name in OURS):
        return
    what = f"is a checkpoint of {whose}" if whose else "holds the weights of a model and no checkpoint"
    ways = f"begin a new run from its weights: {load.format(folder=str(folder))}" if load else "take the weights out of it with that library"
    raise CheckpointError(
        f"{folder} {what}, and optimizer states, loss scale and data position of another library cannot be resumed",
        f"To go on from it, {ways}, then train() without resume_from_checkpoint.",
    )
