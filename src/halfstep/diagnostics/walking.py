"""A training step walked through on shapes: what it makes, keeps and lets go of, with the decisions that the run itself would take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.optim import Optimizer

from halfstep.amp import backward_context, bind, bound_policy, products_of, recycled, scratch
from halfstep.amp.as_written import as_written
from halfstep.amp.recompute import recompute_blocks
from halfstep.diagnostics.blocks import TEMPORARY, Block, Timeline, call
from halfstep.diagnostics.casts import casts_in
from halfstep.diagnostics.ledger import Ledger
from halfstep.diagnostics.stepping import name_told, optimizer_for, sizes_of, state_bytes, states_known, states_of, takes_nothing
from halfstep.diagnostics.trace import loss_of
from halfstep.diagnostics.twin import MEASURED, batch_of_shapes, modules_told, twin_of
from halfstep.errors import ConfigError, HalfstepError
from halfstep.hardware import emulated_families
from halfstep.optim import HALF, RELEASES, master_of
from halfstep.optim.attached import Heard
from halfstep.policy import Policy, model_bytes
from halfstep.step.buffers import SMALL


@dataclass(frozen=True)
class Step:
    """What is to be walked through, or run."""

    model: nn.Module
    batch: Any
    policy: Policy
    device: torch.device
    loss: Callable[..., Tensor] | None
    optimizer: Any
    accumulate: int = 1
    released: bool = False
    recompute: bool = False


@dataclass(frozen=True)
class Walked:
    """A step as it went: its blocks, and the ticks at which it began, its last forward pass was done, its backward passes were, and it ended.

    phased: the ticks tell in which part of the step the peak was.
    """

    timeline: Timeline
    begin: int
    forward: tuple[tuple[int, int], ...]
    backward: int
    end: int
    optimizer: str
    phased: bool = True


class _Frees(Heard):
    """The hook of a gradient that is released: it is let go of at once. Counts as a handle of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True

    @property
    def handle(self) -> Any:
        return self if self.on else None

    def __call__(self, parameter: Tensor) -> None:
        if self.on:
            parameter.grad = None


def walk_through(step: Step) -> Walked:
    """Walk through two steps, of which the first settles what a run's first step settles. Raises ConfigError where numbers decide what is done."""
    if step.policy.autocast != "fp32" and step.device.type == "cpu":
        emulated_families(step.policy.autocast)  # measured where that was not done yet: nothing can be in here
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(fake)
    try:
        with fake, ledger, scratch.WalkedThrough(), recycled.WalkedThrough(), as_written, torch.enable_grad():
            return _walk(step, fake, ledger)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"{ledger.place or 'the model'} decides by numbers ({error.func}) that are known only when it runs: what it takes cannot be told before",
            MEASURED,
        ) from error
    except RuntimeError as error:
        if isinstance(error, HalfstepError):
            raise
        said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"this {type(step.model).__name__} cannot be walked through on shapes: {said}", f"See that it runs on this batch. {MEASURED}"
        ) from error


def _walk(step: Step, fake: FakeTensorMode, ledger: Ledger) -> Walked:
    model = twin_of(step.model, step.device, fake)
    batch = batch_of_shapes(step.batch, step.device, fake)
    ledger.leave_out(batch)
    if step.recompute:
        recompute_blocks(model)
    if bound_policy(model) is None:
        bind(model, step.policy, step.device)
    if not model.training:  # as a trainer does; parts that are in evaluation while the whole is not stay so
        model.train()
    with modules_told(model, ledger):
        _pass(model, batch, replace(step, accumulate=1), ledger, 0)  # what the first step settles: weights in 16 bits, memory that is used again
    ledger.forget_kinds()
    _clear(model)
    optimizer = optimizer_for(step.optimizer, model.parameters(), step.policy)
    for p in model.parameters():
        ledger.adopt(p, "weights")
        master = master_of(p)
        if master is not None and master.residual is not None:
            ledger.adopt(master.residual, "residuals")
    _count_buffers(model, ledger)
    _count_states(model, optimizer, step, ledger)
    forward = []
    begin = ledger.tick()
    with modules_told(model, ledger), _releasing(model, step.released) as release:
        for number in range(step.accumulate):
            release(number == step.accumulate - 1)
            forward.append(_pass(model, batch, step, ledger, number))
    backward = ledger.tick()
    if not takes_nothing(optimizer) and not step.released:
        _step(optimizer, ledger)
    end = ledger.tick()
    return Walked(ledger.timeline, begin, tuple(forward), backward, end, name_told(optimizer))


