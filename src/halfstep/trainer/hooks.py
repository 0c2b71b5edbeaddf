"""Methods of transformers' Trainer that subclasses override, and that this Trainer does not call: said at once, with what it calls instead."""

from __future__ import annotations

import inspect
import warnings

UNHEARD = {  # method of transformers.Trainer: what to write instead
    "_save": "override save_model(output_dir)",
    "_save_checkpoint": "use a callback's on_save, which comes after each checkpoint",
    "_save_optimizer_and_scheduler": "use a callback's on_save; checkpoints have both",
    "_save_rng_state": "use a callback's on_save; checkpoints have the random states",
    "_load_from_checkpoint": "load weights into the model before train()",
    "_load_optimizer_and_scheduler": "pass optimizers=(optimizer, scheduler)",
    "_load_best_model": "leave load_best_model_at_end off and load after train()",
    "_rotate_checkpoints": "set save_total_limit",
    "_determine_best_metric": "set metric_for_best_model and greater_is_better",
    "_maybe_log_save_evaluate": "use a callback, whose control has should_log, should_evaluate and should_save",
    "_inner_training_loop": "override training_step, or use callbacks",
    "_run_epoch": "override training_step, or use callbacks",
    "_prepare_for_training": "use a callback's on_train_begin",
    "_finalize_training": "use a callback's on_train_end",
    "_evaluate": "override evaluate",
    "get_batch_samples": "override get_train_dataloader",
    "_get_num_items_in_batch": "override training_step or compute_loss, which get num_items_in_batch",
    "_get_dataloader": "override get_train_dataloader and get_eval_dataloader",
    "_get_collator_with_removed_columns": "pass data_collator=, and remove_unused_columns=False",
    "_remove_unused_columns": "set remove_unused_columns=False and choose the columns before",
    "_set_signature_columns_if_needed": "set remove_unused_columns=False",
    "_prepare_input": "override _prepare_inputs",
    "_wrap_model": "wrap the model before it is given",
    "_move_model_to_device": "move the model before it is given",
    "_clip_grad_norm": "set max_grad_norm, or clip in a callback's on_pre_optimizer_step",
    "_get_grad_norm": "read grad_norm in a callback's on_step_end",
    "create_accelerator_and_postprocess": "set the arguments' precision and ddp_* fields",
    "get_decay_parameter_names": "override create_optimizer",
    "get_optimizer_cls_and_kwargs": "pass optimizer_cls_and_kwargs=(class, settings)",
    "get_total_train_batch_size": "set per_device_train_batch_size and gradient_accumulation_steps",
    "floating_point_ops": "measure it in a callback: nothing here counts operations",
    "store_flos": "measure it in a callback: nothing here counts operations",
    "hyperparameter_search": "call train() of a Trainer for each trial",
    "_hp_search_setup": "call train() of a Trainer for each trial",
    "create_model_card": "write it after train()",
    "push_to_hub": "upload what save_model() wrote",
}


def warn_unheard(trainer: object) -> None:
    """A warning for each method of a subclass that nothing here calls."""
    kind = type(trainer)
    for name, instead in UNHEARD.items():
        if inspect.getattr_static(kind, name, None) is not None:
            warnings.warn(f"{kind.__name__} overrides {name}, which halfstep.Trainer does not call: {instead}", stacklevel=4)
