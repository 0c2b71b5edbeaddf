"""Law: the bytes that the table promises are those of the tensors of a real training step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.optim import SGD, AdamW, Lion, attach, master_of, wrap
from halfstep.policy import Bytes, Policy, model_bytes, parse, tensor_bytes

PRECISIONS = [
    "bf16-mixed",
    "fp16-mixed,states=int8",
    "bf16-lean",
    "fp16-lean,states=bf16",
    "bf16-lean,states=fp32",
    "fp16-lean,weights=split24",
    "bf16-lean,weights=stochastic",
    "bf16-mixed,weights=plain",
    "bf16-true",
    "fp16-true",
]
OPTIMIZERS = {
    "AdamW": lambda ps, policy: AdamW(ps, policy=policy),
    "SGD": lambda ps, policy: SGD(ps, momentum=0.9, policy=policy),
    "plain SGD": lambda ps, policy: SGD(ps, policy=policy),
    "Lion": lambda ps, policy: Lion(ps, policy=policy),
    "wrapped AdamW": lambda ps, policy: wrap(torch.optim.AdamW(ps), policy),
    "wrapped amsgrad": lambda ps, policy: wrap(torch.optim.Adam(ps, amsgrad=True), policy),
    "wrapped NAdam": lambda ps, policy: wrap(torch.optim.NAdam(ps), policy),
    "wrapped SGD": lambda ps, policy: wrap(torch.optim.SGD(ps, momentum=0.9), policy),
    "wrapped plain SGD": lambda ps, policy: wrap(torch.optim.SGD(ps), policy),
    "wrapped RMSprop": lambda ps, policy: wrap(torch.optim.RMSprop(ps, centered=True, momentum=0.9), policy),
    "wrapped Adafactor": lambda ps, policy: wrap(torch.optim.Adafactor(ps), policy),
}
SHAPES = [(20, 15), (129,), (1,)]


def parameter(shape: tuple[int, ...], policy: Policy, castable: bool) -> nn.Parameter:
    """A parameter with a gradient, as `policy` holds it."""
    p = nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape))
    if policy.weights != "fp32" and (castable or policy.whole):
        attach(p, policy.weights, dtype=policy.weight_dtype)
    p.grad = torch.ones_like(p)
    return p


def measured(p: nn.Parameter, state: dict[str, Any]) -> Bytes[int]:
    master = master_of(p)
    residual = None if master is None else master.residual
    assert p.grad is not None
    states = sum(v.nbytes for v in state.values() if isinstance(v, Tensor))
    return Bytes(p.nbytes, 0 if residual is None else residual.nbytes, p.grad.nbytes, states)


@pytest.mark.parametrize("text", PRECISIONS)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_training_step_takes_the_bytes_that_were_counted(text: str, name: str) -> None:
    policy = parse(text)
    tensors = [(shape, castable) for shape in SHAPES for castable in (True, False)]
    parameters = [parameter(shape, policy, castable) for shape, castable in tensors]
    optimizer = OPTIMIZERS[name](parameters, policy)
    optimizer.step()
    found = [measured(p, optimizer.state[p]) for p in parameters]
    assert found == [tensor_bytes(policy, optimizer, shape, castable=castable) for shape, castable in tensors]
    assert sum(b.total for b in found) == model_bytes(tensors, policy, optimizer).total
