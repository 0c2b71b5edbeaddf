"""Names of settings that are not fields here: old spellings, which are read, and names that are not carried, which are refused with the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from halfstep.errors import ConfigError, suggest

OLD_NAMES = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "group_by_length": "train_sampling_strategy",
    "adafactor": "optim",
    "evaluate_during_training": "eval_strategy",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    "xpu_backend": "ddp_backend",
}
MEANT = {"group_by_length": "group_by_length", "adafactor": "adafactor", "evaluate_during_training": "steps", "include_tokens_per_second": "all"}
"""What True means under the new name, where an old switch became a choice. False means the default."""

OTHER_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Names that transformers has for the same thing today; read without a note."""

_HUB = "Save with trainer.save_model(folder) and upload it with huggingface_hub.upload_folder(folder_path=folder, repo_id=...)."
_SHARDS = (
    "For less memory use precision='bf16-lean' (8 instead of 16 bytes per weight) and gradient_checkpointing=True; torchrun starts several ranks."
)
_TPU = "halfstep trains on CPUs and NVIDIA GPUs; leave it out."
_COMPILE = "Use torch_compile=True, with torch_compile_backend= where another one than inductor is meant."
_AMP = "The precision says it all: precision='fp16-mixed' or 'bf16-mixed'."
_SCRIPT = "It did nothing in the Trainer: call trainer.train(), trainer.evaluate() or trainer.predict() in your script."
_TRACKIO = "Use report_to='tensorboard', 'wandb' or 'mlflow', with run_name=."
_LEVEL = "Use logging.getLogger('halfstep').setLevel(...)."
_LOADERS = "Override Trainer.get_train_dataloader, or use halfstep.Accelerator in a loop of your own."

NOT_CARRIED: dict[str, tuple[tuple[Any, ...], str]] = {
    "deepspeed": ((None, ""), _SHARDS),
    "fsdp": ((None, "", False, []), _SHARDS),
    "fsdp_config": ((None, {}), _SHARDS),
    "fsdp_min_num_params": ((0,), _SHARDS),
    "fsdp_transformer_layer_cls_to_wrap": ((None,), _SHARDS),
    "sharded_ddp": ((None, "", False, []), _SHARDS),
    "parallelism_config": ((None,), _SHARDS),
    "mp_parameters": (("",), _SHARDS),
    "push_to_hub": ((False,), _HUB),
    "hub_model_id": ((None,), _HUB),
    "hub_token": ((None,), _HUB),
    "hub_strategy": (("every_save",), _HUB),
    "hub_private_repo": ((None, False), _HUB),
    "hub_always_push": ((False,), _HUB),
    "hub_revision": ((None,), _HUB),
    "push_to_hub_model_id": ((None,), _HUB),
    "push_to_hub_organization": ((None,), _HUB),
    "push_to_hub_token": ((None,), _HUB),
    "tpu_num_cores": ((None,), _TPU),
    "tpu_metrics_debug": ((False,), _TPU),
    "use_ipex": ((False,), _COMPILE),
    "use_mps_device": ((False,), _TPU),
    "jit_mode_eval": ((False,), _COMPILE),
    "torchdynamo": ((None,), _COMPILE),
    "half_precision_backend": (("auto",), _AMP),
    "fp16_backend": (("auto",), _AMP),
    "fp16_opt_level": (("O1",), _AMP),
    "do_train": ((False,), _SCRIPT),
    "do_eval": ((False,), _SCRIPT),
    "do_predict": ((False,), _SCRIPT),
    "local_rank": ((-1,), "Start with torchrun, which tells each process its rank in the environment."),
    "average_tokens_across_devices": (
        (False,),
        "Each rank divides its loss by its own label tokens, and gradients are averaged over ranks; leave it out.",
    ),
    "log_on_each_node": ((False,), "The first rank writes the log; leave it out."),
    "log_level": (("passive",), _LEVEL),
    "log_level_replica": (("warning",), _LEVEL),
    "project": (("huggingface",), _TRACKIO),
    "trackio_space_id": ((None,), _TRACKIO),
    "trackio_bucket_id": ((None,), _TRACKIO),
    "trackio_static_space_id": ((None,), _TRACKIO),
    "accelerator_config": ((None,), _LOADERS),
    "dispatch_batches": ((None, False), _LOADERS),
    "split_batches": ((None, False), _LOADERS),
    "dataloader_in_order": ((True,), "Batches always come in order here, so that a run can be resumed and repeated; leave it out."),
    "optim_target_modules": ((None,), "Give a Trainer the optimizer itself: optimizers=(optimizer, None)."),
    "liger_kernel_config": ((None,), "Apply the kernels yourself (liger_kernel.transformers), and leave use_liger_kernel out."),
    "use_cache": ((False,), "Set model.config.use_cache."),
    "torch_empty_cache_steps": (
        (None,),
        "Call torch.cuda.empty_cache() in on_step_end of a TrainerCallback; precision='bf16-lean' takes less memory.",
    ),
    "eval_use_gather_object": ((False,), "Return tensors from prediction_step."),
    "include_inputs_for_metrics": ((False,), "Return what the metric needs among the predictions: override Trainer.prediction_step."),
    "save_only_model": ((False,), "Use save_strategy='no' and trainer.save_model(); checkpoints hold all that a run needs to go on."),
    "save_on_each_node": ((False,), "Use an output_dir that all machines see."),
    "save_safetensors": ((True,), "Weights are always saved as safetensors."),
    "enable_jit_checkpoint": ((False,), "Ctrl-C (SIGINT) saves a checkpoint before the run stops."),
    "ignore_data_skip": ((False,), "A resumed run goes on at the batch where it stopped; for another order start a new run from model.safetensors."),
    "restore_callback_states_from_checkpoint": ((True,), "A resumed run goes on with all of its state; leave it out."),
    "debug": (("", [], None), "halfstep.trace(model, batch) names the operation that made the first inf or NaN."),
    "skip_memory_metrics": ((True,), "halfstep.policy.bytes_per_parameter counts the memory; the progress bar shows what is in use."),
    "past_index": ((-1,), "Keep the state in your model, and return the loss and the logits only."),
    "ray_scope": (("last",), "Give each trial arguments of its own with dataclasses.replace."),
    "use_legacy_prediction_loop": ((False,), "There is one prediction loop; leave it out."),
}
"""name: (values that say what happens here anyway, the remedy for others)."""


