"""Positions, timesteps, ids and tables in 16 bits, each beside what keeps them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.amp import bind
from halfstep.policy import parse
from halfstep.tracing import Finding, Observation
from halfstep.tracing.tables import Tables, table_fault

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
FREQUENCIES = 10000.0 ** -(torch.arange(0, 32, 2) / 32)


def found(call: Callable[[], object], model: nn.Module | None = None) -> list[Finding]:
    detector = Tables()
    with Observation(model if model is not None else nn.Identity(), [detector]):
        call()
    return detector.findings()


LOSSY: dict[str, Callable[[torch.dtype], object]] = {
    "positions": lambda d: torch.arange(5000).to(d),
    "two timesteps": lambda d: torch.tensor([4501, 4503]).to(d),
    "arange in 16 bits": lambda d: torch.arange(5000, dtype=d),
    "steps between 0 and 1": lambda d: torch.linspace(0, 1, 5000, dtype=d),
    "integers times 16 bits": lambda d: torch.arange(5000)[:, None] * torch.ones(4, dtype=d),
    "floats that are positions": lambda d: torch.arange(5000.0).to(d),
    "ids and back": lambda d: torch.tensor([257, 4501, 50257]).to(d).long(),
    "running count": lambda d: torch.ones(3000, dtype=d).cumsum(0),
    "sines of large arguments": lambda d: (torch.rand(8) * 3000 + 1000).to(d).sin(),
}


@pytest.mark.parametrize("name", LOSSY)
def test_integers_through_16_bits_are_reported_and_in_fp32_are_not(name: str) -> None:
    torch.manual_seed(0)
    for dtype in (FP16, BF16):
        (finding,) = found(lambda dtype=dtype: LOSSY[name](dtype))
        assert finding.fault == "table"
        assert "fp16" in finding.what or "bf16" in finding.what
    assert found(lambda: LOSSY[name](FP32)) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda d: torch.arange(256).to(d),
        lambda d: torch.arange(200, dtype=d),
        lambda d: torch.tensor([0, 1, 1, 0]).to(d),
        lambda d: torch.full((4,), 5001)[:0].to(d),  # nothing left
        lambda d: torch.tensor(5001).to(d),  # one count, to divide by
        lambda d: torch.arange(0, 8192, 64).to(d),  # numbers of the format
        lambda d: torch.randn(64, 64).mul(1000).to(d),
        lambda d: torch.full((4,), 70000.5).to(d),
        lambda d: torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8).to(d) / 255,
        lambda d: (torch.arange(5000)[:, None] * FREQUENCIES).sin().to(d),
        lambda d: torch.randn(8).to(d).sin(),
        lambda d: (torch.rand(9) * 100).to(d).long(),
        lambda d: torch.rand(3000).to(d).cumsum(0),
        lambda d: torch.arange(5000)[:, None] * torch.ones(4),
    ],
)
def test_what_16_bits_hold_is_no_finding(function: Callable[[torch.dtype], object]) -> None:
    torch.manual_seed(0)
    for dtype in (FP16, BF16):
        assert found(lambda dtype=dtype: function(dtype)) == []


def test_the_finding_counts_what_became_one_and_names_the_module() -> None:
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(x.shape[1]).to(x.dtype)[None, :, None]

    model = nn.Sequential(nn.Identity(), Positions())
    (finding,) = found(lambda: model(torch.zeros(1, 1000, 2, dtype=BF16)), model)
    assert (finding.place.module, finding.place.kind) == ("1", "Positions")
    assert "integers up to 999 are cast to bf16, which counts exactly only to 256: 1000 different values become 507" in finding.what
    assert found(lambda: model(torch.zeros(1, 1000, 2)), model) == []


class Table(nn.Module):
    """A module that holds a table."""

    def __init__(self, name: str, table: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer(name, table)


def sines(dtype: torch.dtype) -> Tensor:
    angles = torch.arange(1000).to(dtype)[:, None] * FREQUENCIES.to(dtype)
    return torch.cat((angles.sin(), angles.cos()), -1).to(dtype)


TABLES: dict[str, tuple[str, Tensor]] = {
    "frequencies": ("inv_freq", FREQUENCIES),
    "frequencies by another name": ("rates", FREQUENCIES),
    "scaled frequencies": ("freqs", FREQUENCIES * torch.linspace(1, 0.1, 16) ** 2),
    "noise levels": ("sigmas", torch.logspace(-2, 2, 100)),
    "a schedule": ("betas", torch.linspace(1e-4, 0.02, 1000)),
    "a product of a schedule": ("alphas_cumprod", (1 - torch.linspace(1e-4, 0.02, 4000)).cumprod(0).clamp_min(1e-4)),
    "positions": ("position", torch.arange(5000.0)),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_in_16_bits_are_reported_before_the_run_and_in_fp32_are_not(name: str) -> None:
    own, table = TABLES[name]
    (finding,) = found(lambda: None, nn.Sequential(Table(own, table).to(BF16)))
    assert (finding.fault, finding.place.module, finding.place.kind) == ("table", "0", "Table")
    assert own in finding.what
    assert found(lambda: None, nn.Sequential(Table(own, table))) == []


def test_a_table_of_sines_is_reported_where_positions_became_one_and_not_where_the_sines_were_rounded() -> None:
    assert found(lambda: None, Table("pe", sines(BF16)))[0].what.startswith("pe, a table of 1000 rows, is held in bf16, and 4")
    assert found(lambda: None, Table("pe", sines(FP32).to(BF16))) == []
    frozen = nn.Embedding.from_pretrained(sines(BF16))
    assert [f.fault for f in found(lambda: None, frozen)] == ["table"]
    frozen.weight.requires_grad_()
    assert found(lambda: None, frozen) == []  # it is trained


def test_frequencies_that_were_rounded_and_cast_back_are_reported() -> None:
    (finding,) = found(lambda: None, Table("inv_freq", FREQUENCIES).to(BF16).float())
    assert "was rounded to bf16 before" in finding.what


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("running_mean", torch.randn(64)),
        ("running_var", torch.ones(64)),
        ("mask", torch.ones(300, 300).tril()),
        ("bias", torch.zeros(300, 8)),
        ("slopes", 2.0 ** -torch.arange(1, 9)),  # powers of two
        ("codes", torch.randn(300, 8).clamp(-1, 1)),
        ("scale", torch.tensor(3.3)),
        ("window", torch.hann_window(64)),
        ("freq_mask", torch.zeros(8)),
    ],
)
def test_other_buffers_in_16_bits_are_no_tables(name: str, table: Tensor) -> None:
    torch.manual_seed(0)
    for dtype in (FP16, BF16, FP32):
        assert table_fault(name, table.to(dtype)) == ""


def test_two_copies_of_one_table_are_one_finding() -> None:
    module = Table("inv_freq", FREQUENCIES)
    module.register_buffer("original_inv_freq", FREQUENCIES.clone())
    assert len(found(lambda: None, module.half())) == 1


class Rotary(nn.Module):
    """Sines of positions, as rotary embeddings compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("inv_freq", FREQUENCIES.clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            angles = torch.arange(x.shape[1])[:, None].float() * self.inv_freq.float()
        return self.layer(x) + torch.cat((angles.sin(), angles.cos()), -1).to(x.dtype)


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "bf16-lean", "bf16-true", "fp16-true"])
def test_rotary_embeddings_under_a_policy_are_no_finding_and_after_a_cast_they_are(policy: str) -> None:
    model = Rotary()
    bind(model, parse(policy), torch.device("cpu"))
    assert found(lambda: model(torch.ones(1, 600, 32)), model) == []
    cast = Rotary().bfloat16()
    assert [f.fault for f in found(lambda: cast(torch.ones(1, 600, 32, dtype=BF16)), cast)] == ["table"]
