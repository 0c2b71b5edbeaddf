"""What a plan takes and refuses. That it computes the right bits is in tests/parity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("numba", reason="the compiled kernels need numba: pip install 'halfstep[cpu]'")
from halfstep import numerics
from halfstep.errors import ConfigError
from halfstep.kernels import cpu
from halfstep.kernels.items import Item
from halfstep.numerics import AdamWStep, LionStep, SGDStep

SETTINGS = AdamWStep(1e-2, 0.9, 0.999, 1e-8, 0.1, 1)


def item(weight: torch.Tensor) -> Item:
    """An fp32 weight with moments of 0 that lie as it does."""
    return Item(weight, "fp32", None, torch.zeros_like(weight), torch.zeros_like(weight))


def take(items: list[Item], gradients: list[torch.Tensor | None], settings: list[AdamWStep], factor: float = 1.0) -> None:
    """One step."""
    cpu.Plan(items).run(gradients, settings, factor)


def split_item() -> Item:
    high, low = numerics.split(torch.randn(5, 6), torch.bfloat16)
    return Item(high, "split", low, torch.zeros(5, 6), torch.zeros(5, 6))


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(6, 5),
    "transposed": lambda: torch.randn(5, 6).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "rows of one": lambda: torch.randn(1, 7).t(),
    "scalar": lambda: torch.randn(()),
    "part of a larger one": lambda: torch.randn(4, 6)[1:3],
    "unaligned": lambda: torch.randn(1001)[1:],
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_weights_of_any_dense_layout_step_as_contiguous_ones(layout: str) -> None:
    weight = LAYOUTS[layout]()
    gradient = torch.empty_like(weight).copy_(torch.randn(weight.shape))
    p, m, v = (t.clone(memory_format=torch.contiguous_format) for t in (weight, torch.zeros_like(weight), torch.zeros_like(weight)))
    numerics.adamw_(p, gradient.contiguous() * 0.5, m, v, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1)
    stepped = item(weight)
    take([stepped], [gradient], [SETTINGS], 0.5)
    assert torch.equal(stepped.weight, p)
    assert torch.equal(stepped.first, m)
    assert torch.equal(stepped.second, v)


def test_what_lies_around_a_weight_is_not_touched() -> None:
    base, moments = torch.zeros(300), torch.zeros(2, 300)
    part = slice(100, 171)
    take([Item(base[part], "fp32", None, moments[0, part], moments[1, part])], [torch.ones(71)], [SETTINGS])
    for t in (base, moments[0], moments[1]):
        assert bool((t[part] != 0).all())
        assert not t[:100].any()
        assert not t[171:].any()


def test_a_weight_without_a_gradient_stays_as_it_is() -> None:
    items = [item(torch.ones(5)), item(torch.ones(200)), item(torch.ones(3))]
    take(items, [torch.ones(5), None, torch.ones(3)], [SETTINGS] * 3)
    assert [bool((i.weight == 1).all()) for i in items] == [False, True, False]
    assert [bool(i.second.any()) for i in items] == [True, False, True]
    take(items, [None] * 3, [SETTINGS] * 3)


def test_gradients_are_only_read() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gradient = torch.randn(1000).to(dtype)
        before = gradient.clone()
        take([item(torch.ones(1000))], [gradient], [SETTINGS], 0.25)
        assert torch.equal(gradient, before)


BAD_GRADIENTS = {
    "shape": torch.ones(6, 5),
    "strides": torch.ones(6, 5).t(),
    "expanded": torch.ones(()).expand(5, 6),
    "float64": torch.ones(5, 6, dtype=torch.float64),
    "sparse": torch.ones(5, 6).to_sparse(),
    "another device": torch.ones(5, 6, device="meta"),
}


@pytest.mark.parametrize("kind", list(BAD_GRADIENTS))
def test_a_gradient_that_does_not_lie_as_its_weight_is_refused_before_anything_is_written(kind: str) -> None:
    items = [item(torch.ones(4)), split_item()]
    with pytest.raises(ConfigError, match="gradient 1 is"):
        take(items, [torch.ones(4), BAD_GRADIENTS[kind]], [SETTINGS] * 2)
    assert bool((items[0].weight == 1).all())


BAD_ITEMS: dict[str, Callable[[], Item]] = {
    "unknown storage": lambda: replace(split_item(), storage="splat"),
    "fp32 weight in split": lambda: replace(item(torch.ones(3)), storage="split"),
    "16-bit weight in fp32": lambda: replace(split_item(), storage="fp32"),
    "float64 weight": lambda: replace(item(torch.ones(3)), weight=torch.ones(3, dtype=torch.float64)),
    "weight with gaps": lambda: item(torch.ones(6, 6)[:, ::2]),
    "expanded weight": lambda: item(torch.ones(1).expand(5)),
    "weight elsewhere": lambda: item(torch.ones(3, device="meta")),
    "no residual": lambda: replace(split_item(), residual=None),
    "residual of another width": lambda: replace(split_item(), residual=torch.zeros(5, 6, dtype=torch.int8)),
    "residual of another shape": lambda: replace(split_item(), residual=torch.zeros(6, 5, dtype=torch.int16)),
    "residual too many": lambda: replace(split_item(), storage="plain"),
    "moment of another shape": lambda: replace(split_item(), first=torch.zeros(6, 5)),
    "moment in fp16": lambda: replace(split_item(), second=torch.zeros(5, 6, dtype=torch.float16)),
    "signed codes for a second moment": lambda: replace(split_item(), second=(torch.zeros(30, dtype=torch.int8), torch.zeros(1))),
    "too few scales": lambda: replace(split_item(), first=(torch.zeros(30, dtype=torch.int8), torch.zeros(0))),
    "no second moment": lambda: replace(split_item(), second=None),
    "too few codes": lambda: replace(split_item(), first=(torch.zeros(29, dtype=torch.int8), torch.zeros(1))),
}


@pytest.mark.parametrize("kind", list(BAD_ITEMS))
def test_an_item_that_does_not_fit_together_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="item 1"):
        cpu.Plan([item(torch.ones(3)), BAD_ITEMS[kind]()])


@pytest.mark.parametrize(("rule", "first", "second"), [("sgd", True, True), ("lion", True, True), ("lion", False, False), ("splat", True, False)])
def test_an_item_that_does_not_fit_its_rule_is_refused(rule: str, first: bool, second: bool) -> None:
    moments = [torch.zeros(3) if there else None for there in (first, second)]
    with pytest.raises(ConfigError, match=r"'splat' is not known" if rule == "splat" else r"item 0 .* has (a|no) first and (a|no) second moment"):
        cpu.Plan([Item(torch.ones(3), "fp32", None, *moments)], rule=rule)


def test_settings_of_another_rule_are_refused() -> None:
    plan = cpu.Plan([Item(torch.ones(3), "fp32", None, torch.zeros(3))], rule="sgd")
    for settings in (LionStep(0.1, 0.9, 0.99), SETTINGS):
        with pytest.raises(ConfigError, match=f"settings of {settings.rule} were given to a plan of sgd"):
            plan.run([torch.ones(3)], [settings])
    plan.run([torch.ones(3)], [SGDStep(0.5)])
    assert plan.items[0].weight.tolist() == [0.5] * 3


def test_as_many_gradients_as_weights_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="2 gradients and 1 steps were given for 1 weights"):
        cpu.Plan([item(torch.ones(3))]).run([torch.ones(3)] * 2, [SETTINGS])


def test_pieces_cover_all_chunks_in_order() -> None:
    for sizes in ([], [0, 0], [5], [70000], [200_000] * 30, [1] * 500 + [10**6], [3, 0, 10**6, 7]):
        chunks, ends = cpu.cut(tuple(sizes))
        assert (ends[0], ends[-1]) == (0, len(chunks))
        assert ends == sorted(set(ends))
        assert sum(end - begin for _, begin, end in chunks.tolist()) == sum(sizes)
        assert all(begin % numerics.BLOCK == 0 for _, begin, _ in chunks.tolist())


@pytest.mark.parametrize(
    "sizes",
    [(5,), (5, 0, 7), (0, cpu.pool.CHUNK + 1), (cpu.pool.CHUNK, cpu.pool.CHUNK), (cpu.pool.CHUNK + 1, 3), (0,), (2 * cpu.pool.CHUNK, 0, 0, 1)],
)
def test_squares_are_told_of_each_tensor_however_many_chunks_it_has(sizes: tuple[int, ...]) -> None:
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in sizes]
    sums, peaks = cpu.squares(tensors)
    assert (sums.dtype, peaks.dtype, len(sums), len(peaks)) == (torch.float64, torch.float32, len(sizes), len(sizes))
    for t, total, peak in zip(tensors, sums.tolist(), peaks.tolist(), strict=True):
        assert total == pytest.approx(float(t.double().square().sum()), rel=1e-12)
        assert peak == (float(t.abs().max()) if t.numel() else 0.0)


def test_squares_of_what_lies_otherwise_are_those_of_its_elements() -> None:
    views = [torch.randn(4, 6).t(), torch.randn(4, 6)[:, ::2], torch.randn(3).expand(5, 3), torch.complex(torch.randn(4), torch.randn(4)).conj().imag]
    for t, total in zip(views, cpu.squares(views)[0].tolist(), strict=True):
        assert total == pytest.approx(float(t.double().square().sum()), rel=1e-12)
