"""What a run may be made of, in combination: storages, states, data, workers, schedules. Stopped inside a pass and resumed, no bit differs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resumed_runs import TEXT, CrashError, StopAt, crash, outcome, same, trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

from halfstep import EarlyStoppingCallback, Trainer
from halfstep.checkpoint import latest, load
from halfstep.demo.text import Blocks


class Noisy(Dataset):
    """Samples that are changed at random when they are read, by torch's and numpy's generators of the process that reads."""

    def __init__(self, samples: int = 16) -> None:
        self.blocks, self.samples = Blocks(TEXT, 16), samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        sample = dict(self.blocks[i])
        kept = torch.rand(sample["input_ids"].shape) > 0.3
        sample["input_ids"] = torch.where(kept, sample["input_ids"], int(np.random.randint(97, 123)))
        return sample


class NoisyStream(IterableDataset):
    """A stream, dealt to workers, whose noise in a pass is that of its workers."""

    def __init__(self) -> None:
        self.rows = Noisy()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        start, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self.rows[i] for i in range(start, 16, stride))


class ShuffledStream(IterableDataset):
    """A stream that is told its pass, as those of `datasets` are, and shuffles by it."""

    def __init__(self) -> None:
        self.rows, self.epoch = Noisy(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = torch.randperm(16, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (dict(self.rows.blocks[i]) for i in order)


class Shuffles(Trainer):
    """A loader of the user's that shuffles by torch's own generator."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=2, shuffle=True, collate_fn=self.data_collator)


