"""`python -m benchmarks.gpu`: all parts in turn, each in a process of its own; the JSON file is whole after each of them."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "accelerate", "lightning", "lightning-fabric", "flashoptim", "torchao", "numba", "numpy")
NEEDED = ("numpy", "safetensors", "rich", "pyyaml", "transformers", "accelerate")
PEERS = ("flashoptim", "torchao")
TRAINED = (
    "torch",
    "torch again",
    "accelerate",
    "fabric",
    "transformers",
    "halfstep trainer",
    "halfstep loop",
    "halfstep lean",
    "halfstep lean split24",
)


SLOWER = 4  # how much longer a part may take where there is no GPU


@dataclass(frozen=True)
class Part:
    """A piece of the run: the module whose `run` does it, its options, and the seconds it may take."""

    name: str
    module: str
    limit: float
    options: dict[str, Any] = field(default_factory=dict)


def _train(model: str, dtype: str, names: tuple[str, ...], limit: float) -> Part:
    return Part(f"train-{model}-{dtype}", "training", limit, {"model": model, "dtype": dtype, "contenders": names})


PARTS = (
    Part("rates", "rates", 40),
    Part("laws", "laws", 75),
    Part("kernels", "kernels", 120),
    _train("gpt2-124m", "bf16", (*TRAINED, *PEERS), 110),
    _train("llama-1b", "bf16", (*TRAINED, *PEERS), 120),
    Part("stage", "stage", 90),
    _train("gpt2-124m", "fp16", ("torch", "torch again", "transformers", "halfstep trainer", "halfstep loop", "halfstep lean"), 70),
    Part("profile", "profiles", 50),
    Part("tf32", "switches", 40),
)


def main() -> int:
    given = _arguments()
    if given.part is not None:
        return _child(given)
    if given.install:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *NEEDED, *PEERS], check=False)
    return _parent(given)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json", help="the JSON file")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.add_argument("--small", action="store_true", help="tiny models and few turns: tries everything, measures nothing")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together; parts that do not fit are left out")
    parser.add_argument("--rounds", type=int, default=None, help="turns of each contender (6; small: 2)")
    parser.add_argument("--parts", nargs="+", choices=[p.name for p in PARTS], default=[p.name for p in PARTS])
    parser.add_argument("--install", action="store_true", help="pip install what is needed, and peers' optimizers, first")
    parser.add_argument("--part", choices=[p.name for p in PARTS], help=argparse.SUPPRESS)  # the process of one part
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _child(given: argparse.Namespace) -> int:
    """One part, in this process."""
    import torch

    from benchmarks.gpu.measure import ROUNDS
    from benchmarks.gpu.setting import Setting

    part = next(p for p in PARTS if p.name == given.part)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device", file=sys.stderr)
        return 2
    rates = next((p["result"] for p in _read(given.out).get("parts", []) if p["name"] == "rates"), {})
    rounds = given.rounds or (2 if given.small else ROUNDS)
    setting = Setting(device, given.small, rounds, given.result, part.options | {"rates": rates})
    importlib.import_module(f"benchmarks.gpu.{part.module}").run(setting)
    sys.stdout.flush()
    os._exit(0)  # threads of trainers that failed may still hold something: the numbers are written


def _parent(given: argparse.Namespace) -> int:
    """All parts; 0 when each was done."""
    begun = time.monotonic()
    report = {
        "kind": "gpu",
        "schema": 1,
        "device": given.device,
        "small": given.small,
        "minutes": given.minutes,
        "machine": _machine(given),
        "parts": [],
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if part.name not in given.parts:
            continue
        left = 60 * given.minutes - (time.monotonic() - begun)
        limit = part.limit if given.device == "cuda" else SLOWER * part.limit
        report["parts"].append(_run(part, min(limit, left), given) if left > 10 else {"name": part.name, "status": "no time left"})
        report["seconds"] = round(time.monotonic() - begun, 1)
        _write(given.out, report)
        done = report["parts"][-1]
        print(f"{part.name:<22} {done['status']:<13} {done.get('seconds', 0):6.1f} s  {_headline(done)}", flush=True)
    print(given.out)
    return 0 if all(p["status"] == "done" for p in report["parts"]) else 1


def _run(part: Part, limit: float, given: argparse.Namespace) -> dict[str, Any]:
    """One part in a process: what it found, also when it failed or was too slow."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said"
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--part",
            part.name,
            "--result",
            str(result),
            "--out",
            str(given.out),
            "--device",
            given.device,
        ]
        command += ["--small"] * given.small + (["--rounds", str(given.rounds)] if given.rounds else [])
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0], "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        with said.open("w") as file:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False
                ).returncode
                status = "done" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "timeout"
        found = {
            "name": part.name,
            "status": status,
            "seconds": round(time.monotonic() - begun, 1),
            "limit": round(limit, 1),
            "result": _read(result),
        }
        if status != "done":
            found["said"] = said.read_text(errors="replace")[-3000:]
        return found


def _headline(part: dict[str, Any]) -> str:
    """The one number of a part that a reader wants first."""
    found = part.get("result") or {}
    if "tokens_per_second" in found:
        return f"tokens/s {found['tokens_per_second']}, over {found.get('best_peer')}: " + ", ".join(
            f"{name} {ratio['median']}" for name, ratio in found.get("over_best_peer", {}).items()
        )
    if "laws" in found:
        broken = [name for name, law in found["laws"].items() if not law["holds"]]
        return ", ".join([f"{len(found['laws']) - len(broken)} of {len(found['laws'])} laws hold", *broken])
    if "over_best_peer" in found:
        return ", ".join(f"{name} {ratio['median']}" for name, ratio in found["over_best_peer"].items())
    if "products" in found:
        return ", ".join(f"{name} {rate / 1e12:.1f} TFLOP/s" for name, rate in found["products"].items())
    return (part.get("said") or "").strip().splitlines()[-1][:150] if part["status"] == "failed" and part.get("said", "").strip() else ""


def _machine(given: argparse.Namespace) -> dict[str, Any]:
    """Machine, driver and versions. torch is not imported here: a process that holds a GPU would take memory from the parts."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    said = ""
    if given.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv,noheader"]
        try:
            said = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            said = "nvidia-smi does not answer"
    return {"gpu": said, "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "versions": versions}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1, default=str) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
