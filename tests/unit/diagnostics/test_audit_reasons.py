"""Why 16 bits are not faster: each planted fault is a reason with its module, and its healthy twin has none of that kind. No clock is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from audited import Net, batch, facts, rows, told
from torch import Tensor, nn

from halfstep.amp import autocast
from halfstep.diagnostics.audit_reasons import Facts, Padded, Reason, reasons
from halfstep.diagnostics.audit_why import Row

NATIVE = "bf16-mixed,products=native"
EMULATED = "fp16-mixed,products=emulated"
WHOLE = "fp16-true,products="
LIBRARY = torch.library.Library("audited", "FRAGMENT")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: (x @ x.mT) @ x, "CPU")
LIBRARY.impl("twice", lambda x: torch.empty_like(x), "Meta")


class Blind(torch.autograd.Function):
    """A product that its author has shut autocast out of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.audited.twice(x.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def island(x: Tensor) -> Tensor:
    with autocast("cpu", enabled=False):
        return x.float() @ torch.ones(32, 32)


class Deep(nn.Module):
    """Eight layers; `wide` casts up before each, and the layer's product casts down again."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.layers, self.wide = nn.ModuleList(nn.Linear(32, 32) for _ in range(8)), wide

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
            x = x.float() if self.wide else x
        return F.cross_entropy(x, labels)


class Scaled(Net):
    """A buffer in fp32 meets 16-bit activations; `cast` casts it to them."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(32))
        self.between = lambda x: F.relu(x * (self.scale.to(x.dtype) if cast else self.scale)).exp2()


FAULTS: dict[str, tuple[str, Callable[[], nn.Module], str, Callable[[], nn.Module], str, str, str]] = {
    # cause, faulty model and precision, healthy twin and precision, what the text says, the module
    "an op in fp32_ops": (
        "fp32 products",
        Net,
        f"{NATIVE},fp32_ops=linear",
        Net,
        NATIVE,
        "the precision has linear in fp32_ops",
        "first",
    ),
    "a rule that is too wide": ("fp32 products", Net, f"{NATIVE},fp32=*", Net, NATIVE, "holds first in fp32", "first"),
    "an island": ("fp32 products", lambda: Net(island), NATIVE, lambda: Net(torch.tanh), NATIVE, "test_audit_reasons.py", ""),
    "a custom op": ("fp32 products", lambda: Net(Blind.apply), NATIVE, lambda: Net(lambda x: (x @ x.mT) @ x), NATIVE, "audited.twice", ""),
    "casts around each layer": ("casts of the code", lambda: Deep(True), NATIVE, lambda: Deep(False), NATIVE, "test_audit_reasons.py", ""),
    "an fp32 buffer": ("promotion", lambda: Scaled(False), NATIVE, lambda: Scaled(True), NATIVE, "scale", ""),
    "a huge loss": (
        "fp32 loss",
        lambda: Net(classes=4096),
        NATIVE,
        lambda: Deep(False),
        NATIVE,
        "over all of its logits",
        "",
    ),
    "an emulated format": ("emulated", Net, EMULATED, Net, NATIVE, "Train in bf16-mixed", "first"),
    "weights cast each time": ("casts of weights", Net, NATIVE, Net, "bf16-true", "bf16-lean keeps them", "first"),
    "emulated in a whole 16-bit model": ("emulated", Net, f"{WHOLE}emulated", Net, f"{WHOLE}native", "Train in bf16-mixed", "first"),
}


def one(found: tuple[Reason, ...], cause: str) -> list[Reason]:
    return [r for r in found if r.cause == cause]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_a_reason_and_its_healthy_twin_has_none(name: str) -> None:
    cause, faulty, precision, healthy, other, words, module = FAULTS[name]
    classes = 4096 if name == "a huge loss" else 8
    found = one(told(faulty(), batch(64, classes=classes), precision), cause)
    assert found, name
    assert words in str(found[0]), str(found[0])
    assert module in (found[0].module, ""), found[0]
    assert 0 < found[0].share <= 1
    assert one(told(healthy(), batch(64), other), cause) == []


class Reads(Net):
    """A table before the layers of a net."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(512, 32), nn.LayerNorm(32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(self.norm(self.table(ids)), labels)


def test_lists_of_ops_are_a_remedy_only_where_a_precision_takes_them() -> None:
    """A `*-true` precision refuses `half_ops=` and `ops=`, and its embeddings round fp32 sums."""
    given = torch.arange(64), torch.zeros(64, dtype=torch.long)
    for precision, said in (
        (NATIVE, "half_ops= in the precision"),
        (f"{WHOLE}native", "such sums would be lost"),
        (f"{WHOLE}emulated", "would be lost"),
    ):
        (reason,) = one(told(Reads(), given, precision), "casts of the list")
        assert said in reason.remedy


def test_all_of_a_model_under_a_wide_rule_is_named_with_its_share_of_the_flops() -> None:
    (reason, *_) = told(Net(), batch(64), f"{NATIVE},fp32=first")
    assert reason.cause == "fp32 products"
    assert "first (Linear)" in reason.what
    assert "last" not in reason.what
    flops = {name: sum(r.flops for r in rows(Net(), batch(64), NATIVE) if r.cls == "products" and r.module == name) for name in ("first", "last")}
    assert f"{flops['first'] / sum(flops.values()):.0%} of the product flops" in reason.what


def test_under_torchs_own_autocast_the_casts_are_autocasts_and_the_products_16_bit() -> None:
    found = rows(Net(), batch(), None, lambda: torch.autocast("cpu", torch.bfloat16))
    assert {r.format for r in found if r.cls == "products"} == {"bf16"}
    assert {r.by for r in found if r.cls == "casts"} == {"autocast", "backward"}


def test_a_model_in_fp32_has_no_reason_about_16_bits() -> None:
    found = rows(Net(), batch())
    assert {r.cause for r in reasons(found, facts(found, "fp32"))} <= {"memory"}


def row(cls: str = "products", form: str = "fp32", seconds: float = 1.0, **others: Any) -> Row:
    return Row("head", "Linear", "mm", "forward", form, form, cls, seconds=seconds, flops=1000, **others)


FACTS = Facts("bf16-mixed", "bf16", "a GPU", "cuda", ("fp32", "tf32", "bf16", "fp16"), 1.0)


def causes(found: tuple[Row, ...], known: Facts) -> list[str]:
    return [r.cause for r in reasons(found, known)]


def test_tf32_that_is_off_is_said_where_the_device_has_it() -> None:
    wide = (row(),)
    off = replace(FACTS, precision="fp32", compute="fp32")
    assert causes(wide, off) == ["tf32"]
    assert "precision='tf32'" in reasons(wide, off)[0].remedy
    assert causes(wide, replace(off, tf32=True)) == []
    assert causes(wide, replace(off, native=("fp32", "fp16"))) == []
    assert causes(wide, replace(off, kind="cpu")) == []
    assert "bf16-mixed,tf32=on" in one(reasons((row(why="off"),), FACTS), "tf32")[0].remedy
    assert "allow_tf32 = True" in one(reasons((row(why="off"),), replace(FACTS, precision="bf16")), "tf32")[0].remedy  # cast by hand


def test_a_step_that_passes_outside_of_ops_says_so() -> None:
    small = (row(form="bf16", seconds=0.1),)
    (reason,) = reasons(small, replace(FACTS, outside=0.9))
    assert (reason.cause, reason.share) == ("outside", 0.9)
    assert "90% of the step" in reason.what
    assert "CUDA graphs" in reason.remedy
    assert causes(small, replace(FACTS, outside=0.1)) == []


def test_a_size_that_misses_the_fast_path_counts_where_padding_was_measured_to_help() -> None:
    slow = Padded("head", "64x1001 by 1001x8", "64x1008 by 1008x8", 3.0, 1.0, 0.5)
    (reason,) = reasons((), replace(FACTS, padded=(slow,)))
    assert (reason.cause, reason.module) == ("shape", "head")
    assert "3.00 times as long" in reason.what
    assert "Pad to 64x1008" in reason.remedy
    same = replace(slow, padded_seconds=2.99)
    for kind in ("cpu", "cuda"):
        assert causes((), replace(FACTS, kind=kind, padded=(same,))) == []


def test_16_bit_products_that_are_no_faster_are_named_with_their_rate() -> None:
    mine = (row(form="bf16"),)
    (reason,) = reasons(mine, replace(FACTS, gain=0.5, native=("fp32", "fp16")))
    assert reason.cause == "slow products"
    assert "0.50 times fp32's rate" in reason.what
    assert "fp16-mixed" in reason.remedy
    assert causes(mine, replace(FACTS, gain=1.5)) == []


def test_reasons_come_by_what_they_cost() -> None:
    found = (row("casts", "fp32", 0.3, by="model", source="net.py:3"), row(seconds=0.2, why="off", origin="net.py:4"), row("norms", seconds=0.5))
    assert causes(found, replace(FACTS, kind="cpu", gain=2.0)) == ["casts of the code", "memory", "fp32 products"]


def test_what_takes_less_than_three_percent_is_no_reason() -> None:
    assert causes((row(seconds=0.02, why="off"),), replace(FACTS, kind="cpu")) == []


def test_a_cast_down_of_what_the_code_cast_up_is_the_codes_too() -> None:
    both = [[r for r in rows(Deep(wide), batch(), NATIVE) if r.cls == "casts" and not r.weights] for wide in (True, False)]
    by = [{r.by for r in found if r.direction == "forward"} for found in both]
    assert by == [{"model", "autocast"}, {"autocast", "list"}]
    downs = [r for r in both[0] if r.by == "model" and r.dtype_out == "bf16"]
    assert sum(r.calls for r in downs) == 7  # all but the first layer's input, and the last output, which the loss takes
