"""Ten faults, each planted into a small model: `trace` names it in its first line, and finds nothing in the healthy twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.diagnostics.trace import trace
from halfstep.optim import wrap

WIDTH, TOKENS, WORDS = 32, 8, 48


class Attention(nn.Module):
    """Self-attention of one head; mask: what masked scores become; how: how they become so."""

    def __init__(self, mask: float = -1e4, how: str = "add", softmax: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask, self.how = mask, how
        self.softmax = softmax or (lambda x: x.softmax(-1))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / WIDTH**0.5
        if keep is not None:
            hidden = ~keep[:, None, :]
            scores = scores.masked_fill(hidden, self.mask) if self.how == "fill" else scores + hidden.to(scores.dtype) * self.mask
        return self.out(self.softmax(scores) @ v)


class Block(nn.Module):
    def __init__(self, growth: float = 1.0, **attention: Any) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(**attention)
        self.wi, self.wo = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        with torch.no_grad():
            self.wi.weight *= growth
            self.wo.weight *= growth

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.ln1(x), keep)
        return x + self.wo(F.relu(self.wi(self.ln2(x))))


class Net(nn.Module):
    """Two blocks between an embedding of words and positions, and a head."""

    def __init__(self, growth: float = 1.0, **attention: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(**attention), Block(growth, **attention)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def features(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, keep)
        return self.head(self.norm(x))

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        logits = self.features(self.words(ids) + self.places(torch.arange(ids.shape[1])), keep)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def batch(keep: Tensor | None = None) -> dict[str, Tensor]:
    ids = torch.arange(4 * TOKENS).reshape(4, TOKENS) % WORDS
    return {"ids": ids} if keep is None else {"ids": ids, "keep": keep}


def padding() -> Tensor:
    return torch.arange(TOKENS) < torch.tensor([8, 6, 5, 3])[:, None]


def named(found: Any, *parts: str) -> None:
    """The first line holds these parts, the fault first."""
    line = str(found).splitlines()[0]
    assert line.startswith(parts[0]), str(found)
    assert all(part in line for part in parts), str(found)


def healthy(found: Any) -> None:
    assert str(found).startswith("nothing found"), str(found)


def autocast(model: nn.Module, dtype: torch.dtype, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    """A user's own forward pass under plain torch.autocast."""

    def call() -> Tensor:
        with torch.autocast("cpu", dtype):
            return model(**inputs)

    return call


@pytest.mark.parametrize("route", ["fp16-mixed", "fp16-lean", "torch.autocast"])
def test_overflow_in_one_layer(route: str) -> None:
    for growth in (600.0, 1.0):
        model = Net(growth)
        if route == "torch.autocast":
            found = trace(model, call=autocast(model, torch.float16, batch()), scale=1024.0)
        else:
            found = trace(model, batch(), precision=route)
        if growth > 1:
            named(found, "overflow in blocks.1.wo (Linear), forward, test_planted_faults.py:", "the product reaches", "fp16 ends at 65504")
            assert "fp32=blocks.1.wo" in found.first.remedy
            assert found.first.inputs
            assert all(r.finite for r in found.first.inputs)
        else:
            healthy(found)


def test_a_gradient_that_underflows() -> None:
    model = Net()
    small = lambda: autocast(model, torch.float16, batch())() * 1e-5  # noqa: E731
    found = trace(model, call=small)
    named(found, "underflow in ", "backward", "became 0")
    healthy(trace(model, call=small, scale=2.0**17))


