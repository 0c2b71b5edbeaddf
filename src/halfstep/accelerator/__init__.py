"""The second door: `Accelerator`, what its `prepare` returns, and the names that scripts import beside it from accelerate and its submodules."""

from halfstep.accelerator.accelerator import Accelerator as Accelerator
from halfstep.accelerator.configuration import AutocastKwargs as AutocastKwargs
from halfstep.accelerator.configuration import DataLoaderConfiguration as DataLoaderConfiguration
from halfstep.accelerator.configuration import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from halfstep.accelerator.configuration import DistributedType as DistributedType
from halfstep.accelerator.configuration import GradientAccumulationPlugin as GradientAccumulationPlugin
from halfstep.accelerator.configuration import GradScalerKwargs as GradScalerKwargs
from halfstep.accelerator.configuration import InitProcessGroupKwargs as InitProcessGroupKwargs
from halfstep.accelerator.configuration import ProjectConfiguration as ProjectConfiguration
from halfstep.accelerator.configuration import TorchDynamoPlugin as TorchDynamoPlugin
from halfstep.accelerator.position import EpochStart as EpochStart
from halfstep.accelerator.prepared import PreparedLoader as PreparedLoader
from halfstep.accelerator.prepared import PreparedOptimizer as PreparedOptimizer
from halfstep.accelerator.prepared import skip_first_batches as skip_first_batches
from halfstep.accelerator.prepared import to_device as to_device
from halfstep.accelerator.seeding import set_seed as set_seed
from halfstep.distributed import get_logger as get_logger
from halfstep.step import Follower as PreparedScheduler
from halfstep.tracking import GeneralTracker as GeneralTracker
from halfstep.tracking import LoggerType as LoggerType

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "EpochStart",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LoggerType",
    "PreparedLoader",
    "PreparedOptimizer",
    "PreparedScheduler",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "get_logger",
    "set_seed",
    "skip_first_batches",
    "to_device",
]
