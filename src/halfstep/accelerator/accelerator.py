"""The second door: keep your loop, hand over device, precision and accumulation."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from halfstep.accelerator.saving import Saving
from halfstep.accelerator.together import Together
from halfstep.amp import GradScaler
from halfstep.errors import ConfigError, refuse_unknown
from halfstep.hardware import default_device, processes
from halfstep.policy import Policy, from_flags
from halfstep.step import Agree, Heal, OnOverflow


class Accelerator(Saving, Together):
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
    agree: gets a small fp32 tensor and returns its maximum over all ranks.

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
        **unknown: Any,
    ) -> None:
        refuse_unknown("Accelerator", unknown, inspect.signature(Accelerator.__init__).parameters)
        if processes() > 1:
            raise ConfigError(
                f"the launcher started {processes()} processes, and this version of halfstep trains in one: each would train alone",
                "Start one process.",
            )
        for name, count in (("gradient_accumulation_steps", gradient_accumulation_steps), ("patience", patience)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigError(f"{name}={count!r}", "Use a whole number of 1 or more.")
        super().__init__(default_device(cpu), gradient_accumulation_steps)
        self._scaler_for = functools.partial(GradScaler.from_policy, patience=patience, on_overflow=on_overflow, heal=heal, agree=agree)
        self._run_under(from_flags(precision=precision, mixed_precision=mixed_precision))

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16" or "bf16"."""
        return self.policy.autocast if self.policy.is_mixed else "no"

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last optimizer step was refused."""
        return self.last_step is not None and self.last_step.reason not in ("applied", "accumulating", "no-gradients")