class Normalize(nn.Module):
    """Divides by the length of each row. Rows of padding are 0."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        return x / (x.abs().amax(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("route", ["fp16-mixed", "fp16-true", "torch.autocast"])
def test_an_eps_that_is_0_in_fp16(route: str, padded: bool) -> None:
    for eps in (1e-8, 1e-3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Normalize(eps))
        x = torch.randn(8, WIDTH)
        if padded:
            x[-1] = 0.0
        if route == "torch.autocast":
            found = trace(model, call=lambda m=model, x=x: autocast(m, torch.float16, {"input": x})().float().pow(2).mean(), scale=256.0)
        else:
            found = trace(model, x, loss=lambda y: y.float().pow(2).mean(), precision=route)
        if eps == 1e-8:
            named(found, "eps in 1 (Normalize), forward, test_planted_faults.py:", "1e-08")
        else:
            healthy(found)


@pytest.mark.parametrize("how", ["add", "fill"])
@pytest.mark.parametrize("whole_row", [True, False])
@pytest.mark.parametrize("route", ["fp16-mixed", "fp16-true", "torch.autocast"])
def test_a_mask_that_overflows(route: str, whole_row: bool, how: str) -> None:
    keep = padding()
    if whole_row:
        keep[3] = False
    for mask in (-1e9, -1e4):
        model = Net(mask=mask, how=how)
        if route == "torch.autocast":
            found = trace(model, call=autocast(model, torch.float16, batch(keep)), scale=256.0)
        else:
            found = trace(model, batch(keep), precision=route)
        if mask == -1e9:
            named(found, "mask in blocks.0.attention (Attention), forward, test_planted_faults.py:", "1e+09")
        else:
            healthy(found)


class Positions(Net):
    """Sinusoids of positions that were made by arange(dtype=...)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        place = torch.arange(TOKENS * 100, dtype=self.dtype)[-TOKENS:].float()
        waves = (place[:, None] * 1e-3 ** torch.linspace(0, 1, WIDTH)).sin()
        return F.cross_entropy(self.features(self.words(ids) + waves, keep).flatten(0, 1).float(), ids.flatten())


