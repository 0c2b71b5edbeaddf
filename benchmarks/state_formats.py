"""Does a run end elsewhere when optimizer states, or weights too, take a quarter of the bytes?

Trains the default model of `halfstep train` under several precisions and seeds, and compares final evaluation losses: the mean over seeds of each
precision's difference from the reference, beside the spread of the reference over seeds (seed noise). As many runs at once as there are cores,
of one thread each; about three minutes per run.
Run: python benchmarks/state_formats.py [--seeds 5 --steps 1000 --precisions bf16-mixed bf16-lean]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from halfstep.hardware import doctor

PRECISIONS = ("bf16-mixed", "bf16-mixed,states=int8", "bf16-mixed,states=bf16", "bf16-lean", "bf16-lean,weights=split24")


def final_loss(precision: str, seed: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "halfstep.cli.main", "train", "--precision", precision, "--seed", str(seed), "--max_steps", str(steps)]
        quiet = ["--eval_steps", str(steps), "--save_strategy", "no", "--sample_length", "0", "--disable_tqdm", "true", "--output_dir", str(run)]
        subprocess.run(command + quiet, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([r["eval_loss"] for r in records if "eval_loss" in r][-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, help="the first is the reference")
    options = parser.parse_args()
    reference = options.precisions[0]

    def run(job: tuple[str, int]) -> float:
        loss = final_loss(*job, options.steps)
        print(f"{job[0]}, seed {job[1]}: {loss:.4f}", file=sys.stderr, flush=True)
        return loss

    jobs = [(precision, seed) for seed in range(options.seeds) for precision in options.precisions]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        losses_of = dict(zip(jobs, pool.map(run, jobs), strict=True))
    found = {precision: [losses_of[precision, seed] for seed in range(options.seeds)] for precision in options.precisions}
    noise = statistics.stdev(found[reference]) if options.seeds > 1 else float("nan")
    rows: dict[str, Any] = {}
    print(
        f"| precision | final evaluation loss, mean of {options.seeds} seeds | from `{reference}` | in seed noise ({noise:.4f}) |\n|---|---|---|---|"
    )
    for precision, losses in found.items():
        difference = statistics.mean(a - b for a, b in zip(losses, found[reference], strict=True))
        rows[precision] = {"losses": losses, "difference": difference}
        print(f"| `{precision}` | {statistics.mean(losses):.4f} | {difference:+.4f} | {difference / noise:+.2f} |")
    print(json.dumps({"steps": options.steps, "seed_noise": noise, "machine": doctor("cpu").as_dict(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
