"""Readying models, optimizers, loaders and schedulers for training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from halfstep.accelerator.decided import adopt_products, decide, refuse_other_policy, resolved
from halfstep.accelerator.facts import Signature, model_facts, refuse_orphans
from halfstep.accelerator.prepared import PreparedLoader, PreparedOptimizer
from halfstep.accelerator.stepping import Stepping
from halfstep.amp import bind, bound_policy
from halfstep.errors import ConfigError
from halfstep.optim import with_masters
from halfstep.policy import chosen
from halfstep.step import Follower

logger = logging.getLogger("halfstep")


class Preparing(Stepping):
    """What an accelerator does with objects before training."""

    def prepare(self, *objects: Any) -> Any:
        """Ready models, optimizers, data loaders and schedulers, in any order; returns them in the same order.

        A model moves to the device and its forward pass runs under the policy from now on, wherever it is called. An
        optimizer and a scheduler follow the truth of each step. Raises PolicyError when the model cannot be trained
        under the policy, ConfigError for an object of another kind.
        """
        ready: dict[int, Any] = {}
        kinds: tuple[tuple[type[Any], Callable[[Any], Any]], ...] = (
            (nn.Module, self._prepare_model),
            (Optimizer, self._prepare_optimizer),
            (DataLoader, self._prepare_loader),
            (LRScheduler, self._prepare_scheduler),
        )
        for kind, make in kinds:
            for item in objects:
                if isinstance(item, kind) and id(item) not in ready:
                    ready[id(item)] = make(item)
        for item in objects:
            if isinstance(item, PreparedLoader | Follower):
                ready[id(item)] = item
            if id(item) not in ready:
                raise ConfigError(
                    f"prepare() was given a {type(item).__name__}", "Give it modules, torch optimizers, DataLoaders and learning rate schedulers."
                )
        result = tuple(ready[id(item)] for item in objects)
        return result[0] if len(result) == 1 else result

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        already = bound_policy(model)
        if self.policy.is_auto:
            self._run_under(*decide(model, self.device))
        refuse_other_policy(already, self.policy)
        self.resolution = resolved(self.policy, self.device, model_facts(model), self._why)
        model.to(self.device)
        if already is None:
            self._bindings[id(model)] = bind(model, self.policy, self.device, self._products)
            logger.info("%s", self.resolution)
        else:
            adopt_products(self._products, model)
        self.scaler.watch(model)
        self._signatures[id(model)] = Signature(model)
        if model not in self._models:
            self._models.append(model)
        return model

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            if optimizer.stepper is not self:
                raise ConfigError(
                    "this optimizer was prepared by another accelerator, which would step with gradients it knows nothing of",
                    "Give each accelerator optimizers of its own.",
                )
            return optimizer
        for known in self._optimizers:
            if optimizer in (known.optimizer, getattr(known.optimizer, "optimizer", None)):
                return known
        refuse_orphans(optimizer, self._models)
        mastered = with_masters(optimizer, chosen(self.policy))
        self.scaler.watch(mastered)
        self._optimizers.append(PreparedOptimizer(mastered, self))
        return self._optimizers[-1]

    def _prepare_scheduler(self, scheduler: LRScheduler) -> Follower:
        for optimizer in self._optimizers:
            if scheduler.optimizer in (optimizer, optimizer.optimizer, getattr(optimizer.optimizer, "optimizer", None)):
                follower = self.scaler.follow(scheduler, optimizer.optimizer)
                follower.optimizer = optimizer
                self._schedulers.append(follower)
                return self._schedulers[-1]
        raise ConfigError(
            "this scheduler's optimizer is not prepared, so nobody could tell it about skipped steps", "Prepare the optimizer first or together."
        )

    def _prepare_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        self._loaders.append(PreparedLoader(loader, self.device))
        return self._loaders[-1]

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The user's own module: what a compiled one was made from, else the module itself.

        keep_fp32_wrapper: False also gives it the forward method back that it had before `prepare`.
        """
        inner = getattr(model, "_orig_mod", model)
        inner = inner if isinstance(inner, nn.Module) else model
        if not keep_fp32_wrapper and id(inner) in self._bindings:
            self._bindings.pop(id(inner)).remove()
        return inner
