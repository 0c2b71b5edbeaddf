"""Ways in which users broke an earlier state of this library, each with the right result."""

import contextlib
import copy
import math
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import Accelerator, Trainer, TrainerCallback, TrainingArguments
from halfstep.amp import GradScaler, autocast
from halfstep.amp.emulation import Emulation
from halfstep.errors import CheckpointError, ConfigError, StepOrderError
from halfstep.trainer import TrainingInterrupted


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_an_autocast_block_begins_when_it_is_entered_and_may_be_entered_again() -> None:
    block = Accelerator("fp16", cpu=True).autocast()
    assert product() == torch.float32
    for _ in range(2):
        with block, block:
            assert product() == torch.float16
        assert product() == torch.float32


def test_a_checkpoint_does_not_replace_a_folder_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("thesis")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match="is not a checkpoint and is not empty"):
        accelerator.save_state(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "thesis"


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed,scale=static:256"])
def test_clearing_at_the_start_of_a_window_keeps_the_micro_batches_before(precision: str) -> None:
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    accelerator = Accelerator(precision=precision, cpu=True, gradient_accumulation_steps=4)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    weights = []
    for _ in range(2):
        for x in (1.0, 2.0, 3.0, 6.0):
            with accelerator.accumulate(net):
                optimizer.zero_grad()
                accelerator.backward(net(torch.full((1, 1), x)).sum())
                optimizer.step()
        weights.append(net.weight.item())
    assert weights == [-2.0, -5.0]


def test_spent_gradients_of_one_optimizer_do_not_hold_the_scale_of_another() -> None:
    """As in adversarial training: several steps of one optimizer between two of the other, whose gradients nobody clears."""
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second, scaler = torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1), GradScaler(strategy="stock")
    scaler.scale(a.sum()).backward()
    assert scaler.step(first)
    scaler.update()
    scales = []
    for _ in range(3):
        second.zero_grad()
        scaler.scale((b * math.nan).nan_to_num().sum()).backward()
        result = scaler.step(second)
        scaler.update()
        scales.append((result.scale, result.next_scale))
    assert scales == [(65536.0, 32768.0), (32768.0, 16384.0), (16384.0, 8192.0)]


def test_a_backward_pass_after_unscale_is_refused() -> None:
    weight, scaler = nn.Parameter(torch.ones(2)), GradScaler(init_scale=1024.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(StepOrderError, match="added scaled gradients to unscaled ones") as caught:
        scaler.scale(weight.sum()).backward()
    assert "after the last backward pass" in caught.value.remedy
    assert torch.equal(weight.detach(), torch.ones(2))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(("name", "value"), [("lr", math.nan), ("lr", math.inf), ("weight_decay", math.nan)])
def test_a_learning_rate_that_is_no_number_does_not_reach_the_weights(enabled: bool, name: str, value: float) -> None:
    weight, scaler = nn.Parameter(torch.ones(2)), GradScaler(enabled=enabled)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.param_groups[0][name] = value
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ConfigError, match=f"{name} of parameter group 0 is {value}"):
        scaler.step(optimizer)
    assert torch.equal(weight.detach(), torch.ones(2))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.dtype)
        return x


@pytest.mark.parametrize("pattern", ["blocks", "blocks*", "blocks.?"])
def test_a_rule_on_a_container_holds_what_is_in_it(pattern: str) -> None:
    net = Accelerator(precision=f"bf16-mixed,fp32={pattern}", cpu=True).prepare(Blocks())
    net(torch.ones(1, 2))
    assert net.seen == [torch.float32, torch.float32]


def test_an_optimizer_belongs_to_one_accelerator() -> None:
    net = nn.Linear(1, 1)
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="prepared by another accelerator"):
        Accelerator("fp16", cpu=True).prepare(net, optimizer)
    with pytest.raises(ConfigError, match=r"Call optimizer.step\(\)"):
        GradScaler().step(optimizer)


def test_unwrapping_gives_the_model_back_for_another_policy() -> None:
    net, first = nn.Linear(2, 2), Accelerator("bf16", cpu=True)
    first.prepare(net)
    assert first.unwrap_model(net) is net
    assert first.unwrap_model(net, keep_fp32_wrapper=False) is net
    assert "forward" not in net.__dict__
    Accelerator("fp16", cpu=True).prepare(net)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_gradients_of_a_run_without_it(use_reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv1d(2, 4, 3, padding=1), nn.Linear(8, 8)
            self.recompute = False

        def body(self, x: Tensor) -> Tensor:
            y = self.out(self.conv(x)).unsqueeze(1)
            return F.scaled_dot_product_attention(y, y, y)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=use_reentrant) if self.recompute else self.body(x)

    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        accelerator, net = Accelerator("bf16", cpu=True), Net()
        net.recompute = recompute
        accelerator.prepare(net)
        accelerator.backward(net(torch.randn(3, 2, 8, requires_grad=True)).square().sum())
        found.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [False, True])
