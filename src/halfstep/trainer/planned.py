"""A plan that a run follows: kept in the run folder, and told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from halfstep.checkpoint import replace as write_whole
from halfstep.errors import CheckpointError
from halfstep.trainer.arguments import TrainingArguments
from halfstep.trainer.rules import follow_rules

PLAN = "plan.yaml"


def noted(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings for config.yaml, which name the plan that is in the run folder."""
    return settings | ({"plan": str(folder / PLAN)} if settings.get("plan") is not None else {})


def follow_plan(args: TrainingArguments, folder: Path, write: bool = True) -> dict[str, Any]:
    """Keep the plan of the arguments in the run folder; the record for the log of what it has decided, empty without a plan.

    The precision with its modules and scale is the arguments' policy already. Raises CheckpointError when the folder does not take the file.
    """
    if args.plan is None:
        return {}
    target = folder / PLAN
    if write:
        _keep(args.plan, target)
    policy = args.policy
    scale = {"planned_scale": policy.scale.init} if policy.scale.kind == "dynamic" else {}
    return {"plan": str(target), "precision": str(policy), "planned_fp32": list(policy.fp32)} | scale


def followed(args: TrainingArguments, folder: Path, model: nn.Module, write: bool = True) -> Iterator[dict[str, Any]]:
    """Follow the plan and the rules file of a run that begins; the records for the log."""
    yield from filter(None, (follow_plan(args, folder, write), follow_rules(args, folder, model, write)))


def line(record: dict[str, Any]) -> str:
    """What a plan has decided, as one line for the terminal."""
    names = record["planned_fp32"]
    held = f", held in fp32: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}" if names else ""
    scale = f", loss scale from {record['planned_scale']:.0f}" if "planned_scale" in record else ""
    return f"plan {record['plan']}: {record['precision'].partition(',')[0]}{scale}{held}"


def _keep(plan: Any, target: Path) -> None:
    try:
        if not isinstance(plan, str):
            from halfstep.diagnostics.planned import Plan

            Plan.from_dict(plan, "plan=").save(target)
        elif not (target.exists() and target.samefile(plan)):
            write_whole(target, Path(plan).read_text())
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror}", "Free some space, or name another output_dir.") from error
