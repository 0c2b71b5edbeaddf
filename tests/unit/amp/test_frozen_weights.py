"""Frozen weights of a model that was loaded in 16 bits: nothing beside them, and their blocks can be computed again in the backward pass."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import Accelerator
from halfstep.optim import master_of


class Blocks(nn.Module):
    """Two frozen blocks around a trained layer. reentrant: None computes nothing again."""

    def __init__(self, dtype: torch.dtype, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)).to(dtype)
        self.blocks.requires_grad_(False)
        self.blocks[1].requires_grad_(True)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-lean", "fp16-mixed", "fp16-lean", "bf16-true"])
def test_frozen_blocks_are_computed_again_bit_for_bit(precision: str) -> None:
    found = []
    for reentrant in (None, False, True):
        accelerator = Accelerator(cpu=True, precision=precision)
        model = Blocks(torch.bfloat16 if precision.startswith("bf16") else torch.float16, reentrant)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            accelerator.backward(model(torch.ones(4, 8)).square().mean())
        found.append([p.grad.clone() for p in model.blocks[1].parameters()])
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert all(p.grad is None and ((m := master_of(p)) is None or m.nbytes() == 0) for p in frozen)
        assert all(p.dtype in (torch.bfloat16, torch.float16) for p in frozen if p.dim() == 2)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert any(bool(g.any()) for g in found[0])
