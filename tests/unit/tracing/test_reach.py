"""How far values reach in fp32, and which of them another run has in 16 bits: masks do not count, what overflowed hides nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfstep.tracing import Observation
from halfstep.tracing.reach import Far, Narrow, Offence, Reach, reach_of

LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("values", "product", "expected"),
    [
        ([1.0, -3.0], False, 3.0),
        ([0.0, LOWEST], False, 0.0),
        ([0.0, -2e4], False, 0.0),  # a mask: 0 and one number far below
        ([0.0, -2e4], True, 2e4),  # a product's own result is none
        ([5.0, -3.0, -1e9], False, 5.0),  # scores with the mask added
        ([5.0, -3.0, -float("inf")], False, 5.0),
        ([float("inf"), 2.0], False, 2.0),
        ([float("nan"), 2.0], True, 2.0),
        ([3e5, -1.0], False, 3e5),
        ([], False, 0.0),
    ],
)
def test_masks_and_what_is_not_finite_do_not_count(values: list[float], product: bool, expected: float) -> None:
    assert reach_of(torch.tensor(values), product) == expected


class Net(nn.Module):
    """Two layers, each followed by a factor; the second factor comes in the model's own code."""

    def __init__(self, narrow: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.narrow = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), narrow
        with torch.no_grad():
            self.a.weight.copy_(1e5 * torch.eye(4))
            self.b.weight.copy_(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x.half() if self.narrow else x)
        return self.b(y * 2)


def look(model: Net) -> Reach:
    reach = Reach()
    with torch.no_grad(), Observation(model, [reach]):  # type: ignore[list-item]
        model(torch.ones(2, 4))
    return reach


def offences(reach: Reach, growth: float = 1.0) -> list[Offence]:
    model, narrow = Net(narrow=True).half(), Narrow(reach, torch.float16, growth)
    with torch.no_grad(), Observation(model, [narrow]):  # type: ignore[list-item]
        model(torch.ones(2, 4))
    return list(narrow.offences)


def test_a_product_has_the_reach_of_what_it_multiplies_and_of_what_it_makes() -> None:
    far = {key[0]: value for key, value in look(Net()).far.items() if key[2] == "product"}
    assert far == {"a": Far(1e5, 1e5), "b": Far(2e5, 2e5)}


def test_the_first_value_beyond_the_range_is_no_heir_of_another_and_those_after_it_are() -> None:
    found = offences(look(Net()))
    assert [(o.module, o.op, o.inherited) for o in found] == [("a", "mm", False), ("", "mul", True), ("b", "mm", True)]
    assert found[0].far.made == 1e5


def test_room_for_growth_makes_the_limit_lower() -> None:
    small = Net()
    small.a.weight.data *= 0.2  # 2e4 and 4e4: within fp16, and within a factor of 4 of its limit
    assert offences(look(small)) == []
    assert [o.module for o in offences(look(small), 4.0)] == ["a", "", "b"]
