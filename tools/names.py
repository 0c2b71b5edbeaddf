"""Names of transformers and accelerate beside those of halfstep, read from the code of all three: tables for the guides on moving over."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any

from halfstep import Accelerator, Trainer, TrainingArguments
from halfstep.accelerator.settings import NOT_CARRIED as ACCELERATOR_NOT_CARRIED
from halfstep.trainer.arguments import NOT_CARRIED, OLD_NAMES, OTHER_NAMES

WHY_OTHER_DEFAULT = {
    "output_dir": "as transformers names it when it is left out",
    "disable_tqdm": "the bar is shown unless you say otherwise; without a terminal its numbers are printed as lines",
    "optim": "fused AdamW for fp32 weights and states, halfstep's for 16-bit ones",
    "logging_nan_inf_filter": "nothing is filtered: a loss that is not finite shows in the mean; True is refused",
    "gradient_checkpointing": "off, as there",
    "include_for_metrics": "nothing, as there",
}
WHAT_FOR = {  # fields that transformers does not have
    "precision": "a policy: `bf16-mixed`, `fp16-mixed,scale=static:1024`, `bf16-lean`, ...",
    "weights": "how 16-bit weights keep small updates: `split`, `split24`, `kahan`, `stochastic`, `plain`",
    "states": "the optimizer's moments in `fp32`, `bf16`, `int8`",
    "activations": "what is kept for the backward pass, in 8 bits: `int8`, `fp8`",
    "fp32_modules": "patterns of modules that stay in fp32",
    "loss_scale": "`dynamic:START`, `static:S`",
    "scale_strategy": "`follow` (the gradients) or `stock` (torch's rule)",
    "scale_window": "good steps before the scale doubles",
    "scale_floor": "the scale never falls below",
    "scale_ceiling": "nor rises above",
    "on_overflow": "`replay` (default), `skip`, `raise`",
    "ema_decay": "the decay of an average of the weights, which is evaluated, saved and left",
    "ema_in_evaluation": "`False`: the trained weights are",
    "ema_warmup": "a lower decay at first",
    "gradient_release": "the optimizer steps inside the backward pass, and gradients are freed one by one",
    "heal": "a module whose outputs do not fit 16 bits: `pin` (default), `skip`, `raise`",
    "plan": "a `halfstep.Plan` or its file: the precision, the modules that stay in fp32, the loss scale",
    "rules": "modules that an earlier run had to hold in fp32",
    "max_bad_steps": "so many refused steps in a row end the run",
    "log_stalled": "log the share of updates that round away",
    "record_every": "steps between samples of the numbers of each layer",
    "audit": "why 16 bits are or are not faster here",
    "report": "an HTML page about the run when it ends",
    "chunked_loss": "causal language models: the loss without the whole of the logits",
    "reduce_dtype": "the format in which ranks exchange gradients",
    "warmup_ratio": "transformers 4's; in 5 a `warmup_steps` below 1 is the same, here too",
    "overwrite_output_dir": "transformers 4's: remove the run that is in the folder",
    "logging_dir": "transformers 4's: where TensorBoard's files go",
}
INSTEAD = {  # of accelerate's Accelerator: what to use where a name is not there
    "deepspeed_plugin": '`precision="bf16-lean"`; torchrun for several GPUs',
    "deepspeed_ulysses_dl_adapter": "nothing: sequences are not split over ranks",
    "fp8_backend": "nothing: products are in bf16 or fp16",
    "is_fsdp2": "nothing: weights are not sharded",
    "is_composable_parallelism_enabled": "nothing: ranks are data parallel",
    "lomo_backward": "`halfstep.optim` with `weights=` and `states=`",
    "maybe_context_parallel": "nothing: sequences are not split over ranks",
    "multi_device": "`num_processes > 1`",
    "parallelism_config": "torchrun: data parallel",
    "profile": "`torch.profiler.profile` around the loop",
    "torch_device_mesh": "nothing: ranks are data parallel",
    "verify_device_map": "nothing: a model lies on one device",
    "should_save_model": "`is_main_process`",
    "use_seedable_sampler": "nothing: a pass over a prepared loader is resumed in its order anyway",
    "use_stateful_dataloader": "`skip_first_batches`",
    "dispatch_batches": "nothing: each process reads its own batches",
    "join_uneven_inputs": "nothing: prepared loaders give every rank as many batches",
    "trigger_sync_in_backward": "`accumulate`, whose last micro-batch synchronises",
}
RANKS = ("context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank", "pipeline_parallel_rank", "tensor_parallel_rank")
INSTEAD |= dict.fromkeys(RANKS, "`process_index`: ranks are data parallel")
OWN = {  # of halfstep's Accelerator
    "run_step": "a whole step, run again at a lower loss scale after an overflow",
    "on_applied": "call a function after each applied step (an average of the weights)",
    "applied_steps": "how many steps moved the weights",
    "last_step": "the `StepResult` of the last step",
}


def defaults(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass with their defaults."""
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(kind)}


