"""What the arguments do to the model and its loss: in force while the trainer uses the model, right in its numbers, and gone afterwards."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, T5Config

from halfstep import Trainer, TrainerCallback, TrainingArguments
from halfstep.amp import pins
from halfstep.errors import ConfigError, DataError
from halfstep.trainer.fitting import is_out_of_memory
from halfstep.trainer.neftune import input_embeddings
from halfstep.trainer.smoothing import LabelSmoother, is_causal

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
HIGH = "scale=dynamic:4294967296,scale_strategy=stock"  # a loss scale at which the first step overflows
TINY = BertConfig(**SIZES, max_position_embeddings=16)


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(TINY)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, loss_type="ForCausalLM"))


def t5() -> nn.Module:
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def rows(model: nn.Module, count: int = 16) -> list[dict[str, Tensor]]:
    ids = torch.randint(2, 32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": r, "labels": r[0] % 2 if isinstance(model, BertForSequenceClassification) else r} for r in ids]


def arguments(place: Path, **settings: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4, "save_strategy": "no", "logging_steps": 1}
    return TrainingArguments(**{"output_dir": str(place), "learning_rate": 1e-2, "max_steps": 3, "report_to": "none", **defaults, **settings})


def run(place: Path, model: nn.Module, **settings: Any) -> tuple[list[float], dict[str, Tensor], Trainer]:
    trainer = Trainer(model, arguments(place, **settings), train_dataset=rows(model))
    trainer.train()
    losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, trainer


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --- gradient checkpointing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "settings"),
    [("fp32", {}), ("bf16-lean", {}), (f"fp16-lean,{HIGH}", {}), (f"fp16-mixed,{HIGH}", {"gradient_accumulation_steps": 2})],
)
def test_gradient_checkpointing_gives_the_same_run_also_with_replayed_steps(tmp_path: Path, precision: str, settings: dict[str, Any]) -> None:
    plain = run(tmp_path / "a", bert(), precision=precision, **settings)
    again = run(tmp_path / "b", bert(), precision=precision, gradient_checkpointing=True, **settings)
    assert plain[0] == again[0]
    assert same(plain[1], again[1])
    assert plain[2].state.replayed_steps == again[2].state.replayed_steps == (HIGH in precision)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in again[2].model.modules())


def test_gradient_checkpointing_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gradient_checkpointing=True has nothing to act on: this Linear"):
        Trainer(nn.Linear(2, 2), arguments(tmp_path, gradient_checkpointing=True))


# --- smoothed labels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [bert, gpt2, t5])
def test_smoothed_losses_are_those_of_transformers(tmp_path: Path, make: Any) -> None:
    ours, _, _ = run(tmp_path / "a", make().eval(), label_smoothing_factor=0.2)
    model = make().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of another library are not ours to mend
        theirs = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                output_dir=str(tmp_path / "b"),
                label_smoothing_factor=0.2,
                use_cpu=True,
                per_device_train_batch_size=4,
                max_steps=3,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                learning_rate=1e-2,
                disable_tqdm=True,
            ),
        )
        batch = {k: torch.stack([r[k] for r in rows(model)[:4]]) for k in ("input_ids", "labels")}
        if make is t5:
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        expected = theirs.compute_loss(model, dict(batch))
    mine = Trainer(model, arguments(tmp_path / "c", label_smoothing_factor=0.2))
    assert torch.allclose(mine.compute_loss(model, dict(batch)), expected, rtol=1e-6, atol=0)
    plain = run(tmp_path / "d", make().eval())[0]
    assert all(a != b for a, b in zip(ours, plain, strict=True))
    assert all(map(math.isfinite, ours))


def test_the_smoother_leaves_out_ignored_places_shifts_and_counts_items() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 7, dtype=torch.bfloat16), torch.randint(0, 7, (2, 5))
    labels[0, 2:] = -100
    wide = logits.double()
    terms = -(0.9 * wide.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] + 0.1 * wide.log_softmax(-1).mean(-1))
    kept = labels != -100
    assert math.isclose(LabelSmoother(0.1)({"logits": logits}, labels).item(), terms[kept].mean().item(), rel_tol=1e-6)
    assert math.isclose(LabelSmoother(0.1)((logits,), labels, 20).item(), terms[kept].sum().item() / 20, rel_tol=1e-6)
    shifted = LabelSmoother(0.1, shifts=True)({"logits": logits}, labels)
    assert torch.allclose(shifted, LabelSmoother(0.1)(logits[:, :-1], labels[:, 1:]))
    assert math.isnan(LabelSmoother(0.1)(logits, torch.full_like(labels, -100)).item())
    with pytest.raises(DataError, match=r"float32 labels of shape \(2,\) for logits of shape \(2, 1\)"):
        LabelSmoother(0.1)(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(ConfigError, match=r"needs the model's logits, and it returned a dict"):
        LabelSmoother(0.1)({"loss": torch.zeros(())}, labels)
    assert is_causal(gpt2())
    assert not is_causal(bert())
    assert not is_causal(t5())


def test_smoothing_that_could_not_act_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"those of this BertForQuestionAnswering are start_positions, end_positions"):
        Trainer(BertForQuestionAnswering(TINY), arguments(tmp_path, label_smoothing_factor=0.1))
    with pytest.raises(ConfigError, match=r"no effect with a compute_loss_func of your own"):
        Trainer(bert(), arguments(tmp_path, label_smoothing_factor=0.1), compute_loss_func=lambda outputs, labels: outputs)


# --- noise on embeddings ------------------------------------------------------------------------------------------------------


def test_noise_is_that_of_the_paper_in_training_only_and_gone_afterwards(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            ids = torch.randint(2, 32, (4, 8))
            table = input_embeddings(model)
            torch.manual_seed(5)
            seen.append(table(ids) - F.embedding(ids, table.weight, table.padding_idx))
            torch.manual_seed(5)
            most = 5.0 / math.sqrt(8 * 16)
            seen.append(torch.zeros(4, 8, 16).uniform_(-most, most))
            model.eval()
            seen.append(table(ids) - F.embedding(ids, table.weight, table.padding_idx))
            model.train()

    model = gpt2()
    trainer = Trainer(model, arguments(tmp_path / "a", neftune_noise_alpha=5.0), train_dataset=rows(model), callbacks=[Watch])
    trainer.train()
    noise, expected, in_evaluation = seen
    assert torch.allclose(noise, expected, atol=1e-6)
    assert not in_evaluation.any()
    assert not input_embeddings(model)._forward_hooks
    assert run(tmp_path / "b", gpt2())[0] != [r["loss"] for r in trainer.state.log_history if "loss" in r]


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_a_run_with_noise_goes_on_bit_for_bit(tmp_path: Path, precision: str) -> None:
    settings: dict[str, Any] = {"neftune_noise_alpha": 5.0, "precision": precision, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    _, whole, _ = run(tmp_path / "a", gpt2(), **settings)
    model = gpt2()
    Trainer(model, arguments(tmp_path / "b", **settings), train_dataset=rows(model)).train(str(tmp_path / "a" / "checkpoint-2"))
    assert same(whole, model.state_dict())


def test_noise_needs_embeddings_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"this Linear has no nn.Embedding"):
        input_embeddings(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"several nn.Embedding \(0, 1\)"):
        input_embeddings(nn.Sequential(nn.Embedding(2, 2), nn.Embedding(2, 2)))
    one = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2))
    assert input_embeddings(one) is one[0]


# --- a batch size that fits -----------------------------------------------------------------------------------------------------


class Scarce(nn.Module):
    """A model that says that memory did not suffice when a batch has more than `most` samples, from its `after`-th call on."""

    def __init__(self, most: int, after: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.drop, self.most, self.left = nn.Linear(4, 1), nn.Dropout(0.3), most, after

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.left -= 1
        if self.left < 0 and len(x) > self.most:
            raise MemoryError("simulated")
        return {"loss": F.mse_loss(self.drop(self.inner(x)).squeeze(-1), labels)}


def numbers() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=g), "labels": torch.randn((), generator=g)} for _ in range(32)]


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_a_batch_that_does_not_fit_is_halved_and_the_run_is_that_of_the_smaller_one(tmp_path: Path, precision: str) -> None:
    settings: dict[str, Any] = {"precision": precision, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    found = Scarce(most=4, after=3)  # the first steps fit, and are given up
    asked = arguments(tmp_path / "a", per_device_train_batch_size=16, auto_find_batch_size=True, **settings)
    trainer = Trainer(found, asked, train_dataset=numbers())
    trainer.train()
    small = Scarce(most=4)
    Trainer(small, arguments(tmp_path / "b", per_device_train_batch_size=4, **settings), train_dataset=numbers()).train()
    assert same(found.state_dict(), small.state_dict())
    assert trainer.state.global_step == 4
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    resumed = Scarce(most=4)
    again = arguments(tmp_path / "c", per_device_train_batch_size=16, auto_find_batch_size=True, **settings)
    Trainer(resumed, again, train_dataset=numbers()).train(str(tmp_path / "a" / "checkpoint-2"))
    assert same(found.state_dict(), resumed.state_dict())


class Reaching(Scarce):
    """One whose product is too large for fp16."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(x * 2.0**17, labels * 2.0**17)


