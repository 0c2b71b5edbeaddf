"""The command line: `python -m benchmarks.suite [--rows NAME ...] [--write]` in the folder of the repository."""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
MINUTES, LEAST = 11.0, 0.6  # of all rows together; of a row whose share is 1, however late it is


def main(argv: list[str]) -> int:
    """Measure the rows, each in its own process; 1 when one of ours failed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    from benchmarks.suite import machine, page, result
    from benchmarks.suite.rows import ROWS

    names = [row.name for row in ROWS]
    options = _options(names, argv)
    if options.list:
        print("\n".join(f"{row.name:19}{row.title}" for row in ROWS))
        return 0
    if options.one is not None:
        options.out.write_text(json.dumps(_measure(options, machine)))
        return 0
    if options.render:
        PAGE.write_text(page.render(*map(result.read, result.files(RESULTS))))
        return 0
    begun, found, failed = time.monotonic(), {}, []
    left = {row.name: row.share for row in ROWS if row.name in (options.rows or names)}
    whole = sum(row.share for row in ROWS)
    minutes = options.minutes * sum(left.values()) / whole
    for name in list(left):
        # what one row takes too long is taken from those after it
        remaining = minutes - (time.monotonic() - begun) / 60
        record = _in_process(name, options, max(LEAST, remaining / sum(left.values())))
        del left[name]
        if record is None:
            failed.append(name)
            continue
        found[name] = record
        print(page.in_terminal(record), flush=True)
    print(f"{len(found)} rows in {(time.monotonic() - begun) / 60:.1f} minutes" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if options.write and found:
        file = result.place(RESULTS, next(iter(found.values())))
        result.write(file, result.merged(result.read(file), found, names))
        PAGE.write_text(page.render(*map(result.read, result.files(RESULTS))))
    if options.json is not None:
        result.write(options.json, result.merged({"rows": {}}, found, names))
    return len(failed) > 0


def _options(names: list[str], argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description="halfstep beside its peers, on a CPU.")
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help="only these: " + " ".join(names))
    parser.add_argument("--rounds", type=int, default=11, help="rounds per row, at least 5 for a row to count (11)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all rows together; slow contenders sit rounds out (11)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads in every process (all cores)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and 2 rounds: whether it runs, not how fast")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"keep the numbers in {RESULTS.relative_to(ROOT)} by kind of CPU and make {PAGE.relative_to(ROOT)} from them",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write these rows alone to a file")
    parser.add_argument("--render", action="store_true", help="measure nothing, make the page from the numbers that are kept")
    parser.add_argument("--profile", action="store_true", help="beside each row, where the time of our first contender goes")
    parser.add_argument("--list", action="store_true", help="the names and titles of the rows")
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.write and options.quick:
        parser.error("--quick measures nothing worth keeping: leave --write away")
    if options.quick:
        options.rounds = 2
    return options


def _in_process(name: str, options: argparse.Namespace, minutes: float) -> dict[str, Any] | None:
    """The record of a row measured in a fresh process, None when it failed. minutes: for a row whose share is 1."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        passed = ["--rounds", str(options.rounds), "--minutes", str(minutes)]
        flags = [f"--{flag}" for flag in ("quick", "profile") if getattr(options, flag)]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TRANSFORMERS_VERBOSITY": "error", "TMPDIR": folder}
        environment |= {"OPENBLAS_NUM_THREADS": "1"}  # no thread begins with the import of numpy: workers are forked after it
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "halfstep-bench-compiled"))
        command = [sys.executable, "-m", "benchmarks.suite", "--one", name, "--out", str(out), *passed, *flags]
        begun, load = time.monotonic(), os.getloadavg()[0]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=sys.stderr)
        if done.returncode or not out.exists():
            return None
        record: dict[str, Any] = json.loads(out.read_text())
        return record | {"load": load, "took_s": time.monotonic() - begun}


def _measure(options: argparse.Namespace, machine: Any) -> dict[str, Any]:
    """Measure one row in this process and those that it forks."""
    from benchmarks.suite.result import today
    from benchmarks.suite.rows import ROWS, Given
    from benchmarks.suite.workers import elsewhere

    row = next(r for r in ROWS if r.name == options.one)
    rates = elsewhere(partial(machine.rates, options.quick))
    # half the time of a row is imports, models and warming up
    given = Given(rates, options.rounds, 0.5 * 60 * options.minutes * row.share, options.quick)
    if options.profile:
        elsewhere(partial(profile, row, given))
    found = row.measure(row, given)
    about = {"name": row.name, "title": row.title, "says": row.says, "unit": row.unit, "day": today(), "rounds": options.rounds}
    return about | {"machine": machine.about(), "rates": asdict(rates)} | found


def profile(row: Any, given: Any) -> None:
    """Ten steps of our first contender under cProfile, on stderr."""
    entries = getattr(row.measure, "keywords", {}).get("entries")
    if entries is None:
        print(f"{row.name}: nothing to profile step by step", file=sys.stderr)
        return
    turn = entries[0][2](row.measure.keywords["job"](given.quick))
    for _ in range(12):
        turn.run()
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(10):
        turn.run()
    watch.disable()
    turn.close()
    pstats.Stats(watch, stream=sys.stderr).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
