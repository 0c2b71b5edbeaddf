"""`gradient_release` of the Trainer: the numbers without clipping, the modes of clipping, what is left behind and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Trainer, TrainingArguments
from halfstep.errors import ConfigError
from halfstep.optim import handle_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.body(x), labels)}


DATA = [{"x": torch.randn(6, generator=torch.Generator().manual_seed(i)), "labels": torch.tensor(i % 3)} for i in range(24)]


def run(folder: Path, **settings: Any) -> tuple[list[Tensor], Trainer]:
    shared = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    trainer = Trainer(Model(), TrainingArguments(str(folder), save_strategy="no", **shared | settings), train_dataset=DATA)
    trainer.train()
    return [p.detach().clone() for p in trainer.model.parameters()], trainer


CASES: list[dict[str, Any]] = [
    {"bf16": True},
    {"fp16": True, "on_overflow": "skip"},
    {"precision": "bf16-lean,weights=split24", "gradient_accumulation_steps": 2},
    {"optim": "sgd"},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_without_clipping_a_run_is_the_run_without_release(settings: dict[str, Any], tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "plain", max_grad_norm=0.0, **settings)
    released, trainer = run(tmp_path / "released", max_grad_norm=0.0, gradient_release=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(plain, released, strict=True))
    assert all(handle_of(p) is None for p in trainer.model.parameters())  # nothing is left behind
    assert trainer.state.global_step == (3 if settings.get("gradient_accumulation_steps") != 2 else 2) * 2


@pytest.mark.parametrize("mode", [True, "last", "per_parameter"])
def test_max_grad_norm_clips_by_the_mode(mode: Any, tmp_path: Path) -> None:
    free, _ = run(tmp_path / "free", max_grad_norm=0.0, gradient_release=True, optim="sgd", max_steps=1)
    clipped, trainer = run(tmp_path / "clipped", max_grad_norm=1e-3, gradient_release=mode, optim="sgd", max_steps=1)
    begun = [p.detach() for p in Model().parameters()]
    far, near = (sum(float((p - q).norm()) for p, q in zip(after, begun, strict=True)) for after in (free, clipped))
    assert 0 < near < far / 10
    assert trainer.state.log_history[0]["grad_norm"] > 1e-3  # before clipping


def test_a_step_that_was_applied_in_part_is_in_the_log(tmp_path: Path) -> None:
    class Spoilt(Trainer):
        def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
            hook = model.body[0].weight.register_hook(lambda g: g * float("nan")) if self.state.global_step == 1 else None  # type: ignore[union-attr]
            loss = super().training_step(model, inputs, num_items_in_batch)
            if hook is not None:
                hook.remove()
            return loss

    args = TrainingArguments(str(tmp_path), max_steps=3, use_cpu=True, disable_tqdm=True, gradient_release=True, save_strategy="no", logging_steps=1)
    trainer = Spoilt(Model(), args, train_dataset=DATA)
    trainer.train()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    partly = [r for r in records if r.get("reason") == "partly"]
    assert len(partly) == 1
    assert partly[0]["culprits"] == ["body.0.weight (backward: nan)"]
    assert "1 of 4 parameters stayed" in partly[0]["detail"]
    assert trainer.state.global_step == 3
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gradient_release": "per_parameter", "max_grad_norm": 0.0}, "clips nothing"),
    ({"gradient_release": True, "log_stalled": True}, "log_stalled"),
    ({"gradient_release": True, "fp16": True}, "half applied"),
    ({"gradient_release": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
    ({"gradient_release": "global"}, "gradient_release='global' is not known"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_settings_that_contradict_it_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainingArguments("here", **settings)


def test_texts_are_read() -> None:
    assert TrainingArguments.from_dict({"output_dir": "here", "gradient_release": "true"}).gradient_release == "last"
    assert TrainingArguments.from_dict({"output_dir": "here", "gradient_release": "per_parameter"}).gradient_release == "per_parameter"
