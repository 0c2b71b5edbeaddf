"""How many steps does a run in fp16 lose to its loss scale?

Trains a small net with BatchNorm and dropout for 2,000 steps by the Trainer, from several starting scales, with a short window so that the
scale would grow forty times under torch's rule; and, for comparison, by a loop under torch's GradScaler. Counts steps that were not applied.
Run: python benchmarks/lost_steps.py [--steps 2000]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import Trainer, TrainingArguments
from halfstep.amp import autocast
from halfstep.hardware import doctor

STARTS = (0, 16, 32)  # exponents of the starting scales
WINDOW, BATCH = 50, 8


class Net(nn.Module):
    """Regression with everything that a repeated step must put back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and predictions of a batch."""
        predicted = self.net(x)
        return {"loss": nn.functional.mse_loss(predicted.float(), labels), "logits": predicted}


def rows() -> list[dict[str, Tensor]]:
    features = torch.randn(512, 16, generator=torch.Generator().manual_seed(0)) * 4
    return [{"x": row, "labels": row.sum(0, keepdim=True) * 8} for row in features]


def by_trainer(start: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    quiet: dict[str, Any] = {"logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    precision = f"fp16-mixed,scale=dynamic:2^{start},scale_window={WINDOW}"
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, max_steps=steps, precision=precision, learning_rate=3e-3, per_device_train_batch_size=BATCH, **quiet)
        trainer = Trainer(Net(), args, train_dataset=rows())
        trainer.train()
    return {"lost": trainer.state.skipped_steps, "replayed": trainer.state.replayed_steps, "scale": trainer.accelerator.scaler.get_scale()}


def by_torch(start: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net, data, generator = Net(), rows(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**start, growth_interval=WINDOW)
    lost = 0
    for _ in range(steps):
        chosen = [data[i] for i in torch.randint(0, len(data), (BATCH,), generator=generator).tolist()]
        with autocast("cpu", torch.float16):
            loss = net(torch.stack([r["x"] for r in chosen]), torch.stack([r["labels"] for r in chosen]))["loss"]
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        lost += scaler.get_scale() < before
    return {"lost": lost, "scale": scaler.get_scale()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    found = {f"2^{e}": {"halfstep.Trainer": by_trainer(e, steps), "torch.amp.GradScaler": by_torch(e, steps)} for e in STARTS}
    print(json.dumps({"steps": steps, "window": WINDOW, "machine": doctor("cpu").as_dict(), "starts": found}, indent=1))


if __name__ == "__main__":
    main()
