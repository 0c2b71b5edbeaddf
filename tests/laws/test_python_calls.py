"""What a step costs in Python, counted: calls of Python functions in a steady step of each door, which no machine changes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from halfstep import Accelerator, Trainer, TrainerCallback, TrainingArguments
from halfstep.amp import GradScaler, autocast
from halfstep.amp.mode import OpMode
from halfstep.optim import AdamW

BEFORE, STEPS = 6, 10
CALLS = {
    "loop": 460,
    "accelerator": 680,
    "trainer": 650,
}  # a quarter above what they were: hooks and a compiler that other tests have left are called too


class Net(nn.Module):
    """Layers with a loss."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


class Counting:
    """Counts calls of Python functions between the ends of two steps."""

    def __init__(self) -> None:
        self.calls = 0
        self.ended = 0

    def step_ended(self) -> None:
        self.ended += 1
        if self.ended == BEFORE:
            sys.setprofile(self._heard)
        elif self.ended == BEFORE + STEPS:
            sys.setprofile(None)

    def _heard(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"


def batch() -> dict[str, Tensor]:
    return {"x": torch.ones(4, 4), "labels": torch.ones(4, dtype=torch.int64)}


def loop(counting: Counting) -> None:
    model, scaler = Net(), GradScaler(enabled=False)
    optimizer = AdamW(model.parameters())
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(BEFORE + STEPS):
        with autocast("cpu", enabled=False):
            loss = model(**batch())["loss"]
        scaler.scale(loss).backward()
        assert scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        counting.step_ended()


def accelerator(counting: Counting) -> None:
    made = Accelerator(cpu=True)
    plain = Net()
    of_torch = torch.optim.AdamW(plain.parameters(), fused=True)
    model, optimizer, schedule = made.prepare(plain, of_torch, LambdaLR(of_torch, lambda step: 1.0))
    for _ in range(BEFORE + STEPS):
        made.backward(model(**batch())["loss"])
        made.clip_grad_norm_(model.parameters(), 1.0)
        assert optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counting.step_ended()


class Ends(TrainerCallback):
    """Tells of the end of each step."""

    def __init__(self, counting: Counting) -> None:
        self.counting = counting

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Tell."""
        self.counting.step_ended()


def trainer(counting: Counting, path: Path) -> None:
    row = {name: value[0] for name, value in batch().items()}
    quiet: dict[str, Any] = {"logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "report_to": "none"}
    args = TrainingArguments(str(path), max_steps=BEFORE + STEPS, per_device_train_batch_size=4, **quiet)
    Trainer(model=Net(), args=args, train_dataset=[row] * 256, callbacks=[Ends(counting)]).train()


@pytest.mark.parametrize("door", list(CALLS))
def test_a_steady_step_makes_no_more_calls_than_it_did(door: str, tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="the counts are those of the compiled kernels: pip install 'halfstep[cpu]'")
    counting = Counting()
    doors: dict[str, Callable[[], None]] = {
        "loop": lambda: loop(counting),
        "accelerator": lambda: accelerator(counting),
        "trainer": lambda: trainer(counting, tmp_path),
    }
    try:
        doors[door]()
    finally:
        sys.setprofile(None)
    assert counting.ended == BEFORE + STEPS
    assert counting.calls / STEPS <= CALLS[door], "calls a step"


def test_an_op_policy_sees_no_more_of_a_backward_pass_where_there_are_more_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = OpMode.__torch_function__
    monkeypatch.setattr(OpMode, "__torch_function__", lambda self, func, *rest: seen.append(func) or real(self, func, *rest))

    def in_backward(layers: int) -> int:
        made = Accelerator(precision="bf16-mixed,products=native", cpu=True)
        model, optimizer = made.prepare(plain := Net(layers), torch.optim.SGD(plain.parameters(), lr=0.1))
        for _ in range(3):
            loss = model(**batch())["loss"]
            seen.clear()
            made.backward(loss)
            count = len(seen)
            assert optimizer.step()
            optimizer.zero_grad()
        return count

    assert 0 < in_backward(2) == in_backward(9)
