"""Checks of gradient release that run on every rank of a group: it must be the plain step on the same ranks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import main
from on_accelerator import distance, same_on_all
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.distributed import DataParallel, Ranks
from halfstep.errors import ConfigError, StepOrderError
from halfstep.optim import AdamW, Lion, release

SMALL = 1e-4  # MiB: buckets of 26 fp32 gradients, so that nearly every parameter travels by itself
Loss = Callable[[nn.Module, int], Tensor]


class Forked(nn.Module):
    """Ranks may take different ways: gradients come in another order on each, and some of `sides` are used by one rank or by none."""

    def __init__(self, world: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = 0
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.sides = nn.ModuleList(nn.Linear(8, 8) for _ in range(world + 1))
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        ways = (self.first, self.second) if self.way % 2 else (self.second, self.first)
        for way in (*ways, self.sides[self.way], self.norm):
            x = torch.tanh(way(x))
        out: Tensor = self.last(x)
        return out


def way_of(rank: int, step: int) -> int:
    """Even steps go the same way on all ranks: the first finds out which weights may be 16-bit, and that must be the same everywhere."""
    return rank if step % 2 else 0


class Run:
    """A forked model on all ranks after some steps."""

    def __init__(
        self,
        ranks: Ranks,
        precision: str,
        released: bool,
        *,
        make: Callable[..., Any] = AdamW,
        window: int = 1,
        reduce_dtype: str | None = None,
        bucket: float = SMALL,
        clip: Any = None,
        start: Path | None = None,
        **settings: Any,
    ) -> None:
        how = DataParallel(reduce_dtype, bucket)
        self.ranks, self.model = ranks, Forked(ranks.world)
        self.accelerator = halfstep.Accelerator(precision=precision, cpu=True, gradient_accumulation_steps=window, data_parallel=how, **settings)
        self.model, self.optimizer = self.accelerator.prepare(self.model, make(self.model.parameters(), lr=1e-2))
        if start is not None:
            self.accelerator.load_state(start)
        if released:
            self.accelerator.release(self.optimizer, clip=clip, max_norm=None if clip is None else 0.05)
        self.told: list[Any] = []
        self.waiting: list[int] = []  # how many gradients there were when each of the first layers had its own

    def batch(self, step: int) -> Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(step * self.ranks.world + self.ranks.rank))

    def steps(self, begin: int, end: int, loss: Loss | None = None) -> Run:
        def count(_: Tensor) -> None:
            self.waiting.append(sum(p.grad is not None for p in self.model.parameters()))

        hooks = [way.weight.register_post_accumulate_grad_hook(count) for way in (self.model.first, self.model.second)]
        for step in range(begin, end):
            self.model.way = way_of(self.ranks.rank, step)
            with self.accelerator.accumulate(self.model):
                of = loss or (lambda model, step: model(self.batch(step)).square().mean())
                self.accelerator.backward(of(self.model, step))
                result = self.optimizer.step()
                self.optimizer.zero_grad()
            if result.reason != "accumulating":
                self.told.append(result)
        for hook in hooks:
            hook.remove()
        return self

    def bits(self) -> dict[str, Tensor]:
        """Weights, and all tensors of the optimizer: states and what masters keep."""
        state = self.optimizer.state_dict()
        found = dict(self.model.state_dict())
        for kind in ("state", "masters"):
            for number, tensors in state.get(kind, {}).items():
                found |= {f"{kind} {number} {key}": t for key, t in tensors.items() if isinstance(t, Tensor)}
        return {name: t.detach().clone() for name, t in found.items()}

    def results(self, *more: str) -> str:
        """What all ranks are told alike, and more. As text: NaN is itself there."""
        said = ("reason", "scale", "next_scale", "clipped", *more)  # norms of stock optimizers' gradients are summed up in fp32 without release
        return str([(f"{r.grad_norm:.5g}", *(getattr(r, name) for name in said)) for r in self.told])


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in ours.items())


def agree(ranks: Ranks, run: Run) -> None:
    """Weights, masters, states and results are those of rank 0."""
    others = ranks.gather_object((run.bits(), run.results()))
    first = others[0][0]
    for bits, _ in others:
        unlike = [name for name in {*bits, *first} if name not in bits or name not in first or not torch.equal(bits[name], first[name])]
        assert not unlike, (unlike, str(run.accelerator.policy))
    assert all(results == others[0][1] for _, results in others), [results for _, results in others]


TABLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp32", {"make": torch.optim.RAdam}),
    ("bf16-mixed", {"reduce_dtype": "bf16", "bucket": 25.0}),
    ("bf16-lean,weights=split24", {}),
    ("bf16-lean,weights=stochastic", {"window": 3, "make": Lion}),
    ("fp16-lean", {"window": 3, "reduce_dtype": "fp32", "bucket": 1e-3}),
    ("fp16-mixed", {"reduce_dtype": "fp16"}),
)


def the_plain_step_on_the_same_ranks_bit_for_bit(ranks: Ranks, folder: Path) -> None:
    for precision, settings in TABLE:
        steps = 3 * settings.get("window", 1)
        plain, released = (Run(ranks, precision, on, **settings).steps(0, steps) for on in (False, True))
        assert [r.reason for r in released.told] == ["applied"] * 3, (precision, released.told)
        assert plain.results("loss") == released.results("loss"), precision
        assert same(plain.bits(), released.bits()), precision
        assert all(p.grad is None for p in released.model.parameters())
        assert plain.accelerator.reduced_bytes == released.accelerator.reduced_bytes
        agree(ranks, released)


def gradients_go_inside_the_backward_pass(ranks: Ranks, folder: Path) -> None:
    """Only the two layers whose order is not the same on all ranks wait for each other; a layer that no rank uses holds up nothing."""
    plain, released = (Run(ranks, "fp32", on).steps(0, 3) for on in (False, True))
    assert max(plain.waiting) >= 9
    assert max(released.waiting) <= 4, released.waiting


def one_process_within_rounding(ranks: Ranks, folder: Path) -> None:
    run = Run(ranks, "fp32", True, make=torch.optim.AdamW).steps(0, 8)
    alone = Forked(ranks.world)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for step in range(8):
        for rank in range(ranks.world):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * ranks.world + rank))
            alone.way = way_of(rank, step)
            (alone(x).square().mean() / ranks.world).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(run.model, alone) < 1e-5


def an_overflow_on_one_rank_leaves_out_the_same_on_all(ranks: Ranks, folder: Path) -> None:
    run = Run(ranks, "fp16-mixed,scale=dynamic:4", True).steps(0, 1)
    before = run.bits()
    hook = run.model.norm.register_full_backward_hook(lambda _, found, __: (found[0] * float("inf" if ranks.rank == 0 else 1),))
    run.steps(1, 2)
    hook.remove()
    result = run.told[-1]
    assert (result.reason, bool(result)) == ("partly", True)
    assert result.next_scale < result.scale
    bad = {f"{name}.{kind}" for name in ("first", "second", "sides.0") for kind in ("weight", "bias")}
    assert {c.name for c in result.culprits} == bad
    after = run.bits()
    assert {name for name, _ in run.model.named_parameters() if torch.equal(before[name], after[name])} == bad | {"sides.2.weight", "sides.2.bias"}
    run.steps(2, 4)
    assert [r.reason for r in run.told[2:]] == ["applied"] * 2
    agree(ranks, run)


def a_loss_that_is_not_finite_on_one_rank_moves_nobody(ranks: Ranks, folder: Path) -> None:
    """In the first micro-batch of a window, and in the last."""
    for bad in (2, 3):

        def loss(model: nn.Module, step: int, bad: int = bad) -> Tensor:
            return model(torch.ones(2, 8)).square().mean() * (float("nan") if step == bad and ranks.rank == 0 else 1.0)

        run = Run(ranks, "bf16-lean", True, window=2).steps(0, 2)
        before = run.bits()
        run.steps(2, 4, loss)
        assert run.told[-1].reason == "nonfinite-loss"
        assert run.told[-1].culprits[0].name == ("loss" if ranks.rank == 0 else "another rank")
        assert same(before, run.bits())
        assert run.steps(4, 6).told[-1].reason == "applied"
        agree(ranks, run)


def a_module_that_overflows_on_one_rank_is_pinned_on_all(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    accelerator = halfstep.Accelerator(precision="fp16-mixed", cpu=True, heal="pin")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    accelerator.release(optimizer)
    large = torch.ones(4, 8) * (1e5 if ranks.rank == 0 else 1.0)
    result = accelerator.run_step(optimizer, lambda: accelerator.backward(model(large).square().mean()))
    assert (result.applied, result.pinned) == (True, ("0",)), result
    same_on_all(ranks, model)


def a_bad_loss_of_gradients_that_stay_apart_moves_nobody_at_the_step(ranks: Ranks, folder: Path) -> None:
    run = Run(ranks, "bf16-mixed", True).steps(0, 2)
    before = run.bits()
    with run.accelerator.no_sync(run.model):
        run.accelerator.backward(run.model(run.batch(2)).square().mean() * (float("nan") if ranks.rank == 0 else 1.0))
    result = run.optimizer.step()
    assert (result.reason, same(before, run.bits())) == ("nonfinite-loss", True)
    run.optimizer.zero_grad()
    agree(ranks, run.steps(3, 4))


def clipping_by_the_last_norm_and_checkpoints(ranks: Ranks, folder: Path) -> None:
    for clip in ("last", "per_parameter"):
        whole = Run(ranks, "bf16-lean", True, clip=clip).steps(0, 2)
        whole.accelerator.save_state(folder / clip)
        whole.steps(2, 4)
        resumed = Run(ranks, "bf16-lean", True, clip=clip, start=folder / clip).steps(2, 4)
        assert all(r.clipped for r in (*whole.told, *resumed.told))
        assert same(whole.bits(), resumed.bits())
        assert str(whole.told[2:]) == str(resumed.told)
        agree(ranks, resumed)


def two_optimizers_of_which_one_is_released(ranks: Ranks, folder: Path) -> None:
    """They share buckets. A second model that the loss does not reach holds up nothing."""

    def told(released: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, other = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, 4)
        accelerator = halfstep.Accelerator(precision="bf16-mixed", cpu=True)
        own = AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[2].parameters(), lr=1e-2), AdamW(other.parameters())
        model, other, *optimizers = accelerator.prepare(model, other, *own)
        for optimizer in (optimizers[0], optimizers[2]) if released else ():
            accelerator.release(optimizer)
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * ranks.world + ranks.rank))
            accelerator.backward(model(x).square().mean())
            assert (model[0].weight.grad is None) == released
            assert model[2].weight.grad is not None
            assert all(optimizer.step() for optimizer in optimizers[:2])
            accelerator.backward(other(model(x).detach()).square().mean())
            assert optimizers[2].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        same_on_all(ranks, model)
        return [p.detach().clone() for p in (*model.parameters(), *other.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(told(False), told(True), strict=True))


def backward_passes_of_the_users_own_are_reduced_before_the_step(ranks: Ranks, folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    accelerator = halfstep.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.release(optimizer)
    before = model.weight.detach().clone()
    (model.weight.sum() * (ranks.rank + 1)).backward()
    assert optimizer.step()
    assert torch.allclose(before - model.weight.detach(), torch.full((1, 4), (ranks.world + 1) / 2))
    same_on_all(ranks, model)


def what_cannot_work_is_refused(ranks: Ranks, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"gradients of \d processes are means over all.*accelerator\.release"):
        release(AdamW(nn.Linear(2, 2).parameters()))
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    accelerator = halfstep.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
    accelerator.release(optimizer)
    strict = halfstep.Accelerator(cpu=True, data_parallel=DataParallel(find_unused_parameters=False))
    torch.manual_seed(0)
    pair = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    pair, its = strict.prepare(pair, AdamW(pair.parameters()))
    strict.release(its)
    with pytest.raises(ConfigError, match=r"2 parameters have no gradient on rank \d, 1.weight among them"):  # before anything has moved
        strict.backward(pair[0](torch.ones(2, 4)).sum())
    assert its.state_dict()["state"] == {}
    x = torch.randn(2, 8, requires_grad=True)
    twice = checkpoint(model, x, use_reentrant=True) + checkpoint(model, x, use_reentrant=True)
    with pytest.raises(StepOrderError, match="one gradient"):
        accelerator.backward(twice.square().mean())


def a_trainer_with_release_is_one_without(ranks: Ranks, folder: Path) -> None:
    from on_trainer import trainer, weights

    shared: dict[str, Any] = {"precision": "bf16-lean", "max_steps": 6, "gradient_accumulation_steps": 2, "ddp_bucket_cap_mb": 1, "logging_steps": 2}
    shared |= {"save_strategy": "steps", "save_steps": 3}
    plain = trainer(folder / "plain", 2, max_grad_norm=0.0, **shared)
    released = trainer(folder / "released", 2, max_grad_norm=0.0, gradient_release=True, **shared)
    clipped = trainer(folder / "clipped", 2, max_grad_norm=0.01, gradient_release=True, **shared)
    for run in (plain, released, clipped):
        run.train()
        assert all(torch.equal(weights(run), other) for other in ranks.gather_object(weights(run)))
    assert torch.equal(weights(plain), weights(released))
    assert not torch.equal(weights(plain), weights(clipped))
    logged = [[(r["loss"], r["grad_norm"], r["scale"]) for r in run.state.log_history if "loss" in r] for run in (plain, released)]
    assert logged[0] == logged[1]
    resumed = trainer(folder / "resumed", 2, max_grad_norm=0.01, gradient_release=True, **shared)
    resumed.train(resume_from_checkpoint=folder / "clipped" / "checkpoint-3")
    assert torch.equal(weights(clipped), weights(resumed))


CHECKS = (
    the_plain_step_on_the_same_ranks_bit_for_bit,
    gradients_go_inside_the_backward_pass,
    one_process_within_rounding,
    an_overflow_on_one_rank_leaves_out_the_same_on_all,
    a_loss_that_is_not_finite_on_one_rank_moves_nobody,
    a_module_that_overflows_on_one_rank_is_pinned_on_all,
    a_bad_loss_of_gradients_that_stay_apart_moves_nobody_at_the_step,
    clipping_by_the_last_norm_and_checkpoints,
    two_optimizers_of_which_one_is_released,
    backward_passes_of_the_users_own_are_reduced_before_the_step,
    what_cannot_work_is_refused,
    a_trainer_with_release_is_one_without,
)

if __name__ == "__main__":
    main({check.__name__: check for check in CHECKS})