def test_lstms_run_in_16_bits(dtype: torch.dtype, packed: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(3, 4, 2, bidirectional=True), torch.randn(5, 2, 3)
    given = nn.utils.rnn.pack_padded_sequence(x, [5, 3]) if packed else x

    def data(outputs: Tensor | nn.utils.rnn.PackedSequence) -> Tensor:
        return outputs if isinstance(outputs, Tensor) else outputs.data

    expected = data(layer(given)[0])
    with torch.autocast("cpu", dtype), Emulation():
        got = data(layer(given)[0])
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=2**-6, atol=2**-6)
    got.float().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


class Noisy(torch.utils.data.Dataset):
    """Augments each sample with torch's random numbers, in whatever process it runs."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict:
        return {"x": torch.full((2,), float(i)) / 24 + torch.randn(2), "labels": torch.tensor(float(i))}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.layer(x).squeeze(-1), labels)}


def trainer(place: Path, *callbacks: TrainerCallback, model: nn.Module | None = None, **settings) -> Trainer:
    torch.manual_seed(0)
    defaults = {"output_dir": str(place), "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 2, "max_steps": 8, "save_steps": 3}
    args = TrainingArguments(**(defaults | {"learning_rate": 0.01} | settings))
    return Trainer(model or Regression(), args, train_dataset=Noisy(), eval_dataset=settings.get("eval_steps") and Noisy(), callbacks=callbacks)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            raise InterruptedError


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_goes_on_as_in_an_unbroken_run(tmp_path: Path, workers: int) -> None:
    whole = trainer(tmp_path / "a", dataloader_num_workers=workers)
    whole.train()
    with contextlib.suppress(InterruptedError):
        trainer(tmp_path / "b", StopAt(5), dataloader_num_workers=workers).train()
    resumed = trainer(tmp_path / "b", dataloader_num_workers=workers)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(whole.model.layer.weight, resumed.model.layer.weight)


@pytest.mark.parametrize("change", [{"learning_rate": 0.5}, {"per_device_train_batch_size": 4}, {"weight_decay": 0.1}, {"seed": 7}])
def test_settings_that_a_checkpoint_fixes_are_not_changed_without_a_word(tmp_path: Path, change: dict) -> None:
    with contextlib.suppress(InterruptedError):
        trainer(tmp_path / "run", StopAt(5)).train()
    with pytest.raises(CheckpointError, match=f"and this run has (data_)?{next(iter(change))}="):
        trainer(tmp_path / "run", **change).train(resume_from_checkpoint=True)
    assert trainer(tmp_path / "run", max_steps=10).train(resume_from_checkpoint=True).global_step == 10


def test_missing_evaluation_data_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evaluation needs data"):
        trainer(tmp_path / "run", eval_strategy="steps").train()
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run")
    made.optimizer = torch.optim.SGD(Regression().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="made before the model's parameters were replaced"):
        made.train()


def test_a_configuration_of_the_users_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="was not written by halfstep"):
            trainer(tmp_path, overwrite_output_dir=overwrite).train()
    assert (tmp_path / "config.yaml").read_text() == "mine: 1\n"


class CtrlC(TrainerCallback):
    pressed = False

    def on_prediction_step(self, args, state, control, **kwargs) -> None:
        if state.global_step == 4 and not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def test_an_evaluation_that_ctrl_c_ended_is_made_up_for(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2}
    whole = trainer(tmp_path / "a", **settings)
    whole.train()
    made = trainer(tmp_path / "b", CtrlC(), **settings)
    with pytest.raises(TrainingInterrupted):
        made.train()
    assert made.evaluate()["eval_loss"] > 0, "the interrupt is over"
    resumed = trainer(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=True)
    evaluated = [[(r["step"], r["eval_loss"]) for r in t.state.log_history if "eval_loss" in r] for t in (whole, resumed)]
    assert [step for step, _ in evaluated[0]] == [2, 4, 6, 8]
    assert [step for step, _ in evaluated[1]] == [2, 4, 6, 8]
    assert torch.equal(whole.model.layer.weight, resumed.model.layer.weight)


def test_a_forward_set_on_the_instance_works_in_two_trainers(tmp_path: Path) -> None:
    model = Regression()
    own = model.forward
    model.forward = lambda x, labels: own(x, labels)
    for name in ("a", "b"):
        trainer(tmp_path / name, model=model, bf16=True, max_steps=2).train()


def test_plausible_wrong_arguments_are_answered() -> None:
    calls = [
        lambda: Accelerator(precision=torch.bfloat16),
        lambda: Accelerator(mixed_precision=["bf16"]),
        lambda: Accelerator(gradient_accumulation_steps="4", cpu=True),
        lambda: Accelerator(gradient_accumulation_steps=1.5, cpu=True),
        lambda: autocast(torch.float16),
        lambda: GradScaler().clip_grad_norm_(nn.Parameter(torch.ones(1)), math.nan),
        lambda: TrainingArguments(learning_rate=math.inf),
        lambda: TrainingArguments(output_dir=""),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.remedy


def test_a_copy_of_a_prepared_model_is_a_model_of_its_own() -> None:
    net = Accelerator("bf16", cpu=True).prepare(nn.Linear(2, 2))
    twin = copy.deepcopy(net)
    nn.init.zeros_(twin.weight)
    assert not torch.equal(net(torch.ones(1, 2)), twin(torch.ones(1, 2)))
