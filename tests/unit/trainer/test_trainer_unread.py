"""In a training step nobody reads a model's outputs but its loss: they stay in 16 bits, and no number of the training changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Trainer, TrainingArguments, amp
from halfstep.amp.mode import inside
from halfstep.policy import parse

CPU = torch.device("cpu")


class Net(nn.Module):
    """Notes the dtypes of its logits, as who calls it gets them; a bound teacher inside is read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)
        self.__dict__["teacher"] = nn.Linear(4, 3)
        amp.bind(self.teacher, parse("bf16-mixed"), CPU)
        self.__dict__["taught"] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        with torch.no_grad():
            self.taught.append(self.teacher(x).dtype)
        return {"loss": nn.functional.cross_entropy(logits, labels).to(logits.dtype), "logits": logits}


class Noting(Trainer):
    """Notes what calls of the model give."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **more: Any) -> Any:
        """As ever, noted by a hook."""
        seen: list[torch.dtype] = []
        hook = model.register_forward_hook(lambda m, a, out: seen.append(out["logits"].dtype))
        found = super().compute_loss(model, inputs, return_outputs, **more)
        hook.remove()
        self.seen = [*getattr(self, "seen", []), (return_outputs, *seen, (found[0] if return_outputs else found).dtype)]
        return found


def trained(path: Path, kind: type[Trainer], precision: str, **more: Any) -> tuple[Trainer, Net]:
    rows = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(n)), "labels": n % 3} for n in range(16)]
    args = TrainingArguments(str(path), max_steps=4, per_device_train_batch_size=4, precision=precision, use_cpu=True, report_to="none", **more)
    model = Net()
    trainer = kind(model=model, args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return trainer, model


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_outputs_stay_in_16_bits_where_only_the_loss_is_used_and_the_loss_is_fp32(tmp_path: Path, precision: str) -> None:
    trainer, model = trained(tmp_path, Noting, precision)
    half = parse(precision).dtype
    assert trainer.seen == [(False, half, torch.float32)] * 4
    assert set(model.taught) == {torch.float32}, "a bound module inside is read, and cast up as ever"
    trainer.seen = []
    trainer.evaluate()
    assert set(trainer.seen) == {(True, torch.float32, torch.float32)}
    assert not inside.unread


def test_the_numbers_are_those_of_outputs_that_were_cast_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, unread = trained(tmp_path / "a", Trainer, "bf16-mixed", gradient_accumulation_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr("halfstep.amp.mode.Unread.__enter__", lambda self: None)
        trainer, read = trained(tmp_path / "b", Noting, "bf16-mixed", gradient_accumulation_steps=2)
        assert trainer.seen[0][1] is torch.float32
    assert all(torch.equal(p, q) for p, q in zip(unread.parameters(), read.parameters(), strict=True))


def test_a_loss_function_of_the_users_own_gets_fp32(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def loss(outputs: dict[str, Tensor], labels: Tensor, **_: Any) -> Tensor:
        seen.append(outputs["logits"].dtype)
        return outputs["loss"]

    rows = [{"x": torch.ones(4), "labels": 1}] * 4
    args = TrainingArguments(str(tmp_path), max_steps=2, precision="bf16-mixed", use_cpu=True, report_to="none", remove_unused_columns=False)

    class WithLabels(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(x, torch.ones(len(x), dtype=torch.int64))

    Trainer(model=WithLabels(), args=args, train_dataset=rows, compute_loss_func=loss).train()
    assert set(seen) == {torch.float32}
