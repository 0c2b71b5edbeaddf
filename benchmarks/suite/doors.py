"""The ways to train: the Trainers, and loops by hand with each library. Every one gives a `Turn` whose run is one whole optimizer step.

A whole step is: fetch the batch, forward, backward, clip to norm 1, fused AdamW, schedule. A Trainer owns its loop, so it runs in a
greenlet that is left at the end of every step and entered again for the next: in the thread that it would have without, and no lock.
What is timed is from one `on_step_end` to the next.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.suite.method import Turn
from benchmarks.suite.nets import Job

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 1_000_000  # a run's length on paper: nobody gets there
RATE, NORM, SCALE = 1e-4, 1.0, 1024.0
# Lightning Fabric is not among them: with its import it puts a function of its own in the place of torch.compile
LIBRARIES: dict[str, tuple[str, ...]] = {
    "torch._dynamo": (),  # by the first optimizer
    "halfstep": ("Accelerator", "Trainer", "TrainerCallback", "TrainingArguments", "amp", "optim"),
    "transformers": ("GPT2LMHeadModel", "Trainer", "TrainerCallback", "TrainingArguments"),
    "accelerate": ("Accelerator",),
    "numba": ("njit",),
}
Steps = Generator[Any, None, None]


def imported(modules: Iterable[str] = tuple(LIBRARIES)) -> None:
    """Import what is installed of these, and compute nothing: processes forked from this one share it (workers.py)."""
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            library = importlib.import_module(module)
            for name in LIBRARIES.get(module, ()):
                getattr(library, name)  # lazy in some: here it is loaded


def by_loop(steps: Steps) -> Turn:
    """A loop that yields its loss after every step."""
    last: list[Any] = [None]

    def run() -> None:
        last[0] = next(steps)

    return Turn(run, loss=lambda: _number(last[0]), close=steps.close)


def by_trainer(make: Callable[[type, Callable[[Any], None]], Any], base: type) -> Turn:
    """A Trainer's own loop. make: f(callback class, note of the loss) to a Trainer; base: its library's TrainerCallback."""
    outside, last = getcurrent(), [None]

    class Pause(base):  # type: ignore[misc]
        """Leaves the loop at the end of every step; ends it when told."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if outside.switch():
                control.should_training_stop = True
            return control

    inside = greenlet(make(Pause, lambda loss: last.__setitem__(0, loss)).train)

    def run() -> None:
        if inside.dead:
            raise RuntimeError("the Trainer's loop has ended")
        inside.switch()

    return Turn(run, loss=lambda: _number(last[0]), close=lambda: inside.switch(True))


def _number(loss: Any) -> float | None:
    return None if loss is None else float(loss)


def noting(trainer: type, note: Callable[[Any], None]) -> type:
    """The Trainer, with every loss of training noted: one call a step more."""

    class Noting(trainer):  # type: ignore[misc]
        """Notes the loss of each training step."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            note(loss)
            return loss

    return Noting


def halfstep_trainer(job: Job, precision: str, **settings: Any) -> Turn:
    """`halfstep.Trainer` with its defaults; neither logging nor saving."""
    import halfstep

    def make(callback: type, note: Callable[[Any], None]) -> Any:
        names = {f.name for f in dataclasses.fields(halfstep.TrainingArguments)}
        if unknown := set(settings) - names:
            raise NotImplementedError(f"halfstep.TrainingArguments has no {', '.join(sorted(unknown))}")
        args = halfstep.TrainingArguments(precision=precision, **_run_settings(job), use_cpu=True, **settings)
        return noting(halfstep.Trainer, note)(model=job.seeded(), args=args, train_dataset=job.samples, callbacks=[callback()])

    return by_trainer(make, halfstep.TrainerCallback)


def transformers_trainer(job: Job, precision: str, **settings: Any) -> Turn:
    """`transformers.Trainer` with fused AdamW; neither logging nor saving."""
    import transformers

    def make(callback: type, note: Callable[[Any], None]) -> Any:
        flags = {} if precision == "fp32" else {precision: True}
        given = {"optim": "adamw_torch_fused", "report_to": "none", "use_cpu": True, "dataloader_pin_memory": False}
        args = transformers.TrainingArguments(**_run_settings(job), **flags, **given, **settings)
        return noting(transformers.Trainer, note)(model=job.seeded(), args=args, train_dataset=job.samples, callbacks=[callback()])

    return by_trainer(make, transformers.TrainerCallback)


def _run_settings(job: Job) -> dict[str, Any]:
    """What both Trainers are told, under the names that both know."""
    folder = tempfile.mkdtemp(prefix="bench-")
    quiet = {"logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
    return {"output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": job.batch, "learning_rate": RATE, **quiet}


def batches(loader: Any) -> Iterator[Any]:
    """Pass after pass."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def parts(job: Job, optimizer: Callable[..., Any] | None = None) -> tuple[nn.Module, Any, Any, Any]:
    """Model, optimizer, schedule and loader of a hand-written loop."""
    model = job.seeded()
    chosen = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True) if optimizer is None else optimizer(model.parameters())
    schedule = LambdaLR(chosen, lambda step: 1.0 - step / STEPS)
    return model, chosen, schedule, DataLoader(job.samples, batch_size=job.batch, shuffle=True)


