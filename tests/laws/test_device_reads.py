"""How often a step reads a value from the device: each read drains the queue of a GPU. Counted on the CPU, where reads are as visible."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.amp import GradScaler

Make = Callable[[Iterable[Tensor]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "fused adamw": lambda ps: AdamW(ps, lr=0.01, fused=True),
    "fused sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9, fused=True),
}
READING_OPERATORS = ("_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "_unique", "unique_dim")
READING_METHODS = ("tolist", "numpy", "__array__", "__dlpack__")  # these do not pass through an operator
UNFUSED: dict[str, Make] = {"adamw": lambda ps: AdamW(ps, lr=0.01, foreach=False), "foreach": lambda ps: AdamW(ps, lr=0.01, foreach=True)}


class Methods(TorchFunctionMode):
    def __init__(self, counter: "Counter") -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READING_METHODS:
            self.counter.note(name, args[0])
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self, counter: "Counter") -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if name in ("index", "index_put", "index_put_") else []
        if name.startswith(READING_OPERATORS) or masks:  # how many elements a mask selects is read too
            self.counter.note(name, args[0])
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            result.made_in = self.counter.iteration()  # type: ignore[attr-defined]
        return result


class Counter:
    """Notes every read of a device value inside the block.

    Only one kind is no read: looking, by `numpy()`, at a tensor that was computed before the newest forward pass. On a GPU that
    is the copy in pinned memory of an earlier verdict, and a newer pass is queued behind it.
    """

    def __init__(self, iteration: Callable[[], int] = lambda: 0) -> None:
        self.iteration = iteration
        self.reads: list[str] = []
        self.late = 0
        self.modes = Methods(self), Operators(self)

    def note(self, name: str, tensor: Any) -> None:
        if name == "numpy" and getattr(tensor, "made_in", self.iteration()) < self.iteration():
            self.late += 1
        else:
            self.reads.append(name)

    def __enter__(self) -> "Counter":
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*error)


class Run:
    """A small regression with a following scheduler. bad: step number to the factor its loss is multiplied by."""

    def __init__(
        self, make: Callable[[Iterable[Tensor]], Optimizer], clip: str = "none", bad: dict[int, float] | None = None, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = make(self.model.parameters())
        self.scaler = GradScaler(**settings)
        self.scaler.watch(self.optimizer)
        self.scheduler = self.scaler.follow(StepLR(self.optimizer, 1, 0.9))
        self.clip, self.bad = clip, bad or {}
        self.inputs = torch.randn(16, 4)
        self.results: list[Any] = []
        self.forwards = 0

    def step(self) -> None:
        factor = self.bad.get(len(self.results), 1.0)
        loss = self.model(self.inputs).square().mean() * factor
        self.forwards += 1
        self.scaler.scale(loss).backward()
        if self.clip != "none":
            self.scaler.unscale_(self.optimizer)
        if self.clip == "scaler":
            self.scaler.clip_grad_norm_(self.model.parameters(), 0.1)
        if self.clip == "torch":
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.results.append(self.scaler.step(self.optimizer))
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> "Run":
        for _ in range(count):
            self.step()
        return self


def test_the_counter_sees_every_way_of_reading() -> None:
    x = torch.arange(4.0)
    ways: dict[str, Callable[[], Any]] = {
        "item": x[1].item,
        "float": lambda: float(x[1]),
        "int": lambda: int(x[1]),
        "bool": lambda: bool(x[1] > 0),
        "if": lambda: 1 if x[1] > 0 else 0,
        "tolist": x.tolist,
        "numpy": x.numpy,
        "equal": lambda: torch.equal(x, x + 1),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 1],
        "any": lambda: bool(torch.isfinite(x).all()),
        "allclose": lambda: torch.allclose(x, x),
    }
    for name, read in ways.items():
        with Counter() as counter:
            read()
        assert counter.reads, name
    with Counter() as counter:
        (x * 2 + torch.where(x > 1, x, 0.0)).sum().clone().to(torch.float64)
    assert counter.reads == []


def test_a_look_at_an_earlier_verdict_is_told_from_a_read_of_the_newest() -> None:
    now = [0]
    with Counter(lambda: now[0]) as counter:
        verdict = torch.ones(3) * 2
        verdict.numpy()
        assert (counter.reads, counter.late) == (["numpy"], 0)
        now[0] = 1
        verdict.numpy()
        assert (counter.reads, counter.late) == (["numpy"], 1)
        float(verdict[0])
        assert len(counter.reads) == 2


@pytest.mark.parametrize("clip", ["none", "unscale", "scaler", "torch"])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("strategy", ["follow", "stock"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_deferred_step_reads_nothing(optimizer: str, strategy: str, enabled: bool, clip: str) -> None:
    run = Run(OPTIMIZERS[optimizer], clip, enabled=enabled, strategy=strategy, on_overflow="skip", deferred=True).steps(3)
    with Counter(lambda: run.forwards) as counter:
        run.step()
        counter.reads.clear()  # among them a verdict from before the block, of which it cannot know the age
        run.steps(40)  # long enough for every look that is taken now and then
    assert counter.reads == []
    assert counter.late <= 2 * 41  # the verdict, and whether it was clipped
    assert all(r.applied for r in run.results)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *UNFUSED])
def test_a_step_that_is_not_deferred_reads_once(optimizer: str, enabled: bool) -> None:
    make = (OPTIMIZERS | UNFUSED)[optimizer]
    alone = Run(make, enabled=enabled).steps(3)
    with Counter() as bare:
        alone.model(alone.inputs).square().mean().backward()
        alone.optimizer.step()
    run = Run(make, enabled=enabled).steps(3)
    with Counter() as counter:
        run.steps(40)
    assert len(counter.reads) <= 40 * (1 + len(bare.reads))
    assert len(counter.reads) >= 40, "the verdict was read somehow"


@pytest.mark.parametrize("clip", ["none", "unscale", "scaler"])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("strategy", ["follow", "stock"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_deferred_steps_tell_what_immediate_ones_tell(optimizer: str, strategy: str, enabled: bool, clip: str) -> None:
    """Overflows and bad losses among good steps: the same weights bit for bit, the same schedule, and true results, read at the end or at once."""
    bad = {0: 1.0, 4: 1e30, 5: math.nan, 9: math.inf, 10: 1e25}
    runs = [Run(OPTIMIZERS[optimizer], clip, bad, enabled=enabled, strategy=strategy, deferred=d).steps(14) for d in (False, True)]
    impatient = Run(OPTIMIZERS[optimizer], clip, bad, enabled=enabled, strategy=strategy, deferred=True)
    for _ in range(14):
        impatient.step()
        assert impatient.results[-1].applied in (True, False)
    immediate = runs[0]
    assert [r.reason for r in immediate.results].count("applied") == 10
    for run in (runs[1], impatient):
        for now, later in zip(immediate.results, run.results, strict=True):
            assert (now.applied, now.reason, now.clipped, bool(now)) == (later.applied, later.reason, later.clipped, bool(later))
            assert now.loss == pytest.approx(later.loss, nan_ok=True)
            assert now.grad_norm is not None
            if later.grad_norm == math.inf:  # the gradients are gone by now, and the squares of bad ones overflow
                assert not now.applied
                assert now.grad_norm > 2.0**60
            else:
                assert now.grad_norm == pytest.approx(later.grad_norm, rel=1e-6, nan_ok=True)
            assert {c.name for c in now.culprits} == {c.name for c in later.culprits}  # worst first, but where squares overflow all are inf
        assert all(torch.equal(a, b) for a, b in zip(immediate.model.parameters(), run.model.parameters(), strict=True))
        run.scheduler.step()  # nothing new was applied; but what was is known now
        assert run.optimizer.param_groups[0]["lr"] == pytest.approx(immediate.optimizer.param_groups[0]["lr"])
        assert run.scaler.bad_steps == immediate.scaler.bad_steps == 0
