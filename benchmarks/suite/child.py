"""What runs in a process of its own: `python -m benchmarks.suite.child KIND LIBRARY`. Prints one number. Nothing is imported before it is needed.

cold: seconds of the system's monotonic clock at the end of the first step. memory: the largest resident size so far in bytes (VmHWM).
"""

import sys
import time
from pathlib import Path


def main(kind: str, library: str) -> None:
    """Run one."""
    {"cold": cold, "memory": memory}[kind](library)


def cold(library: str) -> None:
    """Import, construct, one step of a plain module in bf16."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

        def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            logits = self.layers(features)
            return {"loss": torch.nn.functional.cross_entropy(logits.float(), labels), "logits": logits} if labels is not None else {"logits": logits}

    samples = [{"features": torch.randn(64), "labels": i % 10} for i in range(64)]
    trainer(library, Net(), samples, "bf16-mixed", 1, lambda: print(time.monotonic(), flush=True)).train()


def memory(library: str) -> None:
    """Two steps of a Llama of 135 M parameters (the sizes of SmolLM2-135M) on one sequence of 16 tokens; tiny for `LIBRARY-quick`."""
    library, _, quick = library.partition("-")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    full = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    }
    if library != "nothing":
        model = LlamaForCausalLM(LlamaConfig(**(small if quick else full), tie_word_embeddings=True, max_position_embeddings=2048))
        ids = torch.arange(16) % 500
        trainer(library, model, [{"input_ids": ids, "labels": ids}] * 8, "bf16-lean,weights=split24", 2, lambda: None).train()
    status = Path("/proc/self/status").read_text()
    print(next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), flush=True)


def trainer(library: str, model: object, samples: object, precision: str, steps: int, ended: object) -> object:
    """A Trainer of `library` in its bf16 (ours: `precision`) that calls `ended` at the end of a step."""
    import tempfile

    if library == "halfstep":
        from halfstep import Trainer, TrainerCallback, TrainingArguments

        special = {"precision": precision}
    else:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        special = {"bf16": True, "optim": "adamw_torch_fused", "report_to": "none", "dataloader_pin_memory": False}

    class Ended(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ended()

    run = {"output_dir": tempfile.mkdtemp(), "max_steps": steps, "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
    sizes = {"use_cpu": True, "per_device_train_batch_size": 1 if steps > 1 else 8}
    return Trainer(model=model, args=TrainingArguments(**run, **sizes, **special), train_dataset=samples, callbacks=[Ended()])


if __name__ == "__main__":
    main(*sys.argv[1:])
