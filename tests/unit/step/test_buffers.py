"""Buffers are part of the step: a refused step leaves them as they were, an applied one as the forward pass left them."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, AdamW

from halfstep import Accelerator, Trainer, TrainingArguments
from halfstep.amp import GradScaler


class Codebook(nn.Module):
    """A moving average that is assigned anew and a counter that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen += 1
        return self.layer(x) + self.mean


class Late(nn.Module):
    """A buffer that is None until the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
        return self.layer(x)


class Seldom(nn.Module):
    """A buffer that moves in every fifth forward pass, as codebooks that are renewed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), 0
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 5 == 0:
            self.mean += x.detach().mean(0)
        return self.layer(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch-norm": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), (6, 3)),
    "cumulative": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)), (6, 3)),
    "batch-norm-2d": (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), (4, 1, 3, 3)),
    "instance-norm": (lambda: nn.Sequential(nn.Conv1d(1, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True)), (4, 1, 5)),
    "codebook": (Codebook, (6, 3)),
    "spectral-norm": (lambda: spectral_norm(nn.Linear(3, 3)), (6, 3)),
}
MODES: dict[str, dict[str, Any]] = {
    "follow": {},
    "stock": {"strategy": "stock"},
    "off": {"enabled": False},
    "replay": {"on_overflow": "replay"},
    "deferred": {"deferred": True, "strategy": "stock"},
    "deferred-off": {"deferred": True, "enabled": False},
}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


def batches(shape: tuple[int, ...], bad: set[int], value: float = math.nan, steps: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(shape, generator=generator) for _ in range(steps)]
    for i in bad:
        found[i].view(-1)[0] = value
    return found


