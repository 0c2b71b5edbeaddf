"""Small runs that stop somewhere, and all that a run leaves behind, to compare bit for bit."""

import json
import os
import signal
from pathlib import Path

import torch

from halfstep import Trainer, TrainerCallback, TrainingArguments
from halfstep.checkpoint import latest
from halfstep.demo import GPT, GPTConfig
from halfstep.demo.text import Blocks

TEXT = bytes(torch.randint(97, 123, (16 * 64,), generator=torch.Generator().manual_seed(3)).tolist())
STEPS = 12


class StopAt(TrainerCallback):
    """Ends the run at a step: by an error, as a crash would, or by Ctrl-C."""

    def __init__(self, step: int, act) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            self.act()


class CrashError(Exception):
    pass


def crash() -> None:
    raise CrashError


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def trainer(place: Path, samples: int = 28, kind: type[Trainer] = Trainer, data: object = None, callbacks: tuple = (), **settings) -> Trainer:
    """A tiny GPT with dropout; 2 samples a micro-batch, 2 micro-batches a step, so `samples` / 4 steps a pass."""
    torch.manual_seed(5)
    model = GPT(GPTConfig(block_size=16, layers=1, heads=2, width=16, dropout=0.2))
    defaults = {"max_steps": STEPS, "save_steps": 5, "logging_steps": 1, "learning_rate": 1e-2, "warmup_steps": 3, "weight_decay": 0.1}
    args = TrainingArguments(
        **{
            "output_dir": str(place / "run"),
            "use_cpu": True,
            "disable_tqdm": True,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            **defaults,
            **settings,
        }
    )
    blocks = Blocks(TEXT, 16)
    train_set = data if data is not None else torch.utils.data.Subset(blocks, range(samples))
    return kind(model, args, train_dataset=train_set, eval_dataset=torch.utils.data.Subset(blocks, range(60, 64)), callbacks=callbacks)


def steps_of(records: list[dict]) -> list[dict]:
    """Records without clock times; that of the end is left out, for it tells of one call of train()."""
    return [{k: v for k, v in r.items() if not k.endswith(("_runtime", "_per_second"))} for r in records if "train_runtime" not in r]


def outcome(made: Trainer) -> dict:
    """Everything that a run leaves behind, without clock times."""
    folder = latest(made.run.path)
    assert folder is not None
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("manifest.json", "custom.json")}
    lines = steps_of([json.loads(line) for line in made.run.metrics.read_text().splitlines()])
    state = {k: v for k, v in made.state.state_dict().items() if k != "log_history"}
    state["best_model_checkpoint"] = state["best_model_checkpoint"] and Path(state["best_model_checkpoint"]).name
    weights = {k: (v.dtype, v.flatten().view(torch.uint8).numpy().tobytes()) for k, v in made.model.state_dict().items()}
    return {"weights": weights, "history": steps_of(made.state.log_history), "lines": lines, "files": files, "state": state}


def same(a: dict, b: dict) -> None:
    assert repr(a["history"]) == repr(b["history"])  # as text, for NaN is not equal to itself
    assert repr(a["lines"]) == repr(b["lines"])
    assert a["state"] == b["state"]
    assert a["weights"] == b["weights"]
    assert sorted(a["files"]) == sorted(b["files"])
    assert [name for name in a["files"] if a["files"][name] != b["files"][name]] == []
