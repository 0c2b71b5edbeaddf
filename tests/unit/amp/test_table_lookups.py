"""Embedding tables that are kept in 16 bits: what their rows and gradients are, and what else may happen to them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table_models import CPU, SPLIT, SPLIT24, WIDTH, WORDS, Scaled, Tied, bound, frozen, gradients, ids, same, settled
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import amp
from halfstep.amp import recycled
from halfstep.amp.embedding import gathered
from halfstep.errors import ConfigError
from halfstep.optim import AdamW, attach, full_values, master_of, refresh
from halfstep.policy import parse

STORAGES = ["split", "split24"]
HALF = [torch.bfloat16, torch.float16]


# --- rows and gradients -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", HALF)
def test_rows_are_those_of_the_master_for_every_16_bit_number(dtype: torch.dtype, storage: str) -> None:
    """All codes, one in each element, beside residuals drawn over their range, in an order in which all rows are looked up, one twice."""
    weight = nn.Parameter(torch.zeros(256, 256, dtype=dtype))
    master = attach(weight, storage)
    weight.data.copy_(torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).reshape(256, 256))
    assert master.residual is not None
    info = torch.iinfo(master.residual.dtype)
    master.put(torch.randint(info.min, info.max + 1, (256, 256), generator=torch.Generator().manual_seed(0)).to(master.residual.dtype))
    order = torch.cat([torch.randperm(256, generator=torch.Generator().manual_seed(1)), torch.tensor([7])])
    found, right = gathered(weight, order), master.read()[order]
    assert found.dtype == torch.float32
    assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(found.nan_to_num(7.0, posinf=8.0).view(torch.int32), right.nan_to_num(7.0, posinf=8.0).view(torch.int32))


KINDS: dict[str, Callable[[], Tied]] = {
    "tied": Tied,
    "padding": lambda: Tied(padding_idx=-WORDS + 3),
    "by-frequency": lambda: Tied(scale_grad_by_freq=True),
    "multiplied-rows": lambda: Tied(Scaled),
    "products": lambda: Tied(extra=lambda m: F.linear(F.linear(torch.ones(2, WIDTH), m.table.weight), m.table.weight.t()).float().mean()),
}


@pytest.mark.parametrize("least", [1, 1 << 22], ids=["large", "small"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_an_fp32_table(kind: str, passes: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycled, "LEAST", least)
    recycled.clear()
    lean, mixed = settled(SPLIT, KINDS[kind]()), bound("bf16-mixed", KINDS[kind]())
    assert lean.table.weight.dtype == torch.bfloat16
    for _ in range(2):
        assert torch.equal(lean(ids()), mixed(ids()))
        found, right = gradients(lean, passes), gradients(mixed, passes)
        assert torch.equal(found["table.weight"], right["table.weight"])
        assert passes > 1 or same(found, right)  # of several passes the scaler makes fp32 sums for other weights
    assert lean.table.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("least", [1, 1 << 22], ids=["large", "small"])
def test_gradients_of_a_16_bit_weight_of_several_products_are_summed_in_fp32(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in memory that is used again, where they are added up by hand."""
    monkeypatch.setattr(recycled, "LEAST", least)
    recycled.clear()

    def often(m: Tied) -> Tensor:
        x = torch.ones(2, WIDTH)
        for _ in range(4):
            x = m.body(x).tanh()
        return x.float().square().mean()

    lean, mixed = settled(SPLIT, Tied(extra=often)), bound("bf16-mixed", Tied(extra=often))
    assert same(gradients(lean, 2), gradients(mixed, 2))


class Long(nn.Embedding):
    def __init__(self, words: int, width: int) -> None:
        super().__init__(100 * words, width)