def test_modules_that_an_attempt_has_pinned_are_in_the_log_of_the_one_that_takes_its_place(tmp_path: Path) -> None:
    asked = arguments(tmp_path, per_device_train_batch_size=8, auto_find_batch_size=True, precision="fp16-mixed", max_steps=4, save_strategy="no")
    model = Reaching(most=4, after=4)
    trainer = Trainer(model, asked, train_dataset=numbers())
    trainer.train()
    records = [r for r in trainer.state.log_history if "pinned" in r]
    assert [p.module for p in pins(model)] == ["inner"] == records[0]["pinned"]
    assert "rules.yaml says so" in records[0]["why"][0]


def test_without_the_switch_or_with_one_sample_the_error_is_told(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match="simulated"):
        Trainer(Scarce(most=4), arguments(tmp_path / "a", per_device_train_batch_size=8), train_dataset=numbers()).train()
    with pytest.raises(ConfigError, match=r"a batch of one sample does not fit into memory \(simulated\). Use gradient_checkpointing=True"):
        Trainer(Scarce(most=0), arguments(tmp_path / "b", auto_find_batch_size=True), train_dataset=numbers()).train()
    given = torch.optim.SGD(Scarce(4).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"auto_find_batch_size=True begins a run again, and the optimizer that was given cannot"):
        Trainer(Scarce(4), arguments(tmp_path / "c", auto_find_batch_size=True), train_dataset=numbers(), optimizers=(given, None))
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


