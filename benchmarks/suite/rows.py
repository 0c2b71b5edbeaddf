"""The rows of the table: what is measured, whom it is held against, and what must be reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.suite import compiled, doors, fresh, nets, stage
from benchmarks.suite.machine import Rates
from benchmarks.suite.method import Claim, Contender, Excluded, take_turns
from benchmarks.suite.nets import Job
from benchmarks.suite.result import row_of
from benchmarks.suite.workers import apart, elsewhere

# bytes that a parameter makes a step move: the gradient is written, read for the norm and read for the update; weight and moments are
# read and written (4 bytes each; split weights 2 + 2, int8 states 1 + 1)
MOVED = {"mixed": 3 * 4 + 3 * 8, "lean": 3 * 2 + 2 * 4 + 2 * 2}
SILENT = "its fp16 on a CPU is silently fp32: not fp16"
OURS, THEIRS, PLAIN = "halfstep.Trainer", "transformers.Trainer", "plain torch loop"
AGAIN = "halfstep.Trainer again (A/A)"


@dataclass(frozen=True)
class Given:
    """How a row is to be measured. quick: tiny sizes, to see that it runs; seconds: of measuring, warm-up not counted."""

    rates: Rates
    rounds: int = 11
    seconds: float = 45.0
    quick: bool = False


@dataclass(frozen=True)
class Row:
    """A line of the table. measure: f(row, given) to its record. share: of the suite's time. unit: of every number in it."""

    name: str
    title: str
    says: str
    measure: Callable[[Row, Given], dict[str, Any]]
    claims: Sequence[Claim] = ()
    unit: str = "s"
    share: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)


Entry = tuple[str, str, Callable[..., Any]]  # name, role, f(job) to a Turn


def whole_steps(
    row: Row, given: Given, *, job: Callable[[bool], Job], entries: Sequence[Entry], absent: Sequence[Excluded] = (), moved: str = "mixed"
) -> dict[str, Any]:
    """Whole optimizer steps, each contender in a process of its own, in turns. The floor is the same for all: operations at the fp32 rate, then
    the optimizer's bytes.
    """
    doors.imported()
    made = job(given.quick)
    operations, parameters = elsewhere(made.operations), elsewhere(made.parameters)
    floor = given.rates.floor(operations, parameters * MOVED[moved])
    contenders = [Contender(name, partial(make, made), role, floor) for name, role, make in entries]  # type: ignore[arg-type]
    taken, excluded = take_turns(apart(contenders), given.rounds, given.seconds, needed=[c.against for c in row.claims])
    about = {"parameters": parameters, "operations": operations, "bytes": parameters * MOVED[moved]}
    return row_of(taken, [*excluded, *absent], row.claims) | {"work": about}


def tokens(batch: int, length: int = 128) -> Callable[[bool], Job]:
    """The GPT-2 of 23 M parameters; tiny when quick."""
    return lambda quick: nets.gpt2(batch, 16, layers=1, width=64, vocabulary=256) if quick else nets.gpt2(batch, length)


def images(quick: bool) -> Job:
    """The convolutional net: 16 images of 32 x 32, 4 G operations forward."""
    return nets.convnet(2, 8, width=4, stages=2, blocks=1) if quick else nets.convnet(16, 32)


def few_images(quick: bool) -> Job:
    """A smaller one: 8 images, 16 channels."""
    return nets.convnet(2, 8, width=4, stages=2, blocks=1) if quick else nets.convnet(8, 32, width=16)


def features(quick: bool) -> Job:
    """The net of 120 k parameters, 32 samples."""
    return nets.perceptron(4 if quick else 32)


def trainer(precision: str, **settings: Any) -> list[Entry]:
    """Our Trainer, twice."""
    make = partial(doors.halfstep_trainer, precision=precision, **settings)
    return [(OURS, "ours", make), (AGAIN, "twin", make)]


BF16: list[Entry] = [
    *trainer("bf16-mixed"),
    (THEIRS, "peer", partial(doors.transformers_trainer, precision="bf16")),
    ("Accelerate loop", "peer", partial(doors.accelerate_loop, precision="bf16")),
    ("Lightning Fabric loop", "peer", partial(doors.fabric_loop, precision="bf16")),
    (PLAIN, "peer", partial(doors.torch_loop, precision="bf16")),
    ("plain torch loop, fp32", "reference", doors.bare_loop),
]
LEAN: list[Entry] = [
    *trainer("bf16-lean"),
    (THEIRS + ", fp32", "peer", partial(doors.transformers_trainer, precision="fp32")),
    ("plain torch loop, fp32", "peer", doors.bare_loop),
]
FP16: list[Entry] = [
    ("halfstep loop", "ours", partial(doors.halfstep_loop, precision="fp16")),
    ("halfstep loop again (A/A)", "twin", partial(doors.halfstep_loop, precision="fp16")),
    (OURS, "ours", partial(doors.halfstep_trainer, precision="fp16-mixed")),
    (PLAIN, "peer", partial(doors.torch_loop, precision="fp16")),
    ("plain torch loop, fp32", "reference", doors.bare_loop),
]
NO_FP16 = (
    Excluded(THEIRS, SILENT),
    Excluded("Accelerate loop", SILENT),
    Excluded("Lightning Fabric loop", "refuses fp16 on a CPU"),
)
SMALL: list[Entry] = [
    *trainer("fp32"),
    ("halfstep loop", "ours", partial(doors.halfstep_loop, precision="fp32")),
    (THEIRS, "peer", partial(doors.transformers_trainer, precision="fp32")),
    ("Accelerate loop", "peer", partial(doors.accelerate_loop, precision="fp32")),
    ("Lightning Fabric loop", "peer", partial(doors.fabric_loop, precision="fp32")),
    ("hand-written torch loop", "peer", doors.bare_loop),
]
CONV = "residual net with BatchNorm (stem and 3 stages, 32 to 128 wide, 16 images of 32 x 32)"
GPT2 = "GPT-2 style, 6 blocks of width 384, vocabulary 32,000: 23 M parameters"

