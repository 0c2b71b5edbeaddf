"""A model under a precision for the length of a look at it, and afterwards exactly what it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp import bind, bound_policy
from halfstep.errors import ConfigError
from halfstep.hardware import probe
from halfstep.optim import master_of
from halfstep.policy import Policy, from_flags, resolve
from halfstep.tracing.findings import HALF


def device_of(model: nn.Module) -> torch.device:
    """Where the model stands: the device of its first weight or buffer, the CPU when it has none."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def refuse_lazy(model: nn.Module) -> None:
    """Raise ConfigError for a model whose weights are not made before its first forward pass."""
    name = next((name for name, p in model.named_parameters() if torch.nn.parameter.is_lazy(p)), None)
    if name is not None:
        raise ConfigError(f"{name} is not made yet: a lazy module takes its shape from its first batch", "Run one forward pass first: model(batch).")


def refuse_fp64(model: nn.Module, policy: Policy) -> None:
    """Raise ConfigError where a 16-bit policy would do nothing: autocast leaves weights in fp64, and their products, as they are."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if policy.autocast != "fp32" and kinds == {torch.float64}:
        raise ConfigError(
            f"the weights of this {type(model).__name__} are in fp64, which {policy} leaves as they are: nothing would run in 16 bits",
            "Pass model.float(), or a copy of it, and batches in fp32.",
        )


@contextmanager
def under(model: nn.Module, precision: str | Policy | None) -> Iterator[Policy | None]:
    """The block in which `model` runs under `precision`, or as it is when that is None. Gives the policy that holds inside, None for none.

    Weights and buffers have their memory, bits and dtypes back at its end. Memory: a copy of them under precisions that hold weights in 16 bits, and
    for models that were loaded so. Raises ConfigError when the model is bound to another policy, PolicyError for a precision that cannot work.
    """
    already = bound_policy(model)
    if precision is None:
        yield already
        return
    device = device_of(model)
    policy = resolve(from_flags(precision=precision), probe(device)).policy
    if already is not None:
        if already != policy:
            raise ConfigError(
                f"the model is bound to {already}, and precision={str(policy)!r} was asked for", "Leave precision= out, or pass a copy."
            )
        yield already
        return
    if any(master_of(p) is not None for p in model.parameters()):
        raise ConfigError(
            f"weights of this {type(model).__name__} have masters beside them already, and precision={str(policy)!r} would make its own",
            "Leave precision= out: the model is then looked at as it is.",
        )
    floats = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and not torch.nn.parameter.is_lazy(t)]
    narrow = policy.is_lean or policy.whole or any(t.dtype in HALF for t in floats)
    before = [_Before(t) for t in floats] if narrow else []
    try:
        binding = bind(model, policy, device)
        try:
            yield policy
        finally:
            binding.remove()
    finally:
        for known in before:
            known.put_back()


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """The block in which the 16-bit weights and buffers of a model that is bound to no policy are fp32 ones of the same values.

    They have their memory, bits and dtypes back at its end. Memory: an fp32 copy of the 16-bit ones.
    """
    before = [_Before(t) for t in (*model.parameters(), *model.buffers()) if t.dtype in HALF and not torch.nn.parameter.is_lazy(t)]
    try:
        for known in before:
            known.tensor.data = known.tensor.data.float()
            if known.leaf:
                known.tensor.grad_dtype = torch.float32
        yield
    finally:
        for known in before:
            known.put_back()


class _Before:
    """One weight or buffer as it was. Its gradient is taken away for as long, since it would be cast with it."""

    def __init__(self, t: Tensor) -> None:
        self.tensor, self.memory, self.values = t, t.data, t.detach().clone()
        self.leaf = t.requires_grad and t.is_leaf
        self.takes: Any = t.grad_dtype if self.leaf else None
        self.gradient, t.grad = t.grad, None
        self.notes = dict(t.__dict__)  # a first call under a precision puts masters there

    @torch.no_grad()
    def put_back(self) -> None:
        t = self.tensor
        t.grad = None
        if t.data_ptr() != self.memory.data_ptr() or t.dtype != self.memory.dtype:
            t.data = self.memory
        if self.leaf and t.grad_dtype != self.takes:
            t.grad_dtype = self.takes
        if not torch.equal(_bits(t.detach()), _bits(self.values)):
            t.detach().copy_(self.values)
        t.grad = self.gradient
        t.__dict__.clear()
        t.__dict__.update(self.notes)


def _bits(t: Tensor) -> Tensor:
    """The memory of a dense tensor, to be compared where there are NaNs."""
    return t.reshape(-1).view(torch.uint8)
