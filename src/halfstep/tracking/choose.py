"""Which trackers there are, which of them are installed here, and which were asked for."""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError, suggest
from halfstep.tracking.tracker import GeneralTracker
from halfstep.tracking.trackers import JSONLinesTracker, MLflowTracker, TensorBoardTracker, WandBTracker


class LoggerType(enum.StrEnum):
    """The names of the trackers."""

    ALL = "all"
    JSONL = "jsonl"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


KINDS: dict[str, type[GeneralTracker]] = {kind.name: kind for kind in (JSONLinesTracker, TensorBoardTracker, WandBTracker, MLflowTracker)}
INSTALL = {"tensorboard": "pip install 'halfstep[tensorboard]'", "wandb": "pip install wandb", "mlflow": "pip install mlflow"}
OTHERS = ("aim", "clearml", "codecarbon", "comet_ml", "dvclive", "flyte", "neptune", "swanlab", "trackio")


def is_installed(name: str) -> bool:
    """Whether the package behind a tracker can be imported here; "jsonl" needs none."""
    if name == "jsonl":
        return True
    return name in sys.modules or importlib.util.find_spec(name) is not None


def chosen_trackers(wanted: Any, who: str = "log_with") -> list[str | GeneralTracker]:
    """The names of the trackers asked for, each once, and tracker objects as they are.

    wanted: a name, a `LoggerType` (accelerate's too), a tracker object, or several of these; "all" is every tracker whose package is installed. None
    and "none" are none. who: the argument's name, for messages.
    Raises ConfigError for a name that is not known, and for one whose package is missing, with the line that installs it.
    """
    found: list[str | GeneralTracker] = []
    for one in _several(wanted):
        if not isinstance(one, str | enum.Enum):
            _refuse_other_objects(one, who)
            found.append(one)
            continue
        name = str(one.value if isinstance(one, enum.Enum) else one)
        if name == "all":
            found += [kind for kind in KINDS if kind not in found and is_installed(kind)]
        elif name not in found and name != "none":
            found.append(_known(name, who))
    return found


def make_tracker(
    name: str, run_name: str, logging_dir: str | Path | None, settings: Mapping[str, Any] | None = None, who: str = "log_with"
) -> GeneralTracker:
    """A tracker of this kind, not started yet.

    run_name: the folder under logging_dir, or the project (W&B) or experiment (MLflow). settings: further arguments for the package.
    Raises ConfigError when it needs a folder and there is none, and for settings that it does not take.
    """
    kind, further = KINDS[_known(name, who)], dict(settings or {})
    places = [run_name]
    if kind.requires_logging_directory:
        if logging_dir is None:
            raise ConfigError(f"{who}={name!r} writes files, and no folder was named for them", "Give project_dir='runs', or a ProjectConfiguration.")
        places.append(str(logging_dir))
    try:
        return kind(*places, **further)
    except TypeError as error:
        raise ConfigError(f"the settings {', '.join(further)} do not suit {name}: {error}", "Leave out what it does not know.") from error


def _several(wanted: Any) -> Iterable[Any]:
    if wanted is None:
        return ()
    return wanted if isinstance(wanted, list | tuple | set) else (wanted,)


def _known(name: str, who: str) -> str:
    if name in OTHERS:
        raise ConfigError(f"{who}={name!r} is not supported", f"Use one of {', '.join(KINDS)}, or an object of GeneralTracker.")
    if name not in KINDS:
        raise ConfigError(f"{who}={name!r} is not known", suggest(name, (*KINDS, "all")))
    if not is_installed(name):
        raise ConfigError(f"{who}={name!r} needs the package {name}, which is not installed", f"{INSTALL[name]}, or use 'jsonl', which needs none.")
    return name


def _refuse_other_objects(one: Any, who: str) -> None:
    missing = [part for part in ("name", "log", "store_init_configuration", "finish") if not hasattr(one, part)]
    if missing or isinstance(one, type):
        what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
        lacks = f", which has no {', '.join(missing)}" if missing else ", not an object of it"
        raise ConfigError(f"{who} was given {what}{lacks}", "Give names of trackers or objects of GeneralTracker.")
