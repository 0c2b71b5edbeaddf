"""Does a model whose feed-forward block leaves fp16's range train on, and as fp32 does, once the module is named and held in fp32?

A small T5 from a config, the weights of one feed-forward block scaled up until its output passes 65,504, is trained by the Trainer in fp32 and in
fp16: which modules were named and pinned, in which step and in how many replays, and the loss at the end relative to fp32's. Fails where another
module than expected was named, where it took more than one replay, where a step was lost, or where a loss is more than 2 % from fp32's.
Where its residual stream is fp16, transformers' T5 cuts off what has become infinite, so nothing is there to be healed; with those cuts taken out
("uncut") there is.
Run: python benchmarks/healed_models.py [--steps 100] [--gemma FOLDER_OR_GGUF]

--gemma trains Gemma 3 270M for a few steps in pure fp16 instead, where `model.half()` gives NaN. FOLDER_OR_GGUF is a folder of transformers' format
or a .gguf file (which also wants the packages gguf and accelerate). Sequence 64, batch 1; on a CPU without fp16 instructions minutes a step.
Weights that come from 4 bits often lie just between two fp16 numbers, where the least update moves the rounded one by a whole distance:
the loss then falls faster in fp16 than in fp32, with torch's autocast as well, so compare with the line of fp16-mixed too.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import Trainer, TrainingArguments
from halfstep.amp import pins
from halfstep.hardware import doctor

BLOCK = "encoder.block.1.layer.1.DenseReluDense"  # whose weights are scaled
WO, NORM = f"{BLOCK}.wo", "encoder.final_layer_norm"
RUNS = {  # and what is to be pinned: where all is fp16, whoever reads the values beyond its range is a module that has to be in fp32 too
    "fp16-mixed": [WO],
    "fp16-lean": [WO],
    "fp16-true": [],
    "fp16-true uncut": [WO, NORM],
}
GROWTH = 300.0  # of wi and wo each: the output of wo grows by its square
WORDS, LENGTH, ROWS, BATCH = 64, 12, 256, 16
ALLOWED = 0.02
TEXT = """Loss scaling keeps small gradients alive. Training in half precision takes less memory, and on most devices less time, but the range of its
numbers is small: what is larger than 65,504 becomes infinite, and what is smaller than 6e-8 becomes zero. A model may pass the upper limit in its
forward pass, where no loss scale helps. The first layer that does so is then the one to look at."""


def t5() -> nn.Module:
    """A T5 of two layers whose encoder passes 65,504 in its second feed-forward block."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": 64, "d_ff": 256, "d_kv": 16, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))
    block = model.get_submodule(BLOCK)
    with torch.no_grad():
        block.wi.weight *= GROWTH
        block.wo.weight *= GROWTH
    return model


def uncut() -> nn.Module:
    """The same model, whose blocks hand on what their layers give."""
    from transformers.models.t5.modeling_t5 import T5Block

    class Uncut(T5Block):
        def forward(self, x: Tensor, mask: Any, bias: Any, states: Any = None, crossed: Any = None, other: Any = None, **more: Any) -> Any:
            x, bias, *_ = self.layer[0](x, attention_mask=mask, position_bias=bias, cache=more.get("cache"))
            if self.is_decoder:
                x, other, *_ = self.layer[1](x, key_value_states=states, attention_mask=crossed, position_bias=other, cache=more.get("cache"))
            return self.layer[-1](x), bias, other

    model = t5()
    for part in model.modules():
        if type(part) is T5Block:
            part.__class__ = Uncut
    return model


def turned_words() -> list[dict[str, Tensor]]:
    """Rows of random words; the labels are the same words in the opposite order."""
    rows = torch.randint(1, WORDS // 4, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.flip(0)} for row in rows]


def gemma(path: Path) -> tuple[Callable[[], nn.Module], list[dict[str, Tensor]]]:
    """How to load the model anew, and one text of 64 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    ids = AutoTokenizer.from_pretrained(folder, **where)(TEXT, return_tensors="pt").input_ids[0, :64]
    return lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where), [{"input_ids": ids, "labels": ids}]


def run(model: nn.Module, data: list[dict[str, Tensor]], precision: str, steps: int, **settings: Any) -> dict[str, Any]:
    """Train, and tell what the log and the model hold afterwards. The loss is the mean over the last tenth of the steps."""
    quiet: dict[str, Any] = {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "report_to": "none"}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, max_steps=steps, precision=precision, **quiet, **settings)
        trainer = Trainer(model, args, train_dataset=data)
        trainer.train()
    history = trainer.state.log_history
    losses = [record["loss"] for record in history if "loss" in record]
    return {
        "precision": precision,
        "pinned": {p.module: p.step for p in pins(model)},
        "why": [p.why for p in pins(model)],
        "replays": trainer.state.replayed_steps,
        "skipped": trainer.state.skipped_steps,
        "first_loss": losses[0],
        "last_loss": sum(losses[-max(1, steps // 10) :]) / max(1, steps // 10),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def of_t5(steps: int) -> bool:
    """Print a line for fp32 and for each way to train it in fp16; whether all held."""
    data, good, settings = turned_words(), True, {"learning_rate": 3e-3, "per_device_train_batch_size": BATCH}
    reference = run(t5(), data, "fp32", steps, **settings)
    print(json.dumps(reference), flush=True)
    for name, expected in RUNS.items():
        precision, *without = name.split()
        found = against(run(uncut() if without else t5(), data, precision, steps, **settings), reference) | {"run": name}
        print(json.dumps(found), flush=True)
        good &= list(found["pinned"]) == expected and found["replays"] == bool(expected) and holds(found)
    return good


def of_gemma(path: Path, steps: int) -> bool:
    """The same for Gemma 3 in pure fp16."""
    fresh, data = gemma(path)
    settings: dict[str, Any] = {"learning_rate": 1e-3, "per_device_train_batch_size": 1, "optim": "sgd"}
    reference = run(fresh(), data, "fp32", steps, **settings)
    print(json.dumps(reference), flush=True)
    for precision in ("fp16-mixed", "fp16-true"):  # the first adds up its residuals in fp32: what 16 bits do to these weights without any overflow
        found = against(run(fresh(), data, precision, steps, **settings), reference)
        print(json.dumps(found), flush=True)
    return found["replays"] == 1 and next(iter(found["pinned"]), "").startswith("model.layers.") and holds(found)


def against(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    return found | {"against_fp32": found["last_loss"] / reference["last_loss"]}


def holds(found: dict[str, Any]) -> bool:
    return abs(found["against_fp32"] - 1) <= ALLOWED and not found["skipped"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--gemma", type=Path)
    asked = parser.parse_args()
    steps = asked.steps or (100 if asked.gemma is None else 3)
    good = of_t5(steps) if asked.gemma is None else of_gemma(asked.gemma, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"steps": steps, "good": good, "peak_memory_gib": round(peak, 2), "machine": doctor("cpu").as_dict()}))
    sys.exit(not good)


if __name__ == "__main__":
    main()
