"""A model that was loaded in 16 bits trains as one loaded in fp32 does, through each door and with every optimizer of theirs."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep import Accelerator, Trainer, TrainingArguments
from halfstep.optim import full_values, master_of
from halfstep.policy import parse

LOADED = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS, RATE = 20, 1e-5


class Net(nn.Module):
    """Every parameter gets a gradient that is not 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.body(x).float(), labels)}


class Pixels(nn.Module):
    """A convolution net with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten(), nn.Linear(24, 4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.body(x.view(-1, 1, 4, 4)).float(), labels)}


SIZES = {Net: 8, Pixels: 16}


def rows(size: int = 8, count: int = 64) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(size, generator=made), "labels": torch.tensor(i % 4)} for i in range(count)]


def batches(size: int) -> list[dict[str, Tensor]]:
    data = rows(size, 8 * STEPS)
    return [{key: torch.stack([row[key] for row in data[i : i + 8]]) for key in data[0]} for i in range(0, len(data), 8)]


Make = Callable[[nn.Module], torch.optim.Optimizer]


def by_loop(model: nn.Module, precision: str, make: Make, size: int) -> None:
    policy = parse(precision)
    halfstep.amp.bind(model, policy, torch.device("cpu"))
    optimizer, scaler = make(model), halfstep.amp.GradScaler("cpu", enabled=policy.scale.kind != "none")
    if not isinstance(optimizer, halfstep.optim.MasteredOptimizer):
        optimizer = halfstep.optim.wrap(optimizer)
    for batch in batches(size):
        scaler.scale(model(**batch)["loss"]).backward()
        assert scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def by_accelerator(model: nn.Module, precision: str, make: Make, size: int) -> None:
    accelerator = Accelerator(precision=precision, cpu=True)
    model, optimizer = accelerator.prepare(model, make(model))
    for batch in batches(size):
        accelerator.backward(model(**batch)["loss"])
        assert optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS: dict[str, Make] = {
    "torch": lambda m: torch.optim.AdamW(m.parameters(), lr=RATE),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=RATE, fused=True),
    "halfstep": lambda m: halfstep.optim.AdamW(m.parameters(), lr=RATE),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=RATE, momentum=0.9),
}


def moved(before: list[Tensor], model: nn.Module) -> float:
    """The share of weights whose value is another now."""
    pairs = zip(before, model.parameters(), strict=True)
    return float(torch.cat([(a.float() != full_values(p)).flatten() for a, p in pairs]).float().mean())


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log lines about masters for weights that were loaded in 16 bits."""
    return [m for m in caplog.messages if "master" in m and "loaded in 16 bits" in m] + [m for m in caplog.messages if "had no master" in m]


@pytest.mark.parametrize("door", [by_loop, by_accelerator])
@pytest.mark.parametrize("form", LOADED)
@pytest.mark.parametrize(("kind", "name"), [*((Net, name) for name in OPTIMIZERS), (Pixels, "torch")])
def test_weights_loaded_in_16_bits_move_and_do_so_as_in_fp32(
    kind: type[nn.Module], form: str, door: Callable, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = kind().to(LOADED[form]), kind().to(LOADED[form]).float()
    before = [p.detach().clone() for p in model.parameters()]
    with caplog.at_level(logging.INFO, "halfstep"):
        door(model, f"{form}-mixed", OPTIMIZERS[name], SIZES[kind])
    assert len(told(caplog)) == 1
    assert moved(before, model) > 0.99
    assert {p.dtype for p in model.parameters() if p.dim() > 1} == {LOADED[form]}
    door(twin, f"{form}-mixed", OPTIMIZERS[name], SIZES[kind])
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(full_values(p), other, rtol=0, atol=STEPS * 2.0**-23 * float(other.detach().abs().max()))
    for b, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert b.dtype == other.dtype
        assert torch.equal(b, other), "the forward pass is that of the model loaded in fp32"


def trainer(model: nn.Module, place: Path, **settings) -> Trainer:
    flags = {"output_dir": str(place), "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    schedule = {"max_steps": STEPS, "learning_rate": RATE, "lr_scheduler_type": "constant", "per_device_train_batch_size": 8}
    return Trainer(model, TrainingArguments(**{**flags, **schedule, **settings}), train_dataset=rows())


@pytest.mark.parametrize("settings", [{}, {"optim": "adamw_torch_fused"}, {"optim": "adamw_torch"}, {"optim": "sgd"}])
@pytest.mark.parametrize("flag", ["bf16", "fp16"])
def test_a_model_loaded_in_16_bits_moves_in_the_trainer(flag: str, settings: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, twin = Net().to(LOADED[flag]), Net().to(LOADED[flag]).float()
    before = [p.detach().clone() for p in model.parameters()]
    with caplog.at_level(logging.INFO, "halfstep"):
        trainer(model, tmp_path / "run", **{flag: True}, **settings).train()
    assert len(told(caplog)) == 1
    assert moved(before, model) > 0.99
    assert all(master_of(p) is not None for p in model.parameters() if p.dim() > 1)
    trainer(twin, tmp_path / "twin", **{flag: True}, **settings).train()
    worst = max(float((full_values(p) - q.detach()).abs().max()) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert worst <= 1e-6, "as far as 20 steps of the fp32 twin went, to a twentieth of one step"


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean", "bf16-true", "fp16-true"])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_presets_with_16_bit_weights_move_them_whatever_they_were_loaded_in(precision: str, loaded: torch.dtype) -> None:
    model = Net().to(loaded)
    before = [p.detach().clone() for p in model.parameters()]
    by_accelerator(model, precision, OPTIMIZERS["torch"], SIZES[Net])
    assert moved(before, model) > 0.99
    assert {p.dtype for p in model.parameters() if p.dim() > 1} == {LOADED[precision[:4]]}


@pytest.mark.parametrize("form", LOADED)
def test_plain_16_bit_weights_by_request_do_not_move_at_this_rate(form: str) -> None:
    model = Net().to(LOADED[form])
    before = [p.detach().clone() for p in model.parameters()]
    by_accelerator(model, f"{form}-mixed,weights=plain", OPTIMIZERS["torch"], SIZES[Net])
    assert moved(before, model) < {"bf16": 0.2, "fp16": 0.8}[form]


def test_transformers_default_load_of_a_16_bit_gpt2_moves_with_its_tied_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    before = [p.detach().clone() for p in model.parameters()]
    ids = torch.randint(0, 32, (64, 16), generator=torch.Generator().manual_seed(2))
    args = TrainingArguments(
        str(tmp_path / "run"), bf16=True, use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=STEPS, learning_rate=RATE
    )
    with caplog.at_level(logging.INFO, "halfstep"):
        Trainer(model, args, train_dataset=[{"input_ids": i, "labels": i} for i in ids]).train()
    assert len(told(caplog)) == 1
    assert moved(before, model) > 0.99
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert master_of(model.lm_head.weight) is not None, "rows are looked up in the master"
    assert model.transformer.h[0].mlp.c_fc.weight.dtype == torch.bfloat16
