"""Writes down what a report is made of, while a loop goes on: any loop, ours or torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.amp.recording import record_gradients, scale_of
from halfstep.diagnostics.explanations import WHY, Alarms, of_step
from halfstep.diagnostics.own_loops import TorchSteps, checked_step, source_of
from halfstep.diagnostics.reading import ENVIRONMENT, EVENTS, LAYERS, MEMORY, METRICS
from halfstep.diagnostics.records import LayerSample, MemoryLedger, RunEvent
from halfstep.diagnostics.spreads import SpreadSampler, read, weights_of
from halfstep.diagnostics.surroundings import bytes_of, environment_of, inner, now, peak
from halfstep.diagnostics.under import device_of
from halfstep.diagnostics.writing import RunWriter
from halfstep.errors import ConfigError
from halfstep.step import StepResult
from halfstep.step.result import DeferredResult
from halfstep.step.spread import Spread, of_gradients
from halfstep.step.watching import NoRecorder

EVERY, LOG_EVERY = 100, 10


class _Taken(NamedTuple):
    """A step, and what was measured of it, until it is told."""

    result: StepResult
    number: int | None  # of the step; None: its watch knows, once the result is known
    spreads: tuple[tuple[str, Spread], ...]
    loss: Tensor | None
    scale: float | None = None  # of a scaler of torch's


class Recorder(NoRecorder):
    """Writes events.jsonl, layers.jsonl, metrics.jsonl, environment.json and memory.json of a run into `folder`, for `halfstep.report`.

    Call `step` after each optimizer step and before the gradients are cleared, and `close` at the end (or use it as a context manager):

        recorder = Recorder("runs/mine", model, source=accelerator, optimizer=optimizer)
        ...
        optimizer.step()
        recorder.step(accelerator.last_step)
        optimizer.zero_grad()

    model: the model that is called. source: the Accelerator or the GradScaler of the loop, which measures gradients as they are scaled; torch's
    GradScaler, whose scale is read in each step to tell which were skipped; None: a loop without. The gradients of torch's own loops are measured as
    they are when `step` is called.
    every: in the first step and in each N-th gradients, outputs and weights of each layer are sampled (0: never). log_every: steps between lines of
    metrics.jsonl (0: none; write your own). optimizer: one, or several, for memory.json. go_on: the folder holds records to go on from; put the
    recorder into checkpoints too (`accelerator.register_for_checkpointing`), and it drops what a resumed run gives up. batch: how large one is, as
    text. trackers: objects of `halfstep.tracking`, or a function that gives them: those that can (TensorBoard) show the samples.

    Nothing else is read from the device but in a sampled step, once, and for a line of metrics.jsonl. The numbers of a run are not changed.
    Only the main process of an Accelerator writes. Raises ConfigError for a folder with records that are not to be gone on with, CheckpointError
    when the disk is full.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        source: Any = None,
        *,
        every: int = EVERY,
        log_every: int = LOG_EVERY,
        optimizer: Any = (),
        go_on: bool = False,
        batch: str = "",
        predicted: Mapping[str, int] | None = None,
        trackers: Iterable[Any] | Callable[[], Iterable[Any]] = (),
    ) -> None:
        if not all(type(n) is int and n >= 0 for n in (every, log_every)):
            raise ConfigError(f"every={every!r} and log_every={log_every!r}", "Use 0 for never, or a number of steps.")
        self.writes = bool(getattr(source, "is_main_process", True))
        self._scaler, torchs = source_of(source)
        self._torch = TorchSteps(torchs)
        self._writer, self._log_every = RunWriter(folder, every), log_every
        self._model, self._optimizers = model, list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self._trackers = trackers if callable(trackers) else lambda: trackers
        self._sampler, self._alarms = SpreadSampler(max(1, every)), Alarms()
        self._waiting: list[_Taken] = []
        self._gradients: list[Spread] = []
        self._counts = {"applied": 0, "skipped": 0, "replayed": 0}
        self._scale: float | None = None  # after the last step
        self._losses: tuple[Tensor | None, int] = (None, 0)  # sum, and number, since the last line of metrics.jsonl
        self._shown: dict[str, float] = {}  # of the last sample, for metrics.jsonl
        self._moved: Tensor | None = None  # the last measurement of updates that was told
        self._sampled = 0  # the number of the last step whose outputs and weights were taken
        self._ledger, self._memory_told = MemoryLedger({}, predicted or {}, "", batch), False
        self._initial = 1.0  # the loss scale before the first step
        self._ended = not self.writes
        if self.writes:
            self._begin(folder, source, go_on)

    def _begin(self, folder: str | Path, source: Any, go_on: bool) -> None:
        files = (EVENTS, LAYERS, METRICS) if self._log_every else (EVENTS, LAYERS)
        there = [name for name in files if (Path(folder) / name).exists()]
        if there and not go_on:
            raise ConfigError(f"{folder} already has {' and '.join(there)}", "Name another folder; go_on=True adds to what is there.")
        self._writer.go_on()
        self._sampler.every = self._writer.every * self._writer.stride or 1
        environment = environment_of(
            self._model, self._optimizers[0] if self._optimizers else None, getattr(source, "resolution", None), getattr(source, "num_processes", 1)
        )
        self._ledger = replace(self._ledger, policy=environment.policy)
        if not (Path(folder) / ENVIRONMENT).exists():
            self._writer.document(ENVIRONMENT, environment.as_dict())
        if self._writer.every:
            self._sampler.number = lambda: self._next
            self._sampler.watch(self._model)
        if self._scaler is not None:
            record_gradients(self._scaler, self)
            self._counts["applied"], self._initial = self._scaler.steps, scale_of(self._scaler)

    @property
    def folder(self) -> Path:
        """Where the records are."""
        return self._writer.folder

    @property
    def _next(self) -> int:
        """The number of the step at hand, if the one whose result is not known yet was applied."""
        return self._counts["applied"] + len(self._waiting) + 1

    def due(self, number: int) -> bool:
        """Whether the step of that number is sampled."""
        return not self._ended and self._writer.is_due(number)

    def gradients(self, number: int, names: Sequence[str], held: Sequence[Tensor], limits: Sequence[float], scale: float) -> None:
        """What the engine hands over of one optimizer."""
        with torch.no_grad():
            spread = of_gradients(names, held, limits, scale, number)
        if spread is not None:  # a replay measures again
            self._gradients = [s for s in self._gradients if s.step == number and s.names != spread.names] + [spread]

    def step(self, result: Any = None, *, loss: Tensor | float | None = None, scale: float | None = None) -> None:
        """A step was taken.

        result: its StepResult, from a halfstep scaler or accelerator. Without one (torch's own loop): loss, and with torch's scaler this call after
        its update(): a fall of the scale tells that the step was skipped. scale: the one after it, where the scaler is not the recorder's source;
        of the first step it is then not known whether it was skipped, which an event says.
        """
        if type(result) is not StepResult or loss is not None:
            checked_step(result, loss)
        if self._ended:
            return
        if self._waiting:
            self._tell()
        taken, self._gradients = self._gradients, []
        if isinstance(result, StepResult):
            known = not isinstance(result, DeferredResult)
            if known and result.reason in ("accumulating", "no-gradients"):
                return
            number = self._number_of(result) if known else taken[0].step if taken else None
            spreads = tuple(("gradients", s) for s in taken)
            loss = result.loss_tensor if loss is None else loss
        else:
            known, number = True, self._counts["applied"] + 1
            if scale is not None and self._torch.scale is None:
                self._write(self._torch.unknown(number))
            result, scale = self._torch.take(scale)
            for event in self._torch.lost_loss(loss, result, number):
                self._write(event)
            spreads = (("gradients", own),) if self.due(number) and (own := self._own_gradients(number)) is not None else ()
        if known and not result:
            spreads = ()
        elif number is not None and self.due(number) and number != self._sampled:
            spreads, self._sampled = (*spreads, *self._others(number)), number
        if not self._ledger.measured and (not known or result):
            self._ledger = replace(self._ledger, measured=bytes_of(self._model, map(inner, self._optimizers)))
        step = _Taken(result, number, spreads, _as_tensor(loss) if self._log_every else None, scale)
        if known:
            self._tell_one(step)
        else:
            self._waiting.append(step)

    def _number_of(self, result: StepResult) -> int:
        return result.watch.step if result.watch is not None else self._counts["applied"] + 1

    def _others(self, number: int) -> list[tuple[str, Spread]]:
        """Outputs of the forward pass, and the weights as they are now."""
        outputs = [("outputs", s._replace(step=number)) for s in self._sampler.sampled()]
        self._sampler.forget()
        weights = weights_of(self._model)
        return [*outputs, *([] if weights is None else [("weights", weights._replace(step=number))])]

    def _own_gradients(self, number: int) -> Spread | None:
        """Gradients of a loop without a halfstep scaler."""
        held = [(name, p.grad) for name, p in self._model.named_parameters() if p.grad is not None]
        with torch.no_grad():
            return of_gradients([n for n, _ in held], [g for _, g in held], [math.inf] * len(held), step=number)

    def _tell(self) -> None:
        """Write down the steps whose results are known by now."""
        waiting, self._waiting = self._waiting, []
        for taken in waiting:
            self._tell_one(taken)

    def _tell_one(self, taken: _Taken) -> None:
        result = taken.result.settled()
        number = taken.number if taken.number is not None else self._number_of(result)
        self._tell_step(result, number, taken)
        if result and taken.spreads:
            self._tell_sample(result, number, taken.spreads)
        if result and self._log_every:
            self._tell_metrics(result, number)

    def _tell_step(self, result: StepResult, number: int, taken: _Taken) -> None:
        first, scales = self._scale is None, taken.scale is not None or (self._scaler is not None and self._scaler.is_enabled())
        initial = result.scale if self._scaler is None else self._initial
        for event in of_step(result, number, self._scale, initial if scales else None):
            self._write(event)
        self._scale = result.next_scale
        if result:
            self._counts["applied"] = max(self._counts["applied"], number)  # several optimizers take one step together
        else:
            self._counts["skipped"] += 1
            if self.due(number):  # the one that takes its place is sampled; its outputs only if its forward pass is still to come
                self._sampler.again()
                self._sampled = 0
        self._counts["replayed"] += result.replays > 0
        if taken.loss is not None:
            total, count = self._losses
            self._losses = (taken.loss if total is None else total.to(taken.loss.device) + taken.loss), count + 1
        if result and self._ledger.measured and not self._memory_told:
            self._memory_told = True
            self._writer.document(MEMORY, self._ledger.as_dict())
            self._show({f"memory/{kind}": size for kind, size in self._ledger.measured.items()}, number)
        if first and self._scaler is not None and taken.spreads and taken.spreads[0][0] != "gradients":
            self._write(RunEvent(number, "note", "gradients are not sampled", WHY["released"]))

    def _tell_sample(self, result: StepResult, number: int, spreads: tuple[tuple[str, Spread], ...]) -> None:
        moved = result.watch.moved if result.watch is not None and result.watch.moved is not self._moved else None
        samples, more = read(spreads, [] if moved is None else [moved])
        for event in self._alarms.close(samples):
            self._write(event)
        if moved is not None and more[0][1]:
            self._moved, self._shown["stalled"] = moved, more[0][0] / more[0][1]
            for event in self._alarms.stalled(number, self._shown["stalled"]):
                self._write(event)
        scaled = [n for s in samples if s.kind == "gradients" and s.format == "fp16" for n in s.layers.values()]
        if scaled:
            self._shown["underflow"] = sum(n.underflow * n.n for n in scaled) / max(1, sum(n.n for n in scaled))
        if self._writer.layers(samples):
            self._sampler.every = self._writer.every * self._writer.stride
            self._write(RunEvent(number, "note", f"layers are sampled every {self._sampler.every} steps from now on", WHY["thinned"]))
        self._show({"memory/process peak": peak(device_of(self._model))}, number)
        self._show_layers(samples, number)

    def _tell_metrics(self, result: StepResult, number: int) -> None:
        if number % self._log_every:
            return
        total, count = self._losses
        record: dict[str, Any] = {"step": number, "loss": float(total) / count} if total is not None else {"step": number}
        if self._scaler is None and total is not None and total.device.type != "cpu":
            for event in self._torch.begins(record["loss"], f"a loss of the {count} steps up to step {number} is not finite", number):
                self._write(event)
        record |= {"grad_norm": result.grad_norm, "scale": result.next_scale} | self._counts | self._shown
        self._losses = (None, 0)
        self._writer.metrics({k: v for k, v in record.items() if v is not None})

    def _show(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers():
            if getattr(tracker, "log_layers", None) is not None:
                tracker.log(dict(values), step=step)

    def _show_layers(self, samples: list[LayerSample], step: int) -> None:
        for tracker in self._trackers():
            if (show := getattr(tracker, "log_layers", None)) is not None:
                for sample in samples:
                    show(sample.kind, {name: n._asdict() for name, n in sample.layers.items()}, step=step)

    def predict(self, found: Mapping[str, int] | str) -> None:
        """What `halfstep.memory` has predicted, in bytes by kind, for memory.json; or why it could not, as an event."""
        if isinstance(found, str):
            self.event("note", f"the memory of a step was not predicted: {found}", WHY["unpredicted"])
        else:
            self._ledger = replace(self._ledger, predicted=dict(found))

    def document(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a small file of plain values beside the records."""
        if not self._ended:
            self._writer.document(name, values)

    def event(self, kind: str, text: str, why: str = "", culprits: Iterable[str] = (), step: int | None = None) -> None:
        """Write down something that happened. step: the number of the step; the last applied one when not given. why: WHY[kind] when not given."""
        if not self._ended:
            self._tell()
            self._write(RunEvent(self._counts["applied"] if step is None else step, kind, text, why or WHY.get(kind, ""), tuple(culprits)))

    def _write(self, event: RunEvent) -> None:
        self._writer.event(replace(event, time=now()))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: how far the records are."""
        if not self._ended:
            self._tell()
        total, count = self._losses
        losses = [None if total is None else float(total), count]
        about = {"scale": self._scale, "losses": losses, "shown": dict(self._shown), "alarms": self._alarms.state_dict()}
        about |= {"torch": [self._torch.scale, self._torch.lost]}
        return {"events": self._writer.events, "counts": dict(self._counts)} | about

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as of a checkpoint: what the files have from later steps, which are given up, is removed from them."""
        self._counts, self._scale, self._shown = dict(state["counts"]), state["scale"], dict(state["shown"])
        total, count = state["losses"]
        self._losses = (None if total is None else torch.tensor(total, dtype=torch.float64), count)
        self._alarms.load_state_dict(state["alarms"])
        self._torch.scale, self._torch.lost = state.get("torch", [self._scale, False])
        if self.writes:
            self._writer.go_on(state["events"], self._counts["applied"])
            self._sampler.every = self._writer.every * self._writer.stride or 1

    def close(self, tell: bool = True) -> None:
        """Tell what is left (unless tell=False), and take all hooks off the model. Can be called twice."""
        if self._ended:
            return
        if tell:
            self._tell()
        if tell and self._memory_told:
            measured = dict(self._ledger.measured) | {"process peak": peak(device_of(self._model))}
            self._writer.document(MEMORY, replace(self._ledger, measured=measured).as_dict())
        self._ended = True
        self._sampler.leave()
        if self._scaler is not None:
            record_gradients(self._scaler, None)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_tensor(loss: Tensor | float | None) -> Tensor | None:
    """A loss on its device, in fp64 so that sums are exact enough; NaN and inf stay."""
    return None if loss is None else torch.as_tensor(loss).detach().double()