def train(model: nn.Module, data: list[Tensor], watch: bool = True, skip: set[int] = frozenset(), **options: Any) -> list[str]:
    """One optimizer; batches in `skip` are never shown to the model."""
    scaler = GradScaler(**options)
    if watch:
        scaler.watch(model)
    optimizer, reasons = SGD(model.parameters(), lr=0.1, fused=True), []
    for i, x in enumerate(data):
        if i in skip:
            continue
        scaler.scale(model(x).square().mean()).backward()
        result = scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        reasons.append(result.reason)
    scaler.get_scale()  # a verdict that was left on the device is read
    return reasons


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("bad", [{0, 2}, {3, 4, 6}], ids=str)
def test_a_refused_step_leaves_no_trace_in_any_buffer(name: str, mode: str, bad: set[int]) -> None:
    """As a run that never met the bad batches."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    data = batches(shape, bad)
    reasons = train(model, data, **MODES[mode])
    assert [i for i, r in enumerate(reasons) if r != "applied"] == sorted(bad)
    train(reference, data, skip=bad, **MODES[mode])
    assert same(buffers(model), buffers(reference))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("make", [Late, Seldom])
def test_buffers_that_begin_to_move_after_watch_are_part_of_the_step_too(make: Callable[[], nn.Module]) -> None:
    """One is set by the first forward pass, the other moves in the fifth for the first time; batches 1 and 4 are bad."""
    model = make()
    scaler, optimizer = GradScaler(), SGD(model.parameters(), lr=0.1)
    scaler.watch(model)
    for i, x in enumerate(batches((6, 3), {1, 4})):
        before = buffers(model)
        scaler.scale(model(x).square().mean()).backward()
        if not scaler.step(optimizer):
            assert i in (1, 4)
            assert same(before, buffers(model)), f"batch {i}"
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["batch-norm", "cumulative", "batch-norm-2d"])
def test_without_watch_running_statistics_are_found_in_the_graph(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    reference, data = copy.deepcopy(model), batches(shape, {2, 4})
    train(model, data, watch=False)
    train(reference, data, watch=False, skip={2, 4})
    mine, theirs = buffers(model), buffers(reference)
    for key in mine:
        if key.endswith(("mean", "var")) and name != "cumulative":
            assert torch.equal(mine[key], theirs[key]), key
        assert bool(torch.isfinite(mine[key]).all()), key


def test_an_inf_that_only_the_buffer_saw_is_put_back_although_the_step_was_applied() -> None:
    """The loss ignores the output of the norm, so the step is good; the running statistics are not."""
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "layer": nn.Linear(3, 1)})
    scaler, optimizer = GradScaler(), SGD(model["layer"].parameters(), lr=0.1)
    scaler.watch(model)
    before = buffers(model)
    x = torch.randn(6, 3)
    spoiled = x.clone()
    spoiled[0, 0] = math.inf
    model["norm"](spoiled)
    scaler.scale(model["layer"](x).sum()).backward()
    assert scaler.step(optimizer)
    after = buffers(model)
    assert bool(torch.isfinite(after["norm.running_mean"]).all())
    assert torch.equal(after["norm.running_mean"][0], before["norm.running_mean"][0])


def test_a_model_that_is_cast_after_watch_is_still_guarded() -> None:
    cast = torch.float64
    model = nn.BatchNorm1d(3)
    scaler = GradScaler()
    scaler.watch(model)
    model.to(cast)
    optimizer = SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 3, dtype=cast)
    x[0] = math.nan
    scaler.scale(model(x).sum()).backward()
    assert not scaler.step(optimizer)
    assert torch.equal(model.running_mean, torch.zeros(3, dtype=cast))
    assert torch.equal(model.running_var, torch.ones(3, dtype=cast))
    assert int(model.num_batches_tracked) == 0


def adversaries() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("updates", ["one", "after each"])
@pytest.mark.parametrize("first", [True, False], ids=["first-refused", "second-refused"])
def test_in_adversarial_training_a_refused_step_undoes_just_its_own_forward_pass(enabled: bool, updates: str, first: bool) -> None:
    """The generator's loss gives the discriminator gradients too, which nobody steps with."""

    def run(bad: int | None, leave_out: int | None) -> tuple[nn.Module, nn.Module]:
        judge, maker = adversaries()
        both = (SGD(judge.parameters(), lr=0.01), SGD(maker.parameters(), lr=0.01))
        scaler = GradScaler(enabled=enabled)
        for item in (judge, maker, *both):
            scaler.watch(item)
        generator = torch.Generator().manual_seed(2)
        for i in range(12):
            x, factor = torch.randn(8, 2, generator=generator), math.nan if i == bad else 1.0
            if i != leave_out:
                optimizer = both[i % 2]
                optimizer.zero_grad()
                loss = judge(x if i % 2 == 0 else maker(x)).square().mean() * factor
                scaler.scale(loss).backward()
                assert bool(scaler.step(optimizer)) == (i != bad)
            if updates == "after each" or i % 2 == 1:
                scaler.update()
        return judge, maker

    place = 6 if first else 7
    (judge, maker), (judge_without, maker_without) = run(place, None), run(None, place)
    assert same(buffers(judge), buffers(judge_without))
    assert same(buffers(maker), buffers(maker_without))
    for mine, theirs in ((judge, judge_without), (maker, maker_without)):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("enabled", [True, False])