class Largest(TorchDispatchMode):
    """Notes the largest fp32 tensor that an op makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in (result if isinstance(result, tuple | list) else (result,)) if isinstance(t, Tensor) and t.dtype == torch.float32]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return result


def test_no_more_than_the_rows_is_joined() -> None:
    model = settled(SPLIT24, Tied(Long, tied=False))
    with Largest() as seen:  # type: ignore[no-untyped-call]
        model.table(ids())
    assert 0 < seen.elements <= ids().numel() * WIDTH


def test_a_derivative_of_the_gradient() -> None:
    lean, mixed = settled(), bound("bf16-mixed")
    found = []
    for model in (lean, mixed):
        rows = model.table(torch.tensor([1, 1, 2]))
        seed = torch.ones_like(rows, requires_grad=True)
        (grad,) = torch.autograd.grad(rows, model.table.weight, seed, create_graph=True)
        found.append(torch.autograd.grad(grad[1].sum(), seed)[0])
    assert torch.equal(*found)
    assert found[0].any()


def test_after_steps_rows_are_those_of_the_masters() -> None:
    """Residuals that an optimizer wrote, and not those of the first cast: an fp32 table of the same values gives the same numbers."""
    for precision in (SPLIT, SPLIT24, "fp16-lean"):
        model = settled(precision)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            gradients(model, 1 + step % 2)
            optimizer.step()
        twin = _with_values_of(model)
        bound(precision.split(",")[0].replace("lean", "mixed"), twin)
        assert master_of(model.table.weight).residual.any()  # type: ignore[union-attr]
        assert torch.equal(model.table(ids()), twin.table(ids()))
        if precision != SPLIT24:  # a 16-bit weight whose 24 bits have crossed a tie is another nearest one
            assert torch.equal(model(ids()), twin(ids()))


# --- what else may happen to them -------------------------------------------------------------------------------------------------------------


def test_a_part_alone_and_writes_from_outside_and_refresh() -> None:
    model, wide = settled(), Tied()
    assert torch.equal(model.table(ids()), wide.table(ids()))
    with torch.inference_mode():
        assert torch.equal(model.table(ids()), wide.table(ids()))
    with torch.no_grad():
        model.table.weight[3] = 0.3  # seen by its version: what is read is what was written, rounded to 16 bits
    assert torch.equal(model.table(torch.tensor([3])), torch.full((1, WIDTH), 0.3).bfloat16().float())
    model.table.weight.data.fill_(0.7)
    refresh(model)
    assert torch.equal(model.table(torch.tensor([1])), torch.full((1, WIDTH), 0.7).bfloat16().float())
    model.load_state_dict(wide.state_dict())
    assert torch.equal(model.table(ids()), wide.table(ids()))


def test_copies_and_pickles_go_on_as_they_were() -> None:
    model = settled()
    expected = gradients(model)
    assert same(gradients(copy.deepcopy(model)), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = bound(SPLIT, torch.load(file, weights_only=False))
    assert again.table.weight.grad_dtype == torch.float32
    assert same(gradients(again), expected)


def test_a_pinned_table_is_joined_as_a_whole() -> None:
    model, mixed = settled(), bound("bf16-mixed")
    amp.pin(model, "table")
    amp.pin(mixed, "table")
    assert torch.equal(model(ids()), mixed(ids()))
    assert same(gradients(model), gradients(mixed))


def test_removing_the_binding_gives_fp32_tables_back() -> None:
    model, wide = Tied(), Tied()
    binding = amp.bind(model, parse(SPLIT), CPU)
    model(ids())
    binding.remove()
    assert model.table.weight.dtype == torch.float32
    assert same(gradients(model), gradients(wide))


def test_a_frozen_table_that_is_trained_later_gets_a_master() -> None:
    for precision, form in ((SPLIT, torch.bfloat16), ("bf16-lean,weights=stochastic", torch.float32)):
        model = settled(precision, frozen(tied=True))
        mixed = bound("bf16-mixed", frozen(tied=True))
        assert torch.equal(model(ids()), mixed(ids()))
        for m in (model, mixed):
            m.table.weight.requires_grad_(True)
        assert same(gradients(model), gradients(mixed))
        assert model.table.weight.dtype == form
        assert model.table.weight.grad.dtype == torch.float32


def test_a_table_loaded_in_16_bits_keeps_its_bits() -> None:
    """Under `*-mixed` too: a frozen base in 16 bits takes no byte more than it did when it was loaded."""
    model = Tied(tied=False).bfloat16()
    model.table.weight.requires_grad_(False)
    wide = bound("bf16-mixed", copy.deepcopy(model).float())
    settled("bf16-mixed", model)
    assert model.table.weight.dtype == torch.bfloat16
    assert master_of(model.table.weight).nbytes() == 0  # type: ignore[union-attr]
    assert torch.equal(model(ids()), wide(ids()))
    assert same(gradients(model), gradients(wide))


def test_more_rows_and_fewer() -> None:
    """As transformers does it: the data of the parameter are others."""
    model = settled()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    gradients(model)
    optimizer.step()
    before = full_values(model.table.weight)
    more = torch.cat([model.table.weight.data, torch.full((2, WIDTH), 0.5).bfloat16()])
    model.table.weight.grad = None
    model.table.weight.data = more
    assert torch.equal(model.table(torch.tensor([1, WORDS + 1])), torch.stack([before[1], torch.full((WIDTH,), 0.5)]))
    assert torch.equal(full_values(model.table.weight)[:WORDS], before)
    model.table.weight.data = more[:10]
    assert torch.equal(full_values(model.table.weight), before[:10])


def test_stand_ins_of_16_bits_for_a_table_are_refused() -> None:
    model = settled()
    values = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"bfloat16 tensor of shape \(40, 16\) that stands in the place of its weight"):
        torch.func.functional_call(model, values, (ids(),))
    full = values | {"table.weight": full_values(model.table.weight)}
    assert torch.equal(torch.func.functional_call(model, full, (ids(),)), model(ids()))
    assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), (ids(),)), model(ids()))


@pytest.mark.filterwarnings("ignore:table.weight .* is kept in 16 bits")
def test_a_transform_over_indices() -> None:
    model, wide = settled(), Tied()
    assert torch.equal(torch.func.vmap(model.table)(ids()), wide.table(ids()))


def test_a_kept_weight_of_a_product_that_rows_are_looked_up_in_later() -> None:
    model, mixed = settled(), bound("bf16-mixed")
    model.extra = mixed.extra = lambda m: F.embedding(torch.tensor([1, 1, 2]), m.body.weight, padding_idx=2).square().sum()
    with pytest.warns(UserWarning, match=r"body\.weight .* embedding uses it in fp32"):
        assert torch.equal(model(ids()), mixed(ids()))
    found, right = gradients(model)["body.weight"], gradients(mixed)["body.weight"]
    torch.testing.assert_close(found, right, rtol=0, atol=2**-7 * float(right.abs().max()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_that_ran_eagerly_is_compiled_with_fp32_tables() -> None:
    model = settled()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    gradients(model)
    optimizer.step()
    before, mixed = full_values(model.table.weight), bound("bf16-mixed", _with_values_of(model))
    model.compile(backend="aot_eager", fullgraph=True)
    assert same(gradients(model), gradients(mixed))
    assert model.table.weight.dtype == torch.float32
    assert torch.equal(model.table.weight, before)
    optimizer.step()
    assert not torch.equal(model.table.weight, before)
    assert same(gradients(model), gradients(bound("bf16-mixed", _with_values_of(model))))


def _with_values_of(model: Tied) -> Tied:
    twin = Tied()
    with torch.no_grad():
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.copy_(full_values(q))
    return twin
