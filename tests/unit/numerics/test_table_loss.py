"""What 16 bits leave of fixed tables."""

import pytest
import torch
from torch import Tensor

from halfstep.numerics import table_loss

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
POSITIONS = torch.arange(1024.0)
FREQUENCIES = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
ANGLES = POSITIONS[:, None] / 1000 + torch.arange(4.0)  # slow ones: neighbouring rows differ by a thousandth


@pytest.mark.parametrize(
    ("name", "table", "dtype", "kind"),
    [
        ("sliding_attention_inv_freq", FREQUENCIES, BF16, "frequencies"),
        ("theta", FREQUENCIES, F16, "frequencies"),
        ("inv_freq", FREQUENCIES.bfloat16().float(), F32, "rounded"),
        ("positions", POSITIONS, BF16, "steps"),
        ("pe", ANGLES.sin(), BF16, "rows"),
        ("inv_freq", FREQUENCIES, F32, None),
        ("positions", POSITIONS, F16, None),
        ("mask", (POSITIONS > 512).float(), BF16, None),
        ("scale", torch.full((128,), 0.3), BF16, None),
        ("noise", torch.randn(1024, 64, generator=torch.Generator().manual_seed(0)).clamp(-1, 1), BF16, None),
        ("windows", 2.0 ** torch.arange(8.0), BF16, None),
    ],
)
def test_what_a_table_loses(name: str, table: Tensor, dtype: torch.dtype, kind: str | None) -> None:
    lost = table_loss(name, table.to(dtype))
    assert (lost.kind if lost is not None else None) == kind


def test_the_numbers_are_those_that_are_lost() -> None:
    lost = table_loss("positions", POSITIONS.to(BF16))
    assert lost is not None
    assert lost.size - lost.same == len(set(POSITIONS.to(BF16).tolist())) == 513
    off = table_loss("inv_freq", FREQUENCIES.to(BF16))
    assert off is not None
    exact, kept = FREQUENCIES.double() * 1000, FREQUENCIES.to(BF16).double() * 1000
    assert float((exact - kept).abs().max()) <= off.off
