"""What the parts of an accelerator have in common: the precision, the scaler and the objects that were prepared."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from halfstep.accelerator.configuration import DataLoaderConfiguration, ProjectConfiguration, TorchDynamoPlugin
from halfstep.accelerator.decided import UNDECIDED, products_for, resolved
from halfstep.accelerator.facts import Signature
from halfstep.accelerator.prepared import PreparedLoader, PreparedOptimizer
from halfstep.accelerator.settings import Handlers, whole_number
from halfstep.amp import Binding, GradScaler, Products, backward_context
from halfstep.distributed import DataParallel, MeanOverRanks, NoReducer, Ranks, Reducer
from halfstep.policy import LossScale, Policy, Resolution
from halfstep.step import StepResult

if TYPE_CHECKING:
    from halfstep.optim import Release


class Core:
    """The state of an accelerator. Each part of the public class (preparing, stepping, saving, ...) is a subclass with one job."""

    policy: Policy
    resolution: Resolution
    scaler: GradScaler
    ranks: Ranks
    project_configuration: ProjectConfiguration
    device_placement: bool
    step_scheduler_with_optimizer: bool
    split_batches: bool
    dataloader_config: DataLoaderConfiguration
    _compiler: TorchDynamoPlugin
    _handlers: Handlers
    _ends_with_loader: bool
    _data_parallel: DataParallel
    _products: Products
    _why: str
    _scaler_for: Callable[[LossScale], GradScaler]

    def __init__(self, device: torch.device, gradient_accumulation_steps: int) -> None:
        self.device = device
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._registered: list[Any] = []
        self._save_hooks: OrderedDict[int, Any] = OrderedDict()
        self._load_hooks: OrderedDict[int, Any] = OrderedDict()
        self._flag = False  # see `set_trigger`
        self.forget()

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; a change counts from the next micro-batch on."""
        return self._full_window

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, count: int) -> None:
        whole_number("gradient_accumulation_steps", count)
        self._full_window = self._window = count

    def forget(self) -> None:
        """Nothing is prepared, and no window begun."""
        self._window = self._full_window
        self._reducer: Reducer = MeanOverRanks(self.ranks, self._data_parallel) if self.ranks.world > 1 else NoReducer()
        self.reduced_bytes = 0  # that this rank has handed to reductions for the last optimizer step, buffers included; 0 in one process
        self._sent = 0  # by the reducer up to the end of the last step
        self._reduces = True  # outside `no_sync`
        self.last_step: StepResult | None = None
        self.sync_gradients = True
        self._held = False  # gradients of the window at hand were made and not stepped with
        self._opening = False  # inside `accumulate`, before its backward pass
        self._micro_batches = 0  # since the end of the last window
        self._earlier = 0  # micro-batches of the window before the one at hand
        self._short: int | None = None  # micro-batches of a window that ends early, until its last backward pass
        self._reached: set[int] = set()  # of several optimizers, those whose gradients backward passes of the micro-batch at hand have added to
        self._holding: set[int] = set()  # those with gradients of the window at hand
        self._precise = False  # `autocast` was entered, or it was said that the precision reaches no model
        self._models: list[nn.Module] = []
        self._evaluated: list[nn.Module] = []  # those that were prepared to be evaluated only
        self._bindings: dict[int, Binding] = {}
        self._optimizers: list[PreparedOptimizer] = []
        self._releases: list[Release] = []  # of prepared optimizers
        self._schedulers: list[Any] = []
        self._signatures: dict[int, Signature] = {}
        self._loaders: list[PreparedLoader] = []

    def _run_under(self, policy: Policy, why: str = "") -> None:
        policy = policy if policy.is_auto else self._handlers.adjust(policy)
        self.policy, self._why, self._products = policy, why, products_for(policy)
        self.resolution = resolved(policy, self.device, why=why)
        self.scaler = cast(GradScaler, UNDECIDED) if policy.is_auto else self._scaler_for(policy.scale)
        if not policy.is_auto:
            self._handlers.tune(self.scaler)
            self._data_parallel.refuse_without_scale(str(policy), self.scaler.is_enabled())
            self.scaler.run_backward_inside(functools.partial(backward_context, policy, self.device, self._products))
            if self.ranks.world > 1:
                self.scaler.bring_together(self._reducer.finish, self.ranks.gather_object)
