"""Readying models, optimizers, loaders and schedulers for training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from halfstep.accelerator.decided import adopt_products, decide, refuse_other_policy, resolved
from halfstep.accelerator.facts import Signature, model_facts, refuse_elsewhere, refuse_orphans, refuse_unfilled
from halfstep.accelerator.prepared import PreparedLoader, PreparedOptimizer
from halfstep.accelerator.stepping import Stepping
from halfstep.amp import bind, bound_policy
from halfstep.distributed import refuse_unlike, shard
from halfstep.errors import ConfigError
from halfstep.optim import RELEASES, with_masters
from halfstep.policy import ModelFacts, chosen
from halfstep.step import Follower

logger = logging.getLogger("halfstep")


class Preparing(Stepping):
    """What an accelerator does with objects before training."""

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Ready models, optimizers, data loaders and schedulers, in any order; returns them in the same order. None stays None.

        A model moves to the device and its forward pass runs under the policy from now on, wherever it is called. An
        optimizer and a scheduler follow the truth of each step. device_placement: for each object whether it is moved.
        Raises PolicyError when the model cannot be trained under the policy, ConfigError for an object of another kind.
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise ConfigError(f"device_placement has {len(device_placement)} entries for {len(objects)} objects", "Give one for each.")
        moved = dict(zip(map(id, objects), device_placement or [self.device_placement] * len(objects), strict=True))
        kinds: tuple[tuple[type[Any], Callable[[Any], Any]], ...] = (
            (nn.Module, lambda item: self.prepare_model(item, moved[id(item)])),
            (Optimizer, self.prepare_optimizer),
            (DataLoader, lambda item: self.prepare_data_loader(item, moved[id(item)])),
            (PreparedLoader, self.prepare_data_loader),
            (LRScheduler, self.prepare_scheduler),
            (Follower, self.prepare_scheduler),
        )
        ready: dict[int, Any] = {id(None): None}
        for kind, make in kinds:
            for item in objects:
                if isinstance(item, kind) and id(item) not in ready:
                    ready[id(item)] = make(item)
        for item in objects:
            if id(item) not in ready:
                raise ConfigError(_is_no("prepare", item), "Give it modules, torch optimizers, DataLoaders and learning rate schedulers.")
        result = tuple(ready[id(item)] for item in objects)
        return result[0] if len(result) == 1 else result

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Ready one model. evaluation_mode: it will not be trained, until an optimizer of its parameters is prepared.

        So under fp32 it runs in the format that it was loaded in, whatever that is, and processes exchange no gradients of it.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(_is_no("prepare_model", model), "Give it a torch.nn.Module.")
        already = bound_policy(model)
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            raise ConfigError(_is_no("prepare", model), "Give it the module inside: halfstep brings gradients together itself, under torchrun.")
        refuse_unfilled(model)
        if self.policy.is_auto:
            self._run_under(*self.ranks.broadcast_object(decide(model, self.device)))
        refuse_other_policy(already, self.policy)
        facts = ModelFacts() if evaluation_mode and self.policy.autocast == "fp32" else model_facts(model)
        self.resolution = resolved(self.policy, self.device, facts, self._why)
        if self.device_placement if device_placement is None else device_placement:
            model.to(self.device)
        else:
            refuse_elsewhere(model, self.device)
        if already is None:
            refuse_unlike(self.ranks, model, str(self.policy))
            self._bindings[id(model)] = bind(model, self.policy, self.device, self._products)
            logger.info("%s", self.resolution)
        else:
            adopt_products(self._products, model)
        self.scaler.watch(model)
        self._signatures[id(model)] = Signature(model)
        if model not in self._models:
            self._models.append(model)
        if self._compiler.backend is not None and already is None:
            from halfstep.amp.compiling import CompiledCall

            how = {key: value for key, value in vars(self._compiler).items() if key != "disable" and value is not None}
            model._compiled_call_impl = CompiledCall(model, **how)
        self._evaluated = [m for m in self._evaluated if m is not model] + [model] * evaluation_mode
        if not evaluation_mode:
            self._reducer.join(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Ready one optimizer, whose model was prepared before. device_placement: without effect, its state lies beside the weights."""
        if isinstance(optimizer, PreparedOptimizer):
            if optimizer.stepper is not self:
                raise ConfigError(
                    "this optimizer was prepared by another accelerator, which would step with gradients it knows nothing of",
                    "Give each accelerator optimizers of its own.",
                )
            return optimizer
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(_is_no("prepare_optimizer", optimizer), "Give it a torch.optim.Optimizer.")
        for known in self._optimizers:
            if optimizer in (known.optimizer, getattr(known.optimizer, "optimizer", None)):
                return known
        refuse_orphans(optimizer, self._models)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in [m for m in self._evaluated if not trained.isdisjoint(map(id, m.parameters()))]:
            self.prepare_model(model, device_placement=False)
        mastered = with_masters(optimizer, chosen(self.policy))
        self.scaler.watch(mastered)
        self._reducer.join(p for group in mastered.param_groups for p in group["params"])
        for handle in [handle for handle in RELEASES if handle.optimizer is mastered]:
            handle.shared = self.ranks.world > 1
            self._releases.append(handle)
        self._optimizers.append(PreparedOptimizer(mastered, self))
        return self._optimizers[-1]

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Ready one scheduler, whose optimizer was prepared before.

        With step_scheduler_with_optimizer=False it is left as it is: checkpoints have it, and nothing holds it still.
        """
        if isinstance(scheduler, Follower):
            return scheduler
        if not isinstance(scheduler, LRScheduler):
            raise ConfigError(_is_no("prepare_scheduler", scheduler), "Give it a scheduler of torch.optim.lr_scheduler.")
        for known in self._schedulers:
            if scheduler in (known, getattr(known, "scheduler", None)):
                return known
        if not self.step_scheduler_with_optimizer:
            self._schedulers.append(scheduler)
            return scheduler
        for optimizer in self._optimizers:
            if scheduler.optimizer in (optimizer, optimizer.optimizer, getattr(optimizer.optimizer, "optimizer", None)):
                follower = self.scaler.follow(scheduler, optimizer.optimizer)
                follower.optimizer = optimizer
                follower.times = 1 if self.split_batches else self.ranks.world
                self._schedulers.append(follower)
                return follower
        raise ConfigError(
            "this scheduler's optimizer is not prepared, so nobody could tell it about skipped steps", "Prepare the optimizer first or together."
        )

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None) -> PreparedLoader:
        """Ready one data loader: its batches arrive on the device, unless device_placement is False."""
        if isinstance(data_loader, PreparedLoader):
            if data_loader not in self._loaders:
                self._loaders.append(data_loader)  # prepared by another accelerator: windows end with it here too
            return data_loader
        if not isinstance(data_loader, DataLoader):
            raise ConfigError(_is_no("prepare_data_loader", data_loader), "Give it a torch.utils.data.DataLoader.")
        for known in self._loaders:
            if data_loader in (known.loader, known.source):
                return known
        placed = self.device_placement if device_placement is None else device_placement
        self._loaders.append(PreparedLoader(self._shared_out(data_loader), self.device if placed else None, data_loader))
        return self._loaders[-1]

    def _shared_out(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The loader of this process's batches."""
        return shard(loader, self.ranks, even=self.dataloader_config.even_batches, split=self.split_batches)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False) -> nn.Module:
        """The user's own module: what a compiled one was made from, else the module itself.

        keep_torch_compile: True leaves a compiled one as it is.
        keep_fp32_wrapper: False also gives it the forward method back that it had before `prepare`.
        """
        inner = model if keep_torch_compile else getattr(model, "_orig_mod", model)
        inner = inner if isinstance(inner, nn.Module) else model
        if not keep_fp32_wrapper and id(inner) in self._bindings:
            self._bindings.pop(id(inner)).remove()
        return inner


def _is_no(who: str, item: Any) -> str:
    what = f"the class {item.__name__}, not an object of it" if isinstance(item, type) else f"a {type(item).__name__}"
    return f"{who}() was given {what}"
