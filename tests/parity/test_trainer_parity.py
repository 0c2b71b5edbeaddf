"""`halfstep.Trainer` beside `transformers.Trainer` in fp32: the same losses, gradient norms, rates and weights, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trainers import SMALL, STEPS, Job, Run, both, gap, run
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

CLOSE = 1e-5


def language(samples: int = 240, ragged: bool = False) -> Job:
    """GPT-2 of two layers on random tokens; ragged: sequences of 3 to 16 tokens, padded by a collator of transformers' kind."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 97, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    model.loss_type = "ForCausalLM"  # without it transformers divides by the first token of each row too, which nothing predicts
    lengths = [3 + 5 * i % 14 for i in range(samples + 10)] if ragged else [12] * (samples + 10)
    rows = [torch.randint(0, 97, (n,)).tolist() for n in lengths]
    data = [{"input_ids": row, "labels": list(row)} for row in rows]
    return Job(model, data[:samples], data[samples:], pad if ragged else None)


def classification(samples: int = 240) -> Job:
    """BERT of two layers on sequences of random tokens, 3 classes; the valid set does not divide by the batch."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 97}
    config = BertConfig(**sizes, max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rows = [torch.randint(0, 97, (12,)) for _ in range(samples + 10)]
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "label": int(row.sum()) % 3} for row in rows]
    return Job(BertForSequenceClassification(config), data[:samples], data[samples:], trainer={"compute_metrics": accuracy})


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of one batch at the length of its longest: tokens filled up with 0 and masked, labels with -100."""
    longest = max(len(f["input_ids"]) for f in features)

    def filled(name: str, value: int) -> torch.Tensor:
        return torch.tensor([f[name] + [value] * (longest - len(f[name])) for f in features])

    mask = torch.tensor([[1] * len(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in features])
    return {"input_ids": filled("input_ids", 0), "attention_mask": mask, "labels": filled("labels", -100)}


def same(ours: Run, theirs: Run, steps: int = STEPS) -> None:
    """Every logged number, and the weights at the end."""
    assert len(ours.logged) == len(theirs.logged) == steps
    assert ours.trainer.state.global_step == theirs.trainer.state.global_step == steps
    assert gap(ours.column("loss"), theirs.column("loss")) <= CLOSE
    assert gap(ours.column("grad_norm"), theirs.column("grad_norm")) <= 1e-4
    assert gap(ours.column("epoch"), theirs.column("epoch")) <= 1e-5
    assert len({round(loss, 9) for loss in ours.column("loss")}) > steps // 2  # neither stands still
    for name, weight in theirs.weights.items():
        assert torch.allclose(ours.weights[name], weight, atol=1e-4), name


SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "accumulation, short windows": {"gradient_accumulation_steps": 7, "max_steps": 30},
    "clipping": {"max_grad_norm": 0.05},
    "no clipping": {"max_grad_norm": 0.0},
    "warm-up and cosine": {"warmup_steps": 10, "lr_scheduler_type": "cosine"},
    "constant with warm-up": {"warmup_steps": 10, "lr_scheduler_type": "constant_with_warmup"},
    "weight decay": {"weight_decay": 0.3, "learning_rate": 3e-3},
    "betas and epsilon": {"adam_beta1": 0.7, "adam_beta2": 0.9, "adam_epsilon": 1e-4},
    "sgd": {"optim": "sgd", "learning_rate": 0.05},
    "adafactor": {"optim": "adafactor"},
    "unfused": {"optim": "adamw_torch"},
    "epochs": {"max_steps": -1, "num_train_epochs": 0.8},
}


QUICK = ("as it comes", "clipping", "warm-up and cosine", "weight decay", "sgd", "adafactor")
NIGHTLY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SETTINGS]


@pytest.mark.parametrize("name", NIGHTLY)
def test_a_language_model_has_the_same_losses_under(name: str, tmp_path: Path) -> None:
    ours, theirs = both(language(), tmp_path, **SETTINGS[name])
    same(ours, theirs, len(theirs.logged))


