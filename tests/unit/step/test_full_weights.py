"""An fp16 weight that has reached the largest number of its format is said, once, with its name and the remedy."""

import warnings

import pytest
import torch
from torch import nn

import halfstep
from halfstep.amp import GradScaler
from halfstep.optim import AdamW
from halfstep.step.watching import FP16_LIMIT


class Growing:
    """Two fp16 weights, one of which grows by `lr` a step."""

    def __init__(self, every: int = 2, lr: float = 20000.0) -> None:
        self.model = nn.ModuleDict({"still": nn.Linear(2, 1), "grows": nn.Linear(2, 1, bias=False)}).half()
        with torch.no_grad():
            self.model["grows"].weight.fill_(30000.0)
        still, grows = self.model["still"].parameters(), self.model["grows"].parameters()
        self.optimizer = AdamW([{"params": [*still], "lr": 0.0}, {"params": [*grows]}], lr=lr, weight_decay=0.0)
        self.scaler = GradScaler(enabled=False)
        self.scaler.name_parameters(self.model.named_parameters())
        self.scaler._engine.state.watching.every = every

    def step(self) -> halfstep.StepResult:
        for p in self.model.parameters():
            p.grad = -torch.ones_like(p)
        return self.scaler.step(self.optimizer)


def test_it_is_said_once_and_stays_in_the_watch() -> None:
    loop = Growing()
    assert loop.step().watch.near == ()  # not a sampled step: nothing was measured
    with pytest.warns(UserWarning, match=r"grows\.weight has weights that have reached fp16's largest number, 65504, by step 2.*fp32=grows") as said:
        result = loop.step()
    assert len(said) == 1
    assert loop.model["grows"].weight.max().item() == FP16_LIMIT
    assert result.watch.near == ("grows.weight",)
    assert str(result.watch) == "close to fp16's limit: grows.weight weight 65504 of 65504 (step 2)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [loop.step().watch.near for _ in range(4)] == [("grows.weight",)] * 4


def test_a_weight_that_comes_near_is_in_the_watch_and_not_warned_of() -> None:
    loop = Growing(lr=1500.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.step()
        result = loop.step()
    assert [(c.name, c.what, c.step) for c in result.watch.close] == [("grows.weight", "weight", 2)]
    saved = loop.scaler._engine.state.watching.plain([loop.optimizer])
    other = Growing(lr=1500.0)
    other.scaler._engine.state.watching.take_over(saved, [other.optimizer])
    assert other.step().watch.near == ("grows.weight",)
    del saved["optimizers"][0]["weights"]  # a checkpoint of before
    other.scaler._engine.state.watching.take_over(saved, [other.optimizer])
    assert other.step().watch.weights is not None


def test_other_formats_are_not_measured() -> None:
    loop = Growing()
    loop.model.float()
    assert all(loop.step().watch.weights is None for _ in range(3))


def test_the_trainer_says_it(tmp_path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            with torch.no_grad():
                self.layer.weight.fill_(32000.0)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": -(self.layer(x).float() * 1e-3).mean()}

    args = halfstep.TrainingArguments(
        str(tmp_path), use_cpu=True, disable_tqdm=True, max_steps=100, precision="fp16-true", learning_rate=1000.0, save_strategy="no",
        logging_steps=100, lr_scheduler_type="constant", per_device_train_batch_size=1,
    )  # fmt: skip
    run = halfstep.Trainer(Net(), args, train_dataset=[{"x": torch.ones(1) * 1e-3}] * 4)
    with pytest.warns(UserWarning, match=r"layer\.weight has weights that have reached fp16's largest number, 65504, by step 100"):
        run.train()
    assert any("layer.weight weight 65504" in r.get("near", "") for r in run.state.log_history)