def _pass(model: nn.Module, batch: Any, step: Step, ledger: Ledger, number: int) -> tuple[int, int]:
    """One micro-batch, forward and backward; the ticks at which the forward pass began and ended."""
    begin = ledger.tick()
    if not number:
        ledger.forget()
    ledger.remember(_block(torch.get_rng_state().nbytes, ledger, TEMPORARY))  # should the pass have to be run again
    value = loss_of(model, batch, step.loss)
    if step.accumulate > 1:
        value = value / step.accumulate
    value = value if value.dtype not in HALF else value.float()
    end = ledger.tick()
    call(ledger.blocks(casts_in(value)), "casts")
    kept = [b for b in ledger.timeline.alive(end) if b.born > begin and b is not ledger.block(value) and not ledger.remembers(b)]
    call(kept, "activations")
    if number:
        _widen(model)
    with backward_context(step.policy, step.device, products_of(model)):
        value.backward()  # type: ignore[no-untyped-call]
    for p in model.parameters():
        if p.grad is not None:
            ledger.adopt(p.grad, "gradients")
    return begin, end


def _widen(model: nn.Module) -> None:
    """Gradients of 16-bit weights that others are to be added to become fp32, as `halfstep.step.narrow` does."""
    for p in model.parameters():
        if p.grad is not None and p.dtype in HALF and p.grad.dtype in HALF:
            old, p.grad, p.grad_dtype = p.grad, None, torch.float32
            p.grad = old.float()


def _clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


@contextmanager
def _releasing(model: nn.Module, released: bool) -> Iterator[Callable[[bool], None]]:
    """Inside, what was given switches the release of gradients on and off."""
    hook = _Frees()
    hook.on = False

    def switch(on: bool) -> None:
        hook.on = on and released

    if released:
        RELEASES.add(hook)
    handles = [_hooked(p, hook) for p in model.parameters() if p.requires_grad and released]
    try:
        yield switch
    finally:
        for handle in handles:
            handle.remove()
        RELEASES.discard(hook)


def _hooked(p: Any, hook: _Frees) -> Any:
    return p.register_post_accumulate_grad_hook(hook)


def _count_buffers(model: nn.Module, ledger: Ledger) -> None:
    """The buffers, and the copies of those that a refused step puts back."""
    statistics = {id(b) for part in model.modules() if isinstance(part, nn.modules.batchnorm._NormBase) for b in part._buffers.values()}
    for b in model.buffers():
        ledger.adopt(b, "buffers")
        if b.numel() <= SMALL or id(b) in statistics:
            ledger.timeline.blocks.append(_block(b.nbytes, ledger, "buffers"))


def _count_states(model: nn.Module, optimizer: Optimizer, step: Step, ledger: Ledger) -> None:
    """The optimizer's states: by halfstep.policy where it knows them, else those that a step of it has made."""
    held = [p for p in model.parameters() if p.requires_grad]
    if states_known(optimizer):
        per_group = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        wide = torch.float64 if step.policy.states == "fp32" else None  # torch's states are of the weight's kind
        times = {id(p): 2 if p.dtype == wide else 1 for p in held}
        total = sum(
            times[id(p)] * model_bytes(sizes_of([p], step.policy), step.policy, optimizer, group=per_group.get(id(p), {})).states for p in held
        )
    if not takes_nothing(optimizer) or not states_known(optimizer):
        for p in held:
            p.grad = torch.empty_like(p, dtype=p.grad_dtype or p.dtype)
        _step(optimizer, ledger)
        made = state_bytes(optimizer)
        for t in states_of(optimizer):
            ledger.adopt(t, "states")
        _clear(model)
        total = total - made if states_known(optimizer) else 0
    if total > 0:
        ledger.timeline.blocks.append(_block(total, ledger, "states"))


def _step(optimizer: Optimizer, ledger: Ledger) -> None:
    """The optimizer's step, by whose name a refusal is told."""
    ledger.modules.append(f"the step of {name_told(optimizer)}")
    with torch.no_grad():
        optimizer.step()
    ledger.modules.pop()


def _block(count: int, ledger: Ledger, kind: str) -> Block:
    return Block(count, ledger.tick(), kind=kind)
