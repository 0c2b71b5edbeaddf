"""transformers models of several kinds, made from configurations, train on tables of `datasets` under every kind of precision."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from halfstep import Accelerator, Trainer, TrainingArguments
from halfstep.errors import ConfigError

datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
RNG = np.random.default_rng(0)
IDS = RNG.integers(3, 32, (16, 8))


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, loss_type="ForCausalLM")
    )
    return made, {"input_ids": IDS.tolist(), "labels": IDS.tolist()}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, max_position_embeddings=16)), gpt2()[1]


def bert() -> tuple[nn.Module, dict[str, Any]]:
    made = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, max_position_embeddings=16))
    return made, {"input_ids": IDS.tolist(), "label": (IDS[:, 0] % 2).tolist()}


def spans() -> tuple[nn.Module, dict[str, Any]]:
    made = transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES, max_position_embeddings=16))
    return made, {"input_ids": IDS.tolist(), "start_positions": [2] * 16, "end_positions": [5] * 16}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    settings = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**settings)), {"input_ids": IDS.tolist(), "labels": IDS[:, :4].tolist()}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {k: v for k, v in SIZES.items() if k != "vocab_size"}
    made = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=2))
    return made, {"pixel_values": RNG.normal(size=(16, 3, 8, 8)).astype("float32").tolist(), "label": [0, 1] * 8}


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-lean"])
@pytest.mark.parametrize(("make", "form"), [(gpt2, None), (llama, "torch"), (bert, None), (spans, "numpy"), (t5, None), (vit, "torch")])
def test_models_train_on_tables_and_are_evaluated(tmp_path: Path, make: Any, form: str | None, precision: str) -> None:
    torch.manual_seed(0)
    model, columns = make()
    data = datasets.Dataset.from_dict({**columns, "text": ["x"] * 16, "idx": list(range(16))}).with_format(form)
    args = TrainingArguments(
        output_dir=str(tmp_path),
        precision=precision,
        use_cpu=True,
        disable_tqdm=True,
        max_steps=12,
        learning_rate=5e-3,
        per_device_train_batch_size=8,
        save_strategy="no",
    )
    trainer = Trainer(model, args, None, data, data)
    before = trainer.evaluate()["eval_loss"]
    assert trainer.train().global_step == 12
    after = trainer.evaluate()["eval_loss"]
    assert after < before
    assert trainer.state.skipped_steps == 0


def test_lazy_parameters_are_refused_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ConfigError, match=r"0.weight has no shape yet: it is a lazy parameter.* Call the model once on a batch"):
        Accelerator(cpu=True).prepare(model)
    model(torch.ones(1, 3))
    assert Accelerator(cpu=True).prepare(model)(torch.ones(1, 3)).shape == (1, 2)
