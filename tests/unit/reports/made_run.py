"""A run folder as halfstep writes one, made up: the numbers are planted, so that a test knows what its report must say."""

import json
import math
import random

NAMES = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
ENVIRONMENT = {
    "time": "2026-11-30T12:00:00", "halfstep": "0.1.0", "torch": "2.13.0", "python": "3.11.2", "platform": "Linux", "processes": 1,
    "device": {"name": "a CPU", "kind": "cpu"}, "optimizer": "AdamW", "model": "GPT", "parameters": 824_832, "trainable": 824_832, "route": "",
    "command": ["halfstep", "train"],
}  # fmt: skip
MEMORY = {
    "predicted": {"weights": 3_299_328, "gradients": 3_299_328, "states": 6_598_656, "activations": 9_000_000, "peak": 24_000_000},
    "measured": {"weights": 3_299_328, "gradients": 3_299_328, "states": 6_598_656, "peak": 25_000_000},
    "batch": "16 x 64 int64",
}
FINDING = {"cause": "cast", "module": "blocks.0", "op": "to", "what": "a cast around each layer", "remedy": "leave .float() out", "share": 0.12}
CLASS = {"name": "matmul", "calls": 96, "share": 0.6, "bytes": 10_000, "formats": {"bf16": 0.9, "fp32": 0.1}}
AUDIT = {
    "answer": "bf16-mixed takes 0.71 of fp32's step here.", "measured": 0.71, "predicted": 0.74, "findings": [FINDING],
    "product_flops": {"bf16": 0.9, "fp32": 0.1}, "classes": [CLASS],
    "rows": [{"module": "blocks.0", "op": "linear", "direction": "forward", "dtype_in": "fp32", "dtype_out": "bf16", "share": 0.2, "why": ""}],
}  # fmt: skip
EVENTS = (
    {"step": 1, "kind": "calibrated", "text": "The loss scale was calibrated to 65,536 inside the first backward pass.", "why": "Nothing to do."},
    {"step": 40, "kind": "replayed", "text": "Step 40 overflowed and was run again at a lower scale.", "culprits": ["blocks.0.mlp.up"]},
    {"step": 90, "kind": "close", "text": "blocks.0.mlp.down came within a factor of 2 of fp16's limit.", "why": "Hold it: fp32=blocks.0.mlp.down."},
    {"step": 100, "kind": "evaluated", "text": "Evaluated: loss 2.1."},
    {"step": 200, "kind": "checkpoint", "text": "Saved checkpoint-200."},
)


def metrics(lines, bad=(), seed=0, loss=None, every=1):
    """The records of a run: bad is {line: value} of losses that are not finite, loss f(share of the run) without its noise."""
    noise, bad = random.Random(seed), dict(bad)
    curve = loss or (lambda t: 1.6 + 3.9 * math.exp(-4 * t))
    for i in range(1, lines + 1):
        t, step = i / lines, i * every
        record = {"loss": bad.get(i, curve(t) + noise.gauss(0, 0.03)), "grad_norm": abs(noise.gauss(1, 0.2)) + 0.1, "lr": 3e-3 * (1 - t)}
        record |= {"scale": 65536.0 * 2 ** int(3 * t), "underflow": 0.01 * t, "stalled": 0.02 * t}
        yield record | {"applied": step, "skipped": 0, "replayed": 0, "epoch": round(t, 4), "step": step}
        if i % max(1, lines // 5) == 0:
            yield {"eval_loss": curve(t) + 0.1, "epoch": round(t, 4), "step": step}


def layers(last, samples=10, depth=4):
    """Samples of gradients, whose underflow grows with depth and time, and of outputs, whose last layer comes near its limit."""
    for k in range(samples):
        step = max(1, last * k // max(1, samples - 1))
        for kind in ("gradients", "outputs"):
            rows = {}
            for j in range(depth):
                under = min(1.0, 0.002 * j * (k + 1)) if kind == "gradients" else 0.0
                over = 0.001 * k if kind == "outputs" and j == depth - 1 else 0.0
                rows[f"blocks.{j // 4}.{NAMES[j % 4]}"] = [4096, 0.01, 0.0, round(under, 4), round(over, 4), 3.2, -1.5]
            yield {"step": step, "scale": 65536.0, "kind": kind, "format": "fp16", "layers": rows}


def write_run(folder, *, lines=200, every=1, bad=(), policy="fp16-mixed", samples=10, depth=4, events=(), seed=0, loss=None, config=None, records=()):
    """Write a whole run folder. records: lines of metrics.jsonl to add at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    told = [{"time": "2026-11-30T12:00:00", "why": "", "culprits": []} | event for event in events]
    files = {"metrics": [*metrics(lines, bad, seed, loss, every), *records], "layers": layers(lines * every, samples, depth), "events": told}
    for stem, rows in files.items():
        with (folder / f"{stem}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    wholes = {"environment": ENVIRONMENT | {"policy": policy}, "memory": MEMORY | {"policy": policy}, "audit": AUDIT | {"precision": policy}}
    for stem, value in wholes.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    settings = {"precision": policy, "learning_rate": 3e-3, "seed": seed, "output_dir": str(folder), "on_overflow": "replay", "heal": "pin"}
    text = "".join(f"{k}: {json.dumps(v)}\n" for k, v in (settings | (config or {})).items())
    (folder / "config.yaml").write_text(f"# settings of a halfstep run\n{text}")
    return folder
