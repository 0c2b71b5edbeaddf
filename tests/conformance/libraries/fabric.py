"""Lightning Fabric on a CPU: with the precision that one types, and with its plugin around torch's scaler."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_fabric import Fabric  # type: ignore[import-not-found,unused-ignore]
from lightning_fabric.plugins import MixedPrecision  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from conformance.adapter import Door, Run
from conformance.libraries.bare import Bare, not_offered, refuse_unknown
from conformance.loops import AcceleratorRun
from conformance.tools import BF16, F16, F32

Way = Literal["typed", "plugin"]
NAMES = {F16: "fp16", BF16: "bf16", F32: "no"}
TYPED: dict[str, Any] = {"fp16": "16-mixed", "bf16": "bf16-mixed", "no": "32-true"}
TRUE: dict[torch.dtype, Any] = {F16: "16-true", BF16: "bf16-true"}


class _Scaler:
    """The scaler inside the plugin, called as Fabric calls it: backward() scales, step() also updates."""

    def __init__(self, fabric: Any) -> None:
        self.fabric, self.plugin = fabric, fabric.strategy.precision
        self._ready: dict[int, Any] = {}
        self._stepped = False

    @property
    def inner(self) -> Any:
        return getattr(self.plugin, "scaler", None)

    def prepared(self, optimizer: Optimizer) -> Any:
        known = self._ready.get(id(optimizer))
        if known is None:
            known = self._ready[id(optimizer)] = (optimizer, self.fabric.setup_optimizers(optimizer))
        return known[1]

    def scale(self, loss: Any) -> Any:
        return loss if self.inner is None else self.inner.scale(loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        self.plugin.unscale_gradients(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **closure: Any) -> Any:
        self._stepped = True
        return self.prepared(optimizer).step(*args, **closure)

    def update(self, new_scale: float | None = None) -> None:
        if new_scale is not None:
            not_offered("Fabric has no call that sets the scale")
        if not self._stepped:
            not_offered("Fabric's step updates the scale: there is no update() to call without one")
        self._stepped = False

    def get_scale(self) -> float:
        if self.inner is None:
            not_offered("Fabric has no loss scale here")
        return float(self.inner.get_scale())

    def is_enabled(self) -> bool:
        return self.inner is not None

    def state_dict(self) -> dict[str, Any]:
        return self.plugin.state_dict()  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        not_offered("Fabric has no scaler object of the user's")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.plugin.load_state_dict(state)


class _AsAccelerator:
    """Fabric's calls under Accelerate's names."""

    def __init__(self, fabric: Any) -> None:
        self.fabric = fabric
        self._models: list[Any] = []
        self._optimizers: list[Any] = []

    def prepare(self, *objects: Any) -> Any:
        ready = [self._one(thing) for thing in objects]
        return ready[0] if len(ready) == 1 else ready

    def _one(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            self._models.append(self.fabric.setup_module(thing))
            return self._models[-1]
        if isinstance(thing, Optimizer):
            self._optimizers.append(self.fabric.setup_optimizers(thing))
            return self._optimizers[-1]
        return self.fabric.setup_dataloaders(thing) if isinstance(thing, DataLoader) else thing

    def backward(self, loss: Tensor, **how: Any) -> None:
        self.fabric.backward(loss, **how)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, **how: Any) -> Any:
        wanted = {id(p) for p in parameters}
        for optimizer in self._optimizers:
            if wanted & {id(p) for group in optimizer.param_groups for p in group["params"]}:
                return self.fabric.clip_gradients(self._models[0], optimizer, max_norm=max_norm, error_if_nonfinite=False, **how)
        return not_offered("Fabric clips the gradients of an optimizer that it was given")

    def autocast(self) -> Any:
        return self.fabric.autocast()

    def accumulate(self, *models: nn.Module) -> Any:
        not_offered("Fabric leaves the counting of micro-batches to the loop")

    def __getattr__(self, name: str) -> Any:
        return not_offered(f"Fabric has no {name}")


class LightningFabric(Bare):
    """The loop of Fabric's manual.

    way: typed, `Fabric(precision="16-mixed")`, which on a CPU becomes bf16; plugin, the same with its MixedPrecision plugin given torch's scaler.
    """

    title, package = "Fabric", "lightning_fabric"
    door: Door = "accelerator"

    def __init__(self, way: Way = "typed") -> None:
        self.way = way
        logging.getLogger("lightning_fabric").setLevel(logging.ERROR)  # it tells its precision each time

    def _fabric(self, mixed_precision: str, **scale: Any) -> Any:
        if mixed_precision == "fp16" and self.way == "plugin":
            scaler = torch.amp.GradScaler("cpu", **scale)
            return Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        return Fabric(accelerator="cpu", devices=1, precision=TYPED[mixed_precision])

    def _only_plugin(self) -> None:
        if self.way != "plugin":
            not_offered("Fabric's 16-mixed is bf16 on a CPU, and scales nothing")

    def autocast(self, dtype: torch.dtype | None = None, enabled: bool = True, device: str = "cpu") -> Any:
        if not enabled or dtype is None or device != "cpu":
            not_offered("Fabric's block has the device and dtype of its Fabric, and no switch")
        if dtype not in TRUE:
            not_offered(f"Fabric has no block of {dtype}")
        if dtype is F16:
            self._only_plugin()
        return _Block(lambda: self._fabric(NAMES[dtype]).autocast())

    def scaler(self, init_scale: float = 65536.0, enabled: bool = True, device: str | None = "cpu", **settings: Any) -> Any:
        if not enabled:
            return _Scaler(self._fabric("no"))
        self._only_plugin()
        refuse_unknown(settings, "torch")
        return _Scaler(self._fabric("fp16", init_scale=init_scale, **settings))

    def clip(self, scaler: Any, optimizer: Optimizer, parameters: Iterable[Tensor], max_norm: float) -> float:
        held = nn.ParameterList(p for p in parameters if isinstance(p, nn.Parameter))
        return float(scaler.fabric.clip_gradients(held, optimizer, max_norm=max_norm, error_if_nonfinite=False))

    def run(self, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any = None, dtype: torch.dtype = F16) -> Run:
        if dtype is F16:
            self._only_plugin()
        scale = {"init_scale": 1024.0} if dtype is F16 else {}
        return AcceleratorRun(self, _AsAccelerator(self._fabric(NAMES[dtype], **scale)), model, optimizers, scheduler)

    def accelerator(self, mixed_precision: str, **settings: Any) -> Any:
        if settings:
            not_offered(f"Fabric has no {', '.join(sorted(settings))}")
        return _AsAccelerator(self._fabric(mixed_precision))

    def cast_model(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        ready = Fabric(accelerator="cpu", devices=1, precision=TRUE[dtype]).setup_module(model)
        object.__setattr__(ready, "named_parameters", ready.module.named_parameters)  # under the names that its state_dict has
        return ready  # type: ignore[no-any-return,unused-ignore]

    def save(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        self._fabric("no").save(Path(folder) / "run.ckpt", {"model": model, "optimizer": optimizer})

    def load(self, folder: str, model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
        self._fabric("no").load(Path(folder) / "run.ckpt", {"model": model, "optimizer": optimizer})


class _Block(contextlib.ContextDecorator):
    """fabric.autocast() as a block that can be entered more than once and be put before a function, as torch's can."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._open: list[Any] = []

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)
