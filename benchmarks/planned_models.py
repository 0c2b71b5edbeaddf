"""Does a plan made in fp32 name the modules that fp16 cannot hold, so that a run that follows it meets no overflow and ends as fp32 does?

The models of benchmarks/healed_models.py: a small T5 whose feed-forward output passes 65,504, and with --gemma the real Gemma 3 270M; and a small
Gemma 3 made from a config, the norms behind its layers turned up until the residual stream passes 65,504 (`--only gemma3`). For each precision the
plan's modules, the precision that it starts with, and a training run with `plan=`: fails where a module had to be pinned, a step was skipped or
replayed on the way (two steps without a plan are told beside it), or the loss of the last tenth of the steps is more than 2 % from fp32's.
Run: python benchmarks/planned_models.py [--steps 100] [--only t5|gemma3] [--gemma FOLDER_OR_GGUF]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from healed_models import ALLOWED, BATCH, WORDS, gemma, run, t5, turned_words, uncut
from torch import Tensor, nn

import halfstep
from halfstep import Plan, Trainer, TrainingArguments
from halfstep.amp import pins
from halfstep.hardware import doctor

LARGE = 400.0  # what the norms behind Gemma's layers multiply by
SETTINGS: dict[str, Any] = {"learning_rate": 3e-3, "per_device_train_batch_size": BATCH}


def gemma3() -> nn.Module:
    """A Gemma 3 of four layers whose residual stream passes 65,504: its norms multiply by 1 + weight, and nothing limits what they add up to."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Gemma3TextConfig(**sizes, num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.weight += LARGE
            layer.post_attention_layernorm.weight += LARGE
        model.model.layers[2].post_feedforward_layernorm.weight *= 50
    return model


def rows_of(data: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Batches as a training step sees them."""
    return [{k: torch.stack([row[k] for row in data[i : i + BATCH]]) for k in data[0]} for i in range(0, min(len(data), 4 * BATCH), BATCH)]


def follow(model: nn.Module, data: list[dict[str, Tensor]], found: Plan, steps: int, **settings: Any) -> dict[str, Any]:
    """Train by the plan, and tell what the log and the model hold afterwards."""
    quiet: dict[str, Any] = {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, TrainingArguments(folder, max_steps=steps, plan=found, **quiet, **settings), train_dataset=data)
        trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {
        "pinned": [p.module for p in pins(model)],
        "replays": trainer.state.replayed_steps,
        "skipped": trainer.state.skipped_steps,
        "last_loss": sum(losses[-max(1, steps // 10) :]) / max(1, steps // 10),
    }


def judge(
    name: str, make: Callable[[], nn.Module], data: list[dict[str, Tensor]], precision: str, steps: int, reference: float, **settings: Any
) -> bool:
    """Plan, follow the plan, print a line; whether all held."""
    begun = time.perf_counter()
    batches = rows_of(data) if settings["per_device_train_batch_size"] > 1 else [{k: v.unsqueeze(0) for k, v in row.items()} for row in data]
    found = halfstep.plan(make(), batches, precision=precision, rounds=0)
    planned = time.perf_counter() - begun
    told = follow(make(), data, found, steps, **settings)
    without = run(make(), data, precision, 2, **settings)  # what the first steps meet when nobody has planned
    told["without_a_plan"] = {"pinned": list(without["pinned"]), "replays": without["replays"], "skipped": without["skipped"]}
    told |= {"model": name, "precision": precision, "held": found.modules, "scale": found.scale, "seconds_to_plan": round(planned, 1)}
    told |= {"why": [h.why for h in found.held[:4]], "against_fp32": told["last_loss"] / reference}
    print(json.dumps(told), flush=True)
    clean = not told["pinned"] and not told["replays"] and not told["skipped"]
    return bool(clean and abs(told["against_fp32"] - 1) <= ALLOWED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", choices=("t5", "gemma3"))
    parser.add_argument("--gemma", type=Path)
    asked = parser.parse_args()
    good, steps, data = True, asked.steps or (100 if asked.gemma is None else 3), turned_words()
    if asked.gemma is None and asked.only != "gemma3":
        reference = run(t5(), data, "fp32", steps, **SETTINGS)["last_loss"]
        for precision in ("fp16-mixed", "fp16-lean", "fp16-true"):
            good &= judge("t5", t5, data, precision, steps, reference, **SETTINGS)
        good &= judge("t5 uncut", uncut, data, "fp16-true", steps, reference, **SETTINGS)
    if asked.gemma is None and asked.only != "t5":
        reference = run(gemma3(), data, "fp32", steps, **SETTINGS)["last_loss"]
        for precision in ("fp16-mixed", "fp16-lean", "fp16-true"):
            good &= judge("gemma3", gemma3, data, precision, steps, reference, **SETTINGS)
    if asked.gemma is not None:
        fresh, text = gemma(asked.gemma)
        settings: dict[str, Any] = {"learning_rate": 1e-3, "per_device_train_batch_size": 1, "optim": "sgd"}
        reference = run(fresh(), text, "fp32", steps, **settings)["last_loss"]
        good &= judge("gemma 3 270M", fresh, text, "fp16-true", steps, reference, **settings)
    print(json.dumps({"steps": steps, "good": good, "machine": doctor("cpu").as_dict()}))
    sys.exit(not good)


if __name__ == "__main__":
    main()
