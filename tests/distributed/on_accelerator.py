"""Checks of the accelerator that run on every rank of a group."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from launched import main
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep.distributed import DataParallel, Ranks
from halfstep.distributed.launch import settle
from halfstep.errors import ConfigError

STEPS = 50


class Net(nn.Module):
    """A small model with running statistics, whose loss is a mean over samples."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 32), nn.Linear(32, 4)
        self.norm: nn.Module = nn.BatchNorm1d(32) if norm else nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(torch.tanh(self.norm(self.one(x))))
        return out


def data(samples: int = 64) -> TensorDataset:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 8, generator=random)
    return TensorDataset(x, torch.randint(0, 4, (samples,), generator=random))


def trained(
    precision: str, steps: int, batch: int, *, alone: bool = False, window: int = 1, **settings: Any
) -> tuple[nn.Module, halfstep.Accelerator, list[float]]:
    """A model after some steps; alone: by this process as if there were no others, with the batches of all."""
    torch.manual_seed(0)
    model = Net()
    accelerator = halfstep.Accelerator(precision=precision, cpu=True, gradient_accumulation_steps=window, **settings)
    if alone:
        from halfstep.distributed import NoReducer, Solo

        accelerator.ranks, accelerator._reducer = Solo(), NoReducer()
        accelerator.scaler._engine.state.agree = accelerator.scaler._engine._start._agree = None
        accelerator.scaler.bring_together(lambda only: False, lambda value: [value])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=batch, shuffle=True, generator=torch.Generator().manual_seed(5))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    while len(losses) < steps * window:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == steps * window:
                break
    return model, accelerator, losses


def same_on_all(ranks: Ranks, model: nn.Module) -> None:
    first, *others = ranks.gather_object({name: t.clone() for name, t in model.state_dict().items()})
    for name, t in first.items():
        assert all(torch.equal(t, other[name]) for other in others), f"{name} differs between ranks"


def distance(model: nn.Module, other: nn.Module) -> float:
    a, b = (torch.cat([p.detach().float().reshape(-1) for p in m.parameters()]) for m in (model, other))
    return float((a - b).norm() / b.norm())


