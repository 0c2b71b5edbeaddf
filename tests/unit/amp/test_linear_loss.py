"""The loss without all logits: that of F.cross_entropy of F.linear and its gradients, in every format, whatever the size of the chunks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.amp import chunks, linear_cross_entropy
from halfstep.errors import ConfigError, DataError
from halfstep.optim import master_of
from halfstep.policy import parse

CPU = torch.device("cpu")
HALF = [torch.bfloat16, torch.float16]
ROWS, WIDTH, VOCABULARY = 53, 12, 201
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.3},
    "another number for no label": {"ignore_index": 7},
    "scaled and capped": {"scale": 0.5, "softcap": 2.0},
    "all of it": {"scale": -2.0, "softcap": 9.0, "label_smoothing": 0.1, "reduction": "none"},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7 rows, the last one of what is left, and the weight in pieces of 64."""
    monkeypatch.setattr(chunks, "CHUNK", 1)
    monkeypatch.setattr(chunks, "FEWEST", 7)
    monkeypatch.setattr(chunks, "PIECE", 1)


def operands(dtype: torch.dtype = torch.float64, width: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels (every fifth ignored) and bias; exactly those of fp16 and bf16 at once, so that no rounding of them differs."""
    made = torch.Generator().manual_seed(0)
    h, w, b = (
        (width * torch.randn(shape, generator=made)).to(torch.bfloat16).to(torch.float16).to(dtype).requires_grad_()
        for shape in ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=made)
    labels[::5] = -100
    return h, w, labels, b


def with_logits(h: Tensor, w: Tensor, labels: Tensor, b: Tensor | None = None, *, scale: float = 1.0, softcap: float = 0.0, **options: Any) -> Tensor:
    logits = scale * F.linear(h, w, b)
    return F.cross_entropy(softcap * torch.tanh(logits / softcap) if softcap else logits, labels, **options)


def found(loss: Tensor, *leaves: Tensor, above: float = 1.0) -> list[Tensor]:
    """The loss and its gradients for something from above that differs from row to row."""
    grad = above * torch.arange(1.0, loss.numel() + 1, dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad, retain_graph=True)]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_in_fp64_it_is_torchs_loss_and_gradients(name: str, biased: bool) -> None:
    h, w, labels, b = operands()
    if name.startswith("another"):
        labels = torch.where(labels == -100, 7, labels)
    given, leaves = ((h, w, labels, b), (h, w, b)) if biased else ((h, w, labels), (h, w))
    ours = linear_cross_entropy(*given, **OPTIONS[name])
    for a, e in zip(found(ours, *leaves), found(with_logits(*given, **OPTIONS[name]), *leaves), strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 7, 16, 1000])
def test_the_size_of_a_chunk_does_not_matter(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    h, w, labels, b = operands()
    expected = found(linear_cross_entropy(h, w, labels, b), h, w, b)
    monkeypatch.setattr(chunks, "FEWEST", rows)
    for a, e in zip(found(linear_cross_entropy(h, w, labels, b), h, w, b), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-14)


def test_rows_of_a_chunk() -> None:
    assert chunks.rows_at_a_time(10_000, 1) == 7  # CHUNK is 1 here
    assert chunks.rows_at_a_time(3, 201) == 3
    assert chunks.rows_at_a_time(0, 201) == 1


def test_rows_of_a_chunk_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert chunks.rows_at_a_time(4096, 49_152) == 160
    assert chunks.rows_at_a_time(4096, 262_144) == 128
    assert chunks.rows_at_a_time(100, 49_152) == 100


def test_fp32_is_as_near_to_fp64_as_torchs() -> None:
    h, w, labels, b = operands(torch.float32)
    exact = found(with_logits(*(t.double() if t.is_floating_point() else t for t in (h, w, labels, b))), h, w, b)
    ours, theirs = found(linear_cross_entropy(h, w, labels, b), h, w, b), found(with_logits(h, w, labels, b), h, w, b)
    for a, t, e in zip(ours, theirs, exact, strict=True):
        assert a.dtype == torch.float32
        far = float((a - e).abs().max())
        assert far <= max(2 * float((t - e).abs().max()), 2**-22 * float(e.abs().max()))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("form", [torch.float32, "low"], ids=["fp32 operands", "16-bit operands"])
@pytest.mark.parametrize("name", ["mean", "sum", "none", "scaled and capped"])
def test_under_autocast_only_operands_and_results_are_rounded(dtype: torch.dtype, form: Any, name: str) -> None:
    """The operands are exact in 16 bits here. fp32 sums: 2^-20 of the largest; a gradient for 16-bit operands: and half an ulp of its format."""
    h, w, labels, b = operands(dtype if form == "low" else torch.float32)
    exact = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in (h, w, labels, b)]
    expected = found(with_logits(*exact, **OPTIONS[name]), exact[0], exact[1], exact[3])
    with amp.autocast("cpu", dtype, products="emulated"):
        loss = linear_cross_entropy(h, w, labels, b, **OPTIONS[name])
    assert loss.dtype == torch.float32
    ours = found(loss, h, w, b)
    for a, e, kept in zip(ours, expected, (torch.float32, h.dtype, w.dtype, b.dtype), strict=True):
        assert a.dtype == kept
        rounding = 0.0 if kept == torch.float32 else torch.finfo(kept).eps / 2
        assert float((a - e).abs().max()) <= (2**-20 + rounding) * float(e.abs().max())


def test_native_products_round_their_results_too() -> None:
    h, w, labels, b = operands(torch.bfloat16)
    expected = found(with_logits(h.double(), w.double(), labels, b.double()), h, w, b)
    with amp.autocast("cpu", torch.bfloat16, products="native"):
        loss = linear_cross_entropy(h, w, labels, b)
    assert loss.dtype == torch.float32
    for a, e in zip(found(loss, h, w, b), expected, strict=True):
        assert float((a - e).abs().max()) <= 4 * 2**-8 * float(e.abs().max())


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_gradients_made_before_the_loss_scale_is_known_do_not_underflow(scale: float) -> None:
    """Probabilities of 1e-8 among 1e5 rows: in fp16 they would be 0. Scaled by a power of two they are the same numbers."""
    h, w, labels, _ = operands(torch.float32)
    with amp.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(h, w, labels, num_items_in_batch=1e9)
    one = torch.autograd.grad(loss, w, retain_graph=True)[0]
    assert bool((one.abs() < 6e-8).all())
    assert bool(one.any())
    assert torch.equal(torch.autograd.grad(loss * scale, w)[0], one * scale)


def test_an_overflow_of_a_scaled_gradient_is_seen() -> None:
    h, w, labels, _ = operands(torch.float16)
    with amp.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(h, w, labels, reduction="sum")
    assert not bool(torch.autograd.grad(loss * 2.0**20, h)[0].isfinite().all())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("above", [1.0, 3.0])
def test_twice_is_the_same_bits_also_for_a_second_backward_pass(reduction: str, above: float) -> None:
    """The first one hands over what the forward pass made, the second one computes it again."""
    h, w, labels, b = operands(torch.float32)
    first = linear_cross_entropy(h, w, labels, b, reduction=reduction)
    runs = [found(first, h, w, b, above=above), found(first, h, w, b, above=above)]
    runs.append(found(linear_cross_entropy(h, w, labels, b, reduction=reduction), h, w, b, above=above))
    for other in runs[1:]:
        assert all(torch.equal(a, e) for a, e in zip(other, runs[0], strict=True))
    assert len({t.data_ptr() for run in runs for t in run[1:]}) == 9, "no gradient is handed out twice"


def test_gradients_add_up_in_grad() -> None:
    h, w, labels, _ = operands(torch.float32)
    for _ in range(2):
        loss = linear_cross_entropy(h, w, labels)
        loss.backward(retain_graph=True)
        loss.backward()
    (expected,) = torch.autograd.grad(linear_cross_entropy(h, w, labels), w)
    assert w.grad is not None
    torch.testing.assert_close(w.grad, 4 * expected)


def test_no_label_and_no_row() -> None:
    h, w, labels, b = operands(torch.float32)
    for rows in (ROWS, 0):
        given = (h[:rows], w, torch.full_like(labels, -100)[:rows], b)
        for reduction in ("mean", "sum", "none"):
            ours, theirs = linear_cross_entropy(*given, reduction=reduction), with_logits(*given, reduction=reduction)
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
            for a, e in zip(found(ours, h, w, b)[1:], found(theirs, h, w, b)[1:], strict=True):
                assert torch.equal(a, e)


def test_a_nan_is_in_the_loss_and_an_ignored_row_is_not() -> None:
    h, w, labels, _ = operands(torch.float32)
    with torch.no_grad():
        h[0] = float("nan")
    assert labels[0] == -100
    assert bool(linear_cross_entropy(h, w, labels).isfinite())
    with torch.no_grad():
        h[1] = float("nan")
    assert bool(linear_cross_entropy(h, w, labels).isnan())


def test_large_logits_do_not_overflow() -> None:
    h, w, labels, _ = operands(torch.float32, width=60.0)
    expected = found(with_logits(h.double(), w.double(), labels), h, w)
    for a, e in zip(found(linear_cross_entropy(h, w, labels), h, w), expected, strict=True):
        torch.testing.assert_close(a, e.float(), rtol=1e-5, atol=1e-5 * float(e.abs().max()))


def test_shifted_labels_and_items_are_those_of_transformers() -> None:
    h, w, labels, _ = operands(torch.float32)
    hidden, ids = h[:52].view(4, 13, WIDTH), labels[:52].view(4, 13)
    expected = with_logits(hidden[:, :-1].flatten(0, 1), w, ids[:, 1:].flatten(), reduction="sum")
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    assert linear_cross_entropy(hidden, w, shifted, reduction="none").shape == ids.shape
    for items in (5, torch.tensor(5)):
        torch.testing.assert_close(linear_cross_entropy(hidden, w, ids, shift=True, num_items_in_batch=items), expected / 5)
    torch.testing.assert_close(linear_cross_entropy(hidden, w, ids, shift=True), expected / (ids[:, 1:] != -100).sum())


def test_only_what_is_asked_for_is_made() -> None:
    h, w, labels, _ = operands(torch.float32)
    frozen = linear_cross_entropy(h, w.detach(), labels)
    assert frozen.grad_fn is not None
    assert frozen.grad_fn.kept.weight is None  # type: ignore[attr-defined]
    with torch.no_grad():
        assert linear_cross_entropy(h, w, labels).grad_fn is None
    torch.testing.assert_close(torch.autograd.grad(frozen, h)[0], torch.autograd.grad(linear_cross_entropy(h, w, labels), h)[0])


def test_no_tensor_of_all_logits_is_made() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.extend(t.untyped_storage().nbytes() for t in (result if isinstance(result, tuple | list) else (result,)) if isinstance(t, Tensor))
            return result

    h, w, labels, _ = operands(torch.float32)
    with Sizes():
        linear_cross_entropy(h, w, labels).backward()
    assert sizes
    assert max(sizes) <= 4 * max(VOCABULARY * WIDTH, 7 * VOCABULARY)


def test_second_derivatives_and_transforms_are_refused() -> None:
    h, w, labels, _ = operands(torch.float32)
    with pytest.raises(ConfigError, match="create_graph=True"):
        torch.autograd.grad(linear_cross_entropy(h, w, labels), w, create_graph=True)
    with pytest.raises(ConfigError, match=r"torch\.func"):
        torch.func.grad(lambda w: linear_cross_entropy(h.detach(), w, labels))(w.detach())
    with pytest.raises(ConfigError, match="batched"):
        torch.autograd.grad(linear_cross_entropy(h, w, labels), w, torch.ones(2), is_grads_batched=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(ROWS)}, "int64"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "labels are \\(3,\\)"),
        ({"weight": torch.zeros(5, 3)}, "do not multiply"),
        ({"bias": torch.zeros(5)}, "bias \\(5,\\)"),
        ({"reduction": "average"}, "reduction='average'"),
        ({"reduction": "sum", "num_items_in_batch": 3}, "num_items_in_batch"),
        ({"label_smoothing": 1.5}, "between 0 and 1"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"hidden": torch.zeros(ROWS, WIDTH, dtype=torch.int64)}, "fp32, fp64, bf16 or fp16"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    h, w, labels, _ = operands(torch.float32)
    with pytest.raises(ConfigError, match=message):
        linear_cross_entropy(**{"hidden": h, "weight": w, "labels": labels} | change)


@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    h, w, labels, _ = operands(torch.float32)
    labels[3] = label
    with pytest.raises(DataError, match=f"label {label} is no class: there are {VOCABULARY}"):
        linear_cross_entropy(h, w, labels)


class Headed(nn.Module):
    """A layer and a head whose weight may be that of the table."""

    def __init__(self, tied: bool, chunked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.chunked = chunked
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.layer(self.table(ids))
        if self.chunked:
            return linear_cross_entropy(h, self.head.weight, ids, shift=True)
        return F.cross_entropy(self.head(h)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


IDS = torch.arange(60).view(4, 15)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("text", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-lean", "fp16-lean", "bf16-true"])
def test_in_a_bound_model_it_stands_for_head_and_loss(text: str, tied: bool) -> None:
    """The same weights go to 16 bits, and loss and gradients are those of 16-bit logits within their rounding."""
    policy, results, kept = parse(text), [], []
    for chunked in (False, True):
        model = Headed(tied, chunked)
        amp.bind(model, policy, CPU)
        loss = model(IDS)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        kept.append([(p.dtype, master_of(p) is not None) for p in model.parameters()])
    assert kept[0] == kept[1]
    bound = 1e-6 if text == "fp32" else 4 * torch.finfo(policy.dtype).eps
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert ours.dtype == theirs.dtype
        assert float((ours - theirs).abs().max()) <= bound * float(theirs.abs().max())


def test_an_island_computes_with_the_fp32_masters() -> None:
    class Island(Headed):
        def forward(self, ids: Tensor) -> Tensor:
            h = self.layer(self.table(ids)).float()
            with amp.autocast("cpu", enabled=False):
                return linear_cross_entropy(h, self.head.weight, ids)

    model = Island(False, True)
    weight = model.head.weight.detach().clone()
    amp.bind(model, parse("bf16-lean"), CPU)
    model(IDS)
    amp.convert(model, parse("bf16-lean"), ["head.weight", "layer.weight", "layer.bias"])
    assert model.head.weight.dtype == torch.bfloat16
    with pytest.warns(UserWarning, match="uses it in fp32"):
        loss = model(IDS)
    h = model.layer(model.table(IDS))
    assert torch.equal(loss, linear_cross_entropy(h.float(), weight, IDS))


@pytest.mark.parametrize("text", ["fp16-mixed", pytest.param("fp32", marks=pytest.mark.slow), pytest.param("bf16-lean", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself, when it compiles
def test_compiled_it_is_one_op_with_the_same_bits(text: str, reduction: str) -> None:
    class Reduced(Headed):
        def forward(self, ids: Tensor) -> Tensor:
            return linear_cross_entropy(self.layer(self.table(ids)), self.head.weight, ids, reduction=reduction, shift=True).sum()

    found = []
    for compiled in (False, True):
        model = Reduced(False, True)
        amp.bind(model, parse(text), CPU)
        with torch.no_grad():
            model(IDS)
        loss = (torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)(IDS)
        (3 * loss).backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for ours, eager in zip(found[1], found[0], strict=True):
        assert torch.equal(ours, eager)


def test_the_op_is_what_torch_expects_of_one() -> None:
    h, w, labels, b = operands(torch.float32)
    settings = (torch.float32, False, "mean", -100, 0.0, 1.0, 0.0, [True, True, True])
    torch.library.opcheck(
        torch.ops.halfstep.linear_cross_entropy.default, (h, w, b, labels, *settings), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    h, w, labels, b = operands(dtype)
    expected = found(with_logits(h.double(), w.double(), labels, b.double()), h, w, b)
    h, w, labels, b = (t.detach().cuda().requires_grad_(t.is_floating_point()) for t in (h, w, labels, b))
    for a, e in zip(found(linear_cross_entropy(h, w, labels, b), h, w, b), expected, strict=True):
        assert float((a.cpu() - e).abs().max()) <= max(4 * torch.finfo(dtype).eps, 1e-5) * float(e.abs().max())
