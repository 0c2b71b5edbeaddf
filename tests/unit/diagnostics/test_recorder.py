"""The recorder: what any loop writes down, that nothing is read but in sampled steps, and that the numbers of the loop stay what they were."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import Accelerator, StepResult
from halfstep import optim as ours
from halfstep.amp import GradScaler
from halfstep.diagnostics import Recorder, read_run
from halfstep.diagnostics.explanations import WHY, of_step
from halfstep.diagnostics.records import LayerNumbers, LayerSample, RunEvent
from halfstep.diagnostics.writing import RunWriter
from halfstep.errors import CheckpointError, ConfigError
from halfstep.step import Culprit

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "halfstep": lambda ps: ours.AdamW(ps, lr=1e-2),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 1))


class Loop:
    """A hand-written loop, recorded every so many steps (0: with a recorder that samples nothing; None: without one)."""

    def __init__(self, folder: Path, every: int | None = 2, optimizer: str = "torch", enabled: bool = True, **settings: Any) -> None:
        self.model = net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = GradScaler(enabled=enabled, **settings)
        self.scaler.watch(self.model)
        self.recorder = None if every is None else Recorder(folder, self.model, self.scaler, every=every, optimizer=self.optimizer, go_on=True)

    def step(self, factor: float | Tensor = 1.0) -> StepResult:
        inputs = torch.randn(6, 4)
        with torch.autocast("cpu", torch.float16):
            loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean() * factor
        self.scaler.scale(loss).backward()
        result = self.scaler.step(self.optimizer, max_norm=0.5)
        self.scaler.update()
        if self.recorder is not None:
            self.recorder.step(result)
        self.optimizer.zero_grad()
        return result


def test_a_loop_leaves_what_the_report_is_made_of(tmp_path: Path) -> None:
    loop = Loop(tmp_path, every=2)
    results = [loop.step(math.inf if k == 2 else 1.0) for k in range(11)]
    loop.recorder.close()
    run = read_run(tmp_path)
    assert run.notes == ()
    assert [s.step for s in run.sampled("weights")] == [1, 2, 4, 6, 8, 10]
    first = [s for s in run.layers if s.step == 1]
    assert {(s.kind, s.format) for s in first} == {("gradients", "fp16"), ("outputs", "fp16"), ("weights", "fp32")}
    gradients = first[0].layers
    assert list(gradients) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert first[0].scale == results[0].scale
    norm = math.sqrt(sum(n.n * 4**n.log2rms for n in gradients.values())) / results[0].scale
    assert norm == pytest.approx(results[0].grad_norm, rel=1e-2), "of the gradients as they were scaled, before clipping"
    assert [(e.step, e.kind) for e in run.events if e.kind != "scale"] == [(1, "calibrated"), (3, "nonfinite-loss")]
    assert all(e.time and e.text and e.why for e in run.events)
    assert run.events[1].culprits[0] == "loss"
    (line,) = run.metrics
    assert (line["step"], line["applied"], line["skipped"], math.isinf(line["loss"])) == (10, 10, 1, True)
    assert line["grad_norm"] == results[-1].grad_norm
    assert run.memory.measured["weights"] == run.memory.measured["gradients"] == 4 * 65
    assert run.memory.measured["states"] == 2 * 4 * 65 + 4 * 6
    assert (run.environment.model, run.environment.optimizer, run.environment.parameters) == ("Sequential", "AdamW", 65)
    assert run.environment.device["kind"] == "cpu"


def test_an_accelerators_loop_with_accumulation_has_one_sample_a_step(tmp_path: Path) -> None:
    accelerator = Accelerator(precision="bf16-lean", cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(m := net(), ours.AdamW(m.parameters()))
    with Recorder(tmp_path, model, accelerator, every=1, log_every=1, optimizer=optimizer, batch="2 x 6") as recorder:
        for _ in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(6, 4)).square().mean())
                optimizer.step()
                recorder.step(accelerator.last_step)
                optimizer.zero_grad()
    run = read_run(tmp_path)
    assert [s.step for s in run.sampled("gradients") if "0.weight" in s.layers] == [1, 2, 3]
    formats = {"gradients": {"fp32"}, "outputs": {"bf16", "fp32"}, "weights": {"bf16", "fp32"}}
    assert {kind: {s.format for s in run.sampled(kind)} for kind in formats} == formats, "accumulated in fp32"
    assert run.series("applied") == ((1, 2, 3), (1.0, 2.0, 3.0))
    assert (run.environment.policy, run.memory.policy, run.memory.batch) == ("bf16-lean", "bf16-lean", "2 x 6")
    assert run.memory.measured["residuals"] == 2 * 49


class Reads(TorchDispatchMode):
    """Counts numbers read to the host one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_is_read_but_once_in_a_sampled_step(optimizer: str, enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.diagnostics import recorder as module

    lists, read = [], module.read
    monkeypatch.setattr(module, "read", lambda *a: lists.append(len(a[0])) or read(*a))
    counts = {}
    for every in (None, 0, 3):
        loop = Loop(tmp_path / str(every), every, optimizer, enabled, **({"strategy": "stock", "init_scale": 8.0} if enabled else {}))
        loop.scaler._engine.state.watching.every = 0
        found = []
        for _ in range(6):
            with Reads() as reads:
                loop.step()
            found.append(reads.count)
        counts[every] = found
    assert counts[None] == counts[0]
    assert [counts[3][k] for k in (1, 3, 4)] == [counts[0][k] for k in (1, 3, 4)]
    assert lists == [3, 3, 3], "gradients, outputs and weights of steps 1, 3 and 6, each by one read"


def test_a_result_that_is_on_its_way_is_not_waited_for(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 2, "fused", strategy="stock", init_scale=2.0, deferred=True)
    (record,) = [loop.scaler._engine.state.record(loop.optimizer)]
    told = []
    for factor in (1.0, 1.0, 1.0, math.inf, 1.0):
        loop.step(factor)
        told.append((record.pending is not None and not record.pending.is_settled, loop.recorder._counts["applied"]))
    assert told == [(False, 1), (True, 1), (True, 2), (True, 3), (True, 3)]
    loop.recorder.close()
    run = read_run(tmp_path)
    assert [s.step for s in run.sampled("weights")] == [1, 2, 4]
    assert {s.step for s in run.sampled("gradients")} == {1, 2, 4}
    assert {s.step for s in run.sampled("outputs")} == {1, 2}, "step 4 was refused, and its second forward pass was over when that was known"
    assert [(e.step, e.kind) for e in run.events if e.kind != "scale"] == [(4, "nonfinite-loss")]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_recording_changes_no_bit(optimizer: str, enabled: bool, tmp_path: Path) -> None:
    ends = []
    for every in (None, 1):
        loop = Loop(tmp_path / str(every), every, optimizer, enabled)
        torch.manual_seed(1)
        results = [loop.step(math.inf if k == 3 else 1.0) for k in range(6)]
        ends.append(([(r.scale, r.grad_norm, r.reason) for r in results], [p.detach().clone() for p in loop.model.parameters()]))
    assert str(ends[0][0]) == str(ends[1][0])
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


def test_a_closed_recorder_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = net()
    hooks = [dict(m._forward_pre_hooks) | dict(m._forward_hooks) for m in model.modules()]
    scaler = GradScaler()
    recorder = Recorder(tmp_path, model, scaler)
    model(torch.randn(6, 4))
    recorder.close()
    recorder.close()
    assert [dict(m._forward_pre_hooks) | dict(m._forward_hooks) for m in model.modules()] == hooks
    assert not scaler._engine.state.watching.recorder.due(1)


def test_what_a_resumed_loop_gives_up_is_dropped(tmp_path: Path) -> None:
    def without_time(folder: Path) -> list[Any]:
        return [(e.step, e.kind, e.text) for e in read_run(folder).events]

    whole, broken = Loop(tmp_path / "whole", 1), Loop(tmp_path / "broken", 1)
    torch.manual_seed(1)
    for k in range(6):
        whole.step(math.inf if k in (2, 4) else 1.0)
    torch.manual_seed(1)
    for k in range(4):
        broken.step(math.inf if k == 2 else 1.0)
        if k == 2:
            random, kept = torch.get_rng_state(), json.loads(json.dumps(broken.recorder.state_dict()))
            weights = [p.detach().clone() for p in broken.model.parameters()]
            states, scaler = json.loads("{}") or broken.optimizer.state_dict(), broken.scaler.state_dict()
            states = {**states, "state": {i: {n: t.clone() for n, t in s.items()} for i, s in states["state"].items()}}
    with (tmp_path / "broken" / "layers.jsonl").open("a") as file:
        file.write('{"step": 9, "ki')  # killed in the middle of a line
    again = Loop(tmp_path / "broken", 1)
    with torch.no_grad():
        for p, value in zip(again.model.parameters(), weights, strict=True):
            p.copy_(value)
    again.optimizer.load_state_dict(states)
    again.scaler.load_state_dict(scaler)
    again.scaler.steps = 2
    again.recorder.load_state_dict(kept)
    torch.set_rng_state(random)
    for k in range(3, 6):
        again.step(math.inf if k == 4 else 1.0)
    for loop in (whole, again):
        loop.recorder.close()
    assert (tmp_path / "whole" / "layers.jsonl").read_bytes() == (tmp_path / "broken" / "layers.jsonl").read_bytes()
    assert without_time(tmp_path / "whole") == without_time(tmp_path / "broken")
    assert [e[:2] for e in without_time(tmp_path / "whole") if e[1] != "scale"] == [(1, "calibrated"), (3, "nonfinite-loss"), (4, "nonfinite-loss")]


def test_events_of_steps_that_are_given_up_are_dropped(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    for k in (1, 2, 3):
        writer.event(RunEvent(k, "scale", "the loss scale fell"))
        writer.event(RunEvent(k, "checkpoint", "saved"))
    writer.go_on(events=2, step=2)
    assert [(e.step, e.kind) for e in read_run(tmp_path).events] == [(k, kind) for k in (1, 2) for kind in ("scale", "checkpoint")]


def test_a_folder_with_records_is_not_mixed_with_another_run(tmp_path: Path) -> None:
    with Loop(tmp_path).recorder as recorder:
        recorder.event("note", "hello")
    with pytest.raises(ConfigError, match=r"already has events\.jsonl\. Name another folder; go_on=True"):
        Recorder(tmp_path, net())
    with pytest.raises(ConfigError, match="every=-1"):
        Recorder(tmp_path / "b", net(), every=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        Recorder(tmp_path / "file" / "run", net())


def test_another_process_than_the_main_one_writes_nothing(tmp_path: Path) -> None:
    class Second:
        is_main_process = False

    recorder = Recorder(tmp_path / "run", net(), Second())
    recorder.step(StepResult(True, "applied"))
    recorder.event("note", "hello")
    assert recorder.state_dict()["events"] == 0
    recorder.close()
    assert not (tmp_path / "run").exists()


EVENTS: dict[str, tuple[StepResult, list[tuple[str, str]]]] = {
    "applied": (StepResult(True, "applied", scale=8.0, next_scale=8.0), []),
    "grown": (StepResult(True, "applied", scale=8.0, next_scale=16.0), [("scale", "the loss scale rose from 8 to 16")]),
    "overflow": (
        StepResult(False, "overflow", scale=8.0, next_scale=4.0, culprits=(Culprit("a.weight", "backward", math.inf),)),
        [("skipped", "step 5 was skipped: gradients not fit to be used: a.weight (backward: inf)"), ("scale", "the loss scale fell from 8 to 4")],
    ),
    "replayed": (
        StepResult(True, "applied", scale=4.0, next_scale=4.0, replays=2),
        [("replayed", "step 5 was computed 2 more times, and passed at a loss scale of 4"), ("scale", "the loss scale fell from 8 to 4")],
    ),
    "pinned": (
        StepResult(True, "applied", scale=8.0, next_scale=8.0, pinned=("ff",)),
        [("pinned", "ff held in fp32 from step 5 on")],
    ),
    "many": (
        StepResult(False, "forward-overflow", scale=8.0, next_scale=8.0, culprits=tuple(Culprit(n, "forward", math.inf) for n in "abcde")),
        [("skipped", "step 5 was skipped: outputs beyond 16 bits: a (forward: inf), b (forward: inf), c (forward: inf) and 2 more")],
    ),
    "partly": (
        StepResult(True, "partly", scale=8.0, next_scale=8.0),
        [("skipped", "step 5 was applied in part: some gradients not fit to be used: it was not told which")],
    ),
}


@pytest.mark.parametrize("case", EVENTS)
def test_what_happened_is_told_in_a_sentence_with_what_to_do(case: str) -> None:
    result, expected = EVENTS[case]
    found = of_step(result, 5, 8.0, 8.0)
    assert [(e.kind, e.text) for e in found] == expected
    assert all(e.why in WHY.values() for e in found)
    assert [e for e in of_step(result, 5, 8.0, None) if e.kind == "scale"] == [], "where nothing is scaled"


def sample(step: int, kind: str, count: int, log2max: float = 3.123456) -> LayerSample:
    zeros, bad, small, near, rms = torch.rand(5, generator=torch.Generator().manual_seed(step)).tolist()
    numbers = LayerNumbers(2359296, zeros, bad, small, near, log2max, rms)
    return LayerSample(step, kind, "fp16", {f"transformer.h.{i}.mlp.c_proj.weight": numbers for i in range(count)}, 1024.0)


SIZES = [(100, 100, 101), pytest.param(100, 10, 251, marks=pytest.mark.slow), pytest.param(1200, 100, 26, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("layers", "every", "samples"), SIZES)
def test_records_of_10000_steps_take_at_most_10_mb(layers: int, every: int, samples: int, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, every)
    due = [k for k in range(1, 10_001) if k == 1 or k % every == 0]
    for k in due:
        if writer.is_due(k):
            writer.layers([sample(k, "gradients", layers), sample(k, "outputs", layers), sample(k, "weights", layers)])
    for k in range(1, 10_001, 2):
        writer.event(RunEvent(k, "skipped", "step 5 was skipped: gradients not fit to be used: a.weight (backward: inf)", WHY["overflow"]))
    size = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert 2_000_000 < size < 10_000_000
    run = read_run(tmp_path)
    assert run.notes == ()
    steps = sorted({s.step for s in run.layers})
    assert samples / 2 <= len(steps) <= samples
    assert steps[0] == 1
    assert len({b - a for a, b in itertools.pairwise(steps[1:])}) == 1, "evenly spaced"
    assert steps[-1] > 10_000 - 2 * (steps[2] - steps[1])
    assert (run.events[-1].kind, run.events[-1].text) == ("note", "the list of events ends here, at 2 MB")


def test_a_thinned_file_is_gone_on_with_as_it_was_left(tmp_path: Path) -> None:
    def write(writer: RunWriter, first: int, last: int) -> None:
        for k in range(first, last + 1):
            if writer.is_due(k):
                writer.layers([sample(k, "weights", 10)])

    write(RunWriter(tmp_path / "whole", 1, layers_limit=20_000), 1, 60)
    write(writer := RunWriter(tmp_path / "broken", 1, layers_limit=20_000), 1, 50)
    assert writer.stride > 1
    again = RunWriter(tmp_path / "broken", 1, layers_limit=20_000)
    again.go_on(step=20)
    write(again, 21, 60)
    assert (tmp_path / "whole" / "layers.jsonl").read_bytes() == (tmp_path / "broken" / "layers.jsonl").read_bytes()


def test_what_comes_close_to_a_limit_is_told_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path, every=1, enabled=False)
    with torch.no_grad():
        loop.model[3].weight.mul_(0).add_(28000.0)
    for _ in range(3):
        loop.step(1e-12)
    loop.recorder.close()
    (event,) = [e for e in read_run(tmp_path).events if e.kind == "close"]
    assert (event.step, event.culprits[0]) == (1, "3")
    assert event.text.startswith("outputs close to the limit: 3 at 2^15")
    assert event.text.endswith("of fp16's 65504")
