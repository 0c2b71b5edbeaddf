"""The optimizer that a policy needs: the one given, or a wrapping of it that updates masters and keeps states in the policy's format."""

from __future__ import annotations

from torch.optim import Optimizer

from halfstep.optim.base import MasteredOptimizer
from halfstep.optim.masters import HALF
from halfstep.optim.wrap import wrap_under
from halfstep.policy import Policy


def with_masters(optimizer: Optimizer, policy: Policy) -> Optimizer:
    """`optimizer` itself where all its weights are fp32 under `policy` and its states too, or it knows masters by itself; else it wrapped.

    Raises ConfigError when it was made for other formats than the policy's.
    """
    if isinstance(optimizer, MasteredOptimizer):
        optimizer.follow(policy)
        return optimizer
    narrow = any(p.dtype in HALF and p.requires_grad for group in optimizer.param_groups for p in group["params"])
    if policy.weights == "fp32" and policy.states == "fp32" and not narrow:
        return optimizer
    return wrap_under(optimizer, policy)
