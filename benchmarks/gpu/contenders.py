"""Who trains a model: plain torch, Accelerate, Lightning Fabric, transformers' Trainer, and halfstep by two doors.

All take the same batches, clip to 1 and step AdamW.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.gpu import models
from benchmarks.gpu.measure import Loop, Runner
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.trainers import FOREVER, Driven, Gate

RATE = 1e-4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Missing(Exception):  # noqa: N818  a reason, not a fault
    """A contender that cannot run here; the text says why."""


def make(name: str, model: str, dtype: str, setting: Setting) -> Runner:
    """A contender with a model and an optimizer of its own on the device, before its first step."""
    library = name.partition(" ")[0]
    if dtype == "fp16" and not setting.is_cuda and library in ("accelerate", "transformers"):
        raise Missing(f"{library} on a CPU runs fp16 as fp32")
    return MAKERS[name](model, dtype, setting)


def batches(model: str, setting: Setting) -> DataLoader[dict[str, Tensor]]:
    """The loader of a hand-written loop: random order, pinned memory on a GPU."""
    size = models.size_of(model, setting.small)
    data = models.Tokens(models.VOCABULARY_SMALL if setting.small else 32000, size["length"])
    return DataLoader(data, batch_size=size["batch"], shuffle=True, collate_fn=models.stacked, pin_memory=setting.is_cuda)


def forever(loader: Any) -> Iterator[Any]:
    """Pass after pass."""
    while True:
        yield from loader


def schedule(optimizer: Any) -> Any:
    """The learning rate that Trainers have by default: down to 0, linearly."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / FOREVER)


