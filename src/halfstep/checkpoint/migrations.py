"""Checkpoints of older versions, brought to what this version writes, one version at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halfstep.checkpoint.schema import VERSION

Change = Callable[[dict[str, Any], dict[str, Any]], None]  # of `about` and the parts, in place


def _random_states_by_rank(about: dict[str, Any], parts: dict[str, Any]) -> None:
    """1 to 2: there was one process, whose random states were the part `random`."""
    if "random" in parts:
        parts["random"] = {"ranks": [parts["random"]]}


CHANGES: dict[int, Change] = {1: _random_states_by_rank}  # from that version to the next


def migrate(version: int, about: dict[str, Any], parts: dict[str, Any]) -> None:
    """Bring what was read from a checkpoint of `version` to the newest, in place."""
    for old in range(version, VERSION):
        CHANGES[old](about, parts)