def ranks_equal_one_process_in_fp32(ranks: Ranks, folder: Path) -> None:
    model, accelerator, losses = trained("fp32", STEPS, 16 // ranks.world)
    alone, _, reference = trained("fp32", STEPS, 16, alone=True)
    assert distance(model, alone) < 1e-5
    mean = accelerator.ranks.reduce(torch.tensor(losses, dtype=torch.float64), "mean")
    assert torch.allclose(mean, torch.tensor(reference, dtype=torch.float64), rtol=1e-5)
    same_on_all(ranks, model)


def accumulation_sends_once_per_window(ranks: Ranks, folder: Path) -> None:
    model, accelerator, _ = trained("fp32", 8, 8 // ranks.world, window=2)
    alone, _, _ = trained("fp32", 8, 8, window=2, alone=True)
    assert distance(model, alone) < 1e-5
    elements = sum(p.numel() + 1 for p in model.parameters())
    assert accelerator.reduced_bytes == 4 * elements, accelerator.reduced_bytes
    same_on_all(ranks, model)


def sixteen_bits_on_the_wire(ranks: Ranks, folder: Path) -> None:
    full, wide, _ = trained("bf16-mixed", STEPS, 16 // ranks.world, reduce_dtype="fp32")
    half, narrow, _ = trained("bf16-mixed", STEPS, 16 // ranks.world, reduce_dtype="bf16")
    assert narrow.reduced_bytes <= 0.51 * wide.reduced_bytes
    assert narrow.reduced_bytes > 0
    same_on_all(ranks, half)
    assert distance(half, full) < 2e-2  # 2^-9 a step, and Adam's signs
    scaled, third, _ = trained("fp16-mixed", STEPS, 16 // ranks.world, reduce_dtype="fp16")
    assert third.reduced_bytes == narrow.reduced_bytes
    same_on_all(ranks, scaled)


def narrow_weights_are_the_same_on_all_ranks(ranks: Ranks, folder: Path) -> None:
    for precision, reduce_dtype, window in (
        ("bf16-lean", None, 1),
        ("fp16-lean", "fp32", 2),
        ("bf16-true", "fp32", 1),
        ("fp16-true", None, 2),
        ("bf16-lean,weights=stochastic", None, 1),
        ("bf16-lean,weights=split24", None, 2),
    ):
        model, accelerator, _ = trained(precision, 4, 8 // ranks.world, window=window, reduce_dtype=reduce_dtype)
        same_on_all(ranks, _Masters(accelerator, model))


class _Masters(nn.Module):
    """Weights and what is beside them, as buffers: masters and states."""

    def __init__(self, accelerator: halfstep.Accelerator, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        state = accelerator._optimizers[0].state_dict()
        for number, tensors in (*state.get("masters", {}).items(), *state["state"].items()):
            for key, value in tensors.items():
                if isinstance(value, torch.Tensor):
                    self.register_buffer(f"{number}_{key}_{len(self._buffers)}", value)


def an_overflow_on_one_rank_is_replayed_on_all(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(0)
    model = Net(norm=True)
    accelerator = halfstep.Accelerator(precision="fp16-mixed", cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = data()[:8]
    told = []
    for step in range(6):

        def compute(step: int = step) -> None:
            loss = nn.functional.cross_entropy(model(x + ranks.rank), y)
            if step == 3 and ranks.rank == ranks.world - 1:
                loss = loss * 3e4
            accelerator.backward(loss)

        result = accelerator.run_step(optimizer, compute)
        optimizer.zero_grad()
        told.append((result.applied, result.reason, result.replays, result.scale, result.next_scale))
    assert told[3][2] > 0, told
    assert all(applied for applied, *_ in told)
    assert all(other == told for other in ranks.gather_object(told))
    same_on_all(ranks, model)


def a_module_that_overflows_on_one_rank_is_pinned_on_all(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    accelerator = halfstep.Accelerator(precision="fp16-mixed", cpu=True, heal="pin")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = data()[:8]
    large = x * (3e4 if ranks.rank == 0 else 1.0)
    result = accelerator.run_step(optimizer, lambda: accelerator.backward(nn.functional.cross_entropy(model(large), y)))
    assert result.applied, result
    assert result.pinned == ("one",), result
    assert [p.module for p in halfstep.amp.pins(model)] == ["one"]
    same_on_all(ranks, model)


def a_loss_that_is_not_finite_on_one_rank_moves_nobody(ranks: Ranks, folder: Path) -> None:
    for precision in ("fp32", "bf16-mixed", "fp16-mixed"):
        torch.manual_seed(0)
        model = Net()
        accelerator = halfstep.Accelerator(precision=precision, cpu=True, patience=2)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        x, y = data()[:8]
        before = {k: v.clone() for k, v in model.state_dict().items()}
        for attempt in range(2):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss * (float("nan") if ranks.rank == 0 else 1.0))
            try:
                result = optimizer.step()
            except halfstep.errors.DivergedError as error:
                assert attempt == 1
                result = error.result
            assert not result.applied
            assert result.reason == "nonfinite-loss", result
            optimizer.zero_grad()
        assert attempt == 1
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def running_statistics_are_those_of_rank_0(ranks: Ranks, folder: Path) -> None:
    for broadcast in (True, False):
        torch.manual_seed(0)
        model = Net(norm=True)
        accelerator = halfstep.Accelerator(cpu=True, data_parallel=DataParallel(broadcast_buffers=broadcast))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        x, y = data()[:8]
        accelerator.backward(nn.functional.cross_entropy(model(x + ranks.rank), y))
        optimizer.step()
        means = ranks.gather_object(model.norm.running_mean.clone())
        assert torch.equal(means[0], means[1]) is broadcast


def backward_passes_of_the_users_own_are_reduced_too(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    accelerator = halfstep.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    (model.weight.sum() * (ranks.rank + 1)).backward()
    optimizer.step()
    assert torch.allclose(before - model.weight.detach(), torch.full((1, 4), (ranks.world + 1) / 2))
    same_on_all(ranks, model)


def parameters_that_some_ranks_do_not_use(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 1) for _ in range(ranks.world + 1)])
    accelerator = halfstep.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model[ranks.rank](torch.ones(2, 4)).sum())
    assert torch.allclose(model[0].weight.grad, torch.full((1, 4), 2.0 / ranks.world))
    assert model[-1].weight.grad is None
    assert optimizer.step()
    same_on_all(ranks, model)
    strict = halfstep.Accelerator(cpu=True, data_parallel=DataParallel(find_unused_parameters=False))
    model = strict.prepare(nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)]))
    with pytest.raises(ConfigError, match=r"2 parameters have no gradient on rank \d, 1.weight among them"):
        strict.backward(model[0](torch.ones(2, 4)).sum())


def ranks_that_differ_are_refused(ranks: Ranks, folder: Path) -> None:
    last = ranks.rank == ranks.world - 1
    torch.manual_seed(int(last))
    for precision, model, told in (
        ("fp32", nn.Linear(4, 1), "values of weight"),
        ("fp32", nn.Linear(4, 1 + last), "weight float32 (1, 4)"),
        ("fp32", nn.Linear(4, 1) if last else nn.Bilinear(2, 2, 1), "a Bilinear on rank 0"),
        ("bf16-mixed" if last else "fp32", nn.Linear(4, 1), "precision fp32"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)) as caught:
            halfstep.Accelerator(precision=precision, cpu=True).prepare(model)
        assert f"rank {ranks.world - 1}" in str(caught.value)


def state_goes_on_bit_for_bit(ranks: Ranks, folder: Path) -> None:
    def run(steps: range, start: Path | None = None) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        accelerator = halfstep.Accelerator(precision="fp16-mixed", cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        torch.manual_seed(ranks.rank)
        if start is not None:
            accelerator.load_state(start)
        x, y = data()[:8]
        for step in steps:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                accelerator.save_state(folder / "state")
        return model

    whole, resumed = run(range(8)), run(range(4, 8), folder / "state")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    same_on_all(ranks, resumed)


def data_of_unlike_length_is_refused(ranks: Ranks, folder: Path) -> None:
    accelerator = halfstep.Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"has 20 samples on rank 0 and 13 on rank 1.*Give every rank the whole of the data"):
        accelerator.prepare(DataLoader(data(20 if ranks.rank == 0 else 13), batch_size=4))


class _Slow(torch.Tensor):
    """One whose end takes a while, in the thread that lets go of it."""

    gone: ClassVar[list[int]] = []

    def __del__(self) -> None:
        for _ in range(60):
            time.sleep(0.005)
        self.gone.append(threading.get_ident())


def a_thread_that_lets_go_of_a_tensor_is_waited_for(ranks: Ranks, folder: Path) -> None:
    t = torch.ones(3).as_subclass(_Slow)
    if ranks.is_main:
        torch.distributed.all_reduce(t, async_op=True)
        del t
    else:
        time.sleep(0.1)
        torch.distributed.all_reduce(t)
    if ranks.is_main:
        time.sleep(0.2)  # the sum is there, and the thread at its end
        assert not _Slow.gone
        settle()
        assert _Slow.gone
        assert _Slow.gone[0] != threading.get_ident()


CHECKS = (
    data_of_unlike_length_is_refused,
    ranks_equal_one_process_in_fp32,
    accumulation_sends_once_per_window,
    sixteen_bits_on_the_wire,
    narrow_weights_are_the_same_on_all_ranks,
    an_overflow_on_one_rank_is_replayed_on_all,
    a_module_that_overflows_on_one_rank_is_pinned_on_all,
    a_loss_that_is_not_finite_on_one_rank_moves_nobody,
    running_statistics_are_those_of_rank_0,
    backward_passes_of_the_users_own_are_reduced_too,
    parameters_that_some_ranks_do_not_use,
    ranks_that_differ_are_refused,
    state_goes_on_bit_for_bit,
    a_thread_that_lets_go_of_a_tensor_is_waited_for,
)

if __name__ == "__main__":
    main({check.__name__: check for check in CHECKS})
