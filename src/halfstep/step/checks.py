"""Refusals of a step protocol: losses and settings that cannot work, with the names and the remedy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError, StepOrderError
from halfstep.optim import MasteredOptimizer
from halfstep.step.graph import Reached, nodes
from halfstep.step.marks import parameters


def refuse_loss(loss: Tensor) -> None:
    """A loss must be a floating-point tensor with a graph behind it."""
    if loss.device.type == "meta":
        raise ConfigError(
            "the loss is on the meta device, which holds no numbers", "Move the model to a real device with to_empty() and load its weights."
        )
    if not (loss.is_floating_point() or loss.is_complex()):
        raise ConfigError(
            f"the loss is {str(loss.dtype).removeprefix('torch.')}, which has no gradients", "Compute it in floating point, for example loss.float()."
        )
    if loss.is_complex():
        raise ConfigError(f"the loss is {str(loss.dtype).removeprefix('torch.')}, and a loss must be real", "Take its .real or .abs().")
    if not loss.requires_grad:
        where = (
            "under torch.no_grad()" if not torch.is_grad_enabled() else "from tensors that need no gradient (a detached output, frozen parameters)"
        )
        raise ConfigError(
            f"the loss has no graph, so it cannot train anything: it was computed {where}", "Compute it from the model's outputs with gradients on."
        )


SETTINGS = ("lr", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "lambd", "rho", "etas", "lr_decay", "momentum_decay")


def refuse_settings(optimizer: Optimizer) -> None:
    """A learning rate or another setting that is inf or NaN would write that into the weights, whatever the gradients.

    A learning rate that is a tensor on a GPU is not looked at, since reading it would wait for the device.
    """
    for i, group in enumerate(optimizer.param_groups):
        for name in SETTINGS:
            given = group.get(name)
            if given is None or (type(given) is float and math.isfinite(given)):
                continue
            for value in given if isinstance(given, tuple | list) else (given,):
                number = float(value) if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" else value
                if isinstance(number, int | float) and not math.isfinite(number):
                    raise ConfigError(
                        f"{name} of parameter group {i} is {number}, and a step would write that into the weights", "Look at the schedule."
                    )


def refuse_penalty(loss: Tensor, sign: Tensor | None) -> None:
    """A loss made from gradients of a scaled loss that bear the sign, by somebody who did not ask for the scale to divide them by."""
    if sign is not None and any(getattr(node, "variable", None) is sign for node in nodes(loss)):
        raise StepOrderError(
            "this loss is made from gradients of a scaled loss that are still multiplied by the loss scale (a gradient penalty, for example)",
            "Differentiate the loss itself, torch.autograd.grad(loss, inputs, create_graph=True), or divide by scaler.get_scale() first.",
        )


def look_for_masters(owner: object, held: list[Tensor], scaled: bool, name: Callable[[Tensor], str]) -> None:
    """16-bit weights whose optimizer knows no masters: small updates round away. An error under a loss scale, where unscaling would round too."""
    narrow = [p for p in held if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)]
    if not narrow or isinstance(owner, MasteredOptimizer) or not isinstance(owner, Optimizer):
        return
    cause = (
        f"{name(narrow[0])} is {str(narrow[0].dtype).removeprefix('torch.')} and its optimizer, a {type(owner).__name__}, would update it without "
        f"an fp32 master weight, so small updates would round away ({len(narrow)} such parameters)"
    )
    remedy = (
        "Use optimizer = halfstep.optim.wrap(optimizer), which gives them masters (2 bytes per weight), or load the model with dtype=torch.float32."
    )
    if scaled:
        raise ConfigError(cause, remedy)
    warnings.warn(f"{cause}. {remedy} halfstep.optim.wrap(optimizer, weights='plain') says that this is meant.", stacklevel=7)


def draw_apart(owner: object, others: Iterable[object]) -> None:
    """Optimizers of one run round by other chances, with the same seed too."""
    if isinstance(owner, MasteredOptimizer):
        owner.draw_apart(other for other in others if isinstance(other, MasteredOptimizer))


def refuse_foreign(reached: Reached) -> None:
    """Custom autograd Functions whose backward pass may not run twice."""
    if reached.foreign:
        raise ConfigError(
            f"on_overflow='replay' runs backward passes twice, and {reached.foreign[0]}, a custom autograd Function, may overwrite what it saved",
            "Set repeatable = True on its class if its backward pass can run twice, or use on_overflow='skip'.",
        )


def refuse_unseen(optimizer: Optimizer, name: Callable[[Tensor], str]) -> None:
    """Gradients without any backward pass of a scaled loss since the last step."""
    first = next(p for p in parameters(optimizer) if p.grad is not None)
    raise StepOrderError(
        f"{name(first)} has a gradient, and no backward pass of a scaled loss was run: it would be divided by a scale it was not multiplied by",
        "Call scaler.scale(loss).backward() (accelerator.backward(loss)) instead of loss.backward().",
    )


def refuse_states(optimizer: Optimizer, name: Callable[[Tensor], str], looked: tuple[object, ...] = ()) -> tuple[object, ...]:
    """States on another device than their parameter: the model moved after the optimizer had stepped or loaded.

    Returns what was looked at: given back as `looked`, nothing is looked at again while it is the same.
    """
    states = getattr(optimizer, "state", None)
    if not isinstance(states, Mapping):
        return ()
    held = parameters(optimizer)
    found = (id(states), len(states), *[p.device for p in held])
    for p in held if found != looked else ():
        own = states.get(p)
        for key, value in own.items() if isinstance(own, Mapping) else ():
            if isinstance(value, Tensor) and value.dim() and value.device != p.device:
                raise ConfigError(
                    f"the model has moved since its optimizer was made: {name(p)} is on {p.device} and its {key} on {value.device}",
                    "Move the model first, then make the optimizer, then load its state.",
                )
    return found


def refuse_edits(edited: list[Tensor], mixed: list[Tensor], name: Callable[[Tensor], str]) -> None:
    """Gradients that were changed while still scaled, or that a backward pass added to unscaled ones."""
    if edited:
        raise StepOrderError(
            f"the gradient of {name(edited[0])} was changed between backward() and unscaling, while it was multiplied by the loss scale "
            f"(a clip, for example, has then compared scaled numbers with its limit); {len(edited)} in all",
            "Clip with scaler.clip_grad_norm_ or halfstep.amp.clip_grad_norm_, or call scaler.unscale_(optimizer) first; "
            "an edit that does not depend on the scale (grad.div_(n)) goes inside `with scaler.edits():`.",
        )
    if mixed:
        raise StepOrderError(
            f"the gradient of {name(mixed[0])} was not cleared after the last step: a backward pass has added scaled numbers to unscaled ones; "
            f"{len(mixed)} in all",
            "Call optimizer.zero_grad() after each step, whether it was applied or not.",
        )


def why_no_gradients(optimizer: Optimizer, name: Callable[[Tensor], str], reached: list[Tensor]) -> str:
    """In words: which parameters of an optimizer have no gradient, and the likely reason."""
    own = parameters(optimizer)
    names = ", ".join(name(p) for p in own[:4]) + (f" and {len(own) - 4} more" if len(own) > 4 else "")
    if all(not p.requires_grad for p in own):
        reason = "they are frozen (requires_grad=False)"
    elif reached and not {id(p) for p in own} & {id(p) for p in reached}:
        reason = (
            f"the losses reach {len(reached)} other parameters ({name(reached[0])}, for example), so the optimizer was made for another model, "
            "a copy, or before parameters were replaced"
        )
    elif not reached:
        reason = "no loss was seen, or gradients were cleared before the step"
    else:
        reason = "no backward pass was run, it was cleared, or the branch they belong to was not used"
    return f"no gradient for {names}: {reason}"
