"""What the parts of an accelerator have in common: the precision, the scaler and the objects that were prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from halfstep.accelerator.decided import UNDECIDED, products_for, resolved
from halfstep.accelerator.facts import Signature
from halfstep.accelerator.prepared import PreparedLoader, PreparedOptimizer
from halfstep.amp import Binding, GradScaler, Products, backward_context
from halfstep.policy import LossScale, Policy, Resolution
from halfstep.step import Follower, StepResult


class Core:
    """The state of an accelerator. Each part of the public class (preparing, stepping, saving, ...) is a subclass with one job."""

    policy: Policy
    resolution: Resolution
    scaler: GradScaler
    _products: Products
    _why: str
    _scaler_for: Callable[[LossScale], GradScaler]

    def __init__(self, device: torch.device, gradient_accumulation_steps: int) -> None:
        self.device = device
        self.gradient_accumulation_steps = self._window = gradient_accumulation_steps
        self.last_step: StepResult | None = None
        self.sync_gradients = True
        self._held = False  # gradients of the window at hand were made and not stepped with
        self._opening = False  # inside `accumulate`, before its backward pass
        self._micro_batches = 0  # since the end of the last window
        self._short: int | None = None  # micro-batches of a window that ends early, until its last backward pass
        self._models: list[nn.Module] = []
        self._bindings: dict[int, Binding] = {}
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[Follower] = []
        self._signatures: dict[int, Signature] = {}
        self._loaders: list[PreparedLoader] = []
        self._registered: list[Any] = []

    def _run_under(self, policy: Policy, why: str = "") -> None:
        self.policy, self._why, self._products = policy, why, products_for(policy)
        self.resolution = resolved(policy, self.device, why=why)
        self.scaler = cast(GradScaler, UNDECIDED) if policy.is_auto else self._scaler_for(policy.scale)
        if not policy.is_auto:
            self.scaler.run_backward_inside(functools.partial(backward_context, policy, self.device, self._products))