def torch_loop(job: Job, precision: str, *, compiled: bool = False) -> Turn:
    """Plain torch: autocast, its GradScaler for fp16, clip_grad_norm_, fused AdamW."""

    def steps() -> Steps:
        model, optimizer, schedule, loader = parts(job)
        forward = torch.compile(model) if compiled else model
        dtype, scaler = DTYPES[precision], torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=precision == "fp16")
        for batch in batches(loader):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = forward(**batch)["loss"]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            scaler.step(optimizer)
            scaler.update()
            with warnings.catch_warnings():  # torch's schedule believes that a step skipped for overflow was no call of step()
                warnings.simplefilter("ignore")
                schedule.step()
            optimizer.zero_grad()
            yield loss.detach()

    return by_loop(steps())


def bare_loop(job: Job) -> Turn:
    """The shortest fp32 loop there is: what a person writes by hand."""

    def steps() -> Steps:
        model, optimizer, schedule, loader = parts(job)
        for batch in batches(loader):
            loss = model(**batch)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield loss.detach()

    return by_loop(steps())


def accelerate_loop(job: Job, precision: str, *, compiled: bool = False) -> Turn:
    """Accelerate's loop."""
    from accelerate import Accelerator

    def steps() -> Steps:
        accelerator = Accelerator(mixed_precision="no" if precision == "fp32" else precision, cpu=True)
        model, optimizer, schedule, loader = accelerator.prepare(*parts(job))
        forward = torch.compile(model) if compiled else model
        for batch in batches(loader):
            loss = forward(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield loss.detach()

    return by_loop(steps())


def fabric_loop(job: Job, precision: str) -> Turn:
    """Lightning Fabric's loop. Its fp16 on a CPU is not offered."""
    from lightning_fabric import Fabric  # type: ignore[import-not-found,unused-ignore]

    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

    def steps() -> Steps:
        fabric = Fabric(accelerator="cpu", devices=1, precision="32-true" if precision == "fp32" else f"{precision}-mixed")
        plain, made, schedule, loader = parts(job)
        model, optimizer = fabric.setup(plain, made)
        prepared = fabric.setup_dataloaders(loader)
        for batch in batches(prepared):
            loss = model(**batch)["loss"]
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield loss.detach()

    return by_loop(steps())


def halfstep_loop(job: Job, precision: str, *, compiled: bool = False) -> Turn:
    """The first door: `halfstep.amp` and `halfstep.optim.AdamW` in a loop by hand."""
    import halfstep
    from halfstep.amp import GradScaler, autocast

    def steps() -> Steps:
        model, optimizer, schedule, loader = parts(job, lambda p: halfstep.optim.AdamW(p, lr=RATE, weight_decay=0.0))
        forward = torch.compile(model) if compiled else model
        dtype, scaler = DTYPES[precision], GradScaler("cpu", enabled=precision == "fp16")
        for batch in batches(loader):
            with autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = forward(**batch)["loss"]
            scaler.scale(loss).backward()
            scaler.step(optimizer, max_norm=NORM)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
            yield loss.detach()

    return by_loop(steps())


def halfstep_accelerator(job: Job, precision: str) -> Turn:
    """The second door."""
    import halfstep

    def steps() -> Steps:
        accelerator = halfstep.Accelerator(precision=precision, cpu=True)
        model, optimizer, schedule, loader = accelerator.prepare(*parts(job))
        for batch in batches(loader):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield loss.detach()

    return by_loop(steps())
