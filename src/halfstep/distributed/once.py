"""What rank 0 does for all ranks: touching files, above all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from halfstep.distributed.ranks import Ranks
from halfstep.errors import HalfstepError

T = TypeVar("T")


def on_main(ranks: Ranks, run: Callable[[], T]) -> T:
    """What `run()` returns on rank 0, for all ranks, which wait for it. An error that halfstep raises there is raised on every rank."""
    if ranks.world == 1:
        return run()
    found: T | None = None
    failed: HalfstepError | None = None
    if ranks.is_main:
        try:
            found = run()
        except HalfstepError as error:
            failed = error
    told, kind, *why = ranks.broadcast_object((found, type(failed), *((failed.cause, failed.remedy) if failed is not None else ())))
    if why:
        raise kind(*why) from failed
    return told  # type: ignore[no-any-return]
