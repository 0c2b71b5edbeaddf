"""What was asked of an accelerator, read once: its arguments, objects of accelerate's classes, and what a launcher left in the environment."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar

from halfstep.accelerator.configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from halfstep.distributed import DataParallel
from halfstep.errors import ConfigError, suggest
from halfstep.policy import LossScale, Policy

logger = logging.getLogger("halfstep")
T = TypeVar("T")

SHARD = "Start the script with torchrun: each process trains a whole model, and gradients are averaged. precision='bf16-lean' saves memory."
NOT_CARRIED = {
    "deepspeed_plugin": SHARD,
    "deepspeed_plugins": SHARD,
    "fsdp_plugin": SHARD,
    "megatron_lm_plugin": SHARD,
    "torch_tp_plugin": SHARD,
    "parallelism_config": SHARD,
    "dispatch_batches": "Leave it out: each process reads its own share of the batches.",
    "even_batches": "Pass dataloader_config=DataLoaderConfiguration(even_batches=...).",
    "use_seedable_sampler": "Leave it out: passes over a loader can be resumed in the same order anyway.",
    "logging_dir": "Pass project_dir, or project_config=ProjectConfiguration(logging_dir=...).",
    "fp16": "Pass mixed_precision='fp16'.",
}
HANDLERS = {kind.__name__: kind for kind in (GradScalerKwargs, DistributedDataParallelKwargs, InitProcessGroupKwargs, AutocastKwargs)}
OTHER_HANDLERS = {
    "ProfileKwargs": "Open torch.profiler.profile around the loop.",
    "FP8RecipeKwargs": "halfstep trains in bf16 and fp16.",
    "AORecipeKwargs": "halfstep trains in bf16 and fp16.",
    "TERecipeKwargs": "halfstep trains in bf16 and fp16.",
    "MSAMPRecipeKwargs": "halfstep trains in bf16 and fp16.",
}
USED = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


@dataclass(frozen=True)
class Handlers:
    """What `kwargs_handlers` said."""

    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    group: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)

    def adjust(self, policy: Policy) -> Policy:
        """`policy` with the loss scale that was asked for. Raises ConfigError where it has none."""
        wanted = self.scaler
        if wanted == GradScalerKwargs():
            return policy
        if policy.scale.kind != "dynamic":
            raise ConfigError(
                f"GradScalerKwargs({_told(wanted)}) has no effect under {policy}, whose loss scale is {policy.scale.kind}",
                "Leave it out, or use mixed_precision='fp16'.",
            )
        if not wanted.enabled:
            return replace(policy, scale=LossScale())
        if int(wanted.growth_interval) < 1:
            raise ConfigError(f"growth_interval={wanted.growth_interval}", "Use 1 or more steps.")
        return replace(policy, scale=replace(policy.scale, init=float(wanted.init_scale), window=int(wanted.growth_interval)))

    def tune(self, scaler: Any) -> None:
        """Set what a policy does not say of a scaler: how much it grows and backs off."""
        if self.scaler.growth_factor != GradScalerKwargs.growth_factor:
            scaler.set_growth_factor(self.scaler.growth_factor)
        if self.scaler.backoff_factor != GradScalerKwargs.backoff_factor:
            scaler.set_backoff_factor(self.scaler.backoff_factor)

    def data_parallel(self, reduce_dtype: str | None, given: DataParallel | None) -> DataParallel:
        """How processes train together: as `given`, else as the handlers say. Raises ConfigError where two of them say something."""
        mine, group = self.ddp, self.group
        if given is not None and (mine, group) != (DistributedDataParallelKwargs(), InitProcessGroupKwargs()):
            raise ConfigError("data_parallel and kwargs_handlers both say how processes train together", "Leave one of them out.")
        wire = None if mine.comm_hook == "no" else mine.comm_hook
        asked = [dtype for dtype in (reduce_dtype, wire, given.reduce_dtype if given is not None else None) if dtype is not None]
        if len(set(asked)) > 1:
            raise ConfigError(f"gradients are to travel in {' and in '.join(asked)}", "Say it once, with reduce_dtype.")
        if given is None:
            own = {} if group.timeout is None else {"timeout": group.timeout.total_seconds()}
            unused = True if mine.find_unused_parameters else None
            given = DataParallel(None, mine.bucket_cap_mb, unused, mine.broadcast_buffers, group.backend, **own)
        return replace(given, reduce_dtype=asked[0]) if asked else given


def read_handlers(given: Sequence[Any] | None) -> Handlers:
    """The handlers among `kwargs_handlers`. Raises ConfigError for two of a kind, and for what has no effect here."""
    found: dict[str, Any] = {}
    for item in given or ():
        name = type(item).__name__
        if name in OTHER_HANDLERS:
            raise ConfigError(f"kwargs_handlers has a {name}, which is not supported", OTHER_HANDLERS[name])
        if name not in HANDLERS:
            raise ConfigError(f"kwargs_handlers has a {name}", f"Known: {', '.join(HANDLERS)}.")
        if name in found:
            raise ConfigError(f"kwargs_handlers has two of {name}", "Give one of each kind.")
        found[name] = taken(HANDLERS[name], item)
    if not found.get("AutocastKwargs", AutocastKwargs()).enabled:
        raise ConfigError(
            "kwargs_handlers has AutocastKwargs(enabled=False), which turns mixed precision off",
            "Use mixed_precision='no'; for a block in fp32: accelerator.autocast(AutocastKwargs(enabled=False)).",
        )
    names = {"scaler": "GradScalerKwargs", "ddp": "DistributedDataParallelKwargs", "group": "InitProcessGroupKwargs"}
    return Handlers(**{part: found[name] for part, name in names.items() if name in found})


def taken(kind: type[T], item: Any) -> T:
    """An object of `kind` with the fields of `item`: one of these or of accelerate's class of that name.

    Of a foreign object the fields count that differ from its own defaults. Raises ConfigError for one of those that has no effect here.
    """
    if isinstance(item, kind):
        return item
    if type(item).__name__ != kind.__name__:
        raise ConfigError(f"a {type(item).__name__} was given for a {kind.__name__}", f"Use halfstep.accelerator.{kind.__name__}.")
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    given = {name: _bare(value) for name, value in vars(item).items() if value != _default(item, name)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{kind.__name__}({name}={value!r}) has no effect here", f"Leave it out. Known: {', '.join(sorted(known))}.")
    return kind(**given)


def _default(item: Any, name: str) -> Any:
    """What a field of a foreign object holds when nobody sets it."""
    try:
        return getattr(type(item)(), name, None)
    except Exception:  # noqa: BLE001  another library's constructor: what it checks is not ours
        own = {f.name: f for f in fields(item)}.get(name)
        return None if own is None or own.default is MISSING else own.default


def _bare(value: Any) -> Any:
    text = value.value if isinstance(value, enum.Enum) else value
    return text.lower() if isinstance(value, enum.Enum) and isinstance(text, str) else text


def _told(item: Any) -> str:
    return ", ".join(f"{f.name}={getattr(item, f.name)!r}" for f in fields(item) if getattr(item, f.name) != f.default)


def refuse_not_carried(unknown: Mapping[str, Any]) -> dict[str, Any]:
    """The unknown arguments but for those of accelerate that say nothing (None, False). Raises ConfigError for those that say something."""
    for name, value in unknown.items():
        if name in NOT_CARRIED and value not in (None, False):
            raise ConfigError(f"{name}={value!r} is not supported".replace("\n", " ")[:200], NOT_CARRIED[name])
    return {name: value for name, value in unknown.items() if name not in NOT_CARRIED}


def refuse_environment() -> None:
    """Raise ConfigError where a launcher has asked for something that this is not."""
    for name, what in USED.items():
        if os.environ.get(name, "false").lower() in ("true", "1", "yes"):
            raise ConfigError(f"the environment has {name}={os.environ[name]}, and {what} is not supported", f"Unset it. {SHARD}")


def precision_of(mixed_precision: str | None, precision: object) -> str | None:
    """mixed_precision, or what `accelerate launch --mixed_precision` left in the environment where the script says nothing; one line says so."""
    wanted = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if mixed_precision is None and precision is None and wanted != "no":
        logger.info("mixed_precision=%r: from ACCELERATE_MIXED_PRECISION, which the launcher set", wanted)
        return wanted
    return str(_bare(mixed_precision)) if isinstance(mixed_precision, enum.Enum) else mixed_precision


def accumulation_of(steps: Any, plugin: Any) -> GradientAccumulationPlugin:
    """The accumulation that the arguments, or the launcher where they say nothing, ask for."""
    if plugin is not None:
        if steps != 1:
            raise ConfigError(f"gradient_accumulation_steps={steps!r} and gradient_accumulation_plugin were both given", "Leave one of them out.")
        found = taken(GradientAccumulationPlugin, plugin)
        whole_number("num_steps", found.num_steps)
        return found
    whole_number("gradient_accumulation_steps", steps)
    text = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    launched = int(text) if text.isdigit() else 1
    if launched > 1 and steps not in (1, launched):
        raise ConfigError(
            f"the script says gradient_accumulation_steps={steps} and the launcher ACCELERATE_GRADIENT_ACCUMULATION_STEPS={launched}",
            "Leave one of them out.",
        )
    if launched > 1 and steps == 1:
        logger.info("gradient_accumulation_steps=%d: from ACCELERATE_GRADIENT_ACCUMULATION_STEPS, which the launcher set", launched)
    return GradientAccumulationPlugin(max(steps, launched))


def whole_number(name: str, count: Any) -> None:
    """Raise ConfigError unless `count` is a whole number of 1 or more."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"{name}={count!r}", "Use a whole number of 1 or more.")


