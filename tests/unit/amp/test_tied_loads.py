"""What is loaded into a 16-bit weight that several modules share is its master in full, through whichever name it comes."""

import pytest
import torch
from table_models import SPLIT, Tied, settled
from torch import Tensor, nn

from halfstep.optim import full_values


class Heads(nn.Module):
    """Two products share a weight, and neither has anything else that is in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(nn.functional.one_hot(ids, 40).float())).square().mean()
        return out


@pytest.mark.parametrize("names", [("table", "head"), ("table",), ("head",)], ids="+".join)
@pytest.mark.parametrize("make", [Tied, Heads])
def test_all_of_a_value_is_loaded_through_each_name(make: type[nn.Module], names: tuple[str, ...]) -> None:
    model = settled(SPLIT, make())
    weight = model.table.weight
    assert weight.dtype == torch.bfloat16
    assert model.head.weight is weight
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    model.load_state_dict({f"{name}.weight": values for name in names}, strict=False)
    assert torch.equal(full_values(weight), values)
