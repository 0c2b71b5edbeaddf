"""How long does a report of 100,000 log lines take, and how large is it? Run: python benchmarks/report_speed.py

The run: 100,000 lines of metrics of which one in 500 is NaN and one in 700 inf, 300 samples of 100 layers, 2,000 events. Building is the command
`halfstep report` in a process of its own, Python's start included. Opening is from the call to the last chart drawn, the browser already running.
Each three times, the median. Exits with 1 when a target is missed: 5 s, 3 s, 6 MB. Needs plotly, jinja2, playwright and a chromium.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUILD_S, OPEN_S, FILE_MB = 5.0, 3.0, 6.0


def write_run(folder: Path, lines: int, layers: int = 100, samples: int = 300, events: int = 2000) -> None:
    folder.mkdir()
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            value = math.nan if step % 500 == 7 else math.inf if step % 700 == 9 else 2 + 4 * math.exp(-step / lines * 6) + draw.gauss(0, 0.1)
            record = {"loss": value, "grad_norm": abs(draw.gauss(1, 0.3)), "lr": 1e-3 * (1 - step / lines), "scale": 2.0 ** (10 + step * 8 // lines)}
            file.write(json.dumps(record | {"underflow": draw.random() / 50, "stalled": 0.01, "applied": step, "skipped": 0, "step": step}) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"eval_loss": 2.1 + 4 * math.exp(-step / lines * 6), "step": step}) + "\n")
    with (folder / "layers.jsonl").open("w") as file:
        for i in range(samples):
            for kind in ("gradients", "outputs", "weights"):
                rows = {f"transformer.h.{j}.mlp": [4096, 0.01, 0.0, round(draw.random() ** 8, 4), 0.0, 3.1, -2.2] for j in range(layers)}
                sample = {"step": 1 + i * lines // samples, "scale": 1024.0, "kind": kind, "format": "fp16", "layers": rows}
                file.write(json.dumps(sample) + "\n")
    with (folder / "events.jsonl").open("w") as file:
        for i in range(events):
            event = {
                "step": i * lines // events,
                "kind": ("evaluated", "checkpoint", "close")[i % 3],
                "text": f"Event {i} of the run.",
                "why": "Go on.",
            }
            file.write(json.dumps(event) + "\n")


def opening(page_file: Path) -> float:
    """Seconds from the call to the last chart."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no chromium here: apt-get install chromium")
    took = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(3):
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            begun = time.perf_counter()
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready=yes]", state="attached")
            took.append(time.perf_counter() - begun)
        browser.close()
    return statistics.median(took)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder) / "run", Path(folder) / "run" / "report.html"
        write_run(run, options.lines)
        records = sum(path.stat().st_size for path in run.iterdir()) / 1e6
        took = []
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in range(3):
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-m", "halfstep.cli.main", "report", str(run)], check=True, stdout=subprocess.DEVNULL)
            took.append(time.perf_counter() - begun)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 3
        build, size = statistics.median(took), page.stat().st_size / 1e6
        opened = opening(page)
    print(f"{options.lines:,} log lines, {records:.1f} MB of records")
    print(f"built in {build:.2f} s (at most {BUILD_S:g}; {cpu:.2f} s of CPU), opened in {opened:.2f} s (at most {OPEN_S:g})")
    print(f"the file has {size:.2f} MB (at most {FILE_MB:g})")
    return int(build > BUILD_S or opened > OPEN_S or size > FILE_MB)


if __name__ == "__main__":
    sys.exit(main())
