"""The models that are trained, from their configurations, and the tokens they are trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZES: dict[str, dict[str, Any]] = {
    "gpt2-124m": {"batch": 8, "length": 1024},
    "llama-1b": {"batch": 4, "length": 1024},
}
SMALL = {"batch": 2, "length": 16}
VOCABULARY_SMALL = 64


def size_of(name: str, small: bool) -> dict[str, int]:
    """Samples in a batch and tokens in a sample."""
    return SMALL if small else SIZES[name]


def made(name: str, small: bool, device: torch.device, seed: int = 0) -> nn.Module:
    """A model with random fp32 weights on the device. Without dropout, so that nothing but arithmetic is compared."""
    torch.manual_seed(seed)
    with torch.device(device):
        return _gpt2(small) if name == "gpt2-124m" else _llama(small)


def counted(name: str, small: bool) -> tuple[int, int]:
    """Parameters, and those of them that products multiply with: all but tables that are only looked up."""
    net = made(name, small, torch.device("meta"))
    products = {id(p) for part in net.modules() if not isinstance(part, nn.Embedding) for p in part.parameters(False)}
    return sum(p.numel() for p in net.parameters()), sum(p.numel() for p in net.parameters() if id(p) in products)


def _gpt2(small: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": VOCABULARY_SMALL, "n_positions": SMALL["length"]} if small else {}
    dry = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**shape, **dry))


def _llama(small: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    large = {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
    }
    tiny = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    shape = tiny | {"vocab_size": VOCABULARY_SMALL} if small else large
    return LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=2048, use_cache=False, tie_word_embeddings=False))


class Tokens(Dataset[dict[str, Tensor]]):
    """Samples of random tokens, the same for everybody. They are cut from one table, so that reading one costs next to nothing."""

    def __init__(self, vocabulary: int, length: int, samples: int = 100_000) -> None:
        self.samples, self.length = samples, length
        self.table = torch.randint(0, vocabulary, (1 << 16,), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        start = number * 977 % (len(self.table) - self.length)
        part = self.table[start : start + self.length]
        return {"input_ids": part, "labels": part}


def stacked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Samples as a batch."""
    return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}
