"""What an audit says of another precision from a run in fp32 is what runs there: formats of products, and the casts around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from audited import Attends, Looks, Net, Pictures, batch, book
from torch import nn

from halfstep.demo import GPT, GPTConfig
from halfstep.diagnostics.audit_prices import predict
from halfstep.diagnostics.audit_times import Stopwatch, timed_ops
from halfstep.diagnostics.audit_translate import in_fp32, under_policy
from halfstep.diagnostics.audit_why import explained, rows_of
from halfstep.policy import parse, select
from halfstep.tracing import Observation
from halfstep.tracing.findings import HALF
from halfstep.tracing.ledger import Calls, Ledger

CPU = torch.device("cpu")


def small_gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    ids = torch.randint(0, 256, (2, 16))
    return _Loss(GPT(GPTConfig(block_size=16, layers=2, heads=2, width=32))), (ids, ids)


class _Loss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(ids, labels)["loss"]
        return loss


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "linear": lambda: (Net(), batch()),
    "gpt": small_gpt,
    "attention of torch": lambda: (Attends(), (torch.randn(2, 8, 16), torch.randint(0, 8, (2,)))),
    "convolutions": lambda: (Pictures(), (torch.randn(2, 3, 8, 8), torch.randint(0, 8, (2,)))),
    "lookups": lambda: (Looks(), (torch.randint(0, 20, (8,)), torch.randint(0, 8, (8,)))),
}
PRECISIONS = ("bf16-mixed,products=native", "bf16-true,products=native", "bf16-mixed,products=native,fp32={last}")


def products(ops: Any, formats: Any) -> list[tuple[Any, ...]]:
    return [
        (op.base, op.place.module, tuple(d for t, d in zip(op.inputs, given, strict=True) if t.is_float))
        for op, given in zip(ops, formats, strict=True)
        if op.cls == "products"
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_products_run_in_the_formats_that_were_told_from_fp32(name: str, precision: str) -> None:
    model, given = MODELS[name]()
    precision = precision.format(last=[n for n, part in model.named_modules() if isinstance(part, nn.Linear)][-1])
    before, _ = book(model, given)
    there, policy = book(model, given, precision)
    assert policy is not None
    held = select([n for n, _ in model.named_modules()], policy.fp32) if policy.fp32 else ()
    told = under_policy(before.ops, policy, held)
    assert products(before.ops, [t.inputs for t in told]) == products(there.ops, [[i.dtype for i in op.inputs] for op in there.ops])
    if policy.is_mixed and not policy.fp32:
        foretold = Counter(c.numel for t in told for c in t.casts)
        made = Counter(op.inputs[-1].numel for op in there.ops if op.cls == "casts")
        wrong = (foretold - made).total() + (made - foretold).total()
        assert wrong <= 0.25 * made.total(), (foretold, made)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_in_16_bits_told_in_fp32_has_no_cast_and_no_16_bit_tensor(name: str) -> None:
    model, given = MODELS[name]()
    there, _ = book(model, given, "bf16-mixed,products=native")
    told = in_fp32(there.ops)
    assert any(t.gone for t in told)
    for op, new in zip(there.ops, told, strict=True):
        assert not set(new.inputs + new.outputs) & set(HALF)
        assert new.gone == (op.cls == "casts")
    same, _ = book(model, given)
    assert not any(t.gone or t.casts for t in in_fp32(same.ops))


def test_the_book_counts_operations_and_knows_weights_casts_and_who_made_them() -> None:
    ledger, _ = book(Net(), batch(16), "bf16-mixed,products=native")
    flops = sum(op.flops for op in ledger.ops)
    assert flops == 2 * 16 * 32 * 32 * 2 + 2 * 16 * 32 * 8 * 3  # the batch needs no gradient
    casts = [op for op in ledger.ops if op.cls == "casts"]
    assert {op.by for op in casts if not op.backward} == {"autocast", "list"}
    assert sum(op.inputs[0].weight for op in casts) == 4
    assert set(ledger.owners.values()) == {"first.weight", "first.bias", "last.weight", "last.bias"}


def test_convolutions_count_each_gradient_that_is_wanted() -> None:
    ledger, _ = book(Pictures(), (torch.randn(2, 3, 8, 8), torch.randint(0, 8, (2,))))
    stem, body = 2 * 2 * 64 * 8 * 27, 2 * 2 * 64 * 8 * 72
    found = [op.flops for op in ledger.ops if op.base.startswith("convolution")]
    assert found == [stem, body, 2 * body, stem]


def test_emulated_products_are_told_apart_from_fp32_ones() -> None:
    ledger, policy = book(Net(), batch(), "fp16-mixed,products=emulated")
    rows = rows_of(ledger.ops, explained(ledger.ops, policy), "fp16")
    assert {r.format for r in rows if r.cls == "products"} == {"fp16 emulated"}
    assert {r.by for r in rows if r.cls == "casts"} >= {"product"}


@pytest.mark.parametrize("emulated", [(), ("matmul", "convolution", "attention")])
@pytest.mark.parametrize("name", ["gpt", "convolutions"])
def test_every_op_that_is_priced_runs_alone_in_both_formats(name: str, emulated: tuple[str, ...]) -> None:
    """Nothing is said of how long: only that each op can be run again on operands of its sizes."""
    model, given = MODELS[name]()
    ledger = Ledger(calls := Calls("cpu"))
    watch = Stopwatch(CPU)
    for mode in (Observation(model, [ledger]), watch):
        with mode, calls:
            model(*given).backward()
    ops = timed_ops(ledger, [watch], [1.0])
    assert all(op.seconds > 0 for op in ops)
    told = under_policy(ops, parse("bf16-mixed"), (), emulated)
    found = predict(ops, told, 1.0, CPU)
    assert found.covered >= 0.9
    assert any(p.there.way == "emulated" for p in found.prices) == bool(emulated)
    assert all(p.here_seconds > 0 and p.there_seconds > 0 for p in found.prices)