def test_one_forward_pass_for_two_optimizers_counts_when_one_of_them_is_applied(enabled: bool) -> None:
    body, one, two = nn.BatchNorm1d(2), nn.Linear(2, 1), nn.Linear(2, 1)
    scaler = GradScaler(enabled=enabled)
    optimizers = [SGD(m.parameters(), lr=0.1) for m in (one, two)]
    for item in (body, *optimizers):
        scaler.watch(item)
    y = body(torch.randn(6, 2))
    scaler.scale(one(y).sum()).backward(retain_graph=True)
    scaler.scale(two(y).sum() * math.nan).backward()
    assert [bool(scaler.step(o)) for o in reversed(optimizers)] == [False, True]
    assert int(body.num_batches_tracked) == 1
    assert bool(body.running_mean.any())


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_bad_micro_batch_undoes_the_forward_passes_of_its_whole_window(place: int, enabled: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    scaler, optimizer = GradScaler(enabled=enabled), AdamW(model.parameters())
    scaler.watch(model)
    before = buffers(model)
    for i, x in enumerate(batches((6, 3), {place}, steps=3)):
        scaler.scale(model(x).square().mean() / 3).backward()
        assert not same(before, buffers(model)), i
    assert not scaler.step(optimizer)
    assert same(before, buffers(model))


def test_a_state_loaded_between_steps_is_the_new_truth() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    scaler, optimizer = GradScaler(), SGD(model.parameters(), lr=0.1)
    scaler.watch(model)
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    other(torch.randn(6, 3) + 5.0)
    model.load_state_dict(other.state_dict())
    scaler.scale(model(batches((6, 3), {0}, steps=1)[0]).mean()).backward()
    assert not scaler.step(optimizer)
    assert same(buffers(model), buffers(other))


def test_evaluation_moves_nothing_and_is_not_undone() -> None:
    model = nn.BatchNorm1d(3)
    model(torch.randn(6, 3))
    model.eval()
    scaler, optimizer = GradScaler(), SGD(model.parameters(), lr=0.1)
    scaler.watch(model)
    before = buffers(model)
    for factor in (1.0, math.nan, 1.0):
        scaler.scale(model(torch.randn(6, 3)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert same(before, buffers(model))


def test_a_batch_whose_loss_nobody_scaled_is_not_kept_when_it_was_not_finite() -> None:
    """A loop of the user's that looks at the loss and goes on with the next batch."""
    model = nn.BatchNorm1d(3)
    scaler, optimizer = GradScaler(), SGD(model.parameters(), lr=0.0)
    scaler.watch(model)
    for x in batches((6, 3), {1, 4}):
        loss = model(x).square().mean()
        if not torch.isfinite(loss):
            continue
        scaler.scale(loss).backward()
        assert scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert bool(torch.isfinite(model.running_mean).all())


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301  our own bytes


def through_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", [copy.deepcopy, through_pickle, through_torch])
def test_a_copy_of_a_watched_module_is_a_module_of_its_own(through: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    scaler, optimizer = GradScaler(), SGD(model.parameters(), lr=0.1)
    scaler.watch(model)
    scaler.scale(model(torch.randn(6, 3)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    twin = through(model)
    assert same(buffers(twin), buffers(model))
    model(torch.randn(6, 3))
    twin.load_state_dict(model.state_dict())  # the copy's event must not renew the copies of the original
    scaler.scale(model(torch.randn(6, 3)).mean() * math.nan).backward()
    assert not scaler.step(optimizer)
    assert int(model[1].num_batches_tracked) == 1
    assert int(twin[1].num_batches_tracked) == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("bad", [0, 3])
def test_the_accelerator_puts_buffers_back_from_the_first_step_on(precision: str, bad: int) -> None:
    def run(skip: set[int]) -> nn.Module:
        torch.manual_seed(0)
        accelerator = Accelerator(precision=precision, cpu=True)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.01))
        for i, x in enumerate(batches((6, 3), {bad})):
            if i not in skip:
                accelerator.backward(model(x).square().mean())
                assert bool(optimizer.step()) == (i != bad)
                optimizer.zero_grad()
        return model

    assert same(buffers(run(set())), buffers(run({bad})))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x).squeeze(-1) - labels).square().mean()}


class InOrder(Trainer):
    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        loader.batch_sampler.shuffle = False
        return loader


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_the_trainer_puts_buffers_back(precision: str, tmp_path: Path) -> None:
    def run(bad: set[int], keep: list[int]) -> nn.Module:
        torch.manual_seed(0)
        model = Rows()
        rows = [{"x": x, "labels": x.nan_to_num().sum()} for i in keep for x in batches((4, 3), bad)[i]]
        args = TrainingArguments(
            str(tmp_path / f"{len(keep)}"),
            precision=precision,
            max_steps=6,
            per_device_train_batch_size=4,
            optim="sgd",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            lr_scheduler_type="constant",
            learning_rate=1e-3,
        )
        trainer = InOrder(model, args, train_dataset=rows)
        trainer.train()
        assert trainer.state.skipped_steps == len(bad)
        return model

    assert same(buffers(run({2}, list(range(7)))), buffers(run(set(), [0, 1, 3, 4, 5, 6])))