def torch_amp(model: str, dtype: str, setting: Setting, update: Callable[[nn.Module], Any] | None = None) -> Runner:
    """A loop as torch's documentation has it. update: makes another optimizer, which may cast the model."""
    device, net = setting.device, models.made(model, setting.small, setting.device).train()
    optimizer = update(net) if update is not None else torch.optim.AdamW(net.parameters(), lr=RATE, fused=True)
    rate, data = schedule(optimizer), forever(batches(model, setting))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")

    def step() -> None:
        batch = {k: v.to(device, non_blocking=True) for k, v in next(data).items()}
        with torch.autocast(device.type, dtype=DTYPES[dtype]):
            loss = net(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        rate.step()
        optimizer.zero_grad()

    return Loop(step, device)


def prepared(accelerator: Any, model: str, setting: Setting, optimizer_of: Callable[[nn.Module], Any]) -> Runner:
    """The loop that Accelerate's documentation has, for its Accelerator and for ours."""
    net = models.made(model, setting.small, setting.device).train()
    optimizer = optimizer_of(net)
    net, optimizer, loader, rate = accelerator.prepare(net, optimizer, batches(model, setting), schedule(optimizer))
    data = forever(loader)

    def step() -> None:
        loss = net(**next(data)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()

    return Loop(step, setting.device)


def fused(net: nn.Module) -> Any:
    """torch's fused AdamW."""
    return torch.optim.AdamW(net.parameters(), lr=RATE, fused=True)


def accelerate(model: str, dtype: str, setting: Setting) -> Runner:
    """Accelerate's loop."""
    from accelerate import Accelerator

    return prepared(Accelerator(mixed_precision=dtype, cpu=not setting.is_cuda), model, setting, fused)


def fabric(model: str, dtype: str, setting: Setting) -> Runner:
    """Lightning Fabric's loop."""
    if dtype == "fp16":
        raise Missing("Lightning Fabric refuses to clip with a fused optimizer in fp16")
    lightning: Any = None
    for name in ("lightning.fabric", "lightning_fabric"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            lightning = importlib.import_module(name)
            break
    else:
        raise Missing("Lightning Fabric is not installed")
    door = lightning.Fabric(accelerator="cuda" if setting.is_cuda else "cpu", devices=1, precision=f"{dtype}-mixed")
    net = models.made(model, setting.small, setting.device).train()
    net, optimizer = door.setup(net, fused(net))
    rate, data = schedule(optimizer.optimizer), forever(door.setup_dataloaders(batches(model, setting)))

    def step() -> None:
        door.backward(net(**next(data)).loss)
        door.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()

    return Loop(step, setting.device)


def transformers(model: str, dtype: str, setting: Setting) -> Runner:
    """transformers' Trainer with its own choice of optimizer, fused AdamW."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class TheirGate(Gate, TrainerCallback):
        """Gate among transformers' callbacks."""

    size, folder = models.size_of(model, setting.small), tempfile.TemporaryDirectory()
    args = TrainingArguments(
        output_dir=folder.name,
        max_steps=FOREVER,
        per_device_train_batch_size=size["batch"],
        learning_rate=RATE,
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not setting.is_cuda,
        dataloader_pin_memory=setting.is_cuda,
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
    )
    gate = TheirGate(setting.device)
    trainer = Trainer(
        models.made(model, setting.small, setting.device),
        args,
        train_dataset=batches(model, setting).dataset,
        data_collator=models.stacked,
        callbacks=[gate],
    )
    return Driven(gate, trainer.train, folder.cleanup)


def halfstep_trainer(model: str, precision: str, setting: Setting) -> Runner:
    """halfstep's Trainer as it comes."""
    from halfstep import Trainer, TrainerCallback, TrainingArguments

    class OurGate(Gate, TrainerCallback):
        """Gate among halfstep's callbacks."""

    size, folder = models.size_of(model, setting.small), tempfile.TemporaryDirectory()
    args = TrainingArguments(
        output_dir=folder.name,
        max_steps=FOREVER,
        per_device_train_batch_size=size["batch"],
        learning_rate=RATE,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not setting.is_cuda,
        precision=precision,
    )
    gate = OurGate(setting.device)
    trainer = Trainer(
        models.made(model, setting.small, setting.device),
        args,
        data_collator=models.stacked,
        train_dataset=batches(model, setting).dataset,
        callbacks=[gate],
    )
    return Driven(gate, trainer.train, folder.cleanup)


def halfstep_loop(model: str, dtype: str, setting: Setting) -> Runner:
    """halfstep's Accelerator in the loop that Accelerate's is in."""
    from halfstep import Accelerator

    return prepared(Accelerator(mixed_precision=dtype, cpu=not setting.is_cuda), model, setting, fused)


def flashoptim(model: str, dtype: str, setting: Setting) -> Runner:
    """A plain loop with FlashOptim's AdamW: 16-bit weights, 24-bit masters, int8 states."""
    needs("flashoptim", setting)

    def update(net: nn.Module) -> Any:
        from flashoptim import FlashAdamW, cast_model

        cast_model(net, dtype=DTYPES[dtype])
        return FlashAdamW(net.parameters(), lr=RATE)

    return torch_amp(model, dtype, setting, update)


def torchao(model: str, dtype: str, setting: Setting) -> Runner:
    """A plain loop with torchao's AdamW: 16-bit weights rounded stochastically, 8-bit states."""
    needs("torchao", setting)

    def update(net: nn.Module) -> Any:
        from torchao.optim import AdamW8bit

        net.to(DTYPES[dtype])
        return AdamW8bit(net.parameters(), lr=RATE, bf16_stochastic_round=True)

    return torch_amp(model, dtype, setting, update)


def needs(package: str, setting: Setting) -> None:
    """Raise Missing where a peer is not there, or needs a GPU."""
    if importlib.util.find_spec(package) is None:
        raise Missing(f"{package} is not installed (benchmarks/gpu.sh --install)")
    if not setting.is_cuda:
        raise Missing(f"{package} needs a GPU")


MAKERS: Mapping[str, Callable[[str, str, Setting], Runner]] = {
    "torch": torch_amp,
    "torch again": torch_amp,
    "accelerate": accelerate,
    "fabric": fabric,
    "transformers": transformers,
    "flashoptim": flashoptim,
    "torchao": torchao,
    "halfstep trainer": lambda model, dtype, setting: halfstep_trainer(model, f"{dtype}-mixed", setting),
    "halfstep loop": halfstep_loop,
    "halfstep lean": lambda model, dtype, setting: halfstep_trainer(model, f"{dtype}-lean", setting),
    "halfstep lean split24": lambda model, dtype, setting: halfstep_trainer(model, f"{dtype}-lean,weights=split24", setting),
}
MIXED_PEERS = ("torch", "accelerate", "fabric", "transformers")  # fp32 weights and states, as under *-mixed
LEAN_PEERS = ("flashoptim", "torchao")
