"""Which embedding tables are kept in 16 bits, and what a first call finds out about them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from table_models import SPLIT, SPLIT24, WIDTH, WORDS, Scaled, Tied, bound, frozen, ids
from torch import Tensor, nn
from torch.nn.utils import parametrize

from halfstep import amp
from halfstep.optim import master_of
from halfstep.policy import parse


class Regular(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.weight.mean()


class Partial(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight[: WORDS // 2])


class ByOp(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten.embedding(self.weight, input)
        return out


class Bare(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return torch.embedding(self.weight, input)


class Twice(nn.Module):
    """Forward passes do not reach the second table."""

    def __init__(self, kind: type[nn.Embedding]) -> None:
        super().__init__()
        self.one, self.two, self.head = kind(WORDS, WIDTH), kind(WORDS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.one(ids))
        return out.mean()


def with_a_function(model: Tied) -> Tied:
    model.table.forward = lambda x: model.table.weight[x]  # type: ignore[method-assign]
    return model


def parametrized() -> Tied:
    model = Tied(tied=False)
    parametrize.register_parametrization(model.table, "weight", nn.Identity())
    return model


TABLE = {"table.weight"}
WHICH: dict[str, tuple[Callable[[], nn.Module], str, set[str]]] = {
    "tied": (Tied, SPLIT, TABLE),
    "tied-fp16": (Tied, "fp16-lean", TABLE),
    "tied-split24": (Tied, SPLIT24, TABLE),
    "tied-kahan": (Tied, "bf16-lean,weights=kahan", set()),
    "tied-stochastic": (Tied, "bf16-lean,weights=stochastic", set()),
    "tied-plain": (Tied, "bf16-lean,weights=plain", set()),
    "alone": (lambda: Tied(tied=False), SPLIT, set()),  # 2 + 2 + 4 bytes would be those of fp32
    "alone-split24": (lambda: Tied(tied=False), SPLIT24, TABLE),
    "frozen": (lambda: frozen(True), SPLIT, TABLE),
    "frozen-alone": (lambda: frozen(False), "bf16-lean,weights=stochastic", TABLE),
    "frozen-not-exact": (lambda: frozen(True, exact=False), SPLIT, set()),
    "padding": (lambda: Tied(padding_idx=3), SPLIT, TABLE),
    "by-frequency": (lambda: Tied(scale_grad_by_freq=True), SPLIT, TABLE),
    "max-norm": (lambda: Tied(max_norm=0.5, tied=False), SPLIT24, set()),
    "sparse": (lambda: Tied(sparse=True, tied=False), SPLIT24, set()),
    "multiplied-rows": (lambda: Tied(Scaled), SPLIT, TABLE),
    "bare-function": (lambda: Tied(Bare), SPLIT, TABLE),
    "used-in-fp32": (lambda: Tied(Regular), SPLIT, set()),
    "part-of-it": (lambda: Tied(Partial), SPLIT, set()),
    "by-an-op": (lambda: Tied(ByOp), SPLIT, set()),
    "a-penalty": (lambda: Tied(extra=lambda m: m.table.weight.square().mean()), SPLIT, set()),
    "own-forward": (lambda: with_a_function(Tied()), SPLIT, set()),
    "parametrized": (parametrized, SPLIT24, set()),
    "held": (Tied, f"{SPLIT},fp32=table", set()),
    "head-held": (Tied, f"{SPLIT},fp32=head", set()),
    "rows-in-16-bits": (Tied, f"{SPLIT},half_ops=embedding", set()),
    "not-reached": (lambda: Twice(nn.Embedding), SPLIT24, {"one.weight", "two.weight"}),
    "not-reached-and-not-known": (lambda: Twice(Scaled), SPLIT24, {"one.weight"}),
}


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("make", "precision", "kept"), WHICH.values(), ids=WHICH)
def test_which_tables_are_kept(make: Callable[[], nn.Module], precision: str, kept: set[str], loaded: torch.dtype) -> None:
    model = make()
    if loaded != torch.float32 and (not precision.startswith("bf16") or (make is WHICH["frozen-not-exact"][0])):
        pytest.skip("a model of another case")
    mixed = copy.deepcopy(model).to(loaded).float()
    bound(precision, model.to(loaded))
    bound(re.sub(",weights=[a-z0-9]+|,half_ops=.*", "", precision).replace("lean", "mixed"), mixed)
    outputs = model(ids()), mixed(ids())
    assert {n for n in amp.layout(model)["16bit"] if n not in ("body.weight", "body.bias", "head.weight", "head.bias")} == kept
    rounded = "kahan" in precision or "half_ops" in precision or (SPLIT24 in precision and loaded == torch.float32)
    assert rounded or torch.equal(*outputs)
    for name in kept:
        p = model.get_parameter(name)
        assert p.grad_dtype == torch.float32
        assert master_of(p).storage.name == (parse(precision).weights if p.requires_grad else "plain")  # type: ignore[union-attr]
