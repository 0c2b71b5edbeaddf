"""Checks of the trainer that run on every rank of a group."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from launched import main
from torch import nn

import halfstep
from halfstep.distributed import Ranks, Solo
from halfstep.errors import ConfigError, DataError
from halfstep.trainer.interrupt import TrainingInterrupted


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def data(samples: int) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, generator=random), "labels": int(torch.randint(0, 4, (), generator=random))} for _ in range(samples)]


@contextmanager
def alone() -> Iterator[None]:
    """This process as if there were no others."""
    with mock.patch("halfstep.accelerator.accelerator.launch", return_value=Solo()):
        yield


def trainer(folder: Path, batch: int, *, samples: int = 45, dropout: float = 0.0, callbacks: Any = (), **settings: Any) -> halfstep.Trainer:
    torch.manual_seed(0)
    own: dict[str, Any] = {"max_steps": 20, "learning_rate": 1e-2, "logging_steps": 5, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    args = halfstep.TrainingArguments(output_dir=str(folder), per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **own | settings)

    def accuracy(found: halfstep.EvalPrediction) -> dict[str, float]:
        return {"accuracy": float((np.argmax(found.predictions, -1) == found.label_ids).mean())}

    return halfstep.Trainer(Net(dropout), args, train_dataset=data(samples), eval_dataset=data(23), compute_metrics=accuracy, callbacks=callbacks)


def weights(run: halfstep.Trainer) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])


def two_ranks_equal_one(ranks: Ranks, folder: Path) -> None:
    """45 samples in batches of 8: the last one has 5, of which ranks get 3 and 2."""
    for window in (1, 2):
        shared = trainer(folder / f"shared-{window}", 4, gradient_accumulation_steps=window, max_steps=50 // window, eval_strategy="epoch")
        shared.train()
        with alone():
            single = trainer(
                folder / f"single-{window}-{ranks.rank}", 8, gradient_accumulation_steps=window, max_steps=50 // window, eval_strategy="epoch"
            )
            single.train()
        apart = float((weights(shared) - weights(single)).norm() / weights(single).norm())
        assert apart < 1e-5, (window, apart, [r.get("loss") for r in shared.state.log_history], [r.get("loss") for r in single.state.log_history])
        assert len(shared.state.log_history) == len(single.state.log_history)
        for ours, theirs in zip(shared.state.log_history, single.state.log_history, strict=True):
            for key in ("loss", "eval_loss", "eval_accuracy", "grad_norm", "learning_rate", "epoch", "step"):
                assert (key in ours) == (key in theirs)
                assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-4), (key, ours, theirs)
        assert shared.state.num_input_tokens_seen == single.state.num_input_tokens_seen
        predicted, expected = shared.predict(data(23)), single.predict(data(23))
        assert np.allclose(predicted.predictions, expected.predictions, atol=1e-4)
        assert np.array_equal(predicted.label_ids, expected.label_ids)
        assert shared.state.is_world_process_zero is ranks.is_main


def rank_0_writes_what_all_have_seen(ranks: Ranks, folder: Path) -> None:
    run = trainer(folder / "run", 4, fp16=True, reduce_dtype="fp16", save_strategy="steps", save_steps=10, save_total_limit=1)
    run.train()
    ranks.barrier()
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    elements = sum(p.numel() + 1 for p in run.model.parameters())
    assert all(line["reduced_bytes"] == 2 * elements for line in lines)
    assert [f.name for f in (folder / "run").glob("checkpoint-*")] == ["checkpoint-20"]
    losses = ranks.gather_object([record.get("loss", record.get("train_loss")) for record in run.state.log_history])
    assert all(other == losses[0] for other in losses)
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer(folder / "run", 4).train()


def a_run_goes_on_bit_for_bit(ranks: Ranks, folder: Path) -> None:
    settings: dict[str, Any] = {
        "dropout": 0.3,
        "save_strategy": "steps",
        "save_steps": 7,
        "precision": "bf16-lean",
        "max_steps": 12,
        "ema_decay": 0.9,
    }
    whole = trainer(folder / "whole", 4, **settings)
    whole.train()
    resumed = trainer(folder / "resumed", 4, **settings)
    resumed.train(resume_from_checkpoint=folder / "whole" / "checkpoint-7")
    assert torch.equal(weights(whole), weights(resumed))
    assert whole.average is not None
    assert resumed.average is not None
    assert whole.average.updates == 12
    averages = ranks.gather_object([v for run in (whole, resumed) for v in run.average.averages.values()])
    assert all(torch.equal(a, b) for other in averages for a, b in zip(other, averages[0], strict=True))
    assert [r["loss"] for r in whole.state.log_history if "loss" in r][-1] == [r["loss"] for r in resumed.state.log_history if "loss" in r][-1]
    with alone():
        single = trainer(folder / f"single-{ranks.rank}", 4, **settings)
        single.train(resume_from_checkpoint=folder / "whole" / "checkpoint-7")
    assert single.state.global_step == 12


class Stop(halfstep.TrainerCallback):
    """Ctrl-C on one rank."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and not state.is_world_process_zero:
            os.kill(os.getpid(), signal.SIGINT)


def ctrl_c_on_one_rank_stops_all_after_the_same_step(ranks: Ranks, folder: Path) -> None:
    run = trainer(folder / "run", 4, save_strategy="steps", callbacks=[Stop()])
    with pytest.raises(TrainingInterrupted) as stopped:
        run.train()
    assert stopped.value.step == 4
    assert (folder / "run" / "checkpoint-4" / "manifest.json").exists()


def what_cannot_be_is_refused_on_all(ranks: Ranks, folder: Path) -> None:
    with pytest.raises(ConfigError, match="auto_find_batch_size=True with 2 processes"):
        trainer(folder / "run", 4, auto_find_batch_size=True)
    with pytest.raises(ConfigError, match="ddp_static_graph=True has no effect"):
        trainer(folder / "run", 4, ddp_static_graph=True)
    with pytest.raises(DataError, match="fewer than one batch of 8"):
        trainer(folder / "run", 4, samples=7, dataloader_drop_last=True).train()


class Limit(halfstep.TrainerCallback):
    """A limit of time that one rank alone has noticed."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5 and not state.is_world_process_zero:
            control.should_training_stop = control.should_evaluate = True


def what_a_callback_wants_on_one_rank_is_done_on_all(ranks: Ranks, folder: Path) -> None:
    run = trainer(folder / "run", 4, callbacks=[Limit()])
    run.train()
    assert run.state.global_step == 5
    assert [r["step"] for r in run.state.log_history if "eval_loss" in r] == [5]


def data_of_unlike_length_is_refused(ranks: Ranks, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 43 samples on rank 0 and 37 on rank 1.*Give every rank the whole of the data"):
        trainer(folder / "run", 4, samples=43 if ranks.rank == 0 else 37).train()


CHECKS = (
    two_ranks_equal_one,
    rank_0_writes_what_all_have_seen,
    a_run_goes_on_bit_for_bit,
    ctrl_c_on_one_rank_stops_all_after_the_same_step,
    what_cannot_be_is_refused_on_all,
    what_a_callback_wants_on_one_rank_is_done_on_all,
    data_of_unlike_length_is_refused,
)

if __name__ == "__main__":
    main({check.__name__: check for check in CHECKS})
