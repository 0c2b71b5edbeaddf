"""`save_state` and `load_state`: a run goes on bit for bit, and a checkpoint that does not fit changes nothing."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from halfstep import Accelerator
from halfstep.checkpoint import capture, load, seed_everything
from halfstep.errors import CheckpointError, DivergedError, HalfstepError

PRECISIONS = ["fp32", "bf16-mixed", "fp16-mixed,scale=dynamic:65536,scale_window=2", "fp16-mixed,scale=static:512"]


class Counter:
    """Something of the user's with a state."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Run:
    """A model with dropout, its optimizer and schedule, and a loop that can be left and entered anywhere."""

    def __init__(self, precision: str = "fp32", seed: int = 0, width: int = 8, make=None, schedule=None, register: bool = True) -> None:
        seed_everything(seed)
        self.accelerator = Accelerator(precision=precision, cpu=True)
        net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 2))
        inner = (make or (lambda p: torch.optim.AdamW(p, lr=0.05)))(net.parameters())
        scheduler = (schedule or (lambda o: LambdaLR(o, lambda n: 1 / (1 + n))))(inner)
        self.net, self.optimizer, self.scheduler = self.accelerator.prepare(net, inner, scheduler)
        self.counter = Counter()
        if register:
            self.accelerator.register_for_checkpointing(self.counter)

    def go(self, steps: int) -> list[float]:
        """Steps on random data with random dropout; the second of a run overflows."""
        losses = []
        for _ in range(steps):
            x = torch.randn(8, 4)
            loss = F.cross_entropy(self.net(x), (x.sum(1) > 0).long())
            self.accelerator.backward(loss)
            if self.counter.seen == 1:
                with self.accelerator.scaler.edits():
                    self.net[0].weight.grad.mul_(float("inf"))
            self.accelerator.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.seen += 1
            losses.append(loss.item())
        return losses

    def everything(self) -> dict:
        """Every state there is, as a copy."""
        parts = {"net": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler, "counter": self.counter}
        states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        return states | {"scaler": self.accelerator.scaler.state_dict(), "random": copy.deepcopy(capture())}


def same(a: object, b: object) -> bool:
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "tobytes"):
        return a.tobytes() == b.tobytes()
    return a == b


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_loaded_run_goes_on_as_the_unbroken_one_did(tmp_path: Path, precision: str, at: int) -> None:
    unbroken = Run(precision)
    expected = unbroken.go(6)
    first = Run(precision)
    assert first.go(at) == expected[:at]
    first.accelerator.save_state(tmp_path / "state")
    assert first.go(6 - at) == expected[at:], "saving disturbs nothing"
    second = Run(precision, seed=99)
    second.accelerator.load_state(tmp_path / "state")
    assert second.counter.seen == at
    assert second.go(6 - at) == expected[at:]
    assert same(second.everything(), unbroken.everything())


def test_the_scale_in_the_test_above_has_moved() -> None:
    run = Run(PRECISIONS[2])
    run.go(2)
    assert run.accelerator.scaler.get_scale() < 65536


SCHEDULES = {
    "step": lambda o: StepLR(o, 2),
    "one-cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(o, [StepLR(o, 1), StepLR(o, 2)], milestones=[3]),
    "plateau": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedules_go_on(tmp_path: Path, name: str) -> None:
    unbroken = Run(schedule=SCHEDULES[name])
    expected = unbroken.go(6)
    first = Run(schedule=SCHEDULES[name])
    first.go(3)
    first.accelerator.save_state(tmp_path / "state")
    second = Run(seed=99, schedule=SCHEDULES[name])
    second.accelerator.load_state(tmp_path / "state")
    assert second.go(3) == expected[3:]
    assert second.scheduler.get_last_lr() == unbroken.scheduler.get_last_lr()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_optimizers_go_on(tmp_path: Path, name: str) -> None:
    unbroken = Run(make=OPTIMIZERS[name])
    expected = unbroken.go(6)
    first = Run(make=OPTIMIZERS[name])
    first.go(3)
    first.accelerator.save_state(tmp_path / "state")
    second = Run(seed=99, make=OPTIMIZERS[name])
    second.accelerator.load_state(tmp_path / "state")
    assert second.go(3) == expected[3:]
    assert same(second.everything(), unbroken.everything())


def test_a_window_that_is_open_goes_on_where_it_was_or_is_not_saved(tmp_path: Path) -> None:
    def step(accelerator: Accelerator, net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.ones(1, 2)).sum())
            reason = optimizer.step().reason
            optimizer.zero_grad()
        return reason

    def made() -> tuple:
        torch.manual_seed(0)
        accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=3), nn.Linear(2, 1)
        return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))

    first, second = made(), made()
    assert [step(*first) for _ in range(4)] == ["accumulating", "accumulating", "applied", "accumulating"]
    try:
        first[0].save_state(tmp_path / "inside")
    except HalfstepError as refusal:
        assert "window" in refusal.cause  # noqa: PT017  one of two right answers
        return
    assert [step(*first) for _ in range(2)] == ["accumulating", "applied"]
    second[0].load_state(tmp_path / "inside")
    assert [step(*second) for _ in range(2)] == ["accumulating", "applied"]
    assert torch.equal(first[1].weight, second[1].weight), "the gradients of the open window are part of the state"


def test_the_files_say_what_they_are_of(tmp_path: Path) -> None:
    run = Run("bf16-mixed")
    run.go(1)
    folder = run.accelerator.save_state(tmp_path / "state")
    assert folder == tmp_path / "state"
    loaded = load(folder)
    assert loaded.about["policy"] == "bf16-mixed"
    assert loaded.about["versions"]["torch"] == torch.__version__
    assert set(loaded.parts) == {"model", "optimizer", "scheduler", "custom", "scaler", "random", "watch"}


