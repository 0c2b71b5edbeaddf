"""A small convolution net with BatchNorm learns scikit-learn's digits, in the precision that you name.

Run it with `python examples/digits.py [PRECISION]`, after `pip install --no-deps -r examples/requirements.txt`. The running statistics
of BatchNorm follow applied steps only.
"""

import sys

import numpy as np
import torch
from packaged import folder_of
from torch import nn

from halfstep import Trainer, TrainingArguments  # stock: from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    """Two convolutions with BatchNorm, then a linear layer: 20,000 weights."""

    def __init__(self, width=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.classify = nn.Linear(2 * width, 10)

    def forward(self, pixels, labels=None):
        """A dict of logits, and of the loss with labels."""
        logits = self.classify(self.features(pixels).flatten(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels, label_smoothing=0.05), "logits": logits}


def datasets(validation_size=397, seed=0):
    """1,797 images of 8x8 pixels, in a random order of which the last are kept for validation."""
    table = np.loadtxt(folder_of("sklearn") / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.float32)
    pixels = torch.tensor(table[:, :-1].reshape(-1, 1, 8, 8) / 16)
    labels = torch.tensor(table[:, -1]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tolist()
    samples = [{"pixels": pixels[i], "labels": labels[i]} for i in order]
    return samples[:-validation_size], samples[-validation_size:]


def compute_metrics(prediction):
    """The share of the digits that are read."""
    return {"accuracy": (prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean()}


def main(precision="fp16-mixed", seed=0, epochs=8, output_dir="results"):
    """Train, print how many steps were applied, and return the accuracy on images that the net did not see."""
    train_dataset, validation_dataset = datasets()
    torch.manual_seed(seed)
    args = TrainingArguments(
        output_dir=output_dir,
        overwrite_output_dir=True,
        precision=precision,
        seed=seed,
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=200,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        logging_steps=22,
        save_strategy="no",
    )
    trainer = Trainer(Net(), args, train_dataset=train_dataset, eval_dataset=validation_dataset, compute_metrics=compute_metrics)
    trainer.train()
    print(f"steps: {trainer.state.global_step} applied, {trainer.state.skipped_steps} skipped")
    return trainer.evaluate()["eval_accuracy"]


if __name__ == "__main__":
    print(f"validation accuracy: {main(*sys.argv[1:2]):.3f}")
