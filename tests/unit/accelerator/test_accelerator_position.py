"""A loop with prepared loaders that is left inside a pass goes on with the very next batch, bit for bit."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from halfstep import Accelerator
from halfstep.accelerator import skip_first_batches
from halfstep.checkpoint import capture, seed_everything
from halfstep.errors import ConfigError, DataError


class Noisy(Dataset):
    """Rows changed at random when they are read."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i, 1.0, -i / 4, 0.5]) + 0.1 * torch.randn(4)


class Stream(IterableDataset):
    """Rows in a fixed order, of no length that a loader knows."""

    def __iter__(self):
        return iter(torch.arange(72.0).view(18, 4) / 40)


def noisy(**kwargs) -> DataLoader:
    return DataLoader(Noisy(), batch_size=2, **kwargs)


class Own(torch.utils.data.Sampler):
    """Batches of a sampler that torch does not know, the last one short."""

    def __iter__(self):
        return iter([[i, i + 1] for i in range(0, 16, 2)] + [[16]])

    def __len__(self) -> int:
        return 9


LOADERS = {
    "in order": noisy,
    "shuffled": lambda: noisy(shuffle=True),
    "shuffled in workers": lambda: noisy(shuffle=True, num_workers=2),
    "own generator": lambda: noisy(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "own batches": lambda: DataLoader([row / 10 for row in torch.arange(72.0).view(18, 4)], batch_sampler=Own()),
}


class Loop:
    """A script of a user's: two micro-batches a step, checkpoints by number of batches."""

    def __init__(self, loader: str, precision: str, seed: int = 0) -> None:
        seed_everything(seed)
        self.accelerator = Accelerator(precision=precision, cpu=True, gradient_accumulation_steps=2)
        net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        prepared = self.accelerator.prepare(net, optimizer, LOADERS[loader](), StepLR(optimizer, 2))
        self.net, self.optimizer, self.loader, self.scheduler = prepared
        self.losses: list[float] = []

    def batch(self, x: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.net):
            loss = F.cross_entropy(self.net(torch.cat([x, -x])), (torch.cat([x, -x]).sum(1) > 0).long())
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def run(self, passes: range, skip: int = 0, save_at: tuple[int, int] | None = None, place: Path | None = None) -> None:
        for epoch in passes:
            batches = self.accelerator.skip_first_batches(self.loader, skip) if epoch == passes.start and skip else self.loader
            for i, x in enumerate(batches, skip if epoch == passes.start else 0):
                self.batch(x)
                if save_at == (epoch, i + 1):
                    self.accelerator.save_state(place)
                    return

    def everything(self) -> dict:
        parts = {"net": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()} | {
            "scaler": self.accelerator.scaler.state_dict(),
            "random": copy.deepcopy(capture()),
        }


def same(a: object, b: object) -> bool:
    if torch.is_tensor(a):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b


PRECISIONS = ["fp32", "bf16-lean,weights=split24", "fp16-mixed", "bf16-true,weights=stochastic", "fp16-lean", "bf16-true"]
CASES = [(name, PRECISIONS[i]) for i, name in enumerate(LOADERS)] + [("shuffled", PRECISIONS[2]), ("own generator", PRECISIONS[0])]


@pytest.mark.parametrize(("loader", "precision"), CASES)
@pytest.mark.parametrize("at", [4, 9], ids=["inside a pass", "at its end"])
def test_a_loop_goes_on_in_the_middle_of_the_second_pass(tmp_path: Path, loader: str, precision: str, at: int) -> None:
    unbroken = Loop(loader, precision)
    unbroken.run(range(3))
    first = Loop(loader, precision)
    first.run(range(2), save_at=(1, at), place=tmp_path / "state")
    second = Loop(loader, precision, seed=99)
    second.accelerator.load_state(tmp_path / "state")
    second.run(range(1, 3), skip=at)
    assert first.losses + second.losses == unbroken.losses
    assert len(unbroken.losses) == 27
    assert same(second.everything(), unbroken.everything())


@pytest.mark.parametrize("loader", ["shuffled", "own generator", "in order"])
def test_a_loop_saved_between_two_passes_begins_the_next(tmp_path: Path, loader: str) -> None:
    unbroken = Loop(loader, "fp32")
    unbroken.run(range(2))
    first = Loop(loader, "fp32")
    first.run(range(1))
    first.accelerator.save_state(tmp_path / "state")
    second = Loop(loader, "fp32", seed=99)
    second.accelerator.load_state(tmp_path / "state")
    second.run(range(1, 2))
    assert first.losses + second.losses == unbroken.losses


def test_another_number_of_batches_than_were_used_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Loop("shuffled", "fp32")
    first.run(range(1), save_at=(0, 4), place=tmp_path / "state")
    second = Loop("shuffled", "fp32")
    second.accelerator.load_state(tmp_path / "state")
    assert len(list(second.accelerator.skip_first_batches(second.loader, 2))) == 7
    assert "the checkpoint was saved after 4 batches of this pass, and the run goes on after 2" in caplog.text


def test_another_number_of_loaders_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Loop("in order", "fp32").run(range(1), save_at=(0, 2), place=tmp_path / "state")
    second = Loop("in order", "fp32")
    second.accelerator.prepare(noisy())
    second.accelerator.load_state(tmp_path / "state")
    assert "the places of 1 prepared loaders and this run has 2" in caplog.text


def test_a_pass_may_begin_anew_after_loading(tmp_path: Path) -> None:
    Loop("in order", "fp32").run(range(1), save_at=(0, 4), place=tmp_path / "state")
    second = Loop("in order", "fp32")
    second.accelerator.load_state(tmp_path / "state")
    assert len(list(second.loader)) == 9
    assert len(list(second.accelerator.skip_first_batches(second.loader, 4))) == 5, "the place was for that pass only"


def test_batches_are_skipped_without_a_checkpoint_and_of_any_loader() -> None:
    plain = DataLoader(torch.arange(10), batch_size=2)
    skipped = skip_first_batches(plain, 3)
    assert [b.tolist() for b in skipped] == [[6, 7], [8, 9]]
    assert len(skipped) == 2
    assert skipped.batch_size == 2
    prepared = Accelerator(cpu=True).prepare(plain)
    assert [b.tolist() for b in skip_first_batches(prepared, 4)] == [[8, 9]]
    assert list(skip_first_batches(prepared, 5)) == []
    assert next(b.tolist() for b in prepared) == [0, 1]


@pytest.mark.parametrize("number", [-1, 1.5, True, None])
def test_a_number_that_is_none_is_refused(number: object) -> None:
    with pytest.raises(ConfigError, match=r"num_batches=.*Use a whole number of batches"):
        skip_first_batches([1, 2], number)


@pytest.mark.parametrize("make", [lambda: DataLoader(torch.arange(5), batch_size=2), lambda: DataLoader(Stream(), batch_size=4)])
def test_the_last_batch_of_a_pass_is_known(make) -> None:
    loader = Accelerator(cpu=True).prepare(make())
    for _ in range(2):
        ends = [loader.at_end for _ in loader]
        assert ends == [False] * (len(ends) - 1) + [True]
    assert loader.at_end is False


def test_a_loader_that_yields_nothing_is_refused() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(3), batch_size=4, drop_last=True))
    with pytest.raises(DataError, match="the data loader yields nothing"):
        list(loader)


def test_a_counted_loader_draws_as_torchs_does() -> None:
    """Nothing is read ahead where the number of batches is known: random numbers fall in the order of a loop without halfstep."""
    torch.manual_seed(3)
    plain = [(x, torch.rand(())) for x in noisy(shuffle=True)]
    torch.manual_seed(3)
    prepared = [(x, torch.rand(())) for x in Accelerator(cpu=True).prepare(noisy(shuffle=True))]
    assert same(plain, prepared)
