"""Weights that discovery puts into 16 bits leave the forward pass and every gradient what they are under autocast with fp32 weights, bit for bit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.optim import AdamW, master_of
from halfstep.policy import parse

CPU = torch.device("cpu")
FORMATS = ["bf16", "fp16"]
SCALE = 256.0  # of the loss, under both formats: fp16 gradients shall not all be subnormal


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(1, 60, (2, 12), generator=seeded(seed))


def gpt2() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config), lambda seed: {"input_ids": tokens(seed), "labels": tokens(seed)}


def llama() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config), lambda seed: {"input_ids": tokens(seed), "labels": tokens(seed)}


def bert() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, max_position_embeddings=16, num_labels=3
    )
    labels = torch.tensor([0, 2])
    return transformers.BertForSequenceClassification(config), lambda seed: {"input_ids": tokens(seed), "labels": labels}


def bert_with_tied_decoder() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, max_position_embeddings=16, pad_token_id=0
    )
    return transformers.BertForMaskedLM(config), lambda seed: {"input_ids": tokens(seed), "labels": tokens(seed)}


def t5() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """One table that the encoder, the decoder and the head share."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), lambda seed: {"input_ids": tokens(seed), "labels": tokens(seed + 2)}


def gemma() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """Its embedding is a subclass that multiplies the rows by a number in the dtype of its weight."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    return transformers.Gemma3ForCausalLM(config), lambda seed: {"input_ids": tokens(seed), "labels": tokens(seed)}


class Images(nn.Module):
    """Convolutions with batch norm, one of them transposed, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, stride=2), nn.BatchNorm2d(6)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(F.gelu(self.body(x)).mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def images() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    return Images(), lambda seed: {"x": torch.randn(4, 3, 8, 8, generator=seeded(seed)), "labels": torch.tensor([0, 1, 2, 3])}


class Experts(nn.Module):
    """A mixture of linear experts: each token goes to the one with the largest gate; the last gate is never the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.norm = nn.LayerNorm(16)
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(4))
        self.head = nn.Linear(16, 64, bias=False)
        with torch.no_grad():
            self.gate.bias[3] = -100

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.embed(input_ids)).flatten(0, 1)
        weight, choice = self.gate(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            places = (choice == i).nonzero().squeeze(-1)
            if places.numel():
                mixed = mixed.index_add(0, places, (expert(x[places]) * weight[places, None]).to(mixed.dtype))
        logits = self.head(x + mixed)
        return {"loss": F.cross_entropy(logits, labels.flatten()), "logits": logits}


def experts() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    return Experts(), lambda seed: {"input_ids": tokens(seed), "labels": tokens(seed + 1)}


class Recurrent(nn.Module):
    """An LSTM, a GRU, attention with one packed projection and one with three, and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(24, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 2, kdim=24, vdim=24, batch_first=True, add_bias_kv=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        wide, _ = self.lstm(x)
        y, _ = self.gru(wide)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        y = y + self.cross(y, wide, wide, need_weights=False)[0]
        logits = self.head(y.mean(1))
        return {"loss": logits.float().square().mean(), "logits": logits}


def recurrent() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    return Recurrent(), lambda seed: {"x": torch.randn(3, 5, 8, generator=seeded(seed))}


MODELS = {f.__name__: f for f in (gpt2, llama, bert, images, experts, recurrent, bert_with_tied_decoder, t5, gemma)}
TABLES = {"gpt2": "transformer.wte.weight", "t5": "shared.weight", "gemma": "model.embed_tokens.weight"}  # kept in 16 bits, for the head too
TABLES["bert_with_tied_decoder"] = "bert.embeddings.word_embeddings.weight"
SHARE = dict.fromkeys(MODELS, 0.7) | {"images": 0.9, "recurrent": 0.9}  # of the weights, at least, that go to 16 bits


def made(name: str, precision: str) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    amp.bind(model.train(), parse(precision), CPU)
    return model, batch


def passed(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """One forward and backward pass with dropout as seed 1 gives it; returns the loss."""
    torch.manual_seed(1)
    loss: Tensor = model(**batch)["loss"]
    (loss * SCALE).backward()
    return loss.detach()


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert torch.equal(p.grad.float(), q.grad), name


def assert_same_buffers(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, b), c in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(b, c), name


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_autocast(name: str, form: str) -> None:
    (lean, batch), (mixed, _) = made(name, f"{form}-lean"), made(name, f"{form}-mixed")
    for seed in (0, 1):  # the first call, which discovers, and one after it
        assert torch.equal(passed(lean, batch(seed)), passed(mixed, batch(seed)))
        assert_same_gradients(lean, mixed)
        assert_same_buffers(lean, mixed)
        lean.zero_grad()
        mixed.zero_grad()
    kept = amp.layout(lean)["16bit"]
    weights = dict(lean.named_parameters())
    assert sum(weights[n].numel() for n in kept) > SHARE[name] * sum(p.numel() for n, p in weights.items() if "embed" not in n and "wte" not in n)
    for name_, p in weights.items():
        assert p.dtype == (parse(f"{form}-lean").dtype if name_ in kept else torch.float32)
        assert (master_of(p) is not None) == (name_ in kept)
    assert [n for n in kept if "embed" in n or "wte" in n or "shared" in n] == ([TABLES[name]] if name in TABLES else [])
    assert name not in TABLES or weights[TABLES[name]].grad_dtype == torch.float32


@pytest.fixture
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch's 16-bit kernels are faster: its own autocast casts, inside its dispatcher. (Without instructions it has no 16-bit LSTM.)"""
    monkeypatch.setattr(sys.modules["halfstep.amp.autocast"], "emulated_families", lambda form: ())


@pytest.mark.usefixtures("_native")
@pytest.mark.parametrize("ops", ["cuda", "device"])
@pytest.mark.parametrize(
    ("name", "form"), [("gpt2", "bf16"), ("llama", "fp16"), ("bert", "bf16"), ("images", "bf16"), ("experts", "fp16"), ("t5", "bf16")]
)
def test_loss_and_gradients_are_those_of_torchs_own_casts(name: str, form: str, ops: str) -> None:
    (lean, batch), (mixed, _) = made(name, f"{form}-lean,ops={ops}"), made(name, f"{form}-mixed,ops={ops}")
    torch.manual_seed(0)
    stock, _ = MODELS[name]()
    for seed in (0, 1):
        loss = passed(lean, batch(seed))
        assert torch.equal(loss, passed(mixed, batch(seed)))
        assert_same_gradients(lean, mixed)
        if ops == "device":
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=parse(f"{form}-lean").dtype, cache_enabled=False):
                expected = stock.train()(**batch(seed))["loss"]
            (expected * SCALE).backward()
            assert torch.equal(loss, expected)
            assert_same_gradients(lean, stock)
        for model in (lean, mixed, stock):
            model.zero_grad()
    assert amp.layout(lean)["16bit"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_after_optimizer_steps_are_those_with_fp32_weights(name: str, form: str) -> None:
    """Each step may move a master by one fp32 ulp, where 65,537 values share 65,536 codes."""
    steps, found = 3, []
    for precision in (f"{form}-lean", f"{form}-mixed"):
        model, batch = made(name, precision)
        model(**batch(0))
        optimizer = AdamW(model.parameters(), lr=1e-3)
        for step in range(steps):
            passed(model, batch(step))
            optimizer.step(factor=1 / SCALE)
            optimizer.zero_grad()
        found.append(model)
    lean, mixed = found
    for name_, p in lean.named_parameters():
        master, reference = master_of(p), mixed.get_parameter(name_).detach()
        values = master.read() if master is not None else p.detach()
        room = steps * (2.0**-23 if form == "bf16" else 2.0**-22) * float(reference.abs().max())
        assert (values - reference).abs().max() <= room, name_
        assert torch.equal(p.detach(), values.to(p.dtype))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_copy_of_a_lean_model_and_one_that_generates_go_on_like_autocast(name: str) -> None:
    (lean, batch), (mixed, _) = made(name, "bf16-lean"), made(name, "bf16-mixed")
    outputs = []
    for model in (lean, mixed):
        model.eval()
        outputs.append(model.generate(batch(0)["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0))
    assert torch.equal(*outputs)
    assert amp.layout(lean)["16bit"]
    twin = copy.deepcopy(lean)
    assert torch.equal(passed(twin.train(), batch(1)), passed(mixed.train(), batch(1)))
    assert_same_gradients(twin, mixed)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:None of the inputs have requires_grad")
def test_activation_checkpointing_computes_again_what_was_computed(reentrant: bool) -> None:
    (lean, batch), (mixed, _) = made("gpt2", "bf16-lean"), made("gpt2", "bf16-mixed")
    for model in (lean, mixed):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
    for seed in (0, 1):
        assert torch.equal(passed(lean, batch(seed)), passed(mixed, batch(seed)))
        assert_same_gradients(lean, mixed)
        lean.zero_grad()
        mixed.zero_grad()