# --- kernels, determinism -----------------------------------------------------------------------------------------------------------


def test_fused_kernels_are_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"use_liger_kernel=True needs a GPU, and the run is on cpu"):
        Trainer(gpt2(), arguments(tmp_path, use_liger_kernel=True))


def test_full_determinism_holds_inside_a_run_only(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append(torch.are_deterministic_algorithms_enabled())

    model = gpt2()
    Trainer(model, arguments(tmp_path, full_determinism=True), train_dataset=rows(model), callbacks=[Watch]).train()
    assert seen == [True] * 3
    assert not torch.are_deterministic_algorithms_enabled()


# --- the order of the data -------------------------------------------------------------------------------------------------------------


def ragged(count: int = 40) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(2, 32, (int(n),), generator=g).tolist()} for n in torch.randint(2, 12, (count,), generator=g)]


def padded(features: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(f["input_ids"]) for f in features], batch_first=True, padding_value=1)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 1, -100)}


def test_a_run_grouped_by_length_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train_sampling_strategy": "group_by_length", "save_strategy": "steps", "save_steps": 4, "max_steps": 12}
    whole, resumed = gpt2(), gpt2()
    Trainer(whole, arguments(tmp_path / "a", **settings), padded, ragged()).train()
    Trainer(resumed, arguments(tmp_path / "b", **settings), padded, ragged()).train(str(tmp_path / "a" / "checkpoint-4"))
    assert same(whole.state_dict(), resumed.state_dict())
    settings["train_sampling_strategy"] = "random"
    with pytest.raises(Exception, match=r"train_sampling_strategy=group_by_length, and this run has train_sampling_strategy=random"):
        Trainer(gpt2(), arguments(tmp_path / "c", **settings), padded, ragged()).train(str(tmp_path / "a" / "checkpoint-4"))


def test_samples_in_their_own_order(tmp_path: Path) -> None:
    trainer = Trainer(gpt2(), arguments(tmp_path, train_sampling_strategy="sequential"), None, rows(gpt2()))
    assert list(trainer.get_train_dataloader().batch_sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


# --- the loss without logits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16-lean"])
def test_a_run_without_logits_has_the_losses_of_the_run_with_them(tmp_path: Path, precision: str) -> None:
    plain = run(tmp_path / "a", gpt2(), precision=precision)
    model = gpt2()
    trainer = Trainer(
        model, arguments(tmp_path / "b", precision=precision, chunked_loss="on", eval_strategy="steps"), None, rows(model), rows(model, 4)
    )
    trainer.train()
    losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    assert all(math.isclose(a, b, rel_tol=1e-5 if precision == "fp32" else 1e-2) for a, b in zip(plain[0], losses, strict=True))
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(1, 4, dtype=torch.long)}
    assert model.train()(**batch).logits is None
    assert trainer.predict(rows(model, 4)).predictions.shape == (4, 8, 32)
    assert Trainer(model, arguments(tmp_path / "c", precision=precision, chunked_loss="on"), None, rows(model)).train().global_step == 3


def test_a_loss_that_cannot_be_chunked_is_refused_or_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BertForSequenceClassification"):
        Trainer(bert(), arguments(tmp_path, chunked_loss="on"))
    with pytest.raises(ConfigError, match=r"chunked_loss='on' replaces the model's own loss, and label_smoothing_factor asks for another"):
        Trainer(gpt2(), arguments(tmp_path, chunked_loss="on", label_smoothing_factor=0.1))
    assert run(tmp_path / "a", bert(), chunked_loss="auto")[0] == run(tmp_path / "b", bert())[0]
