"""Hooks on loading that see a state before anything of it is used, and the optimizer when all of it is there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

BEFORE, AFTER = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"


def to_load(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state as the hooks that run before loading have made it."""
    for before in list(getattr(optimizer, BEFORE).values()):
        changed = before(optimizer, dict(state_dict))
        state_dict = state_dict if changed is None else changed
    return state_dict


def loaded(optimizer: Optimizer) -> None:
    """Run the hooks that are to run after loading."""
    for after in list(getattr(optimizer, AFTER).values()):
        after(optimizer)


@contextmanager
def without_hooks(optimizer: Optimizer, *names: str) -> Iterator[None]:
    """A block in which torch's own methods run without these hooks, which are called when the whole state is there."""
    before = {name: getattr(optimizer, name) for name in names}
    vars(optimizer).update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        vars(optimizer).update(before)