class Table(nn.Module):
    """A table of positions in a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("positions", torch.arange(600.0).to(dtype), persistent=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        angles = self.positions[-TOKENS:, None].float() * 1e-3 ** torch.linspace(0, 1, WIDTH)
        return F.cross_entropy(self.head(self.words(ids) + angles.sin()).flatten(0, 1).float(), ids.flatten())


def test_a_table_of_positions_in_bf16() -> None:
    named(
        trace(Positions(torch.bfloat16), batch(), precision="bf16-mixed"), "table in the model (Positions), forward, test_planted_faults.py:", "bf16"
    )
    healthy(trace(Positions(torch.float32), batch(), precision="bf16-mixed"))
    named(trace(Table(torch.bfloat16), batch()), "table in ", "positions", "bf16")
    healthy(trace(Table(torch.float32), batch()))


def by_hand(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_softmax_by_hand_in_16_bits(dtype: torch.dtype) -> None:
    named(mastered(Net(softmax=by_hand).to(dtype)), "softmax in blocks.0.attention (Attention), forward, test_planted_faults.py:")
    healthy(mastered(Net(softmax=lambda x: by_hand(x.float()).to(x.dtype)).to(dtype)))
    healthy(mastered(Net().to(dtype)))


def mastered(model: nn.Module, inputs: dict[str, Tensor] | None = None) -> Any:
    """A trace of a model whose 16-bit weights have masters in their optimizer."""
    return trace(model, inputs or batch(), optimizer=wrap(torch.optim.SGD(model.parameters(), 0.1), weights="split"), scale=256.0)


class Mixed(Net):
    """A head in fp32 behind 16-bit blocks, with or without the cast that it needs."""

    def __init__(self, dtype: torch.dtype, cast: bool) -> None:
        super().__init__()
        self.to(dtype)
        self.head.float()
        self.cast = cast

    def features(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, keep)
        x = self.norm(x)
        return self.head(x.float() if self.cast else x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_missing_cast(dtype: torch.dtype) -> None:
    found = mastered(Mixed(dtype, cast=False))
    named(found, "mismatch in head (Linear), forward, test_planted_faults.py:", "head.weight")
    assert found.error.startswith("RuntimeError: ")
    healthy(mastered(Mixed(dtype, cast=True)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_without_masters(dtype: torch.dtype) -> None:
    named(trace(Net().to(dtype), batch(), scale=256.0), "masters in ", "fp16" if dtype == torch.float16 else "bf16")
    healthy(mastered(Net().to(dtype)))
    healthy(trace(Net(), batch(), precision="bf16-true"))


class Cached(nn.Linear):
    """Keeps a cast copy of its weight, and does or does not make it anew after an update."""

    def made(self) -> Cached:
        self.narrow = self.weight.detach().to(torch.bfloat16)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), self.narrow)


def test_a_cast_that_is_stale() -> None:
    model = Net()
    model.head = Cached(WIDTH, WORDS).made()
    with torch.no_grad():
        model.head.weight += 0.01
    named(trace(model, batch()), "stale in head (Cached)", "narrow is a bf16 copy of weight")
    model.head.made()
    healthy(trace(model, batch()))


def test_a_cast_by_autocast_that_is_stale() -> None:
    """Weights that change inside of a block of torch.autocast, whose cache of casts does not see it."""
    model = Net()

    def call(outer: bool) -> Tensor:
        if outer:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch())
                with torch.no_grad():
                    model.head.weight += 0.01
                return loss + model(**batch())
        return autocast(model, torch.bfloat16, batch())()

    named(trace(model, call=lambda: call(True)), "stale in ", "head")
    healthy(trace(model, call=lambda: call(False)))


@pytest.mark.parametrize("route", ["bf16-mixed", "fp16-mixed", "bf16-true", "torch.autocast"])
def test_a_nan_in_the_data(route: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    for bad in (True, False):
        x, y = torch.randn(8, WIDTH), torch.arange(8)
        if bad:
            x[3, 5] = float("nan")
        if route == "torch.autocast":
            found = trace(model, call=lambda x=x, y=y: F.cross_entropy(autocast(model, torch.bfloat16, {"input": x})(), y))
        else:
            found = trace(model, x, loss=lambda out, y=y: F.cross_entropy(out, y), precision=route)
        if bad:
            own = {"torch.autocast": "a tensor given to it"}.get(route, "batch")
            where = "the model (Sequential)" if route == "bf16-true" else "0 (Linear)"  # which casts its inputs as they come
            named(found, f"data in {where}, forward", f"{own} holds 1 NaN of 256 values")
        else:
            healthy(found)


def of_transformers(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model with random weights, and a batch with padding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids, keep = torch.randint(2, 64, (2, 16)), torch.arange(16) < torch.tensor([[16], [10]])
    text = {"input_ids": ids, "attention_mask": keep.long(), "labels": ids.clone()}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(config), text
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=1, max_position_embeddings=64)), text
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**small, max_position_embeddings=64)), text
    if kind == "vit":
        config = transformers.ViTConfig(**{k: v for k, v in small.items() if k != "vocab_size"}, image_size=16, patch_size=4, num_labels=8)
        return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 2])}
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), text | {"labels": ids[:, :8].contiguous()}


def healthy_under(kind: str, route: str) -> None:
    model, inputs = of_transformers(kind)
    if route == "torch.autocast":
        found = trace(model, call=lambda: autocast(model, torch.float16, inputs)()["loss"], scale=256.0)
    else:
        found = trace(model, inputs, precision=route)
    assert [str(f) for f in found.findings if f.fault != "shape" and not f.fixed] == []


def test_a_healthy_transformer_has_nothing() -> None:
    healthy_under("llama", "fp16-mixed")


@pytest.mark.slow
@pytest.mark.parametrize("route", ["fp16-mixed", "bf16-mixed", "bf16-lean", "fp16-lean", "fp16-true", "bf16-true", "torch.autocast"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5", "vit"])
def test_healthy_transformers_have_nothing(kind: str, route: str) -> None:
    healthy_under(kind, route)


@pytest.mark.parametrize("route", ["fp16-mixed", "fp16-true"])
def test_a_t5_whose_feed_forward_passes_the_limit(route: str) -> None:
    model, inputs = of_transformers("t5")
    part = model.encoder.block[1].layer[1].DenseReluDense
    with torch.no_grad():
        part.wi.weight *= 100
        part.wo.weight *= 3000
    found = trace(model, inputs, precision=route)
    named(found, "overflow in encoder.block.1.layer.1.DenseReluDense.wo (Linear), forward, modeling_t5.py:", "the product reaches")
