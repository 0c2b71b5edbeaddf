"""A run of the trainer in which the data of one rank fail in the second step."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halfstep


class Data(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.read += 1
        if os.environ["RANK"] == "1" and self.read > 4:
            raise OSError("the data of rank 1 are gone")
        return {"x": torch.ones(4), "labels": 0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.body(x), labels)}


if __name__ == "__main__":
    torch.manual_seed(0)
    args = halfstep.TrainingArguments(
        output_dir=str(Path(sys.argv[1]) / "run"), per_device_train_batch_size=4, max_steps=20, use_cpu=True, disable_tqdm=True, ddp_timeout=600
    )
    halfstep.Trainer(Net(), args, train_dataset=Data()).train()