def test_two_of_a_kind_keep_their_own_states(tmp_path: Path) -> None:
    def made(seed: int) -> tuple:
        torch.manual_seed(seed)
        nets = nn.Linear(2, 2), nn.Linear(2, 2)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(*nets, *(torch.optim.SGD(n.parameters(), 0.1) for n in nets))
        return accelerator, nets

    (first, saved), (second, found) = made(0), made(1)
    first.save_state(tmp_path / "two")
    second.load_state(tmp_path / "two")
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(saved, found, strict=True))
    assert not torch.equal(found[0].weight, found[1].weight)


# --- what does not fit ----------------------------------------------------------------------------------------------------


def refused(folder: Path, run: Run) -> CheckpointError:
    """The refusal, after a look at every state of the run that got it."""
    before, here = run.everything(), run.accelerator._micro_batches
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.load_state(folder)
    assert same(run.everything(), before), "a refused checkpoint changes nothing"
    assert run.accelerator._micro_batches == here
    run.go(1)
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = Run("bf16-mixed")
    run.go(2)
    return run.accelerator.save_state(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("other", ["fp32", "fp16-mixed", "bf16-mixed,output=compute", "bf16-mixed,fp32=3"])
def test_another_policy_is_refused(folder: Path, other: str) -> None:
    error = refused(folder, Run(other))
    assert error.cause == f"checkpoint {folder} was made under precision bf16-mixed, and this run has {other}"
    assert "Resume with the same precision" in error.remedy
    assert "model.safetensors" in error.remedy


def test_a_model_of_other_shape_is_refused(folder: Path) -> None:
    error = refused(folder, Run("bf16-mixed", width=16))
    assert "is of another model: '0.weight' is torch.float32 (8, 4) there and torch.float32 (16, 4) here" in error.cause
    assert error.remedy == "Build the model as the run that saved it did."


@pytest.mark.parametrize(("more_there", "said"), [(True, "the model lacks '4.weight'"), (False, "the checkpoint lacks '4.weight'")])
def test_a_model_with_other_layers_is_refused(tmp_path: Path, more_there: bool, said: str) -> None:
    plain, deeper = Run(), Run()
    deeper.net.append(nn.Linear(2, 2).requires_grad_(False))
    there, here = (deeper, plain) if more_there else (plain, deeper)
    error = refused(there.accelerator.save_state(tmp_path / "c"), here)
    assert f"is of another model: {said}" in error.cause


def test_a_buffer_of_another_dtype_is_refused(tmp_path: Path) -> None:
    there, here = Run(), Run()
    there.net[1].running_mean = there.net[1].running_mean.double()
    error = refused(there.accelerator.save_state(tmp_path / "c"), here)
    assert "'1.running_mean' is torch.float64" in error.cause


def test_an_optimizer_with_other_groups_is_refused(folder: Path) -> None:
    def grouped(parameters):
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=0.05)

    error = refused(folder, Run("bf16-mixed", make=grouped))
    assert "has an optimizer with groups of [6] parameters, and this run's has [1, 5]" in error.cause
    assert error.remedy == "Build the optimizer as the run that saved it did."


@pytest.mark.parametrize("name", ["sgd", "adafactor", "rmsprop"])
def test_an_optimizer_of_another_kind_is_refused(folder: Path, name: str) -> None:
    error = refused(folder, Run("bf16-mixed", make=OPTIMIZERS[name]))
    assert "optimizer" in error.cause
    assert "AdamW" in error.cause


def test_a_schedule_of_another_kind_is_refused(folder: Path) -> None:
    error = refused(folder, Run("bf16-mixed", schedule=lambda o: StepLR(o, 2)))
    assert "StepLR" in error.cause
    assert "LambdaLR" in error.cause


def test_other_registered_objects_are_refused(folder: Path) -> None:
    error = refused(folder, Run("bf16-mixed", register=False))
    assert "holds custom, model, optimizer, scheduler, and this run has model, optimizer, scheduler" in error.cause
    assert "same kinds of object, in the same order" in error.remedy


def test_nothing_prepared_is_said(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="this run has nothing prepared"):
        Accelerator("bf16", cpu=True).load_state(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "random.json", "manifest.json", "custom.json"])
@pytest.mark.parametrize("damage", ["truncated", "gone", "flipped"])
def test_a_damaged_checkpoint_changes_nothing(folder: Path, name: str, damage: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 0x10
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data if damage == "flipped" else data[:-9])
    error = refused(folder, Run("bf16-mixed"))
    assert str(folder) in error.cause
    assert name in error.cause or name == "manifest.json"


@pytest.mark.parametrize("part", ["scaler", "random"])
def test_a_checkpoint_that_lacks_a_part_changes_nothing(tmp_path: Path, folder: Path, part: str) -> None:
    """Whole and written by halfstep, but not by `save_state`."""
    from halfstep.checkpoint import save

    loaded = load(folder)
    other = save(tmp_path / "other", {k: v for k, v in loaded.parts.items() if k != part}, loaded.about)
    assert part in refused(other, Run("bf16-mixed")).cause


def test_a_run_that_diverges_names_the_checkpoint_that_it_went_on_from(tmp_path: Path) -> None:
    def fresh() -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
        accelerator, model = Accelerator(cpu=True, patience=1), nn.Linear(4, 1)
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    fresh()[0].save_state(tmp_path / "good")
    accelerator, model, optimizer = fresh()
    accelerator.load_state(tmp_path / "good")
    accelerator.backward(model(torch.full((2, 4), float("nan"))).sum())
    with pytest.raises(DivergedError, match=r"last good checkpoint is .*good"):
        optimizer.step()