def warn(text: str) -> None:
    """Say it as a DeprecationWarning that points at whoever made the arguments."""
    warnings.warn(text, DeprecationWarning, stacklevel=4)


def translate(settings: Mapping[str, Any], known: Iterable[str], note: Callable[[str], object] = warn) -> dict[str, Any]:
    """`settings` under the names of the `known` fields. note: gets a line about each old name.

    Raises ConfigError for an unknown name, for one given in both spellings, and for one that is not carried, unless its value asks for nothing.
    """
    known, result = set(known), dict[str, Any]()
    for name, value in settings.items():
        if name in NOT_CARRIED and name not in known:
            refuse_not_carried(name, value)
            continue
        new = OLD_NAMES.get(name) or OTHER_NAMES.get(name, name)
        if new not in known:
            raise ConfigError(f"TrainingArguments has no field {name!r}", suggest(name, known | set(OLD_NAMES) | set(OTHER_NAMES)))
        if name in MEANT and not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}", f"Use {new}={MEANT[name]!r}.")
        if new in result or (new != name and new in settings):
            kind = "the old" if name in OLD_NAMES else "another"
            raise ConfigError(f"{name} is {kind} name of {new}, and both were given", f"Leave {name} out.")
        if name in OLD_NAMES:
            note(f"{name} is now called {new}; it is read as that")
        if name not in MEANT:
            result[new] = value
        elif value:
            result[new] = MEANT[name]
    return result


def refuse_not_carried(name: str, value: Any) -> None:
    """Raise ConfigError for a setting of transformers that is not carried here, unless `value` asks for what happens anyway."""
    harmless, remedy = NOT_CARRIED[name]
    if not any(value == plain and type(value) is type(plain) for plain in harmless):
        raise ConfigError(f"{name}={value!r} is not carried by halfstep", remedy)
