"""`halfstep train [CONFIG.yaml] [--field value ...]`: train a model from text, by default a small GPT on Python's documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from halfstep.checkpoint import latest, seed_everything
from halfstep.cli.options import DemoArguments, by_name, on_the_line
from halfstep.demo import GPT, GPTConfig, read, split
from halfstep.errors import CheckpointError, ConfigError
from halfstep.trainer import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, TrainingInterrupted
from halfstep.trainer.arguments import IN_THE_POLICY, TAKES, check_types, read_file
from halfstep.trainer.run import CONFIG

RUNS = Path("runs")
DEFAULTS: dict[str, Any] = {
    "output_dir": "",
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 64,
    "max_steps": 1000,
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "adam_beta2": 0.99,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 40,
    "logging_steps": 40,
    "eval_strategy": "steps",
    "eval_steps": 500,
    "eval_on_start": True,
    "save_steps": 250,
    "save_total_limit": 3,
}


KINDS = (DemoArguments, GPTConfig, TrainingArguments)
PRECISION = {"precision", "plan", "fp16", "bf16", "tf32"}


def main(argv: Sequence[str]) -> int:
    """Train, evaluate before and after, show a sample, and say where the run is."""
    settings, resume = configure(list(argv))
    demo = DemoArguments(**fields_of(DemoArguments, settings))
    shape = GPTConfig(**fields_of(GPTConfig, settings))
    args = TrainingArguments(**fields_of(TrainingArguments, settings))
    train_set, eval_set = split(read(demo.text), shape.block_size)
    _refuse_folder(args, resume)
    seed_everything(args.seed)
    model = GPT(shape)
    console = Console(highlight=False, soft_wrap=True)
    source = demo.text or "Python's documentation"
    size = f"{len(train_set):,} blocks of {shape.block_size} bytes"
    about = Say(console, f"model: GPT, {model.parameters_count:,} parameters; text: {source}, {size}")
    trainer = Trainer(model, args, train_dataset=train_set, eval_dataset=eval_set, callbacks=[about])
    trainer.settings = settings | {"overwrite_output_dir": False, "resume_from_checkpoint": None}
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or resume)
    except TrainingInterrupted as stop:
        how = (
            f"saved in {stop.checkpoint}; go on with: halfstep train --resume --output_dir {args.output_dir}"
            if stop.checkpoint
            else "nothing was saved"
        )
        raise KeyboardInterrupt(f"stopped at step {stop.step}, {how}") from None
    console.print(report(trainer, demo), markup=False)
    return 0


class Say(TrainerCallback):
    """Prints one line when training begins, that is when nothing was refused."""

    def __init__(self, console: Console, line: str) -> None:
        self.console, self.line = console, line

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print it."""
        self.console.print(self.line, markup=False)


def report(trainer: Trainer, demo: DemoArguments) -> str:
    """What the run came to, for people."""
    state, lines = trainer.state, []
    found = [(record["step"], record["eval_loss"]) for record in state.log_history if "eval_loss" in record]
    steps = f"{state.global_step} steps ({state.skipped_steps} skipped)"
    if found and found[-1][0] == state.global_step:
        before = f"{found[0][1]:.3f} before, " if found[0][0] == 0 else ""
        lines.append(f"evaluation loss {before}{found[-1][1]:.3f} after {steps}, in nats per byte")
    elif found:
        lines.append(f"{steps}; last evaluated after {found[-1][0]}: loss {found[-1][1]:.3f} in nats per byte")
    if demo.sample_length and isinstance(trainer.model, GPT):
        sample = trainer.model.generate(demo.prompt.encode(), demo.sample_length, seed=trainer.args.seed)
        lines.append(f"sample:\n{sample.decode(errors='replace')}")
    lines.append(f"run folder: {trainer.run.path}")
    return "\n".join(lines)


