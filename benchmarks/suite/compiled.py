"""Compiled models beside eager ones."""

from __future__ import annotations

import dataclasses
import math
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.suite import doors, nets
from benchmarks.suite.method import Contender, Excluded, take_turns
from benchmarks.suite.result import row_of
from benchmarks.suite.workers import apart

if TYPE_CHECKING:
    from benchmarks.suite.rows import Given, Row

EAGER = "halfstep.Trainer, eager"


def whole_steps(row: Row, given: Given) -> dict[str, Any]:
    """A small GPT-2 in bf16, each contender in a process of its own. Time to compile is not counted. Without a C++ compiler nothing is compiled, and
    that is said.
    """
    import halfstep

    doors.imported([*doors.LIBRARIES, "torch._inductor.compile_fx"])

    job = nets.gpt2(2, 16, layers=1, width=64, vocabulary=256) if given.quick else nets.gpt2(4, 64, layers=2, width=128, vocabulary=2048)
    compiler = shutil.which("g++") or shutil.which("clang++")
    knows = "torch_compile" in {f.name for f in dataclasses.fields(halfstep.TrainingArguments)}
    eager = partial(doors.halfstep_trainer, job, "bf16-mixed")
    ours = [
        Contender(EAGER, eager, "ours" if not compiler else "reference"),
        Contender(EAGER + " again (A/A)", eager, "twin" if not compiler else "reference"),
    ]
    absent = []
    compiled = [
        Contender("transformers.Trainer, compiled", partial(doors.transformers_trainer, job, "bf16", torch_compile=True)),
        Contender("Accelerate loop, compiled", partial(doors.accelerate_loop, job, "bf16", compiled=True)),
        Contender("plain torch loop, compiled", partial(doors.torch_loop, job, "bf16", compiled=True)),
    ]
    loop = partial(doors.halfstep_loop, job, "bf16", compiled=True)
    trained = partial(doors.halfstep_trainer, job, "bf16-mixed", torch_compile=True)
    if not compiler:
        absent = [Excluded(c.name, "no C++ compiler on this machine") for c in compiled]
        compiled = []
    else:
        first = [Contender("halfstep loop, compiled", loop, "ours"), Contender("halfstep loop, compiled again (A/A)", loop, "twin")]
        more = [Contender("halfstep.Trainer, compiled", trained, "ours")] if knows else []
        absent = [] if knows else [Excluded("halfstep.Trainer, compiled", "no torch_compile in this version's TrainingArguments")]
        compiled = [*first, *more, *compiled]
    peers = [
        Contender("transformers.Trainer, eager", partial(doors.transformers_trainer, job, "bf16"), "reference" if compiler else "peer"),
        Contender("plain torch loop, eager", partial(doors.torch_loop, job, "bf16"), "reference" if compiler else "peer"),
    ]
    taken, excluded = take_turns(
        apart([*compiled, *(ours[:1] if compiler else ours), *peers]), given.rounds, given.seconds, slow=math.inf, patience=math.inf
    )
    return row_of(taken, [*excluded, *absent], row.claims)