def transformers_fields() -> dict[str, Any]:
    """The fields of `transformers.TrainingArguments` with their defaults."""
    from transformers import TrainingArguments as Theirs

    return defaults(Theirs)


def same_fields() -> str:
    """The fields that both libraries have, with the same default."""
    ours, theirs = defaults(TrainingArguments), transformers_fields()
    return ", ".join(f"`{name}`" for name in theirs if name in ours and ours[name] == theirs[name])


def other_defaults() -> str:
    """The fields that both libraries have, with another default here."""
    ours, theirs = defaults(TrainingArguments), transformers_fields()
    rows = [(n, theirs[n], ours[n], WHY_OTHER_DEFAULT[n]) for n in theirs if n in ours and ours[n] != theirs[n]]
    return _table(("field", "transformers", "here", "why"), [(f"`{n}`", f"`{a!r}`", f"`{b!r}`", why) for n, a, b, why in rows])


def spellings() -> str:
    """Names that are read as other ones."""
    old = [(f"`{name}`", f"`{new}`", "read, with a note") for name, new in OLD_NAMES.items()]
    return _table(("name", "read as", ""), [*old, *((f"`{name}`", f"`{new}`", "read") for name, new in OTHER_NAMES.items())])


def own_fields() -> str:
    """The fields that transformers 5 does not have."""
    ours, theirs = defaults(TrainingArguments), transformers_fields()
    return _table(("field", "default", "what for"), [(f"`{n}`", f"`{ours[n]!r}`", WHAT_FOR[n]) for n in ours if n not in theirs])


def refused_fields() -> str:
    """Fields of transformers 4 and 5 that are not carried, with what to do instead; names with the same remedy share a row."""
    rows: dict[str, list[str]] = {}
    for name, (_, remedy) in NOT_CARRIED.items():
        rows.setdefault(remedy, []).append(f"`{name}`")
    return _table(("refused", "instead"), [(", ".join(names), remedy) for remedy, names in rows.items()])


def trainer_arguments() -> str:
    """The arguments of `Trainer` in both libraries."""
    from transformers import Trainer as Theirs

    ours, theirs = (set(inspect.signature(kind.__init__).parameters) - {"self", "unknown"} for kind in (Trainer, Theirs))
    lines = [f"The same: {_names(ours & theirs)}."]
    if theirs - ours:
        lines.append(f"Not here: {_names(theirs - ours)}.")
    return "\n".join(lines)


def accelerator_same() -> str:
    """The public names that both Accelerators have."""
    ours, theirs = accelerator_names()
    return _names(ours & theirs)


def accelerator_missing() -> str:
    """What accelerate's has and ours has not, with what to use."""
    ours, theirs = accelerator_names()
    rows: dict[str, list[str]] = {}
    for name in sorted(theirs - ours):
        rows.setdefault(INSTEAD[name], []).append(f"`{name}`")
    return _table(("not here", "instead"), [(", ".join(names), remedy) for remedy, names in rows.items()])


def accelerator_refused() -> str:
    """Arguments of accelerate's constructor that are refused."""
    rows: dict[str, list[str]] = {}
    for name, remedy in ACCELERATOR_NOT_CARRIED.items():
        rows.setdefault(remedy, []).append(f"`{name}`")
    return _table(("argument", "instead"), [(", ".join(names), remedy) for remedy, names in rows.items()])


def accelerator_own() -> str:
    """What only halfstep's Accelerator has."""
    return _table(("name", "what it does"), [(f"`{name}`", text) for name, text in OWN.items()])


def accelerator_names() -> tuple[set[str], set[str]]:
    """The public names of halfstep's Accelerator, those that its constructor sets included, and of accelerate's class."""
    from accelerate import Accelerator as Theirs

    ours, theirs = {*dir(Accelerator), *vars(Accelerator(cpu=True))}, dir(Theirs)
    return {n for n in ours if not n.startswith("_")}, {n for n in theirs if not n.startswith("_")}


def _names(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


TABLES = {
    "same_fields": same_fields,
    "other_defaults": other_defaults,
    "spellings": spellings,
    "own_fields": own_fields,
    "refused_fields": refused_fields,
    "trainer_arguments": trainer_arguments,
    "accelerator_same": accelerator_same,
    "accelerator_missing": accelerator_missing,
    "accelerator_refused": accelerator_refused,
    "accelerator_own": accelerator_own,
}
