"""Forward and backward passes for a plan: with what seed, at which loss scale, how long they take and how much they keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.amp import backward_context, products_of, upcast
from halfstep.amp.as_written import as_written
from halfstep.checkpoint import seed_everything
from halfstep.diagnostics.plan_values import Values, off, sample
from halfstep.diagnostics.trace import answered, undone
from halfstep.diagnostics.under import device_of, in_fp32, under
from halfstep.numerics import FORMATS
from halfstep.optim import master_of
from halfstep.policy import LossScale, Policy
from halfstep.step.calibration import CannotProbe, calibrate, prober
from halfstep.step.graph import nodes, walk
from halfstep.step.scaling import HEAD_ROOM, FollowingScaling, scaling_for

SEED = 20_170_710  # each batch has its own random states, the same under every precision
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Task:
    """What is run: a model on some batches with a loss, which is None where the outputs hold it."""

    model: nn.Module
    batches: Sequence[Any]
    loss: Callable[..., Tensor] | None

    def forward(self, number: int, wide: bool = False) -> tuple[Any, Tensor | None]:
        """Outputs and loss of one batch, with the random states of its number. wide: 16-bit tensors of the batch are cast up."""
        seed_everything(SEED + number)
        batch = upcast(self.batches[number]) if wide else self.batches[number]
        return answered(self.model, batch, self.loss)

    def untouched(self, writes: bool = True) -> AbstractContextManager[None]:
        """The block in which the model may be run, and after which it is what it was."""
        return undone(self.model, (list(self.batches), self.loss), writes)


@dataclass
class Outcome:
    """What the passes over all batches gave. gradients: samples of the weights' gradients of the first batch, unscaled, by name."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    backward: bool = False
    finite: bool = True
    scale: float | None = None
    bytes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def loss(self) -> float | None:
        """The mean over the batches."""
        return sum(self.losses) / len(self.losses) if self.losses else None


def passes(task: Task, policy: Policy | None, values: Values, start: float | None = None) -> Outcome:
    """Run every batch forward and, where there is a loss with a graph, backward. To be called in the blocks of `under` and `untouched`.

    start: the loss scale for graphs that cannot be differentiated twice to find one. Raises what the model raises.
    """
    found, saved = Outcome(), Saved(task.model)
    spec = policy.scale if policy is not None else LossScale()
    with as_written, torch.inference_mode(False), torch.enable_grad(), values:
        task.model.train()
        for number in range(len(task.batches)):
            values.begin()
            with saved if number == 0 and (policy is None or policy.activations == "full") else nullcontext():
                outputs, loss = task.forward(number, wide=policy is None)
            if loss is not None:
                found.losses.append(float(loss.detach()))
            if loss is not None and loss.requires_grad:
                _back(task, policy, spec, loss, found, start, first=number == 0)
            del outputs, loss
    if 0 < len(found.losses) < len(task.batches):
        found.notes.append(f"{len(task.batches) - len(found.losses)} of {len(task.batches)} batches gave no loss, and no gradients")
    found.notes = list(dict.fromkeys(found.notes))
    found.bytes |= {"activations": saved.total} if saved.total else {}
    found.bytes |= _held_bytes(task.model)
    return found


def _back(task: Task, policy: Policy | None, spec: LossScale, loss: Tensor, found: Outcome, start: float | None, first: bool) -> None:
    """The backward pass of one batch at the scale that it asks for."""
    where: AbstractContextManager[Any] = nullcontext()
    if policy is not None:
        where = backward_context(policy, device_of(task.model), products_of(task.model))
    weights = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
    with where:
        scale = _scale(spec, loss, start, found)
        found.scale = scale if found.scale is None or scale is None else min(found.scale, scale)
        gradients(loss, [*weights.values()], scale or 1.0)
    found.backward = True
    made = {name: p.grad for name, p in weights.items() if p.grad is not None}
    found.finite &= all(bool((g if g.layout == torch.strided else g._values()).isfinite().all()) for g in made.values())
    if first:
        dense = {name: g for name, g in made.items() if g.layout == torch.strided}
        found.gradients = {name: sample(g) / (scale or 1.0) for name, g in dense.items()}
        found.bytes["gradients"] = sum(g.nbytes for g in dense.values())
    for p in weights.values():
        p.grad = None


def gradients(loss: Tensor, weights: Sequence[Tensor], scale: float) -> None:
    """Add the gradients of `scale` times a loss of one element to those of the weights that it reaches, and to no other tensor's."""
    wide = loss.float() if loss.dtype in _HALF else loss
    reached = {id(t) for t in walk(loss).leaves}
    chosen = [p for p in weights if id(p) in reached]
    older = any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes(loss))  # which refuses to be told whose gradients are wanted
    wide.backward(torch.full_like(wide, scale), inputs=None if older or not chosen else chosen)  # type: ignore[no-untyped-call]


