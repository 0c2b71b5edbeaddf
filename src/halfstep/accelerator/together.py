"""What processes do together: gathering, waiting, printing once."""

from __future__ import annotations

from typing import Any

from halfstep.accelerator.core import Core


class Together(Core):
    """What an accelerator does over its processes."""

    is_main_process = True
    is_local_main_process = True
    num_processes = 1
    process_index = 0

    def gather_for_metrics(self, values: Any) -> Any:
        """`values` as they are: there is one process, and prepared loaders pad nothing."""
        return values

    def wait_for_everyone(self) -> None:
        """Return at once: there is one process."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once and not once per process."""
        print(*args, **kwargs)
