"""Tiny models and their ledgers for the tests of `audit`: what ran, without any clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.amp import bind, pins
from halfstep.diagnostics.audit_reasons import Facts, Reason, reasons
from halfstep.diagnostics.audit_why import Row, explained, rows_of
from halfstep.policy import Policy, parse, select
from halfstep.tracing import Observation
from halfstep.tracing.findings import HALF, short
from halfstep.tracing.ledger import Calls, Ledger, Op

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two linear layers with something of the test between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh, width: int = 32, classes: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, classes)
        self.between = between

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.between(self.first(x))), labels)


class Attends(nn.Module):
    """A transformer layer of torch's, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(x).mean(1)), labels)


class Pictures(nn.Module):
    """Convolutions, a batch norm and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + F.relu(self.norm(self.body(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Looks(nn.Module):
    """An embedding, a layer norm, a product and a loss of sigmoids."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.top = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.top(self.norm(F.silu(self.table(ids)) * 2)), labels)


def batch(rows: int = 16, width: int = 32, classes: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, width), torch.randint(0, classes, (rows,))


def book(model: nn.Module, given: tuple[Any, ...], precision: str | None = None, block: Any = nullcontext) -> tuple[Ledger, Policy | None]:
    """The ledger of a step of `model` under `precision`, or as it is inside `block()`; the second step, whose weights are settled."""
    policy = None if precision is None else parse(precision)
    bound = bind(model, policy, CPU) if policy is not None else None
    ledger = Ledger(calls := Calls("cpu"))
    try:
        for where in (nullcontext(), Observation(model, [ledger])):
            with where, calls:
                with block():
                    loss = model(*given)
                loss.backward()
            model.zero_grad()
    finally:
        if bound is not None:
            bound.remove()
    return ledger, policy


def by_size(ops: list[Op]) -> list[Op]:
    """Ops with seconds of a machine that moves 10 bytes and multiplies 100 times a nanosecond: the same on every machine."""
    return [replace(op, seconds=1e-10 * op.bytes + 1e-11 * op.flops) for op in ops]


def rows(model: nn.Module, given: tuple[Any, ...], precision: str | None = None, block: Any = nullcontext) -> tuple[Row, ...]:
    ledger, policy = book(model, given, precision, block)
    held = select([n for n, _ in model.named_modules()], policy.fp32) if policy is not None and policy.fp32 else ()
    compute = policy.autocast if policy is not None else "bf16"
    return rows_of(by_size(ledger.ops), explained(ledger.ops, policy, (*held, *(p.module for p in pins(model))), ledger.owners), compute)


def facts(found: tuple[Row, ...], precision: str = "bf16-mixed", **others: Any) -> Facts:
    half = [short(d) for d in HALF]
    compute = next((form for form in half if precision.startswith(form)), "fp32")
    known: dict[str, Any] = {"gain": 2.0, "native": ("fp32", "bf16"), "kind": "cpu", "device": "a CPU"} | others
    return Facts(precision, compute, step=sum(r.seconds for r in found), **known)


def told(model: nn.Module, given: tuple[Any, ...], precision: str, block: Any = nullcontext, **others: Any) -> tuple[Reason, ...]:
    """The reasons of a step, by sizes instead of seconds."""
    found = rows(model, given, precision, block)
    return reasons(found, facts(found, precision, **others))
