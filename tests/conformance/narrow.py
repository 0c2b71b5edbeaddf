"""Weights that are 16 bits wide (kind A)."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from conformance.adapter import Library, Record, collector
from conformance.tools import BF16, F16, F32, copies, near, read

RECORDS: list[Record] = []
record = collector(RECORDS, "A")


@record(
    "default-load-is-bf16",
    "a bf16 checkpoint loaded with transformers' defaults, trained with bf16=True at lr 2e-5 for ten steps",
    today="most weights never move: the update is under half a unit in the last place, and nothing is said",
    right="more than 99 % of the weights moved, or a refusal that says to load in fp32",
    check=lambda share: share > 0.99,
    refused=("float32",),
    refs=("F9", "case 49"),
    doors=("trainer",),
)
def default_load(library: Library) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": (ids := torch.randint(0, 64, (16,), generator=generator)), "labels": ids} for _ in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(BF16).save_pretrained(folder)  # type: ignore[arg-type]
        model = AutoModelForCausalLM.from_pretrained(folder)
        before = [library.full(p).float() for p in model.parameters()]
        settings = {"learning_rate": 2e-5, "lr_scheduler_type": "constant", "logging_strategy": "no"}
        library.trainer(model, rows, folder, max_steps=10, per_device_train_batch_size=8, bf16=True, **settings).train()
    changed = torch.cat([(a != library.full(b).float()).flatten() for a, b in zip(before, model.parameters(), strict=True)])
    return float(changed.float().mean())


@record(
    "half-loaded-model-and-fp16-amp",
    "a model loaded in fp16 is trained with fp16 autocast, scaler and clipping",
    today="ValueError: Attempting to unscale FP16 gradients, at the first clip, without a name or a remedy",
    right="works with fp32 masters, or is refused with the parameter and the remedy",
    check=lambda v: v,
    refused=("weight", "float32"),
    refs=("F15", "case 23"),
    doors=("loop", "accelerator"),
)
def half_loaded(library: Library) -> Any:
    net = nn.Sequential(nn.Linear(4, 4)).to(F16)
    run = library.run(net, [SGD(net.parameters(), lr=0.1)])
    before = copies(net.parameters())
    run.backward(run.forward(torch.ones(1, 4)).float().sum() / 64)
    run.clip(1.0)
    run.step()
    return any(bool((a != b).any()) for a, b in zip(before, net.parameters(), strict=True))


@record(
    "half-adapter-on-a-frozen-half-base",
    "a frozen fp16 base with a trainable fp16 adapter (LoRA), fp16 autocast and scaler",
    today="ValueError: Attempting to unscale FP16 gradients",
    right="works with fp32 masters, or is refused with the adapter's name and the remedy",
    check=lambda v: v,
    refused=("adapter", "float32"),
    refs=("case 23", "F15"),
)
def half_adapter(library: Library) -> Any:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.adapter(x)  # type: ignore[no-any-return]

    net = Adapted().to(F16)
    net.base.requires_grad_(False)
    scaler, optimizer = library.scaler(8.0), SGD(net.adapter.parameters(), lr=0.1)
    library.watch(scaler, net, optimizer)
    before = copies(net.adapter.parameters())
    with library.autocast(F16):
        loss = net(torch.ones(1, 4)).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    return any(bool((a != b).any()) for a, b in zip(before, net.adapter.parameters(), strict=True))


@record(
    "frozen-half-base-and-fp32-adapter",
    "a frozen fp16 base with a trainable fp32 adapter: the right way to do LoRA in fp16",
    today="right",
    right="the adapter moves, the base does not",
    check=lambda v: v["adapter"] and not v["base"] and v["size"] < 1.0,
    refs=("case 23",),
    stock="right",
)
def fp32_adapter(library: Library) -> Any:
    base, adapter = nn.Linear(4, 4).to(F16).requires_grad_(False), nn.Linear(4, 4)
    scaler, optimizer = library.scaler(1024.0), SGD(adapter.parameters(), lr=0.1)
    before = copies([*base.parameters(), *adapter.parameters()])
    with library.autocast(F16):
        loss = (base(torch.ones(1, 4, dtype=F16)) + adapter(torch.ones(1, 4))).float().sum() / 4
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    changed = [bool((a != b).any()) for a, b in zip(before, [*base.parameters(), *adapter.parameters()], strict=True)]
    size = float((before[2] - adapter.weight.detach()).abs().max())
    return {"base": any(changed[:2]), "adapter": all(changed[2:]), "size": size}


def _narrow_weights(library: Library, start: float, gradients: list[float], make: Any) -> tuple[nn.Parameter, Optimizer]:
    """Steps of an optimizer on a bf16 weight with given gradients, by the loop for bf16."""
    w = nn.Parameter(torch.full((4,), start, dtype=BF16))
    optimizer, scaler = library.masters(make([w])), library.scaler(enabled=False)
    library.watch(scaler, optimizer)
    for g in gradients:
        optimizer.zero_grad()
        scaler.scale((w * g).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return w, optimizer


@record(
    "bf16-weights-stop-moving",
    "a bf16 weight of 1 under AdamW with lr 1e-3, 40 steps",
    today="it never moves: the step is under half the spacing of bf16",
    right="0.96, or a refusal that says to use float32",
    check=lambda v: near(v, 0.96, 0.01),
    refused=("float32",),
    refs=("case 37", "F7"),
)
def stop_moving(library: Library) -> Any:
    w, _ = _narrow_weights(library, 1.0, [1.0] * 40, lambda ps: AdamW(ps, lr=1e-3, weight_decay=0.0))
    return read(w)[0]


@record(
    "weight-decay-is-lost-in-bf16",
    "a bf16 weight of 1 under AdamW with lr 1e-3 and weight decay 0.1, 100 steps of zero gradient",
    today="1.0: w x 0.9999 rounds to w",
    right="0.990, or a refusal that says to use float32",
    check=lambda v: near(v, 0.99, 4e-3),
    refused=("float32",),
    refs=("F7", "case 38"),
)
def decay_lost(library: Library) -> Any:
    w, _ = _narrow_weights(library, 1.0, [0.0] * 100, lambda ps: AdamW(ps, lr=1e-3, weight_decay=0.1))
    return read(w)[0]


@record(
    "second-moment-is-stuck-in-bf16",
    "one gradient of 10, then 100 of 0.01, bf16 weight under Adam",
    today="0.1 for good: v x 0.999 rounds back to v",
    right="0.1 x 0.999^100 = 0.0905, or a refusal that says to use float32",
    check=lambda v: near(v, 0.0905, 0.01),
    refused=("float32",),
    refs=("F8", "case 39"),
)
def moment_stuck(library: Library) -> Any:
    w, optimizer = _narrow_weights(library, 0.0, [10.0] + [0.01] * 100, lambda ps: torch.optim.Adam(ps, lr=1e-3))
    return float(optimizer.state[w]["exp_avg_sq"][0])


@record(
    "gradients-accumulated-in-bf16",
    "400 micro-batches of gradient 1 into a bf16 weight",
    today="the sum stops at 256",
    right="400, or a refusal that says to use float32",
    check=lambda v: near(v, 400.0, 1e-3),
    refused=("float32",),
    refs=("F14", "case 42"),
)
def accumulated_in_bf16(library: Library) -> Any:
    w = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer, scaler = library.masters(SGD([w], lr=1.0)), library.scaler(enabled=False)
    library.watch(scaler, optimizer)
    for _ in range(400):
        scaler.scale(w.float().sum()).backward()
    assert w.grad is not None
    grad = float(w.grad[0])
    scaler.step(optimizer)
    return grad


@record(
    "fp32-gradients-of-bf16-weights",
    "w.grad_dtype = float32 on a bf16 weight, AdamW",
    today="RuntimeError in the optimizer",
    right="the step is taken, or refused with the remedy",
    check=lambda v: v,
    refused=("float32",),
    refs=("F16",),
)
def fp32_gradients(library: Library) -> Any:
    w = nn.Parameter(torch.ones(4, dtype=BF16))
    w.grad_dtype = F32
    optimizer, scaler = library.masters(AdamW([w], lr=0.1)), library.scaler(enabled=False)
    library.watch(scaler, optimizer)
    scaler.scale(w.float().sum()).backward()
    scaler.step(optimizer)
    return read(w)[0] < 1.0


@record(
    "clipping-16-bit-gradients",
    "gradients of 30000 in fp16, clipped by torch's clip_grad_norm_ under a scaler that is off",
    today="the norm overflows in fp16 and every gradient becomes 0",
    right="an update of norm 1, or not applied, or a refusal that says to use float32",
    check=lambda v: near(v, 1.0, 0.01),
    refused=("float32",),
    refs=("case 50",),
    pending="torch's own function sums squares of fp16 gradients in fp16, and leaves zeros that look like any gradient",
)
def clipping_narrow(library: Library) -> Any:
    w = nn.Parameter(torch.zeros(100, dtype=F16))
    optimizer, scaler = library.masters(SGD([w], lr=1.0)), library.scaler(enabled=False)
    library.watch(scaler, optimizer)
    scaler.scale((w.float() * 30000.0).sum()).backward()
    clip_grad_norm_([w], 1.0)
    scaler.step(optimizer)
    return float(w.detach().float().norm())


@record(
    "clipping-16-bit-gradients-with-the-librarys-function",
    "gradients of 30000 in fp16, clipped by the library's own function under a scaler that is off",
    today="the norm overflows in fp16 and every gradient becomes 0",
    right="an update of norm 1",
    check=lambda v: near(v, 1.0, 0.01),
    refs=("case 50",),
)
def clipping_narrow_well(library: Library) -> Any:
    w = nn.Parameter(torch.zeros(100, dtype=F16))
    optimizer, scaler = library.masters(SGD([w], lr=1.0)), library.scaler(enabled=False)
    library.watch(scaler, optimizer)
    scaler.scale((w.float() * 30000.0).sum()).backward()
    library.clip(scaler, optimizer, [w], 1.0)
    scaler.step(optimizer)
    return float(w.detach().float().norm())


@record(
    "stock-optimizer-on-bf16-weights",
    "bf16 weights under torch's AdamW in the loop for bf16: nothing keeps their small updates",
    today="not a word",
    right="a warning, or a refusal, that names the parameter and says to use float32",
    check=lambda v: "weight" in v and "float32" in v,
    refused=("weight", "float32"),
    refs=("F7", "case 37"),
)
def stock_optimizer(library: Library) -> Any:
    net, scaler = nn.Sequential(nn.Linear(4, 4)).to(BF16), library.scaler(enabled=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        library.watch(scaler, net, AdamW(net.parameters()))
    return " ".join(str(w.message) for w in said)


@record(
    "half-loaded-model-in-the-trainer",
    "a model loaded in fp16, trained with fp16=True and clipping at lr 1e-5 for ten steps",
    today="ValueError: Attempting to unscale FP16 gradients on a GPU; on a CPU most weights never move",
    right="more than 99 % of the weights moved, or a refusal that says to load in fp32",
    check=lambda share: share > 0.99,
    refused=("float32",),
    refs=("F15", "F9"),
    doors=("trainer",),
)
def half_loaded_trainer(library: Library) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.body(x.to(next(self.parameters()).dtype)).float().squeeze(-1) - labels).square().mean()}

    net, data = Net().to(F16), torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(8, generator=data), "labels": float(i % 3)} for i in range(64)]
    before = [library.full(p).float() for p in net.parameters()]
    settings = {"learning_rate": 1e-5, "lr_scheduler_type": "constant", "logging_strategy": "no", "max_grad_norm": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        library.trainer(net, rows, folder, max_steps=10, per_device_train_batch_size=8, fp16=True, **settings).train()
    changed = torch.cat([(a != library.full(b).float()).flatten() for a, b in zip(before, net.parameters(), strict=True)])
    return float(changed.float().mean())


@record(
    "half-cast-model-and-fp32-inputs",
    "model.to(bfloat16) with fp32 inputs: Linear, LayerNorm and Conv1d",
    today="three errors in three wordings; none names a module",
    right="works, or a refusal that names the parameter and the remedy",
    check=lambda v: v,
    refused=("weight", "float32"),
    refs=("case 67",),
    doors=("accelerator",),
)
def half_cast(library: Library) -> Any:
    shapes = ((nn.Linear(4, 4), (2, 4)), (nn.LayerNorm(4), (2, 4)), (nn.Conv1d(2, 2, 1), (1, 2, 4)))
    return [float(library.accelerator("bf16").prepare(m.to(BF16))(torch.ones(shape)).detach().sum()) for m, shape in shapes]


@record(
    "casting-after-prepare",
    "the model is prepared, then cast: model.to(bfloat16) (a line left over from an older script)",
    today="trains bf16 weights without a word: an update of 2e-4 is lost",
    right="the update is kept, or a refusal that names the weight and says what happened since prepare",
    check=lambda v: near(v, 1.0 - 40 * 2e-4, 1e-3),
    refused=("weight", "bf16", "prepare"),
    refs=("case 37",),
    doors=("accelerator",),
)
def casting_after_prepare(library: Library) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    accelerator = library.accelerator("bf16")
    model, optimizer = accelerator.prepare(layer, SGD(layer.parameters(), lr=2e-4))
    model.to(BF16)
    for _ in range(40):
        accelerator.backward(model(torch.ones(1, 1, dtype=BF16)).float().sum())
        optimizer.step()
        optimizer.zero_grad()
    return read(layer.weight)[0]
