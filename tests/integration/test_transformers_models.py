"""With transformers: its models train and are saved its way, and the events of a run come in the order of its Trainer."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

from halfstep import Accelerator, EvalPrediction, Trainer, TrainerCallback, TrainingArguments
from halfstep.errors import DataError, PolicyError

PRECISIONS = ["fp32", "bf16-mixed", "fp16-mixed"]


def bert(labels: int = 2, **settings) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=16, num_labels=labels, **settings))


def samples(count: int = 32, labels: int = 2) -> list[dict]:
    """The label is whether token 5 is at the first place."""
    rng = np.random.default_rng(0)
    rows = rng.integers(6, 32, (count, 8))
    rows[::2, 0] = 5
    return [{"input_ids": r.tolist(), "attention_mask": [1] * 8, "label": int(r[0] == 5) % labels, "idx": i, "text": "x"} for i, r in enumerate(rows)]


def arguments(place: Path, **settings) -> TrainingArguments:
    defaults = {"output_dir": str(place / "run"), "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 8, "save_strategy": "no"}
    return TrainingArguments(**{**defaults, "logging_steps": 1, "learning_rate": 1e-2, **settings})


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": (logits.argmax(-1) == labels).mean()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bert_classifier_learns_is_saved_and_is_loaded_by_from_pretrained(tmp_path: Path, precision: str) -> None:
    made = Trainer(bert(), arguments(tmp_path, precision=precision, max_steps=30), None, samples(), samples(), compute_metrics=accuracy)
    before = made.evaluate()
    made.train()
    after = made.evaluate()
    assert after["eval_loss"] < 0.5 * before["eval_loss"]
    assert after["eval_accuracy"] > 0.9
    assert made.state.skipped_steps <= 3
    made.save_model(tmp_path / "model")
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    ids = torch.tensor([s["input_ids"] for s in samples()])
    with torch.no_grad():
        logits = loaded(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert torch.allclose(logits, torch.from_numpy(made.predict(samples()).predictions), atol=1e-5 if precision == "fp32" else 0.1)
    assert {k: v.dtype for k, v in loaded.state_dict().items()} == {k: v.dtype for k, v in made.model.state_dict().items()}


def test_padded_batches_of_other_lengths_train_and_join(tmp_path: Path) -> None:
    class Pad:
        """The part of a tokenizer that DataCollatorWithPadding asks."""

        def pad(self, features: list[dict], **_: object) -> dict[str, torch.Tensor]:
            longest = max(len(f["input_ids"]) for f in features)
            padded = {k: torch.tensor([f[k] + [0] * (longest - len(f[k])) for f in features]) for k in ("input_ids", "attention_mask")}
            return padded | {"labels": torch.tensor([f["label"] for f in features])}

    rows = [{**s, "input_ids": s["input_ids"][: 3 + i % 5], "attention_mask": [1] * (3 + i % 5)} for i, s in enumerate(samples())]
    made = Trainer(bert(), arguments(tmp_path, max_steps=4), DataCollatorWithPadding(Pad()), rows, rows)
    assert made.train().global_step == 4
    assert made.predict(rows).predictions.shape == (32, 2)
    with pytest.raises(DataError, match=r"the column 'input_ids' cannot be stacked .*DataCollatorWithPadding"):
        Trainer(bert(), arguments(tmp_path / "b", max_steps=1), None, rows).train()


def test_labels_beyond_the_classes_are_refused_before_the_model_sees_them(tmp_path: Path) -> None:
    rows = [{**s, "label": i % 4} for i, s in enumerate(samples())]
    with pytest.raises(DataError, match=r"run from 0 to 3, and the model has 2 classes, 0 to 1"):
        Trainer(bert(), arguments(tmp_path, max_steps=1), None, rows).train()


def test_a_model_loaded_in_16_bits_is_refused_in_fp32_with_the_remedy(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "model")
    half = BertForSequenceClassification.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(PolicyError, match=r"trainable parameters are 16-bit.*Load the model with dtype=torch.float32.* bf16-mixed"):
        Trainer(half, arguments(tmp_path), None, samples()).train()
    for dtype, precision in ((torch.float32, "fp32"), (torch.bfloat16, "bf16-mixed"), (torch.bfloat16, "fp16-mixed")):
        Trainer(
            BertForSequenceClassification.from_pretrained(tmp_path / "model", dtype=dtype), arguments(tmp_path, precision=precision), None, samples()
        )


def test_outputs_of_a_prepared_model_are_fp32_and_keep_their_type() -> None:
    model = Accelerator("bf16", cpu=True).prepare(bert(output_hidden_states=True))
    outputs = model(input_ids=torch.ones(2, 4, dtype=torch.long), labels=torch.tensor([0, 1]))
    assert type(outputs).__name__ == "SequenceClassifierOutput"
    assert outputs.logits.dtype == outputs.loss.dtype == torch.float32
    assert {h.dtype for h in outputs.hidden_states} == {torch.float32}


# --- the order of events --------------------------------------------------------------------------------------------------

SHARED = sorted(
    n for n in vars(TrainerCallback) if n.startswith("on_") and hasattr(transformers.TrainerCallback, n)
)  # on_step_skipped is halfstep's own


def recorder(base: type) -> tuple[list[str], object]:
    """A callback of one of the two libraries that notes every event both have, with its step."""
    events: list[str] = []

    def method(name: str):
        def note(self, args, state, control, **kwargs) -> None:
            if name == "on_log" and "train_runtime" in kwargs["logs"]:
                return  # transformers logs a summary at the end of training, halfstep returns it
            what = {"on_log": " eval" if "eval_loss" in kwargs.get("logs", {}) else " loss"}.get(name, "")
            epoch = "" if name == "on_optimizer_step" else f"{state.epoch or 0:.3f}"  # there transformers has not counted the batches yet
            events.append(f"{name}{what} {state.global_step} {epoch}")

        return note

    return events, type("Recorder", (base,), {name: method(name) for name in SHARED})()


JOBS = {
    "steps": {"max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3},
    "epochs": {"num_train_epochs": 2, "logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"},
    "windows": {"num_train_epochs": 2, "gradient_accumulation_steps": 3, "logging_steps": 1, "eval_on_start": True, "save_strategy": "no"},
    "middle": {"max_steps": 5, "logging_steps": 5, "save_strategy": "steps", "save_steps": 2},
    "ragged": {"num_train_epochs": 1.5, "per_device_train_batch_size": 5, "logging_steps": 1, "save_strategy": "no"},
}


@pytest.mark.parametrize("job", JOBS)
def test_events_come_in_the_order_of_transformers_trainer(tmp_path: Path, job: str) -> None:
    shared = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        **JOBS[job],
    }
    ours, callback = recorder(TrainerCallback)
    made = Trainer(bert(), TrainingArguments(output_dir=str(tmp_path / "ours"), **shared), None, samples(), samples(12), callbacks=[callback])
    made.train()
    theirs, callback = recorder(transformers.TrainerCallback)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of another library are not ours to mend
        args = transformers.TrainingArguments(output_dir=str(tmp_path / "theirs"), **shared)
        theirs_trainer = transformers.Trainer(bert(), args, train_dataset=samples(), eval_dataset=samples(12), callbacks=[callback])
        theirs_trainer.train()
    assert len(theirs) > 20
    assert ours == theirs