def _scale(spec: LossScale, loss: Tensor, start: float | None, found: Outcome) -> float | None:
    """The loss scale of a backward pass: the fixed one, or that which a run would find here; None without scaling."""
    if spec.kind == "none":
        return None
    scaling = scaling_for(spec)
    if not isinstance(scaling, FollowingScaling):
        return scaling.scale
    reached = walk(loss)
    why = f"{reached.foreign[0]} may not be differentiated twice" if reached.foreign else ""
    if not why:
        try:
            hopeless = calibrate(scaling, prober(loss, reached.leaves, None)) == "hopeless"
        except CannotProbe as error:
            why = str(error).splitlines()[0].partition(". ")[0]
        else:
            found.notes += [f"no loss scale keeps the gradients finite, not even {spec.floor:.0f}"] if hopeless else []
            return scaling.scale
    found.notes.append(f"the loss scale was taken from fp32's gradients, since the backward pass cannot be tried: {why}")
    return start if start is not None else spec.init


def scale_for(largest: float, spec: LossScale) -> float | None:
    """The largest power of two that keeps a gradient of this magnitude 16 times below fp16's limit, within the bounds of a dynamic scale."""
    if spec.kind != "dynamic":
        return None
    if not largest > 0:
        return spec.init
    scale = spec.ceiling
    while scale > spec.floor and scale * largest * HEAD_ROOM > FORMATS["fp16"].largest:
        scale /= 2
    return scale


class Saved:
    """The block in which what the forward pass keeps for the backward pass is counted: each memory once, weights and buffers not."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._own = model, _memory_of(model)
        self._sizes: dict[int, int] = {}
        self._hooks: Any = None

    @property
    def total(self) -> int:
        """Bytes."""
        own = self._own | _memory_of(self._model)  # a first call may have put weights into 16 bits, elsewhere
        return sum(size for place, size in self._sizes.items() if place not in own)

    def __enter__(self) -> Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, t: Tensor) -> Tensor:
        if t.layout == torch.strided and not t.is_meta:
            self._sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()  # an output that is kept as it is would hold itself alive


def _memory_of(model: nn.Module) -> set[int]:
    """The addresses of weights and buffers."""
    return {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()) if t.layout == torch.strided}


def _held_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of weights, of what lies beside 16-bit ones, and of buffers."""
    masters = [m for p in model.parameters() if (m := master_of(p)) is not None]
    found = {
        "weights": sum(p.nbytes for p in model.parameters()),
        "residuals": sum(m.residual.nbytes for m in masters if m.residual is not None),
        "buffers": sum(b.nbytes for b in model.buffers()),
    }
    return {kind: count for kind, count in found.items() if count}


def gradient_errors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[dict[str, float], float | None]:
    """Relative errors of weight gradients by module, and over all of them together."""
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, reference in wanted.items():
        if name in found:
            pairs.setdefault(name.rpartition(".")[0], []).append((found[name], reference))
    joined = {module: tuple(map(torch.cat, zip(*some, strict=True))) for module, some in pairs.items()}
    own = {module: off(*both) for module, both in joined.items() if bool(both[1].any())}
    if not joined:
        return own, None
    every, reference = (torch.cat(parts) for parts in zip(*joined.values(), strict=True))
    return own, off(every, reference)


@contextmanager
def running(task: Task, policy: Policy | None, writes: bool = True) -> Iterator[None]:
    """The block in which the model runs under a policy (None: in fp32), and after which it is what it was."""
    off = torch.autocast(device_of(task.model).type, enabled=False)  # that of whoever asks
    with off, in_fp32(task.model) if policy is None else under(task.model, policy), task.untouched(writes):
        yield


def timed(task: Task, policies: Sequence[Policy | None], scales: Sequence[float | None], rounds: int) -> list[tuple[float, ...]]:
    """Seconds of a forward and a backward pass of the first batch under each policy (None: in fp32), in turns; the first of each is not counted."""
    found: list[list[float]] = [[] for _ in policies]
    for turn in range(rounds):
        for place in [(i + turn) % len(policies) for i in range(len(policies))]:
            with running(task, policies[place], writes=False), as_written, torch.inference_mode(False), torch.enable_grad():
                task.model.train()
                once(task, policies[place], scales[place])
                found[place].append(once(task, policies[place], scales[place]))
    return [tuple(one) for one in found]


def once(task: Task, policy: Policy | None, scale: float | None) -> float:
    """Seconds of one forward and backward pass."""
    device = device_of(task.model)
    where: AbstractContextManager[Any] = nullcontext()
    if policy is not None:
        where = backward_context(policy, device, products_of(task.model))
    weights = [p for p in task.model.parameters() if p.requires_grad]
    _wait(device)
    begun = time.perf_counter()
    outputs, loss = task.forward(0, wide=policy is None)
    if loss is not None and loss.requires_grad:
        with where:
            gradients(loss, weights, scale or 1.0)
    _wait(device)
    taken = time.perf_counter() - begun
    del outputs, loss
    for p in weights:
        p.grad = None
    return taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
