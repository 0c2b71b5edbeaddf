"""The trackers of a run: started, told and closed by the main process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfstep.accelerator.together import Together
from halfstep.errors import ConfigError, StepOrderError
from halfstep.tracking import GeneralTracker, chosen_trackers, make_tracker


class Tracked(Together):
    """What an accelerator tells its trackers."""

    def _track_with(self, log_with: Any) -> None:
        self.log_with = chosen_trackers(log_with)
        self.trackers: list[Any] = []

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Start the trackers of `log_with`.

        project_name: the folder of files, the project of W&B, the experiment of MLflow. config: the settings of the run, which each tracker keeps.
        init_kwargs: further arguments by tracker: {"wandb": {"tags": ["a"]}}.
        Raises ConfigError for arguments of trackers that are not in `log_with`.
        """
        further = dict(init_kwargs or {})
        names = [item if isinstance(item, str) else str(item.name) for item in self.log_with]
        for name in further:
            if name not in names:
                raise ConfigError(f"init_kwargs has {name!r}, and log_with has {', '.join(names) or 'nothing'}", "Add it there, or leave it out.")
        logs = self.project_configuration.logging_dir
        made = [item if not isinstance(item, str) else make_tracker(item, project_name, logs, further.get(item)) for item in self.log_with]
        self.trackers = [tracker for tracker in made if self.is_main_process or not getattr(tracker, "main_process_only", True)]
        for tracker in self.trackers:
            if hasattr(tracker, "start"):
                tracker.start()
            if config is not None:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name; unwrap: the object of the package behind it. One that does nothing, in processes that have no trackers.

        Raises ConfigError for one that is not in `log_with`, StepOrderError before `init_trackers`.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        asked = [item if isinstance(item, str) else str(item.name) for item in self.log_with]
        if name not in asked:
            raise ConfigError(f"there is no tracker {name!r}", f"log_with has {', '.join(asked) or 'nothing'}.")
        if self.is_main_process:
            raise StepOrderError(f"tracker {name!r} was not started", "Call init_trackers(project_name) first.")
        return GeneralTracker()

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Tell all trackers numbers and texts of a step. Tensors of one element are numbers; NaN and inf are told as they are.

        log_kwargs: further arguments by tracker. Reading tensors waits for the device.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"log() was given a {type(values).__name__}", "Give it a mapping: accelerator.log({'loss': loss}, step=step).")
        if self.log_with and not self.trackers and self.is_main_process:
            raise StepOrderError("log() was called and no tracker was started: the numbers would be lost", "Call init_trackers(project_name) first.")
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Close the trackers. Can be called twice."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
