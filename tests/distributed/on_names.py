"""Checks of accelerate's names on several ranks: what they exchange, who runs what, who writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launched import main
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from halfstep.accelerator import DistributedType, GeneralTracker, ProjectConfiguration
from halfstep.distributed import Ranks
from halfstep.errors import ConfigError, DataError


def accelerator(**settings: object) -> halfstep.Accelerator:
    return halfstep.Accelerator(cpu=True, **settings)


def places_are_told(ranks: Ranks, folder: Path) -> None:
    a = accelerator()
    assert (a.num_processes, a.process_index) == (ranks.world, ranks.rank)
    assert (a.is_main_process, a.is_last_process) == (ranks.rank == 0, ranks.rank == ranks.world - 1)
    assert a.distributed_type == DistributedType.MULTI_CPU == a.state.distributed_type
    assert a.use_distributed
    here = [a.on_main_process(int)("1"), a.on_last_process(int)("2"), a.on_process(process_index=1)(int)("3")]
    assert here == [1 if ranks.rank == 0 else None, 2 if a.is_last_process else None, 3 if ranks.rank == 1 else None]


def the_main_process_goes_first(ranks: Ranks, folder: Path) -> None:
    a, note = accelerator(), folder / "note"
    with a.main_process_first():
        if a.is_main_process:
            assert not note.exists()
            note.write_text("written")
        assert note.exists()
    a.wait_for_everyone()
    with pytest.raises(KeyError), a.main_process_first():  # an error there does not leave the others waiting
        raise KeyError


def values_of_all_are_brought_together(ranks: Ranks, folder: Path) -> None:
    a, world, rank = accelerator(), ranks.world, ranks.rank
    mine = {"x": torch.tensor([float(rank), 10.0 + rank]), "y": (torch.tensor(rank),)}
    gathered = a.gather(mine)
    assert gathered["x"].tolist() == [value for r in range(world) for value in (float(r), 10.0 + r)]
    assert gathered["y"][0].tolist() == list(range(world))
    assert a.reduce(mine["x"], "sum").tolist() == [sum(range(world)), 10.0 * world + sum(range(world))]
    assert a.reduce(mine["x"], "mean", scale=2.0)[0] == 2 * sum(range(world)) / world
    assert a.reduce({"x": mine["x"]}, "max")["x"].tolist() == [world - 1.0, 9.0 + world]
    assert a.reduce(mine["x"], "none").tolist() == mine["x"].tolist() == [float(rank), 10.0 + rank]
    padded = a.pad_across_processes(torch.ones(1, rank + 1), dim=1, pad_index=-1)
    assert padded.tolist() == [[1.0] * (rank + 1) + [-1.0] * (world - 1 - rank)]
    assert a.pad_across_processes(torch.ones(rank + 1), pad_first=True).tolist() == [0.0] * (world - 1 - rank) + [1.0] * (rank + 1)
    with pytest.raises(DataError, match="pad_across_processes"):
        a.gather(torch.ones(rank + 1))
    with a.split_between_processes(list(range(world + 1))) as part:
        assert part == ([0, 1] if rank == 0 else [rank + 1])
    with a.split_between_processes({"a": list(range(world + 1))}, apply_padding=True) as part:
        assert len(part["a"]) == 2
    if rank == 1:
        a.set_trigger()
    assert a.check_trigger()
    assert not a.check_trigger()


def padding_is_dropped_from_metrics(ranks: Ranks, folder: Path) -> None:
    for samples, size in ((9, 2), (8, 2), (7, 3), (1, 4), (12, 3)):
        for split in (False, True):
            a = accelerator(split_batches=split)
            loader = a.prepare(DataLoader(TensorDataset(torch.arange(samples)), batch_size=size * (ranks.world if split else 1)))
            tensors, objects, both = [], [], []
            for (batch,) in loader:
                tensors += a.gather_for_metrics(batch).tolist()
                objects += a.gather_for_metrics([f"sample {i}" for i in batch.tolist()])
                both += a.gather_for_metrics((batch, batch))[1].tolist()
            assert sorted(tensors) == list(range(samples)), (samples, size, split, tensors)
            assert sorted(objects) == sorted(f"sample {i}" for i in range(samples))
            assert sorted(both) == list(range(samples))


def schedules_count_the_batches_of_one_process(ranks: Ranks, folder: Path) -> None:
    for split, expected in ((False, 3 * ranks.world), (True, 3)):
        a = accelerator(split_batches=split)
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        model, optimizer, schedule = a.prepare(model, optimizer, LambdaLR(optimizer, lambda k: 1.0))
        for _ in range(3):
            a.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert schedule.last_epoch == expected


def files_are_written_once(ranks: Ranks, folder: Path) -> None:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    a = accelerator(project_config=project, log_with="jsonl")
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 1.0)
    nn.init.zeros_(model.bias)
    model, _ = a.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    a.init_trackers("run", config={"lr": 0.1})
    a.log({"loss": 1.0}, step=1)
    assert a.is_main_process or type(a.get_tracker("jsonl")) is GeneralTracker
    told: list[str] = []
    a.register_save_state_pre_hook(lambda models, weights, output_dir: told.append(Path(output_dir).name))
    for _ in range(3):
        a.save_state()
    a.save({"a": torch.ones(1)}, folder / "single.pt")
    a.save_model(model, folder / "model")
    a.end_training()
    a.wait_for_everyone()
    assert told == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert (folder / "run" / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'
    assert (folder / "single.pt").exists()
    assert (folder / "model" / "model.safetensors").exists()
    with torch.no_grad():
        model.weight.zero_()
    a.load_state()
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert a.save_iteration == 3
    a.wait_for_everyone()


def two_models_train_against_each_other(ranks: Ranks, folder: Path) -> None:
    """Windows of two micro-batches, `zero_grad` of one while the other's window goes on: as one process with all samples."""
    generator = torch.Generator().manual_seed(1)
    real, noise = torch.randn(8 * ranks.world, 2, generator=generator), torch.randn(8 * ranks.world, 3, generator=generator)

    def train(a: halfstep.Accelerator | None, window: int, real: torch.Tensor, noise: torch.Tensor, count: int) -> torch.Tensor:
        torch.manual_seed(0)
        g, d = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        parts = [torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)]
        if a is not None:
            g, d, *parts = a.prepare(g, d, *parts)
        for r, z in zip(real.chunk(count), noise.chunk(count), strict=True):
            for model, optimizer, batch in ((d, parts[1], r), (g, parts[0], z)):
                loss = model(batch).square().mean()
                if a is None:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            if a is not None:
                with a.accumulate(g, d):
                    parts[1].zero_grad()
                    a.backward(d(r).square().mean())
                    parts[1].step()
                    parts[0].zero_grad()
                    a.backward(g(z).square().mean())
                    parts[0].step()
        return torch.cat([p.detach().reshape(-1) for m in (g, d) for p in m.parameters()])

    # process r has samples 2r and 2r+1 of each micro-batch, so that a window of two is a batch of 4 x world
    mine = torch.cat([torch.arange(2) + 2 * ranks.rank + 2 * ranks.world * k for k in range(4)])
    ours = train(accelerator(gradient_accumulation_steps=2), 2, real[mine], noise[mine], 4)
    reference = train(None, 1, real, noise, 2)
    assert torch.allclose(ours, reference, atol=1e-6)


def what_ranks_cannot_do_is_refused(ranks: Ranks, folder: Path) -> None:
    a = accelerator()
    with pytest.raises(ConfigError, match="is not known"):
        a.reduce(torch.ones(1), "median")
    with pytest.raises(DataError, match="mean"):
        a.reduce(torch.ones(1, dtype=torch.long), "mean")


CHECKS = [
    places_are_told,
    the_main_process_goes_first,
    values_of_all_are_brought_together,
    padding_is_dropped_from_metrics,
    schedules_count_the_batches_of_one_process,
    files_are_written_once,
    two_models_train_against_each_other,
    what_ranks_cannot_do_is_refused,
]

if __name__ == "__main__":
    main({check.__name__: check for check in CHECKS})
