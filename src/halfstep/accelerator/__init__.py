"""The second door: `Accelerator` and what its `prepare` returns."""

from halfstep.accelerator.accelerator import Accelerator as Accelerator
from halfstep.accelerator.prepared import PreparedLoader as PreparedLoader
from halfstep.accelerator.prepared import PreparedOptimizer as PreparedOptimizer
from halfstep.accelerator.prepared import to_device as to_device
from halfstep.step import Follower as PreparedScheduler

__all__ = ["Accelerator", "PreparedLoader", "PreparedOptimizer", "PreparedScheduler", "to_device"]