ROWS: list[Row] = [
    Row(
        "bf16-4x128",
        "Whole step, bf16, 23 M, 4 x 128 tokens",
        GPT2,
        partial(whole_steps, job=tokens(4), entries=BF16),
        [Claim(OURS, THEIRS, 0.65, 0.60)],
        share=1.6,
    ),
    Row(
        "bf16-1x128",
        "Whole step, bf16, 23 M, 1 x 128 tokens",
        GPT2,
        partial(whole_steps, job=tokens(1), entries=BF16),
        [Claim(OURS, THEIRS, 0.65, 0.60)],
    ),
    Row(
        "lean-1x128",
        "bf16-lean against fp32, 23 M, 1 x 128 tokens",
        GPT2 + "; split weights, int8 states",
        partial(whole_steps, job=tokens(1), entries=LEAN, moved="lean"),
        [Claim(OURS, THEIRS + ", fp32", 1.0, 0.90)],
    ),
    Row(
        "fp16-1x128",
        "True fp16 with a loss scale, 23 M, 1 x 128 tokens",
        GPT2,
        partial(whole_steps, job=tokens(1), entries=FP16, absent=NO_FP16),
        [Claim("halfstep loop", PLAIN, 0.80, 0.70), Claim(OURS, PLAIN, 0.80, 0.70)],
    ),
    Row(
        "conv-fp16",
        "Convolutional net, fp16",
        CONV,
        partial(whole_steps, job=images, entries=FP16, absent=NO_FP16),
        [Claim("halfstep loop", PLAIN, 0.02), Claim(OURS, PLAIN, 0.02)],
    ),
    Row(
        "conv-fp16-small",
        "Convolutional net of 16 channels, fp16",
        "the same with 16 channels and 8 images: the ratio depends on the net",
        partial(whole_steps, job=few_images, entries=FP16, absent=NO_FP16),
        [Claim("halfstep loop", PLAIN, 0.02), Claim(OURS, PLAIN, 0.02)],
        share=0.5,
    ),
    Row("conv-bf16", "Convolutional net, bf16", CONV, partial(whole_steps, job=images, entries=BF16), [Claim(OURS, PLAIN, 0.95, 0.85)]),
    Row(
        "tiny",
        "Tiny model, whole step, fp32",
        "three linear layers, 120 k parameters, batch 32: what the loop itself costs",
        partial(whole_steps, job=features, entries=SMALL),
        [Claim(OURS, THEIRS, 0.90, 0.80), Claim(OURS, "hand-written torch loop", 1.05, 0.95)],
        share=0.5,
    ),
    Row(
        "stage",
        "Step stage, 20 M parameters in 100 tensors",
        "all between backward and the next forward: unscale, check, clip, AdamW, the 16-bit weights",
        stage.stage,
        [Claim("split, by GradScaler", stage.PEER, 0.45, 0.40), Claim("fp32 weights, by GradScaler", stage.PEER, 0.60, 0.50)],
        share=0.5,
    ),
    Row(
        "growth-parameters",
        "Step stage against parameters, 1 M to 135 M in 100 tensors",
        "the slope: what a parameter more costs",
        stage.by_parameters,
        [Claim("split, by GradScaler", stage.PEER, 1.0), Claim("fp32 weights, by GradScaler", stage.PEER, 1.0)],
        unit="ns a parameter",
    ),
    Row(
        "growth-tensors",
        "Step stage against the number of tensors, 4 to 400 of 1,000 elements",
        "the slope: what a small tensor more costs",
        stage.by_tensors,
        [Claim("split, by GradScaler", stage.PEER, 1.0), Claim("fp32 weights, by GradScaler", stage.PEER, 1.0)],
        unit="us a tensor",
        share=0.3,
    ),
    Row(
        "memory",
        "Peak resident memory, 135 M Llama style, AdamW",
        "sizes of SmolLM2-135M, two steps of 16 tokens, whole process; ours bf16-lean with split24 weights and int8 states, theirs bf16",
        fresh.memory,
        [Claim(OURS, THEIRS, 0.65, 0.55)],
        unit="MB",
    ),
    Row(
        "cold-start",
        "Start of the process to the end of the first step, bf16",
        "a plain nn.Module of 10 k parameters: import, construct, one step",
        fresh.cold_start,
        [Claim(OURS, THEIRS, 0.50, 0.40)],
    ),
    Row(
        "start-up",
        "Start-up of the commands",
        "whole processes",
        fresh.start_up,
        [Claim("halfstep --help", "import torch", 1.2), Claim("halfstep doctor", "import torch", 1.2)],
        share=0.6,
    ),
    Row(
        "compile",
        "Compiled, whole step, bf16",
        "GPT-2 style, 2 blocks of width 128, vocabulary 2,048, 4 x 64 tokens",
        compiled.whole_steps,
        [Claim("halfstep loop, compiled", "best peer", 1.0), Claim(OURS + ", compiled", "best peer", 1.0)],
        share=0.8,
    ),
]