def configure(argv: list[str]) -> tuple[dict[str, Any], bool]:
    """All settings by name, and whether to resume. The command line wins over CONFIG.yaml, that over the run to resume, that over the defaults."""
    line = on_the_line(argv, DEFAULTS)
    from_checkpoint, base = line.settings.get("resume_from_checkpoint"), dict[str, Any]()
    resume = bool(line.resume or from_checkpoint)
    if resume:
        named_run = Path(from_checkpoint).parent if from_checkpoint else None
        folder = Path(line.settings["output_dir"]) if line.settings.get("output_dir") else named_run or _newest_run()
        if (folder / CONFIG).exists():
            base = _noted(folder / CONFIG)
        base["output_dir"] = str(folder)
    if line.config:
        base |= _noted(Path(line.config))
    if set(line.settings) & PRECISION:  # however it is spelled, the command line's precision replaces the configuration's
        base = {k: v for k, v in base.items() if k not in PRECISION | set(IN_THE_POLICY)}
    own = {f.name: f.default for kind in KINDS for f in fields(kind)}
    settings = own | DEFAULTS | base | line.settings
    settings["overwrite_output_dir"] = line.overwrite or settings["overwrite_output_dir"]
    for kind in (DemoArguments, GPTConfig):
        check_types(kind, settings)
    _yield_defaults(settings, set(line.settings), set(base))
    if not settings["output_dir"]:
        settings["output_dir"] = str(_new_run(TrainingArguments(**fields_of(TrainingArguments, settings | {"output_dir": "runs"})).policy.preset))
    return settings, resume


def _noted(path: Path) -> dict[str, Any]:
    """The settings in a configuration, by today's names."""
    return by_name(read_file(path), f"the configuration {path} has a setting {{!r}}, which halfstep train does not know")


def _yield_defaults(settings: dict[str, Any], line: set[str], noted: set[str]) -> None:
    """Settings give way where they would contradict stronger ones: the command line's, then a configuration's, then the demo's defaults.

    line, noted: names of the options on the command line and in configurations. A configuration that contradicts itself is refused later.
    """

    def weaker(name: str, than: str) -> bool:
        return name not in line and (than in line or name not in noted)

    if not (settings["plan"] or settings["precision"] or settings["fp16"] or settings["bf16"] or settings["tf32"]):
        settings["precision"] = "bf16-mixed"
    if settings["eval_strategy"] != "steps" and weaker("eval_steps", "eval_strategy"):
        settings["eval_steps"] = None
    if settings["lr_scheduler_type"] in ("constant", "reduce_lr_on_plateau") and weaker("warmup_steps", "lr_scheduler_type"):
        settings["warmup_steps"] = 0
    if "adam_beta2" not in TAKES.get(str(settings["optim"]), ()) and weaker("adam_beta2", "optim"):
        settings["adam_beta2"] = TrainingArguments.adam_beta2
    if settings["load_best_model_at_end"] and settings["eval_strategy"] == "steps" and weaker("save_steps", "load_best_model_at_end"):
        settings["save_steps"] = settings["eval_steps"]
    if settings["save_strategy"] == "no" and weaker("save_total_limit", "save_strategy"):
        settings["save_total_limit"] = None
    if settings["warmup_ratio"] and weaker("warmup_steps", "warmup_ratio"):
        settings["warmup_steps"] = 0


def _refuse_folder(args: TrainingArguments, resume: bool) -> None:
    """Refuse an output folder with something in it, unless the run there is to be resumed or overwritten."""
    folder = Path(args.output_dir)
    if resume and args.overwrite_output_dir:
        raise ConfigError("--resume and --overwrite were both given", "Leave one of them out.")
    if not resume and not args.overwrite_output_dir and folder.is_dir() and any(folder.iterdir()):
        newest = latest(folder)
        go_on = f"--resume goes on from {newest.name}; " if newest else ""
        raise ConfigError(
            f"the folder {folder} is not empty", f"{go_on}--overwrite removes the run in it and starts anew; another --output_dir keeps both."
        )


def fields_of(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that are fields of a dataclass."""
    return {f.name: settings[f.name] for f in fields(kind)}


def _newest_run() -> Path:
    """The run under runs/ whose newest checkpoint is the youngest."""
    found = [c for folder in (RUNS.iterdir() if RUNS.is_dir() else []) if (c := latest(folder))]
    if not found:
        raise CheckpointError(f"there is no checkpoint to resume from under {RUNS}/", "Name the run with --output_dir, or start without --resume.")
    return max(found, key=lambda c: c.stat().st_mtime).parent


def _new_run(preset: str) -> Path:
    """runs/001-bf16-mixed, runs/002-..., the first number that is free."""
    used = [int(m[1]) for p in (RUNS.iterdir() if RUNS.is_dir() else []) if (m := re.match(r"(\d+)-", p.name))]
    return RUNS / f"{max(used, default=0) + 1:03d}-{preset}"