class ShufflesInWorkers(Trainer):
    """And one with workers."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=2, shuffle=True, collate_fn=self.data_collator, num_workers=2)


class Generates(Trainer):
    """A loader that has a generator of its own, which goes on from pass to pass."""

    def get_train_dataloader(self) -> DataLoader:
        own = torch.Generator().manual_seed(11)
        return DataLoader(self.train_dataset, batch_size=2, shuffle=True, collate_fn=self.data_collator, generator=own)


class DrawsWithReplacement(Trainer):
    """A sampler with a generator of its own inside the loader."""

    def get_train_dataloader(self) -> DataLoader:
        sampler = RandomSampler(self.train_dataset, replacement=True, num_samples=16, generator=torch.Generator().manual_seed(12))
        return DataLoader(self.train_dataset, batch_size=2, sampler=sampler, collate_fn=self.data_collator)


class StopsEarly(Trainer):
    """With a callback that counts evaluations which were no better."""

    def __init__(self, *given: Any, callbacks: Any = (), **named: Any) -> None:
        super().__init__(*given, callbacks=[*callbacks, EarlyStoppingCallback(3)], **named)


EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}
STOCK = "scale=dynamic:65536,scale_window=3,scale_strategy=stock"  # a scale that moves, up and down
TABLE = {  # 4 steps of 2 micro-batches a pass
    "fp32, noise at reading": {"precision": "fp32", "data": Noisy()},
    "bf16-mixed, workers": {"precision": "bf16-mixed", "data": Noisy(), "dataloader_num_workers": 2},
    "fp16-mixed with a stock scale, shuffled loader": {"precision": f"fp16-mixed,{STOCK}", "kind": Shuffles},
    "fp16-mixed that follows, loader with a generator": {"precision": "fp16-mixed", "kind": Generates, "data": Noisy()},
    "split, int8, short last window": {"precision": "bf16-lean", "data": Noisy(13)},
    "split, fp32 states, draws with replacement": {"precision": "bf16-lean,states=fp32", "kind": DrawsWithReplacement},
    "split24, int8, loader with workers": {"precision": "bf16-lean,weights=split24", "kind": ShufflesInWorkers, "data": Noisy()},
    "split24, bf16 states, cosine": {"precision": "bf16-lean,weights=split24,states=bf16", "lr_scheduler_type": "cosine"},
    "kahan, 16-bit states, stream": {"precision": "bf16-true", "data": ShuffledStream()},
    "kahan, int8, noise at reading": {"precision": "bf16-true,weights=kahan,states=int8", "data": Noisy()},
    "stochastic, fp32 states": {"precision": "bf16-true,weights=stochastic,states=fp32"},
    "stochastic, int8, stream in workers": {"precision": "bf16-lean,weights=stochastic", "data": NoisyStream(), "dataloader_num_workers": 2},
    "fp16 split, int8, scale that follows": {"precision": "fp16-lean", "data": Noisy()},
    "fp16 split, stock scale, sgd": {"precision": f"fp16-true,{STOCK}", "optim": "sgd", "learning_rate": 0.1},
    "plain, no accumulation": {"precision": "bf16-true,weights=plain", "gradient_accumulation_steps": 1, "data": Noisy(8)},
    "a static scale, no clipping, long windows": {
        "precision": "fp16-mixed,scale=static:256",
        "gradient_accumulation_steps": 3,
        "max_steps": 5,
        "save_steps": 4,
        "max_grad_norm": 0.0,
        "data": Noisy(18),
    },
    "label smoothing, Lion, int8": {"precision": "bf16-lean", "label_smoothing_factor": 0.1, "optim": "lion", "learning_rate": 1e-3},
    "a plateau's schedule": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, "warmup_steps": 0, **EVALUATES},
    "best model, early stopping": {"kind": StopsEarly, "load_best_model_at_end": True, **EVALUATES, "save_steps": 5, "eval_steps": 5},
    "activations in int8, split24": {"precision": "bf16-lean,weights=split24,activations=int8", "data": Noisy()},
}


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE.keys())
def test_no_bit_differs_after_a_stop_inside_the_second_pass(tmp_path: Path, case: dict) -> None:
    settings = {"max_steps": 7, "save_steps": 5, "samples": 16} | case
    unbroken = trainer(tmp_path / "a", **settings)
    unbroken.train()
    with pytest.raises(CrashError):
        trainer(tmp_path / "b", **settings, callbacks=(StopAt(settings["save_steps"] + 1, crash),)).train()
    saved = latest(tmp_path / "b" / "run")
    assert saved.name == f"checkpoint-{settings['save_steps']}"
    at = load(saved).parts["custom"]
    assert at["epoch_index"] == 1
    assert at["batches_in_epoch"] > 0, "inside the second pass"
    torch.manual_seed(123)
    resumed = trainer(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=True)
    same(outcome(resumed), outcome(unbroken))


@pytest.mark.parametrize("kind", [Generates, DrawsWithReplacement, Shuffles])
def test_a_generator_goes_on_where_a_pass_ended(tmp_path: Path, kind: type[Trainer]) -> None:
    """Saved between two passes: the next order is not that of the first again."""
    settings = {"max_steps": 7, "save_strategy": "epoch", "samples": 16, "kind": kind}
    unbroken = trainer(tmp_path / "a", **settings)
    unbroken.train()
    with pytest.raises(CrashError):
        trainer(tmp_path / "b", **settings, callbacks=(StopAt(6, crash),)).train()
    resumed = trainer(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=True)
    same(outcome(resumed), outcome(unbroken))


class DrawsAsItGoes(IterableDataset):
    """What cannot go on exactly: its order depends on numbers drawn between those of dropout."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        blocks, left = Blocks(TEXT, 16), list(range(16))
        while left:
            yield dict(blocks[left.pop(int(torch.randint(len(left), ())))])


def test_a_stream_that_draws_from_the_models_generator_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"max_steps": 8, "save_steps": 4, "data": DrawsAsItGoes()}
    with pytest.raises(CrashError):
        trainer(tmp_path, **settings, callbacks=(StopAt(5, crash),)).train()
    trainer(tmp_path, **settings).train(resume_from_checkpoint=True)
    assert "may differ from those of a run that never stopped. Give the dataset a generator of its own" in caplog.text