@pytest.mark.parametrize("name", ["accumulation", pytest.param("weight decay", marks=pytest.mark.slow)])
def test_a_classifier_has_the_same_losses_under(name: str, tmp_path: Path) -> None:
    ours, theirs = both(classification(), tmp_path, **SETTINGS[name])
    same(ours, theirs)


def test_an_epoch_that_does_not_divide_by_batch_or_window(tmp_path: Path) -> None:
    settings = {"max_steps": -1, "num_train_epochs": 3, "gradient_accumulation_steps": 4}
    ours, theirs = both(classification(samples=70), tmp_path, **settings)
    same(ours, theirs, 15)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_sequences_of_all_lengths_count_by_their_tokens(accumulation: int, tmp_path: Path) -> None:
    """Micro-batches of unlike numbers of tokens: a step's loss is the mean over the tokens of its window, as in one large batch."""
    ours, theirs = both(language(ragged=True), tmp_path, gradient_accumulation_steps=accumulation)
    same(ours, theirs)


def test_evaluation_over_a_ragged_last_batch(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 10, "per_device_eval_batch_size": 4}
    ours, theirs = both(classification(), tmp_path, **settings)
    same(ours, theirs)
    for name in ("eval_loss", "eval_accuracy"):
        assert gap([r[name] for r in ours.evaluated], [r[name] for r in theirs.evaluated]) <= CLOSE
    assert len(ours.evaluated) == 5
    alone, there = ours.trainer.predict(classification().valid), theirs.trainer.predict(classification().valid)
    assert torch.allclose(torch.as_tensor(alone.predictions), torch.as_tensor(there.predictions), atol=1e-4)
    assert (alone.label_ids == there.label_ids).all()


def test_the_logged_rate_is_the_one_of_the_step(tmp_path: Path) -> None:
    ours, theirs = both(language(), tmp_path, warmup_steps=10, lr_scheduler_type="cosine")
    assert gap(ours.column("learning_rate"), theirs.column("learning_rate")) <= 1e-12


def test_a_loss_function_of_the_user(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    job = classification()
    given = Job(job.model, job.train, job.valid, trainer={"compute_loss_func": loss})
    ours, theirs = both(given, tmp_path, gradient_accumulation_steps=3)
    same(ours, theirs)


@pytest.mark.parametrize("make", [language, classification])
def test_label_smoothing(make: Any, tmp_path: Path) -> None:
    ours, theirs = both(make(), tmp_path, label_smoothing_factor=0.1, gradient_accumulation_steps=2)
    same(ours, theirs)


def test_the_losses_of_the_two_libraries_do_differ_where_the_runs_do(tmp_path: Path) -> None:
    """What the others compare is not always equal."""
    ours, _ = both(language(), tmp_path)
    _, theirs = both(language(), tmp_path / "other", learning_rate=1.01e-3)
    assert gap(ours.column("loss"), theirs.column("loss")) > CLOSE


def test_what_transformers_adds_up_is_a_mean_here(tmp_path: Path) -> None:
    """Left to itself it sums the losses of a window where a model takes the number of items and does not use it, as BERT's classifiers do."""
    settings = {"max_steps": 2, "gradient_accumulation_steps": 3}
    ours, _ = both(classification(), tmp_path, **settings)
    theirs = run(transformers, classification(), tmp_path, SMALL | settings, told=False)
    assert theirs.column("loss")[0] == pytest.approx(3 * ours.column("loss")[0], rel=1e-5)


def test_what_transformers_counts_too_much_is_not_counted_here(tmp_path: Path) -> None:
    """Left to itself it divides GPT-2's loss by all tokens of a row, though nothing predicts the first of the 12."""
    job = language()
    job.model.loss_type = None
    ours, theirs = both(job, tmp_path, max_steps=2)
    assert theirs.column("loss")[0] == pytest.approx(11 / 12 * ours.column("loss")[0], rel=1e-5)
