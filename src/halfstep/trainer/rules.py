"""The rules file of a run: which modules are held in fp32, so that the next run begins with what this one has learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from torch import nn

from halfstep.amp import Pinned, pin, pins
from halfstep.checkpoint import replace
from halfstep.errors import ConfigError, suggest
from halfstep.trainer.arguments import TrainingArguments

RULES = "rules.yaml"
HEADER = "# modules that 16 bits could not hold; halfstep reads this file when a run begins in this folder, or with rules=FILE\n"


def note_pins(folder: Path, model: nn.Module, names: tuple[str, ...], write: bool = True) -> dict[str, Any]:
    """Write the pins of `model` down for the next run; the record of those of this step, for the log."""
    why = {p.module: p.why for p in pins(model)}
    return {"pinned": list(names), "why": [why[name] for name in names], "rules": str(write_rules(folder, model) if write else folder / RULES)}


def follow_rules(args: TrainingArguments, folder: Path, model: nn.Module, write: bool = True) -> dict[str, Any]:
    """Hold the modules in fp32 that the rules file of the arguments names, or with heal="pin" that of the run folder, which then has them all.

    Returns the record for the log, empty without any.
    """
    path = Path(args.rules) if args.rules is not None else folder / RULES
    if args.rules is None and (args.heal != "pin" or not path.exists()):
        return {}
    held = apply_rules(path, model)
    if held and write and args.rules is not None:
        write_rules(folder, model)
    return {"pinned": held, "why": [f"{path} says so"] * len(held), "rules": str(path)} if held else {}


def write_rules(folder: Path, model: nn.Module) -> Path:
    """Write the pins of `model` to the rules file of a run folder, one entry each with its reason. Returns the file."""
    held = [{"module": p.module, "step": p.step, "why": p.why} for p in pins(model)]
    path = folder / RULES
    folder.mkdir(parents=True, exist_ok=True)
    replace(path, HEADER + yaml.safe_dump({"fp32": held}, sort_keys=False))
    return path


def apply_rules(path: Path, model: nn.Module) -> list[str]:
    """Hold the modules in fp32 that a rules file names. Returns the names of those that were not held yet.

    Raises ConfigError for a file that is not there or is no rules file, and for a module that the model does not have.
    """
    named = _read(path)
    known, held = {name for name, _ in model.named_modules()}, {p.module for p in pins(model)}
    for rule in named:
        if rule["module"] not in known:
            raise ConfigError(
                f"{path} holds {rule['module']!r} in fp32, and the model has no such module",
                f"{suggest(rule['module'], known - {''})} Mend the file, or remove it if it is of another model.",
            )
    fresh = {rule["module"]: rule for rule in named if rule["module"] not in held}
    made: list[Pinned] = []
    try:
        for name, rule in fresh.items():
            made.append(pin(model, name, str(rule.get("why") or ""), rule.get("step")))
    except ConfigError:
        for handle in reversed(made):  # all of the file or nothing
            handle.remove()
        raise
    return list(fresh)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the rules file {path} cannot be read: {error}", "Name a file that a run wrote, or leave rules out.") from error
    rules = found.get("fp32") if isinstance(found, dict) else None
    if not isinstance(rules, list) or not all(map(_is_rule, rules)):
        raise ConfigError(f"{path} is no rules file: it has no list of modules under fp32:", "Write fp32: [{module: NAME}].")
    return rules


def _is_rule(rule: Any) -> bool:
    step = rule.get("step") if isinstance(rule, dict) else "no rule"
    return isinstance(rule, dict) and isinstance(rule.get("module"), str) and (step is None or (isinstance(step, int) and not isinstance(step, bool)))
