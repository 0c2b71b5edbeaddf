"""One side of a comparison: a copy of the model under its precision, with an optimizer of its own, taken through steps one at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from halfstep.amp import GradScaler, backward_context, bind, bound_policy, products_of, upcast
from halfstep.amp.compiling import CompiledCall
from halfstep.checkpoint import seed_everything
from halfstep.diagnostics.boundaries import at_least_fp32
from halfstep.diagnostics.simulate import simulate
from halfstep.diagnostics.stepping import optimizer_for
from halfstep.diagnostics.trace import loss_of
from halfstep.diagnostics.under import device_of, refuse_lazy
from halfstep.errors import ConfigError
from halfstep.hardware import probe
from halfstep.numerics import FORMATS, Format, format_named
from halfstep.optim import AdamW, full_values
from halfstep.policy import Policy, from_flags, resolve
from halfstep.tracing.findings import HALF

SIMULATED = "simulate:"
Loss = Callable[..., Tensor] | None
Asked = Callable[..., Optimizer] | Optimizer | str  # as an optimizer is asked for
COARSE = {"full": 0.0, "int8": 2.0**-6, "fp8": 2.0**-4}  # of gradients, by how activations are kept for the backward pass


@dataclass(frozen=True)
class Manner:
    """How one side runs. text: as it was asked for. form: the format of its products; simulated: it is one that the model runs in by simulation."""

    text: str
    policy: Policy
    form: Format
    simulated: bool = False
    compiled: bool = False

    @property
    def exact(self) -> bool:
        """Whether it is fp32 throughout."""
        return self.policy.autocast == "fp32" and not self.policy.tf32 and not self.simulated

    @property
    def half_step(self) -> float:
        """The largest relative error of one rounding."""
        return self.form.epsilon / 2

    def __str__(self) -> str:
        return f"{self.text}, compiled" if self.compiled else self.text


def manner(text: str | Policy, device: torch.device, compiled: bool = False) -> Manner:
    """How a side runs that is asked for as a precision or "simulate:FORMAT". Raises ConfigError or PolicyError where it cannot."""
    if isinstance(text, str) and text.lower().startswith(SIMULATED):
        if compiled:
            raise ConfigError(f"{text} cannot be compiled: a simulation looks at every function as it runs", "Leave compile out.")
        form = format_named(text[len(SIMULATED) :])
        return Manner(f"{SIMULATED}{form.name}", resolve(from_flags(precision="fp32"), probe(device)).policy, form, simulated=True)
    policy = resolve(from_flags(precision=text), probe(device)).policy
    if policy.is_auto:
        raise ConfigError("precision='auto' is chosen when a model is prepared", "Name one; halfstep doctor says which suits the device.")
    return Manner(str(policy), policy, FORMATS["tf32" if policy.tf32 else policy.autocast], compiled=compiled)


def copied(model: nn.Module) -> nn.Module:
    """A copy of the model, of its own. Raises ConfigError for one that cannot be copied, or is bound to a precision."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if bound_policy(model) is not None:
        raise ConfigError(
            f"the model is bound to {bound_policy(model)}, and each side needs one that is not",
            "Pass it as it is before bind or prepare, or a factory.",
        )
    refuse_lazy(model)
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ConfigError(
            f"a copy of this {type(model).__name__} cannot be made ({type(error).__name__}: {error})", "Pass a factory: f(seed) that makes the model."
        ) from error


def widened(model: nn.Module) -> nn.Module:
    """`model` itself with what is 16-bit in it as fp32."""
    for t in (*model.parameters(), *model.buffers()):
        if t.dtype in HALF:
            t.grad = None
            t.data = t.data.float()
    return model


def losses_of(model: nn.Module, batch: Any, loss: Loss, wide: bool = False) -> Tensor:
    """The loss of one batch, given as to `halfstep.trace`. The model gets tensors of its own. wide: 16-bit ones of the batch
    as fp32, for a model that was widened. Raises ConfigError where there is none.
    """
    own = tree_map_only(Tensor, Tensor.clone, upcast(batch) if wide else batch)
    return loss_of(model, own, loss)


def default_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """AdamW at a learning rate of 1e-3."""
    return AdamW(parameters, lr=1e-3)


class Runner:
    """A model under its manner, and steps of it; a block, at whose end a simulation ends. wide: it was widened, and takes batches in fp32.

    Of the last step stay the scale and the unscaled gradients; refused: why steps were not applied.
    """

    def __init__(self, model: nn.Module, how: Manner, loss: Loss, optimizer: Asked, wide: bool = False) -> None:
        self.model, self.how, self.loss, self.wide = model, how, loss, wide
        self.device = device_of(model)
        bind(model, how.policy, self.device)
        if how.compiled:
            model._compiled_call_impl = CompiledCall(model)
        self.optimizer = optimizer_for(optimizer, model.parameters(), how.policy)
        if isinstance(self.optimizer, torch.optim.LBFGS) or isinstance(getattr(self.optimizer, "optimizer", None), torch.optim.LBFGS):
            raise ConfigError("LBFGS computes the loss several times a step, and steps are compared one by one", "Use another optimizer.")
        self.scaler = GradScaler.from_policy(how.policy.scale)
        self.scaler.run_backward_inside(self._backward)
        self.refused: list[str] = []
        self.gradients: dict[str, Tensor] = {}
        self.scale = 1.0
        self._simulated: AbstractContextManager[Any] = simulate(model, how.form) if how.simulated else nullcontext()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._simulated.__exit__(None, None, None)

    def _backward(self) -> AbstractContextManager[Any]:
        return backward_context(self.how.policy, self.device, products_of(self.model))

    def step(self, batch: Any, seed: int, around: AbstractContextManager[Any] | None = None) -> Tensor:
        """Take one optimizer step, and give its loss. around: a block for the forward pass."""
        seed_everything(seed)
        self.optimizer.zero_grad(set_to_none=True)
        with around if around is not None else nullcontext():
            loss = losses_of(self.model, batch, self.loss, self.wide)
        scaled = self.scaler.scale(loss)
        with self._backward():
            scaled.backward()  # type: ignore[no-untyped-call]
        self.scale = self.scaler.scale_at_hand
        with torch._C.DisableTorchFunction():  # a kept weight says that it is fp32
            self.gradients = {n: at_least_fp32(p.grad.detach()) / self.scale for n, p in self.model.named_parameters() if p.grad is not None}
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        if not result:
            self.refused.append(result.reason)
        return loss.detach()

    @torch.no_grad()
    def mean_loss(self, batches: Iterable[Any], seed: int) -> float:
        """The mean loss of batches as the model is now."""
        found = []
        for number, batch in enumerate(batches):
            seed_everything(seed + number)
            found.append(float(losses_of(self.model, batch, self.loss, self.wide)))
        return sum(found) / len(found)

    def weights(self) -> dict[str, Tensor]:
        """The parameters in full, fp32 where they are 16-bit with masters."""
        return {name: full_values(p) for name, p in self.model.named_parameters()}
