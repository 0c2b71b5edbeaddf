"""The second door: keep your loop, hand over device, precision and accumulation."""

from __future__ import annotations

import difflib
import functools
import gc
import inspect
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from halfstep.accelerator.saving import Saving
from halfstep.accelerator.settings import (
    accumulation_of,
    compiler_of,
    loading_of,
    precision_of,
    project_of,
    read_handlers,
    refuse_environment,
    refuse_generators,
    refuse_not_carried,
    whole_number,
)
from halfstep.accelerator.tracked import Tracked
from halfstep.amp import GradScaler
from halfstep.distributed import DataParallel, launch
from halfstep.errors import refuse_unknown
from halfstep.hardware import default_device, give_back_unused_memory
from halfstep.policy import Policy, from_flags
from halfstep.step import Agree, Heal, OnOverflow

ELSEWHERE = {
    "profile": "Open torch.profiler.profile around the loop.",
    "join_uneven_inputs": "Leave it out: prepared loaders give every process as many batches.",
    "lomo_backward": "Use precision='bf16-lean' to save memory.",
    "maybe_context_parallel": "Each process reads whole samples.",
    "verify_device_map": "A model trains on one device per process.",
    "trigger_sync_in_backward": "Run the last backward pass outside no_sync().",
    "deepspeed_plugin": "Models are trained in one process per GPU.",
}


class Accelerator(Saving, Tracked):
    """Device, precision, loss scaling, accumulation and checkpoints for a loop of your own.

    mixed_precision: "no", "fp16" or "bf16"; fp16 on a CPU is fp16.
    precision: halfstep's own text (`fp16-mixed,scale=static:1024,fp32=lm_head`) or a `Policy`, instead of mixed_precision. "auto": chosen when the
        first model is prepared, by the device's measured rates and its memory, and said with the reason.
    cpu: train on the CPU although there is a GPU.
    gradient_accumulation_steps: micro-batches per optimizer step, for `accumulate` and for the division in `backward`.
    on_overflow: "skip" a step whose gradients overflow; "replay" its backward passes at lower loss scales (the activations of a step
        are kept until it is taken); "raise" StepRefusedError.
    heal: what becomes of a module whose outputs do not fit 16 bits (the step is refused and the result names it): "skip" goes on; "pin" holds it in
        fp32 from the next forward pass on (`halfstep.amp.pins(model)` tells which; checkpoints keep it); "raise" StepRefusedError.
    patience: bad steps of an optimizer in a row before `DivergedError`.
    agree: gets a small fp32 tensor and returns its maximum over all ranks; by default the processes that torchrun started agree by themselves.
    reduce_dtype: under torchrun, the format in which gradients go between processes: "fp32", "bf16" or "fp16"; None for the one they have.
    data_parallel: the other settings of that (`halfstep.distributed.DataParallel`).

    Under accelerate's names, with the classes of `halfstep.accelerator` or accelerate's own:
    gradient_accumulation_plugin: instead of gradient_accumulation_steps. step_scheduler_with_optimizer: a prepared scheduler moves with the
        applied steps of its optimizer, once per process (its length counts the batches of one process); False: whenever it is called.
    split_batches, dataloader_config: how loaders are shared out over processes. device_placement: False leaves models and batches where they are.
    log_with: trackers ("jsonl", "tensorboard", "wandb", "mlflow", "all", or objects), started by `init_trackers`. project_dir, project_config: where
        they and automatically named checkpoints are written. dynamo_backend, dynamo_plugin: let `prepare` compile models in place.
    kwargs_handlers: how the loss scale, the process group and DistributedDataParallel are set up.

    16-bit weights always have masters unless the precision says weights=plain: prepared optimizers are wrapped where that is needed
    (`halfstep.optim.wrap`). With AdamW weights, gradient and states take 16 bytes per parameter under fp32 and *-mixed, about 8 under *-lean:
    `halfstep.policy.bytes_per_parameter` counts them.
    Raises ConfigError for settings that contradict each other, PolicyError (here or in `prepare`) for a precision that
    cannot work with the device or the model.
    """

    def __init__(
        self,
        mixed_precision: str | None = None,
        *,
        precision: str | Policy | None = None,
        cpu: bool = False,
        gradient_accumulation_steps: int = 1,
        on_overflow: OnOverflow = "skip",
        heal: Heal = "skip",
        patience: int = 50,
        agree: Agree | None = None,
        reduce_dtype: str | None = None,
        data_parallel: DataParallel | None = None,
        device_placement: bool = True,
        split_batches: bool = False,
        dataloader_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        rng_types: Iterable[Any] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: Any = None,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("Accelerator", refuse_not_carried(unknown), inspect.signature(Accelerator.__init__).parameters)
        refuse_environment()
        refuse_generators(rng_types)
        whole_number("patience", patience)
        accumulation = accumulation_of(gradient_accumulation_steps, gradient_accumulation_plugin)
        self._handlers, self._compiler = read_handlers(kwargs_handlers), compiler_of(dynamo_backend, dynamo_plugin)
        self.project_configuration = project_of(project_dir, project_config)
        self.dataloader_config = loading_of(split_batches, dataloader_config)
        self.split_batches = self.dataloader_config.split_batches
        self.device_placement, self.step_scheduler_with_optimizer = device_placement, step_scheduler_with_optimizer
        self._ends_with_loader = accumulation.sync_with_dataloader
        cpu = cpu or _wants_cpu()
        self._data_parallel = self._handlers.data_parallel(reduce_dtype, data_parallel)
        self.ranks = launch(cpu, backend=self._data_parallel.backend, timeout=self._data_parallel.timeout)
        super().__init__(default_device(cpu), accumulation.num_steps)
        agree = self.ranks.agree if agree is None and self.ranks.world > 1 else agree
        self._scaler_for = functools.partial(GradScaler.from_policy, patience=patience, on_overflow=on_overflow, heal=heal, agree=agree)
        self._track_with(log_with)
        self._asked = from_flags(precision=precision, mixed_precision=precision_of(mixed_precision, precision))
        self._run_under(self._asked)

    @property
    def even_batches(self) -> bool:
        """Whether the last batches of a pass are filled up, so that every process has as many."""
        return self.dataloader_config.even_batches

    @property
    def non_blocking(self) -> bool:
        """What was asked for; batches in pinned memory are moved without waiting either way."""
        return self.dataloader_config.non_blocking

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of a prepared optimizer, of one of them, was refused."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything that was prepared, and give memory back: before a training with other models. Returns a None for each of `objects`.

        `model, optimizer = accelerator.free_memory(model, optimizer)` lets go of them; the loss scale begins anew.
        """
        self.forget()
        self.scaler = cast(GradScaler, None)
        self._run_under(self._asked)
        gc.collect()
        give_back_unused_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None for _ in objects]

    clear = free_memory

    def __getattr__(self, name: str) -> Any:
        near = difflib.get_close_matches(name, [known for known in dir(type(self)) if not known.startswith("_")], n=1)
        raise AttributeError(f"halfstep's Accelerator has no {name!r}. {ELSEWHERE.get(name, f'Did you mean {near[0]!r}?' if near else '')}".strip())


def _wants_cpu() -> bool:
    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")
