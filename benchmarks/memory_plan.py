"""Is what `halfstep.memory` says before a step what the step takes?

Eleven models from configurations (random weights, nothing is downloaded), each under four precisions, and under two of them with gradient
checkpointing too: bytes by kind and the peak as predicted from shapes, and as counted in a real step (torch's profiler sees every allocation on a
CPU). Bytes of tensors are what is compared, so the numbers do not depend on what else the machine does. Beside them, for orientation, how much the
resident memory of the process has grown at its highest.

Reach: peak, and each kind that is 1 % of the peak or more, within 5 % of what was measured; `temporary` within 5 % of the peak.
Run: python benchmarks/memory_plan.py [--models gpt2 llama ...] [--precisions fp32 ...] [--quick] [--write]
(--write: the rows into benchmarks/results/memory_plan.json, where others stay, and the table of all into docs/guides/memory.md)
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from halfstep.amp.recompute import recompute_blocks
from halfstep.diagnostics import MemoryPlan, measure
from halfstep.diagnostics.memory import memory
from halfstep.diagnostics.memory_plan import KINDS
from halfstep.errors import HalfstepError
from halfstep.hardware import doctor

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "guides" / "memory.md", ROOT / "benchmarks" / "results" / "memory_plan.json"
PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-lean")
CHECKPOINTED = ("fp32", "bf16-lean")  # those that are run with gradient checkpointing too
REACH, COUNTS = 0.05, 0.01
Made = tuple[nn.Module, Any, Callable[..., Tensor] | None]
WIDTH, LAYERS, VOCABULARY, BATCH, LENGTH = 192, 4, 2000, 4, 96


def tokens(*names: str) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone(), **{name: torch.ones_like(ids) for name in names}}


def gpt2() -> Made:
    size = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**size)), tokens("attention_mask"), None


def decoder(kind: type, config: type, **more: Any) -> Made:
    size = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 3 * WIDTH}
    return kind(config(**size, vocab_size=VOCABULARY, max_position_embeddings=256, **more)), tokens(), None


def llama() -> Made:
    return decoder(hf.LlamaForCausalLM, hf.LlamaConfig)


def gemma() -> Made:
    return decoder(hf.Gemma2ForCausalLM, hf.Gemma2Config, head_dim=48, sliding_window=64)


def mixtral() -> Made:
    return decoder(hf.MixtralForCausalLM, hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2)


def bert() -> Made:
    size = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH, "vocab_size": VOCABULARY}
    return hf.BertForMaskedLM(hf.BertConfig(**size)), tokens("attention_mask"), None


def t5() -> Made:
    size = {"num_layers": LAYERS // 2, "d_model": WIDTH, "d_kv": 48, "num_heads": 4, "d_ff": 3 * WIDTH, "vocab_size": VOCABULARY}
    return hf.T5ForConditionalGeneration(hf.T5Config(**size, decoder_start_token_id=0)), tokens(), None


def images(count: int, side: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, side, side, generator=g), torch.randint(0, 10, (count,), generator=g)


def vit() -> Made:
    size = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH, "image_size": 64}
    x, y = images(8, 64)
    return hf.ViTForImageClassification(hf.ViTConfig(**size, patch_size=8, num_labels=10)), {"pixel_values": x, "labels": y}, None


def resnet() -> Made:
    x, y = images(8, 64)
    config = hf.ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], layer_type="basic", num_labels=10)
    return hf.ResNetForImageClassification(config), {"pixel_values": x, "labels": y}, None


def mlp() -> Made:
    widths = [256, 1024, 1024, 1024, 1024]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b))]
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(512, 256, generator=g), torch.randint(0, 10, (512,), generator=g)
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10)), x, lambda outputs: F.cross_entropy(outputs, y)


class Recurrent(nn.Module):
    """A table, two layers of LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of the next token."""
        logits = self.head(self.cells(self.table(input_ids))[0])
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def lstm() -> Made:
    return Recurrent(), tokens(), None


def mamba() -> Made:
    config = hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, state_size=8, use_mambapy=False)
    ids = tokens()
    return hf.MambaForCausalLM(config), {k: v[:, :32] for k, v in ids.items()}, None


MODELS: dict[str, Callable[[], Made]] = {f.__name__: f for f in (gpt2, llama, gemma, mixtral, bert, t5, vit, resnet, mlp, lstm, mamba)}


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def row(name: str, precision: str, checkpointed: bool) -> dict[str, Any]:
    """One model under one precision: both counts, and how far apart they are."""
    torch.manual_seed(0)
    model, batch, loss = MODELS[name]()
    model.train()
    if checkpointed:
        recompute_blocks(model)
    start = time.process_time()
    predicted = memory(model, batch, precision=precision, loss=loss, savings=False)
    seconds, before = time.process_time() - start, resident()
    found = measure(model, batch, precision=precision, loss=loss)
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "precision": precision,
        "checkpointed": checkpointed,
        "predicted": predicted.as_dict(),
        "measured": found.as_dict(),
        "phase": [predicted.phase, found.phase],
        "error": errors(predicted, found),
        "seconds": round(seconds, 2),
        "resident_growth": resident() - before,
    }


def errors(predicted: MemoryPlan, found: MemoryPlan) -> dict[str, float]:
    """How far a prediction is off, for the peak and each kind that counts; `temporary` as a share of the peak.

    That only where both are of one moment, and not of two peaks of about one height.
    """
    off = {"peak": predicted.peak / found.peak - 1}
    lasting = [sum(n for kind, n in plan.at_peak.items() if kind != "temporary") for plan in (predicted, found)]
    same_moment = abs(lasting[0] - lasting[1]) <= REACH * found.peak
    for kind in KINDS if same_moment else KINDS[:-1]:
        mine, theirs = getattr(predicted, kind), getattr(found, kind)
        if max(mine, theirs) >= COUNTS * found.peak:
            off[kind] = (mine - theirs) / (found.peak if kind == "temporary" else max(theirs, 1))
    return {kind: round(value, 5) for kind, value in off.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown: peaks in MiB, and the largest error of a kind."""
    lines = [
        "| model | parameters | precision | checkpointing | predicted | measured | peak off by | worst kind |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "refused" in r:
            lines.append(f"| {r['model']} | | `{r['precision']}` | {'yes' if r['checkpointed'] else ''} | refused: {r['refused']} | | | |")
            continue
        kind, off = max(((k, v) for k, v in r["error"].items() if k != "peak"), key=lambda pair: abs(pair[1]))
        cells = [r["model"], f"{r['parameters'] / 1e6:.2f} M", f"`{r['precision']}`", "yes" if r["checkpointed"] else ""]
        cells += [f"{r[way]['peak'] / 2**20:.2f}" for way in ("predicted", "measured")] + [f"{r['error']['peak']:+.2%}", f"{kind} {off:+.2%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(rows: list[dict[str, Any]]) -> None:
    """Put rows into the results, in the place of those of the same model, precision and checkpointing, and the table of all into the guide."""
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    every = {(r["model"], r["precision"], r["checkpointed"]): r for r in (*known, *rows)}
    ordered = sorted(every.values(), key=lambda r: (list(MODELS).index(r["model"]), r["precision"], r["checkpointed"]))
    about = {"date": str(datetime.date.today()), "machine": doctor("cpu").as_dict(), "threads": torch.get_num_threads(), "rows": ordered}
    RESULTS.write_text(json.dumps(about, indent=1) + "\n")
    made = f"<!-- measured -->\n{table(ordered)}\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- measured -->\n.*?<!-- end -->", lambda _: made, PAGE.read_text(), flags=re.S))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--quick", action="store_true", help="three models, without checkpointing")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ("gpt2", "resnet", "mlp") if options.quick else options.models:
        for precision in options.precisions:
            twice = precision in CHECKPOINTED and name not in ("lstm", "mlp", "resnet") and not options.quick
            for checkpointed in (False, True) if twice else (False,):
                try:
                    rows.append(row(name, precision, checkpointed))
                except HalfstepError as error:
                    rows.append({"model": name, "precision": precision, "checkpointed": checkpointed, "refused": error.cause})
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    far = [r for r in rows if "refused" not in r and max(map(abs, r["error"].values())) > REACH]
    print(f"\n{len(rows)} rows, {len(far)} beyond {REACH:.0%}, {sum('refused' in r for r in rows)} refused", file=sys.stderr)
    if options.write:
        write(rows)
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    main()
