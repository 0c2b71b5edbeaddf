"""What does watching cost over the same loop without it?

One training step of the GPT-2 of 23 M parameters of step_protocol.py, with the step protocol and torch's fused AdamW (whose gradients are not
measured on the way, as those of halfstep's optimizers are): off is the protocol alone; on samples gradients, updates and outputs of all modules
every 100 steps, as by default; in the row "sampled" every step is such a sample and its fields are read. All take turns in one process, the order
flipped every round; each round gives one ratio to the step without it, and the median is reported with its quartiles. Off against itself (A/A) says
how noisy the machine was. A median does not see one step in a hundred, so `ratio` of the run is put together: 99 parts "on", 1 part "sampled".
The records of a run (`halfstep.diagnostics.Recorder`) come on top: in the row "recorded" every step is a sample that is measured, read and written;
`record_every` has the ratio of a run with a sample every 100 and every 10 steps.
Reach: at most 1.03. Run: python benchmarks/watch_overhead.py [--steps 30] [--batch 4] [--length 128] [--dtypes bf16 fp16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from typing import Any

import torch
from step_protocol import DTYPES, ProtocolLoop, Stages, milliseconds

from halfstep.amp.sampling import Sampler
from halfstep.diagnostics import Recorder
from halfstep.hardware import doctor
from halfstep.step.watching import EVERY

REACH = 1.03


class WatchedLoop(ProtocolLoop):
    """The loop with everything watched every so many steps (0: not at all); read: look at the watch after each step."""

    def __init__(self, dtype: torch.dtype, batch: int, length: int, every: int, read: bool = False, record: bool = False) -> None:
        super().__init__(dtype, batch, length)
        self.read = read
        watching = self.scaler._engine.state.watching
        watching.every = every
        if every:
            self.sampler = Sampler(every)
            self.sampler.watch(self.model)
            watching.modules = self.sampler.sampled
        self.scaler.name_parameters(self.model.named_parameters())
        self.folder = tempfile.TemporaryDirectory()  # gone with the loop
        self.recorder = Recorder(self.folder.name, self.model, self.scaler, every=1, log_every=0) if record else None

    def stages(self, loss: torch.Tensor) -> list[tuple[str, Any]]:
        """Those of the protocol, whose step is looked at where that is asked for."""
        stages = super().stages(loss)
        other = self.looked_at if self.read else self.recorded if self.recorder is not None else None
        return [(name, other if name == "step" and other is not None else call) for name, call in stages]

    def recorded(self) -> None:
        """A step that is written down layer by layer."""
        assert self.recorder is not None
        self.recorder.step(self.scaler.step(self.optimizer))

    def looked_at(self) -> None:
        """A step whose watch is read, as for a line of a log."""
        watch = self.scaler.step(self.optimizer).watch
        assert watch is not None
        str(watch), watch.largest, watch.underflow, watch.stalled, watch.outputs


def compare(dtype: torch.dtype, batch: int, length: int, steps: int) -> dict[str, Any]:
    """Rows of medians and of ratios to the loop that is not watched, and the ratio of a run."""
    size = (dtype, batch, length)
    loops = {
        "off": WatchedLoop(*size, 0),
        "off again (A/A)": WatchedLoop(*size, 0),
        "on": WatchedLoop(*size, EVERY),
        "sampled": WatchedLoop(*size, 1, read=True),
        "recorded": WatchedLoop(*size, EVERY, record=True),
    }
    times: dict[str, list[Stages]] = {name: [] for name in loops}
    for loop in loops.values():
        loop.settle()
    for round_ in range(steps + 1):
        for name in list(loops)[:: 1 if round_ % 2 else -1]:
            taken = loops[name].step()
            if round_:  # the first one warms up
                times[name].append(taken)
    rows: dict[str, Any] = {}
    for name, taken in times.items():
        ratios = [t["total"] / b["total"] for t, b in zip(taken, times["off"], strict=True)]
        rows[name] = {
            "ms": milliseconds([t["total"] for t in taken]),
            "ratio": round(statistics.median(ratios), 4),
            "quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]] if len(ratios) > 1 else None,
            "stages_ms": {stage: milliseconds([t[stage] for t in taken]) for stage in taken[0]},
        }
    ratio = rows["on"]["ratio"] * (1 - 1 / EVERY) + rows["sampled"]["ratio"] / EVERY
    more = rows["recorded"]["ratio"] - rows["on"]["ratio"]
    recorded = {str(n): round(ratio + more / n, 4) for n in (100, 10)}
    return {"ratio": round(ratio, 4), "reached": ratio <= REACH, "record_every": recorded, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    given = parser.parse_args()
    report: dict[str, Any] = {"machine": doctor("cpu").as_dict(), "threads": torch.get_num_threads(), "steps": given.steps}
    report |= {"batch": given.batch, "length": given.length, "every": EVERY}
    report |= {name: compare(DTYPES[name], given.batch, given.length, given.steps) for name in given.dtypes}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
