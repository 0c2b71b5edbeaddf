"""Tokens a second and peak memory of whole training steps, contender beside contender."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import contenders, models
from benchmarks.gpu.measure import Runner, Timing, Waits, compared, in_turns, steps_for
from benchmarks.gpu.setting import Setting, error_text
from halfstep.hardware import memory_in_use

WARM, COUNTED = 3, 4  # steps before anything is measured; steps over which waits are counted
TURN = 0.4  # seconds of one turn
ROOM = 0.85  # share of the free memory that contenders may take together


@dataclass
class Entry:
    """A contender that is ready: what it takes for a while (peak) and for good (kept), in bytes, and a timing of a few steps."""

    runner: Runner
    peak: int  # on a CPU the same as kept, by what the process has in memory
    kept: int
    first: Timing


def run(setting: Setting) -> None:
    """The part `train-MODEL-DTYPE`: the options name model, dtype and contenders."""
    model, dtype = setting.options["model"], setting.options["dtype"]
    names: Sequence[str] = setting.options["contenders"]
    size = models.size_of(model, setting.small)
    tokens = size["batch"] * size["length"]
    total, in_products = models.counted(model, setting.small)
    setting.tell(
        model=model,
        dtype=dtype,
        tokens_per_step=tokens,
        parameters=total,
        parameters_in_products=in_products,
        floor_ms=_floor(in_products, tokens, dtype, setting),
    )
    ready, alone = _entries(names, model, dtype, setting)
    taken = in_turns({n: e.runner for n, e in ready.items()}, {n: _steps(e, setting) for n, e in ready.items()}, setting.rounds)
    for name, entry in ready.items():
        _count_waits(name, entry, setting)
        entry.runner.close()
    taken |= alone
    _conclude(taken, tokens, setting)


def _floor(weights: int, tokens: int, dtype: str, setting: Setting) -> float | None:
    """Milliseconds of the products alone, at the rate measured here: 6 operations a weight and token. Attention is left out."""
    rate = setting.options.get("rates", {}).get("products", {}).get(dtype)
    return round(1e3 * 6 * weights * tokens / rate, 3) if rate else None


def _steps(entry: Entry, setting: Setting) -> int:
    return 2 if setting.small else steps_for(TURN, entry.first)


def _entries(names: Sequence[str], model: str, dtype: str, setting: Setting) -> tuple[dict[str, Entry], dict[str, list[Timing]]]:
    """Contenders that are in memory together, and timings of those for which there was no room beside others, each measured by itself."""
    ready: dict[str, Entry] = {}
    alone: dict[str, list[Timing]] = {}
    for name in names:
        try:
            crowded = bool(ready) and not _room(max(e.peak for e in ready.values()) + max(e.peak - e.kept for e in ready.values()), setting)
            entry = _begin(name, model, dtype, setting)
            if crowded:
                steps = _steps(entry, setting)
                alone[name] = [entry.runner.run(steps) for _ in range(setting.rounds)]
                _count_waits(name, entry, setting)
                entry.runner.close()
            else:
                ready[name] = entry
            setting.add("memory", name, {"peak_bytes": entry.peak, "kept_bytes": entry.kept, "alone": crowded})
        except contenders.Missing as reason:
            setting.add("left_out", name, str(reason))
        except Exception as error:  # noqa: BLE001  one contender that fails stops no other
            setting.add("left_out", name, error_text(error))
            del error
        _clear(setting)
    return ready, alone


def _begin(name: str, model: str, dtype: str, setting: Setting) -> Entry:
    """Make a contender and take its first steps. Others are idle meanwhile, so the peak above what they hold is its own."""
    _clear(setting)
    before = memory_in_use(setting.device)
    if setting.is_cuda:
        torch.cuda.reset_peak_memory_stats(setting.device)
    runner = contenders.make(name, model, dtype, setting)
    runner.run(WARM)
    kept = memory_in_use(setting.device) - before
    peak = torch.cuda.max_memory_allocated(setting.device) - before if setting.is_cuda else kept
    return Entry(runner, peak, kept, runner.run(1 if setting.small else COUNTED))


def _count_waits(name: str, entry: Entry, setting: Setting) -> None:
    waits = Waits(setting.device)
    try:
        entry.runner.run(COUNTED, waits)
        setting.add("waits_per_step", name, waits.per_step(COUNTED))
    except Exception as error:  # noqa: BLE001
        setting.add("waits_per_step", name, error_text(error))


def _room(wanted: int, setting: Setting) -> bool:
    """Whether so many bytes more fit beside what is there."""
    if not setting.is_cuda:
        return True
    free, _ = torch.cuda.mem_get_info(setting.device)
    reserved = torch.cuda.memory_reserved(setting.device) - torch.cuda.memory_allocated(setting.device)
    return wanted < ROOM * (free + reserved)


def _clear(setting: Setting) -> None:
    gc.collect()
    if setting.is_cuda:
        torch.cuda.empty_cache()


def _conclude(taken: dict[str, list[Timing]], tokens: int, setting: Setting) -> None:
    """Tokens a second, ratios over the best peer, and peak memory over the best peer's."""
    if not taken:
        return
    mixed = [n for n in ("halfstep trainer", "halfstep loop") if n in taken]
    lean = [n for n in ("halfstep lean", "halfstep lean split24") if n in taken]
    rate = {name: round(tokens / statistics.median(t.seconds / t.steps for t in times)) for name, times in taken.items()}
    setting.tell(tokens_per_second=rate, **compared(taken, ("torch", "torch again"), contenders.MIXED_PEERS, [*mixed, *lean]))
    if any(n in taken for n in contenders.LEAN_PEERS):
        setting.tell(over_lean_peers=compared(taken, ("torch", "torch again"), contenders.LEAN_PEERS, lean)["over_best_peer"])
    peaks: dict[str, Any] = {name: m["peak_bytes"] for name, m in setting.found.get("memory", {}).items()}
    peers = {n: peaks[n] for n in contenders.MIXED_PEERS if peaks.get(n)}
    if peers:
        least = min(peers.values())
        setting.tell(peak_over_best_peer={n: round(peaks[n] / least, 3) for n in [*mixed, *lean] if n in peaks})
