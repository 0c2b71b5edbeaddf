"""Saving, loading and resuming runs whose weights or states are not all in one dtype (kind L)."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from conformance.adapter import Library, Record, collector
from conformance.tools import BF16, F16, F32, copies, near, read, same

RECORDS: list[Record] = []
record = collector(RECORDS, "L")


def _moments(optimizer: Optimizer, p: Tensor) -> list[Tensor]:
    state = optimizer.state[p]
    return [state["exp_avg"], state["exp_avg_sq"]]


@record(
    "fp32-states-loaded-beside-bf16-weights",
    "AdamW's fp32 states are loaded into the optimizer of a bf16 weight",
    today="load_state_dict casts them to bf16, the dtype of the parameter",
    right="fp32, bit for bit as saved",
    check=lambda v: v["dtypes"] == {F32} and v["same"],
    refs=("case 48",),
)
def states_loaded(library: Library) -> Any:
    wide, narrow = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=BF16))
    saved = AdamW([wide])
    wide.grad = torch.full((3,), 1 / 3)
    saved.step()
    optimizer = library.masters(AdamW([narrow]))
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    return {"dtypes": {t.dtype for t in _moments(optimizer, narrow)}, "same": same(_moments(saved, wide), _moments(optimizer, narrow))}


def _pushed(w: Tensor, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        w.grad = torch.full_like(w, 1 / 3)
        optimizer.step()
        optimizer.zero_grad()


@record(
    "small-updates-across-a-resume",
    "a bf16 weight of 1 under AdamW with lr 1e-4: ten steps, saved, loaded into a new optimizer, ten more",
    today="1.0: no step was ever kept, and bf16 states are what is saved",
    right="0.998, and the same bits as twenty steps without a break",
    check=lambda v: near(v["resumed"], 0.998, 1e-5) and v["same"],
    refs=("case 48",),
)
def small_updates(library: Library) -> Any:
    def begun(value: Tensor) -> tuple[nn.Parameter, Optimizer]:
        w = nn.Parameter(value)
        return w, library.masters(AdamW([w], lr=1e-4, weight_decay=0.0))

    one, whole = begun(torch.ones(3, dtype=BF16))
    _pushed(one, whole, 10)
    two, resumed = begun(one.detach().clone())
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for w, optimizer in ((one, whole), (two, resumed)):
        _pushed(w, optimizer, 10)
    return {"resumed": read(library.full(two))[0], "same": same([library.full(one)], [library.full(two)])}


@record(
    "a-run-in-16-bits-through-a-file",
    "a bf16 model under SGD with momentum and lr 1e-4, saved to a file after ten steps, ten more from there",
    today="the weights are where they began",
    right="where an fp32 run is, to 1e-4: 1 - 1e-3 x (20 - 9 x (1 - 0.9^20)), with and without the break",
    check=lambda v: near(v, [0.987906] * 2, 1e-4),
    refs=("case 48", "case 32"),
)
def through_a_file(library: Library) -> Any:
    def built() -> tuple[nn.Module, Optimizer]:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        model = library.cast_model(layer, BF16)
        return model, library.masters(SGD(model.parameters(), lr=1e-4, momentum=0.9))

    def trained(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(2, 1, dtype=BF16)).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = built()
    trained(model, optimizer, 10)
    with tempfile.TemporaryDirectory() as folder:
        library.save(folder, model, optimizer)
        again, loaded = built()
        library.load(folder, again, loaded)
    for m, o in ((model, optimizer), (again, loaded)):
        trained(m, o, 10)
    return [read(library.full(p))[0] for m in (model, again) for p in m.parameters()]


@record(
    "fp32-checkpoint-into-a-16-bit-model",
    "load_state_dict of fp32 weights into a model that is bf16: pretrained weights, or a run that was fp32",
    today="rounded to 8 bits of mantissa on the way in; what was lost stays lost",
    right="what the library keeps of each weight is the saved value to 2^-15",
    check=lambda v: v < 2.0**-15,
    refs=("case 48", "case 49"),
)
def fp32_into_16(library: Library) -> Any:
    model, saved = library.cast_model(nn.Linear(16, 16), BF16), nn.Linear(16, 16).state_dict()
    model.load_state_dict(saved)
    errors = [(library.full(p).float() - saved[name]).abs() / saved[name].abs() for name, p in model.named_parameters()]
    return max(float(e.max()) for e in errors)


@record(
    "another-precision-on-resume",
    "a run saved under bf16 is resumed under fp16",
    today="loaded without a word, with no loss scale to go on from",
    right="refused with both precisions named",
    check=lambda v: False,
    refused=("bf16", "fp16"),
    refs=("case 32",),
    doors=("accelerator",),
)
def another_precision(library: Library) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for step, precision in enumerate(("bf16", "fp16")):
            accelerator, layer = library.accelerator(precision), nn.Linear(2, 2)
            accelerator.prepare(layer, SGD(layer.parameters(), lr=0.1))
            (accelerator.load_state if step else accelerator.save_state)(f"{folder}/saved")
    return "loaded"


@record(
    "a-checkpoint-that-is-cut-off",
    "the optimizer's part of a checkpoint is half a file (a full disk, a killed job), and the run resumes from it",
    today="the weights are those of the checkpoint and the states are not, and the error is one of the file format",
    right="refused with cause and remedy before a weight is touched",
    check=lambda v: v["refused"] and v["kept"],
    refs=("case 48",),
    doors=("accelerator",),
)
def cut_off(library: Library) -> Any:
    accelerator, layer = library.accelerator("bf16"), nn.Linear(32, 32)
    model, optimizer = accelerator.prepare(layer, AdamW(layer.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 32)).sum())
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(f"{folder}/saved")
        with torch.no_grad():
            layer.weight.fill_(7.0)
        before = copies(layer.parameters())
        for part in Path(folder).rglob("optimizer*"):
            part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
        try:
            accelerator.load_state(f"{folder}/saved")
        except Exception as error:  # noqa: BLE001  whatever a library raises is its answer
            said = library.refusal(error)
            return {"refused": said is not None and "truncated" in said.cause and bool(said.remedy), "kept": same(before, layer.parameters())}
    return {"refused": False, "kept": same(before, layer.parameters())}


@record(
    "16-bit-copy-for-a-file",
    "the weights of a run in fp32 are written in fp16, as model.half().state_dict() in the middle of training",
    today="half() casts the live weights; float() does not bring the bits back",
    right="the file holds fp16, each weight rounded once, and the live weights are what they were",
    check=lambda v: v["dtypes"] == {F16} and v["rounded"] and v["kept"],
    refs=("case 53",),
)
def copy_for_a_file(library: Library) -> Any:
    model = nn.Sequential(nn.Linear(32, 32))
    before = copies(model.parameters())
    written = library.export(model, F16)
    rounded = same([t.half() for t in before], [written[name] for name, _ in model.named_parameters()])
    return {"dtypes": {t.dtype for t in written.values()}, "rounded": rounded, "kept": same(before, model.parameters())}


@record(
    "16-bit-copy-of-16-bit-weights",
    "a bf16 model is trained with small steps, and its weights are written in fp16, which has three bits more",
    today="the bf16 weights, which did not move",
    right="the values that were trained, 0.99, rounded once to fp16; the run has them as before",
    check=lambda v: near(v["live"], 0.99, 1e-4) and v["file"] == v["rounded"] and v["dtype"] is F16,
    refs=("case 53", "case 37"),
)
def copy_of_16_bit_weights(library: Library) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    model = library.cast_model(layer, BF16)
    optimizer = library.masters(SGD(model.parameters(), lr=1e-3))
    _pushed(layer.weight, optimizer, 30)
    written = library.export(model, F16)["weight"]
    live = library.full(layer.weight)
    return {"file": read(written)[0], "dtype": written.dtype, "live": read(live)[0], "rounded": read(live.to(F16))[0]}


@record(
    "half-and-back-on-a-live-model",
    "the script itself has model.half().state_dict(); model.float() between two steps of a prepared model",
    today="every weight is rounded to fp16, and nothing is said",
    right="the weights are what they were, or a refusal that names a weight, what was done and how to get a copy",
    check=lambda v: v,
    refused=("weight", "copy"),
    refs=("case 53",),
    doors=("accelerator",),
)
def half_and_back(library: Library) -> Any:
    net = nn.Sequential(nn.Linear(16, 16))
    accelerator = library.accelerator("bf16")
    model, optimizer = accelerator.prepare(net, SGD(net.parameters(), lr=0.0))
    before = copies(net.parameters())
    net.half().state_dict()
    net.float()
    accelerator.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()
    return same(before, net.parameters())
