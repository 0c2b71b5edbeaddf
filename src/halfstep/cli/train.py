"""`halfstep train [CONFIG.yaml] [--field value ...]`: train a model from text, by default a small GPT on Python's documentation."""

from __future__ import annotations

import json
import re
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from rich.console import Console

from halfstep.checkpoint import latest, seed_everything
from halfstep.demo import GPT, GPTConfig, read, split
from halfstep.errors import CheckpointError, ConfigError, suggest
from halfstep.trainer import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, TrainingInterrupted
from halfstep.trainer.arguments import GROUPS as TOPICS
from halfstep.trainer.arguments import IN_THE_POLICY, OLD_NAMES, TAKES
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


@dataclass(frozen=True)
class DemoArguments:
    """What to train on, and what to show at the end.

    Args:
        text: a text file to learn; Python's own documentation when not given.
        prompt: what the sample of generated text begins with.
        sample_length: bytes to generate at the end; 0 for no sample.
    """

    text: str | None = None
    prompt: str = "The "
    sample_length: int = 240

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("prompt is empty, and the sample continues it", "Give it at least one character, or sample_length=0.")
        if self.sample_length < 0:
            raise ConfigError(f"sample_length={self.sample_length}", "Use 0 or more.")


GROUPS = (DemoArguments, GPTConfig, TrainingArguments)
OPTIONS = (DemoArguments, GPTConfig, *TOPICS)
PRECISION = {"precision", "fp16", "bf16", "tf32"}
SWITCHES = ("--resume", "--overwrite", "--help")


def parser() -> ArgumentParser:
    """All options, from the fields of three dataclasses; their docstrings are the help."""
    made = ArgumentParser(
        "halfstep train",
        description="Train a small GPT on a text. Without options: on Python's own documentation, in bf16-mixed. "
        "CONFIG.yaml holds any of the options below by name; options on the command line win over it.",
        exit_on_error=False,
    )
    made.add_argument("config", nargs="?", help="a YAML file with options, such as the config.yaml of an earlier run")
    made.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of output_dir, or of the newest run under runs/")
    made.add_argument("--overwrite", action="store_true", help="remove an earlier run from output_dir first")
    for group in OPTIONS:
        made.add_class_arguments(group, None)
    made.set_defaults(DEFAULTS)
    return made


def main(argv: Sequence[str]) -> int:
    """Train, evaluate before and after, show a sample, and say where the run is."""
    settings, resume = configure(list(argv))
    demo = DemoArguments(**_fields_of(DemoArguments, settings))
    shape = GPTConfig(**_fields_of(GPTConfig, settings))
    args = TrainingArguments(**_fields_of(TrainingArguments, settings))
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
    made, line = parser(), _normal(argv)
    try:
        given = made.parse_args(line)
        resume, base = bool(given.resume or given.resume_from_checkpoint), dict[str, Any]()
        if resume:
            named_run = Path(given.resume_from_checkpoint).parent if given.resume_from_checkpoint else None
            folder = Path(given.output_dir) if given.output_dir else named_run or _newest_run()
            if (folder / CONFIG).exists():
                base = _read(folder / CONFIG)
            base["output_dir"] = str(folder)
        if given.config:
            base |= _read(Path(given.config))
        named = _named(line)
        if named & PRECISION:  # however it is spelled, the command line's precision replaces the configuration's
            base = {k: v for k, v in base.items() if k not in PRECISION | set(IN_THE_POLICY)}
        chosen = made.parse_args([*_tokens(base), *line])
    except ArgumentError as error:
        raise ConfigError(str(error), "halfstep train --help lists the options.") from error
    settings = {k: v for k, v in chosen.as_dict().items() if k not in ("config", "resume", "overwrite")}
    settings["overwrite_output_dir"] = chosen.overwrite or chosen.overwrite_output_dir
    _yield_defaults(settings, named, set(base))
    if not settings["output_dir"]:
        settings["output_dir"] = str(_new_run(TrainingArguments(**_fields_of(TrainingArguments, settings | {"output_dir": "runs"})).policy.preset))
    return settings, resume


def _yield_defaults(settings: dict[str, Any], line: set[str], noted: set[str]) -> None:
    """Settings give way where they would contradict stronger ones: the command line's, then a configuration's, then the demo's defaults.

    line, noted: names of the options on the command line and in configurations. A configuration that contradicts itself is refused later.
    """

    def weaker(name: str, than: str) -> bool:
        return name not in line and (than in line or name not in noted)

    if not (settings["precision"] or settings["fp16"] or settings["bf16"] or settings["tf32"]):
        settings["precision"] = "bf16-mixed"
    if settings["eval_strategy"] != "steps" and weaker("eval_steps", "eval_strategy"):
        settings["eval_steps"] = None
    if settings["lr_scheduler_type"] in ("constant", "reduce_lr_on_plateau") and weaker("warmup_steps", "lr_scheduler_type"):
        settings["warmup_steps"] = 0
    if "adam_beta2" not in TAKES.get(settings["optim"], ()) and weaker("adam_beta2", "optim"):
        settings["adam_beta2"] = TrainingArguments.adam_beta2
    if settings["save_strategy"] == "no" and weaker("save_total_limit", "save_strategy"):
        settings["save_total_limit"] = None
    if settings["warmup_ratio"] and weaker("warmup_steps", "warmup_ratio"):
        settings["warmup_steps"] = 0


def _named(line: list[str]) -> set[str]:
    """Names of the options on a normal command line."""
    return {token[2:].partition("=")[0] for token in line if token.startswith("--")}


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


def _normal(argv: list[str]) -> list[str]:
    """The command line under today's names, with `true` after bare switches. Refuses unknown options with the nearest one."""
    known = {f.name: f.type for kind in GROUPS for f in fields(kind)}
    result: list[str] = []
    for i, token in enumerate(argv):
        if not token.startswith("--") or token in SWITCHES:
            result.append(token)
            continue
        name, sign, value = token[2:].partition("=")
        name = name.replace("-", "_")
        name = OLD_NAMES.get(name, name)
        if name not in known:
            raise ConfigError(f"halfstep train has no option --{name}", suggest(name, {*known, *OLD_NAMES, *(s[2:] for s in SWITCHES)}))
        following = argv[i + 1].lower() if i + 1 < len(argv) else ""
        bare = not sign and str(known[name]).startswith("bool") and following not in ("true", "false", "yes", "no")
        result.append(f"--{name}{sign}{value}" + ("=true" if bare else ""))
    return result


def _tokens(settings: dict[str, Any]) -> list[str]:
    """Settings from YAML as command line tokens, so that one parser checks the types of both."""
    return _normal([f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items()])


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}", "Name a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is not YAML: {error}", "Write one `name: value` per line.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration {path} holds no settings", "Write one `name: value` per line.")
    return {str(k): v for k, v in data.items()}


def _fields_of(kind: Any, settings: dict[str, Any]) -> dict[str, Any]:
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
