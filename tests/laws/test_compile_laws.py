"""torch.compile of a bound model: one graph without a break, and the bits of the model that is not compiled, under every precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.policy import parse

# torch warns about itself when it compiles
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("fresh_compiler")]
CPU = torch.device("cpu")
PRECISIONS = [
    "fp32",
    "bf16-mixed",
    "fp16-mixed",
    "bf16-lean",
    "fp16-lean",
    *(f"{f}-true,products={p}" for f in ("bf16", "fp16") for p in ("native", "emulated")),
]
QUICK = ("bf16-lean", "bf16-true,products=emulated")  # tests/unit/amp/test_autocast_compile.py has bf16-mixed


class Language(nn.Module):
    """What a language model is made of: a table of embeddings, a norm, attention, an MLP, a head that may be the table, and its loss."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.mix, self.up = nn.Embedding(31, 16), nn.LayerNorm(16), nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.head = nn.Linear(16, 31, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.table(ids)
        q, k, v = self.mix(self.norm(h)).chunk(3, -1)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(h + F.gelu(self.up(h)))
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), "logits": logits}


def compared(make: Callable[[], nn.Module], text: str, batch: dict[str, Tensor], read: Callable[[Any], list[Tensor]]) -> None:
    """Two copies, one compiled after the first call (in which a `*-lean` policy decides on the weights): outputs and gradients have the same bits."""
    found = []
    for compiled in (False, True):
        model = make()
        amp.bind(model, parse(text), CPU)
        with torch.no_grad():
            model(**batch)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        outputs = read(call(**batch))
        outputs[0].backward()
        found.append([*(t.detach() for t in outputs), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > len(outputs)
    for eager, other in zip(*found, strict=True):
        assert eager.dtype == other.dtype
        assert torch.equal(eager, other)
    assert not torch._dynamo.utils.counters["graph_break"]


IDS = torch.arange(24).remainder(31).view(2, 12)


@pytest.mark.parametrize("text", [text if text in QUICK else pytest.param(text, marks=pytest.mark.slow) for text in PRECISIONS])
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "tied"])
def test_a_bound_model_is_one_graph_with_the_bits_of_the_model_itself(text: str, tied: bool) -> None:
    compared(lambda: Language(tied), text, {"ids": IDS, "labels": IDS.roll(-1, 1)}, lambda out: [out["loss"], out["logits"]])


@pytest.mark.slow
@pytest.mark.parametrize("text", PRECISIONS)
def test_a_llama_is_one_graph_with_the_bits_of_the_model_itself(text: str) -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, **sizes)).train()
        return model

    compared(make, text, {"input_ids": IDS, "labels": IDS}, lambda out: [out.loss, out.logits])
