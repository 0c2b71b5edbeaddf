"""What a run shows on the terminal: the precision in force, a progress bar, and every step that was refused."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from halfstep.hardware import memory_in_use
from halfstep.step import StepResult
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.callbacks import TrainerCallback
from halfstep.trainer.planned import line
from halfstep.trainer.state import TrainerControl, TrainerState


class ProgressCallback(TrainerCallback):
    """One line with the precision, then a bar with loss, lr, scale, tokens/s, memory and ETA; plain lines when it is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._began = (0.0, 0, 0)  # time, tokens, steps
        self._skips_shown = 0
        self._near = ""  # what was said last of what is close to a limit
        self._refresh = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say which precision is in force and start the bar."""
        self.console.print(str(kwargs["resolution"]), markup=False)
        self._began = (time.perf_counter(), state.num_input_tokens_seen, state.global_step)
        if self.console.is_terminal:
            columns = (
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(None),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console, expand=True)
            self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step)
            self._bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar; its numbers are refreshed twice a second, so that reading the loss does not slow the steps down."""
        now = time.perf_counter()
        if self._bar is None:
            return
        if now - self._refresh < 0.5 and state.global_step < state.max_steps:
            self._bar.update(self._task, completed=state.global_step)
            return
        self._refresh = now
        result: StepResult = kwargs["step_result"]
        logs = {"loss": result.loss, "learning_rate": kwargs["learning_rate"], "scale": result.next_scale}
        self._bar.update(self._task, completed=state.global_step, description=self._numbers(logs, state, kwargs["device"]))

    def on_step_skipped(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say that a step was refused, why and by whom: each of the first ten, then every tenth."""
        self._skips_shown += 1
        if self._skips_shown > 10 and self._skips_shown % 10:
            return
        r: StepResult = kwargs["step_result"]
        culprits = ", ".join(str(c) for c in r.culprits[:3]) + (" and more" if len(r.culprits) > 3 else "")
        scale = f"; loss scale {r.scale:g} -> {r.next_scale:g}" if r.next_scale != r.scale else ""
        self._print(f"step {state.global_step + 1} not applied: {r.reason}: {culprits or 'nothing to apply'}{scale} ({state.skipped_steps} so far)")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Without a terminal, print what the bar would show; evaluation results are printed in any case."""
        logs: dict[str, Any] = kwargs["logs"]
        if "pinned" in logs:
            for name, why in zip(logs["pinned"], logs["why"], strict=True):
                self._print(f"step {state.global_step + 1}: {name} is held in fp32 from now on: {why}")
        if "planned_fp32" in logs:
            self._print(line(logs))
        if logs.get("reason") == "partly":
            self._print(f"step {state.global_step + 1} applied in part: {', '.join(logs['culprits'][:3])}: {logs['detail']}")
        if logs.get("near", self._near) != self._near:
            self._near = logs["near"]
            self._print(f"step {state.global_step}: {self._near}")
        if "eval_loss" in logs:
            shown = {k: v for k, v in logs.items() if k.startswith("eval_") and not k.endswith(("_runtime", "_per_second"))}
            self._print(f"step {state.global_step}: " + "  ".join(f"{k} {_short(v)}" for k, v in shown.items()))
        elif "loss" in logs and "reason" not in logs and self._bar is None:
            left = self._left(state)
            self._print(f"step {state.global_step}/{state.max_steps}  {self._numbers(logs, state, kwargs['device'])}  eta {left}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the bar where it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False)

    def _numbers(self, logs: dict[str, Any], state: TrainerState, device: Any) -> str:
        began, tokens, _ = self._began
        rate = (state.num_input_tokens_seen - tokens) / max(time.perf_counter() - began, 1e-9)
        parts = [f"loss {_short(logs.get('loss'))}", f"lr {_short(logs.get('learning_rate'))}", f"scale {logs.get('scale', 1.0):g}"]
        return "  ".join([*parts, f"{rate:,.0f} tokens/s", f"{memory_in_use(device) / 2**20:,.0f} MiB"])

    def _left(self, state: TrainerState) -> str:
        began, _, steps = self._began
        done = state.global_step - steps
        if done <= 0:
            return "?"
        seconds = (time.perf_counter() - began) / done * (state.max_steps - state.global_step)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


def _short(value: Any) -> str:
    """A number for people; NaN and inf as themselves."""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return str(value)