def compiler_of(backend: Any, plugin: Any) -> TorchDynamoPlugin:
    """How models are compiled: as the arguments say, or not at all."""
    if backend is not None and plugin is not None:
        raise ConfigError("dynamo_backend and dynamo_plugin were both given", "Leave one of them out.")
    found = taken(TorchDynamoPlugin, plugin) if plugin is not None else TorchDynamoPlugin(None if backend is None else str(_bare(backend)).lower())
    if found.backend in (None, "no") or found.disable:
        return TorchDynamoPlugin()
    import torch

    known = torch._dynamo.list_backends(exclude_tags=())
    if found.backend not in known:
        raise ConfigError(f"dynamo_backend={found.backend!r} is no backend of torch.compile here", suggest(str(found.backend), known))
    return found


def project_of(directory: Any, configuration: Any) -> ProjectConfiguration:
    """Where the run keeps its files."""
    if configuration is None:
        return ProjectConfiguration(project_dir=directory)
    found = taken(ProjectConfiguration, configuration)
    if directory is not None:
        if found.project_dir is not None and str(found.project_dir) != str(directory):
            raise ConfigError(f"project_dir={str(directory)!r} and a ProjectConfiguration of {str(found.project_dir)!r}", "Leave one of them out.")
        found.set_directories(directory)
    return found


def loading_of(split_batches: bool, configuration: Any) -> DataLoaderConfiguration:
    """How loaders are shared out."""
    found = taken(DataLoaderConfiguration, configuration) if configuration is not None else DataLoaderConfiguration()
    return replace(found, split_batches=True) if split_batches else found


def refuse_generators(rng_types: Iterable[Any] | None) -> None:
    """Raise ConfigError for random states that would have to be made equal over processes: the order of batches is agreed on in another way."""
    names = [str(_bare(name)) for name in rng_types or ()]
    if others := [name for name in names if name != "generator"]:
        raise ConfigError(
            f"rng_types={others}: generators are not made equal over processes",
            "Leave it out: processes agree on the order of batches, and dropout should differ between them.",
        )
