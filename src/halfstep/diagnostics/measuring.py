"""Real training steps of a copy of a model, with every allocation of torch's in them: what a plan is to be compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep import optim
from halfstep.amp import GradScaler, backward_context, bind, bound_policy, products_of, recycled, scratch
from halfstep.amp.recompute import recompute_blocks
from halfstep.diagnostics.blocks import Block, Timeline, call
from halfstep.diagnostics.casts import casts_in
from halfstep.diagnostics.memory_plan import MemoryPlan
from halfstep.diagnostics.stepping import name_told, optimizer_for, states_of
from halfstep.diagnostics.trace import loss_of
from halfstep.diagnostics.twin import mapped, uncopied
from halfstep.diagnostics.walking import Step, Walked
from halfstep.errors import ConfigError
from halfstep.optim import HALF, master_of
from halfstep.step.buffers import SMALL, TRIALS

MARK = "halfstep memory "  # the beginning of the names of moments in a profile
Addresses = dict[str, set[int]]


def run(step: Step) -> MemoryPlan:
    """Run the steps and tell what the last took. Random states go on."""
    from halfstep.diagnostics.memory import about, plan_of

    model = step.model
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError(
            f"this {type(model).__name__} is on the meta device, and a real step needs its weights",
            "Load them, or pass a function that makes the model.",
        )
    own = replace(step, batch=mapped(step.batch, _clone))  # no dispatch mode: it would change how products are run
    walked, notes = _on_cpu(own) if step.device.type == "cpu" else _on_gpu(own)
    return plan_of(walked, about(step, walked, "measured on the"), True, notes)


def _clone(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


class _Run:
    """A copy of the model, bound and with its optimizer, that takes steps."""

    def __init__(self, step: Step) -> None:
        self.step = step
        try:
            self.model = copy.deepcopy(step.model)
        except Exception as error:
            raise uncopied(step.model, error) from error
        for p in self.model.parameters():
            p.grad = None
        if not self.model.training:
            self.model.train()
        if step.recompute:
            recompute_blocks(self.model)
        if bound_policy(self.model) is None:
            bind(self.model, step.policy, step.device)
        self.optimizer = optimizer_for(step.optimizer, self.model.parameters(), step.policy)
        self.scaler = GradScaler.from_policy(step.policy.scale)
        self.scaler.watch(self.model)
        self.scaler.watch(self.optimizer)
        self.release = optim.release(self.optimizer, self.model) if step.released else None
        if self.release is not None:
            self.scaler.watch(self.optimizer)

    @property
    def warm(self) -> int:
        """Steps until the memory of a step is that of all later ones: large buffers are copied for some steps."""
        large = any(b.numel() > SMALL for b in self.model.buffers())
        return TRIALS + 2 if large else 1

    def take(self, moment: Any) -> None:
        """One step. moment: called with a name and what is to be noted then."""
        step, window = self.step, self.step.accumulate
        moment("begin", dict)
        for number in range(window):
            moment(f"forward {number}", dict)
            loss = loss_of(self.model, step.batch, step.loss)
            loss = loss / window if window > 1 else loss
            loss = loss.float() if loss.dtype in HALF else loss
            moment(f"forward {number} ended", lambda loss=loss: {"casts": _at(casts_in(loss)), "other": _at([loss, *self._remembered()])})
            if self.release is not None:
                self.release.hold = number < window - 1
            scaled = self.scaler.scale(loss)
            del loss
            with backward_context(step.policy, step.device, products_of(self.model)):
                scaled.backward()  # type: ignore[no-untyped-call]
            del scaled
            moment(f"gradients {number}", self._gradients)
        moment("backward ended", lambda: _held(self.model, self.optimizer, self.scaler))
        applied = bool(self.scaler.step(self.optimizer))
        self.scaler.update()
        moment("end", lambda: {"states": _at(states_of(self.optimizer))})
        self.optimizer.zero_grad()
        self.refused = not applied

    def _remembered(self) -> list[Tensor]:
        """The random states of forward passes that may have to be run again."""
        return [call.random for call in self.scaler._healer.recall._calls]

    def _gradients(self) -> Addresses:
        return {"gradients": _at(p.grad for p in self.model.parameters() if p.grad is not None)}


def _at(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided}


def _held(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> Addresses:
    """Where what is there all the time lies."""
    masters = [m.residual for p in model.parameters() if (m := master_of(p)) is not None and m.residual is not None]
    copies = [item.copy for item in scaler._engine.state.buffers._guarded if item.copy is not None]
    return {
        "states": _at(states_of(optimizer)),
        "residuals": _at(masters),
        "weights": _at(model.parameters()),
        "buffers": _at([*model.buffers(), *copies]),
    }


def _on_cpu(step: Step) -> tuple[Walked, tuple[str, ...]]:
    """Under torch's profiler, which sees each allocation and its end."""
    from torch.profiler import ProfilerActivity, profile, record_function

    noted: dict[str, Addresses] = {}

    def moment(name: str, note: Any) -> None:
        noted[name] = note()
        with record_function(f"{MARK}{name}"):
            pass

    # memory that is used again: the run's own, and not what other runs of this thread have left
    with scratch.WalkedThrough(), recycled.WalkedThrough(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        taken = _Run(step)
        for _ in range(taken.warm):
            taken.take(lambda name, note: None)
        taken.take(moment)
        optimizer = name_told(taken.optimizer)
    line, ticks = _timeline(seen.profiler.kineto_results.experimental_event_tree())
    forward = tuple((ticks[f"forward {n}"], ticks[f"forward {n} ended"]) for n in range(step.accumulate))
    _name(line, ticks, noted, step.accumulate)
    notes = ("the step that was measured was refused: a gradient was not finite",) if taken.refused else ()
    return Walked(line, ticks["begin"], forward, ticks["backward ended"], ticks["end"], optimizer), notes


def _timeline(tree: Any) -> tuple[Timeline, dict[str, int]]:
    """The blocks of a profile, each with its address in the place of a module, and the ticks of its moments."""
    events: list[tuple[int, int, Any]] = []

    def walk(nodes: Any) -> None:
        for node in nodes:
            mark = node.name.startswith(MARK)
            if mark or str(node.tag).endswith("Allocation"):
                events.append((node.start_time_ns, int(mark), node))
            walk(node.children)

    walk(tree)
    events.sort(key=lambda event: event[:2])
    line, ticks, there = Timeline(), dict[str, int](), dict[int, Block]()
    for tick, (_, mark, node) in enumerate(events, 1):
        if mark:
            ticks[node.name.removeprefix(MARK)] = tick
            continue
        address, size = node.extra_fields.ptr, node.extra_fields.alloc_size
        if size > 0:
            there[address] = Block(size, tick, module=str(address))
            line.blocks.append(there[address])
        elif (block := there.pop(address, None)) is not None:
            block.died = tick
    return line, ticks


def _name(line: Timeline, ticks: dict[str, int], noted: dict[str, Addresses], window: int) -> None:
    """Call the blocks by their kinds."""

    def at(moment: str, kind: str, addresses: set[int]) -> None:
        call([b for b in line.alive(ticks[moment]) if int(b.module) in addresses], kind)

    for kind, addresses in noted["backward ended"].items():
        at("backward ended", kind, addresses)
    at("end", "states", noted["end"]["states"])
    for number in range(window):
        at(f"gradients {number}", "gradients", noted[f"gradients {number}"]["gradients"])
    for number in range(window):
        ended = noted[f"forward {number} ended"]
        at(f"forward {number} ended", "casts", ended["casts"])
        begin, end = ticks[f"forward {number}"], ticks[f"forward {number} ended"]
        call([b for b in line.alive(end) if b.born > begin and int(b.module) not in ended["other"]], "activations")
    for block in line.blocks:
        block.module = ""


def _on_gpu(step: Step) -> tuple[Walked, tuple[str, ...]]:
    """By the allocator's own counts: what is there at each moment, and the most that was there."""
    device = step.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    found: dict[str, int] = {}

    def moment(name: str, note: Any) -> None:
        found[name] = torch.cuda.memory_allocated(device) - before
        if name == "begin":
            torch.cuda.reset_peak_memory_stats(device)

    taken = _Run(step)
    for _ in range(taken.warm):
        taken.take(lambda name, note: None)
    taken.take(moment)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    line = _told(taken, step, found, peak)
    optimizer = name_told(taken.optimizer)
    notes = ("casts are among activations, and when the peak was is not known: a GPU's allocator does not say",)
    return Walked(line, 2, ((2, 3),), 4, 5, optimizer, phased=False), notes


def _told(taken: _Run, step: Step, found: dict[str, int], peak: int) -> Timeline:
    """A timeline with the counts of a GPU's allocator: what is always there, what is kept, and the rest at the peak."""
    always = {
        "weights": taken.model.parameters(),
        "buffers": taken.model.buffers(),
        "states": states_of(taken.optimizer),
        "residuals": [m.residual for p in taken.model.parameters() if (m := master_of(p)) is not None and m.residual is not None],
    }
    last = step.accumulate - 1
    blocks = [Block(sum(_sizes(tensors).values()), 1, kind=kind) for kind, tensors in always.items()]
    kept = found[f"forward {last} ended"] - found[f"forward {last}"]
    gradients = max(0, found["backward ended"] - found["begin"])
    there = sum(b.bytes for b in blocks)
    blocks += [Block(kept, 3, 4, "activations"), Block(gradients, 4, 5, "gradients"), Block(max(0, peak - there - kept), 3, 4)]
    return Timeline(blocks)


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
