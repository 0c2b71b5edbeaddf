"""What a run shows: the precision in force, a bar on a terminal and plain lines elsewhere."""

import io
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from halfstep import Trainer, TrainingArguments
from halfstep.trainer.progress import ProgressCallback


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.layer(x).squeeze(-1), labels)}


DATA = [{"x": torch.tensor([float(i), 1.0]), "labels": float(i)} for i in range(8)]


def shown(place: Path, *, terminal: bool, **settings) -> str:
    screen = io.StringIO()
    progress = ProgressCallback(Console(file=screen, width=160, force_terminal=terminal, highlight=False, soft_wrap=True))
    defaults = {"output_dir": str(place / "run"), "use_cpu": True, "disable_tqdm": True, "max_steps": 4, "save_strategy": "no", "logging_steps": 2}
    args = TrainingArguments(**{**defaults, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 4, **settings})
    Trainer(Regression(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[progress]).train()
    return screen.getvalue()


def test_without_a_terminal_every_record_is_a_line(tmp_path: Path) -> None:
    lines = shown(tmp_path, terminal=False, precision="bf16-mixed").splitlines()
    assert lines[0].startswith("precision bf16-mixed on cpu, bf16 products (")
    numbers = [line for line in lines if re.match(r"step \d/4  loss ", line)]
    assert [line[:8] for line in numbers] == ["step 2/4", "step 4/4"]
    for line in numbers:
        assert re.fullmatch(r"step \d/4  loss \S+  lr \S+  scale 1  [\d,]+ tokens/s  [\d,]+ MiB  eta \d+:\d\d", line)
    assert any(re.fullmatch(r"step 4: eval_loss \S+", line) for line in lines)


def test_on_a_terminal_a_bar_shows_steps_loss_and_rate(tmp_path: Path) -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(tmp_path, terminal=True))
    assert "step 4/4" in text
    assert re.search(r"loss \S+  lr \S+  scale 1  [\d,]+ tokens/s", text)
    assert "eval_loss" in text
    assert "eta" not in text, "the bar has its own"


def test_text_in_brackets_is_not_taken_for_markup(tmp_path: Path) -> None:
    class Named(ProgressCallback):
        def on_train_begin(self, args, state, control, **kwargs) -> None:
            super().on_train_begin(args, state, control, **kwargs | {"resolution": "[bold]precision[/bold]"})

    screen = io.StringIO()
    args = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, disable_tqdm=True, max_steps=1, save_strategy="no")
    Trainer(Regression(), args, train_dataset=DATA, callbacks=[Named(Console(file=screen))]).train()
    assert "[bold]precision[/bold]" in screen.getvalue()
