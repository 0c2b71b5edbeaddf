"""What a step's watch tells: largest gradients, near misses, underflow, updates rounded away; and that taking it reads nothing."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import StepResult, numerics
from halfstep import optim as ours
from halfstep.amp import GradScaler
from halfstep.step.verdict import FP16_NORMAL, gather
from halfstep.step.watching import FP16_LIMIT, Close, Magnitudes, Watch, Watching

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "halfstep": lambda ps: ours.AdamW(ps, lr=1e-3),
}


class Loop:
    """Weights whose gradients are just what a step is given, times the scale."""

    def __init__(self, optimizer: str = "torch", every: int = 3, *, enabled: bool = False, **settings: Any) -> None:
        self.model = nn.ParameterDict(
            {"small": nn.Parameter(torch.ones(5)), "large": nn.Parameter(torch.ones(2, 3)), "idle": nn.Parameter(torch.ones(2))}
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = GradScaler(enabled=enabled, **settings)
        self.scaler.name_parameters(self.model.named_parameters())
        self.watching: Watching = self.scaler._engine.state.watching
        self.watching.every = every
        self.watching.modules = tuple

    def step(self, small: float | Tensor = 0.5, large: float | Tensor = -2.0, **asked: Any) -> StepResult:
        self.optimizer.zero_grad()
        loss = (self.model["small"] * small).sum() + (self.model["large"] * large).sum()
        self.scaler.scale(loss).backward()
        result = self.scaler.step(self.optimizer, **asked)
        self.scaler.update()
        return result


def watch_of(result: StepResult) -> Watch:
    assert result.watch is not None
    return result.watch


def measured_in(result: StepResult) -> int:
    gradients = watch_of(result).gradients
    assert gradients is not None
    return gradients.step


@pytest.mark.parametrize("optimizer", ["torch", "fused"])
def test_gradients_are_measured_in_the_first_step_and_in_every_nth(optimizer: str) -> None:
    loop = Loop(optimizer, every=3)
    assert [measured_in(loop.step()) for _ in range(7)] == [1, 1, 3, 3, 3, 6, 6]


def test_a_pass_that_measures_them_anyway_is_used_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop("torch", every=100, enabled=True)  # a following scale looks at the size of gradients in its first steps
    assert [measured_in(loop.step()) for _ in range(4)] == [1, 2, 3, 4]
    pytest.importorskip("numba")
    monkeypatch.delenv("HALFSTEP_KERNELS", raising=False)
    loop = Loop("halfstep", every=100)
    assert [measured_in(loop.step()) for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, {"enabled": True, "strategy": "stock", "init_scale": 1024.0}, {"enabled": True}])
def test_largest_is_unscaled_by_name_and_worst_first(optimizer: str, settings: dict[str, Any]) -> None:
    loop = Loop(optimizer, **settings)
    slope = torch.tensor([0.25, -0.5, 0.0, 0.125, 0.5])
    watch = watch_of(loop.step(slope, -2.0, max_norm=0.1))  # before clipping
    assert list(watch.largest.items()) == [("large", 2.0), ("small", 0.5)]
    assert watch.nonfinite == ()


def test_scaled_gradients_within_a_factor_of_2_of_the_limit_are_near_misses() -> None:
    loop = Loop(enabled=True, strategy="stock", init_scale=1024.0)
    assert watch_of(loop.step(31.9, 1.0)).near == ()
    for _ in range(2):
        watch = watch_of(loop.step(32.0, 50.0))
    assert watch.near == ("large", "small")
    assert str(watch) == "close to fp16's limit: large scaled gradient 51200 of 65504 (step 3), small scaled gradient 32768 of 65504 (step 3)"
    far = Loop()  # fp32 gradients of an unscaled loss end far above that
    assert (watch_of(far.step(32000.0, 65000.0)).near, str(watch_of(far.step()))) == ((), "")


def test_fp16_gradients_are_near_the_limit_without_a_scale_too() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.float16))
    ours.attach(p, "split")
    optimizer, scaler = ours.AdamW([p]), GradScaler(enabled=False)
    (p * 40000.0).sum().backward()
    watch = watch_of(scaler.step(optimizer))
    assert watch.near == ("param_groups[0]['params'][0] of shape (4,)",)
    assert str(watch).startswith("close to fp16's limit: param_groups[0]['params'][0] of shape (4,) gradient 4")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_refused_step_names_all_bad_gradients_and_keeps_its_number(bad: float) -> None:
    loop = Loop(enabled=True, strategy="stock", init_scale=2.0, every=2)
    assert loop.step()
    refused = loop.step(1.0, torch.tensor([1.0, bad, 1.0]))
    watch = watch_of(refused)
    assert (bool(refused), watch.step, watch.nonfinite, watch.near) == (False, 2, ("large",), ())
    assert next(iter(watch.largest)) == "large"
    assert not math.isfinite(watch.largest["large"])
    after = loop.step()
    assert (bool(after), watch_of(after).step, watch_of(after).nonfinite) == (True, 2, ())
    assert watch_of(after).largest == {"large": 2.0, "small": 0.5}


def test_more_bad_gradients_than_culprits_are_named() -> None:
    parts = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(12)])
    optimizer, scaler = torch.optim.SGD(parts.parameters(), lr=0.1), GradScaler(enabled=False)
    scaler.name_parameters(parts.named_parameters())
    sum(p.sum() * math.inf for p in parts).backward()
    result = scaler.step(optimizer)
    assert len(result.culprits) == 8
    assert sorted(watch_of(result).nonfinite, key=int) == [str(i) for i in range(12)]


def test_underflow_is_that_of_the_scaled_gradients_and_only_where_they_are_fp16s() -> None:
    slope = torch.tensor([2.0**-20, 1.0, 0.0, 2.0**-25, 2.0**-14])
    loop = Loop(enabled=True, strategy="stock", init_scale=4.0, every=100)
    watch = watch_of(loop.step(slope, 1.0))
    expected = numerics.subnormal_share([slope * 4, torch.full((2, 3), 4.0)], FP16_NORMAL, torch.device("cpu"))
    assert watch.underflow == float(expected) == pytest.approx(0.2)
    assert watch_of(Loop().step(slope, 1.0)).underflow is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("lr", "share"), [(1e-2, 0.0), (1e-12, 1.0)])
def test_updates_rounded_away_are_sampled_but_not_in_the_first_step(optimizer: str, lr: float, share: float) -> None:
    loop = Loop(optimizer, every=2)
    for group in loop.optimizer.param_groups:
        group["lr"], group["weight_decay"] = lr, 0.0
    results = [loop.step() for _ in range(3)]
    assert [watch_of(r).stalled for r in results] == [None, share, share]
    assert [r.stalled for r in results] == [None] * 3  # nobody has asked for all of them
    asked = loop.step(stalled=True)
    assert (asked.stalled, watch_of(asked).stalled) == (share, share)


def test_what_is_sampled_of_a_large_weight_is_not_one_column() -> None:
    p = nn.Parameter(torch.ones(256, 64))
    frozen = torch.arange(64) < 32  # these columns get updates too small to be seen
    rate = torch.where(frozen, 1e-12, 1.0)
    optimizer, scaler = torch.optim.SGD([p], lr=1e-2), GradScaler(enabled=False)
    scaler._engine.state.watching.every = 2
    for _ in range(2):
        optimizer.zero_grad()
        (p * rate).sum().backward()
        watch = watch_of(scaler.step(optimizer))
    assert watch.stalled == pytest.approx(0.5, abs=0.02)


def test_a_step_refused_on_the_device_has_no_updates() -> None:
    loop = Loop("fused", every=2, enabled=True, strategy="stock", init_scale=2.0, deferred=True)
    results = [loop.step(), loop.step(math.inf), loop.step(), loop.step()]
    assert [bool(r) for r in results] == [True, False, True, True]
    assert [watch_of(r).stalled for r in results] == [None, None, 0.0, 0.0]
    assert [watch_of(r).step for r in results] == [1, 2, 2, 3]
    assert [watch_of(r).nonfinite for r in results] == [(), ("small",), (), ()]


def test_a_watch_stays_as_it_was_while_the_run_goes_on() -> None:
    loop = Loop("fused", every=1, enabled=True, strategy="stock", init_scale=2.0, deferred=True)
    results = [loop.step(large=float(k + 1)) for k in range(4)]  # read after all of them
    assert [watch_of(r).largest["large"] for r in results] == [1.0, 2.0, 3.0, 4.0]


class Reads(TorchDispatchMode):
    """Counts numbers read to the host one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_read_to_the_host_until_somebody_asks(optimizer: str, enabled: bool) -> None:
    counts = []
    for every in (1, 0):
        loop = Loop(optimizer, every=every, enabled=enabled, **({"strategy": "stock"} if enabled else {}))
        loop.step()
        with Reads() as reads:
            result = loop.step()
        counts.append(reads.count)
        if every:
            watch = watch_of(result)
            assert watch.gradients is not None
            assert "numbers" not in vars(watch.gradients)
            assert watch.largest
            assert "numbers" in vars(watch.gradients)
    assert counts[0] == counts[1]


def test_watching_changes_neither_weights_nor_scale() -> None:
    ends = []
    for every in (1, 0):
        loop = Loop(every=every, enabled=True, growth_interval=2)
        scales = [loop.step(small=0.5 * k).scale for k in range(6)]
        ends.append((scales, [p.detach().clone() for p in loop.model.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


def test_switched_off_it_is_none_and_so_it_is_without_gradients() -> None:
    assert Loop(every=0).step().watch is None
    loop = Loop()
    assert loop.scaler.step(loop.optimizer).watch is None


def test_a_run_that_goes_on_counts_from_where_it_was() -> None:
    loop = Loop(every=4)
    loop.watching.before = 6
    assert [measured_in(loop.step()) for _ in range(3)] == [7, 8, 8]


def test_names_follow_the_parameters_that_have_gradients() -> None:
    loop = Loop(every=1)
    assert set(watch_of(loop.step()).largest) == {"small", "large"}
    loop.scaler.scale(loop.model["idle"].sum() * 3.0).backward()  # beside the gradients of that step
    loop.optimizer.zero_grad()
    loop.scaler.scale((loop.model["idle"] * 3.0).sum()).backward()
    assert watch_of(loop.scaler.step(loop.optimizer)).largest == {"idle": 3.0}
    loop.scaler.name_parameters((f"net.{name}", p) for name, p in loop.model.named_parameters())
    assert set(watch_of(loop.step()).largest) == {"net.small", "net.large"}


def test_gradients_clipped_before_the_optimizer_was_seen_are_measured_from_the_next_step_on() -> None:
    loop = Loop(enabled=True, strategy="stock", init_scale=8.0, every=100)
    (loop.scaler.scale((loop.model["large"] * 2.0).sum())).backward()
    loop.scaler.clip_grad_norm_(loop.model.parameters(), 0.5)
    assert watch_of(loop.scaler.step(loop.optimizer)).largest == {}
    loop.scaler.update()
    assert watch_of(loop.step()).largest == {"large": 2.0, "small": 0.5}


def test_two_optimizers_are_told_apart() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first, second = torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1)
    scaler = GradScaler(enabled=False)
    scaler.name_parameters([("a", a), ("b", b)])
    scaler.scale((a * 2).sum() + (b * 3).sum()).backward()
    assert [watch_of(scaler.step(o)).largest for o in (first, second)] == [{"a": 2.0}, {"b": 3.0}]


def test_results_compare_without_it_and_it_can_be_copied_and_pickled() -> None:
    loop = Loop(every=1)
    result = loop.step()
    assert result == StepResult(**{k: v for k, v in vars(result).items() if k not in ("watch", "loss_tensor")})
    for twin in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):  # noqa: S301  our own
        assert watch_of(twin).largest == watch_of(result).largest
    assert "watch" not in repr(result)


def test_outputs_come_with_the_step_that_they_were_seen_in_and_only_the_worst() -> None:
    loop = Loop(every=100)
    bf16 = numerics.FORMATS["bf16"].largest
    first = Magnitudes(("ff", "head"), torch.tensor([41000.0, 1.0]), (FP16_LIMIT, bf16))
    loop.watching.modules = lambda: (first,)
    loop.step()
    watch = watch_of(loop.step())
    assert watch.outputs == (("ff", 41000.0 / FP16_LIMIT), ("head", 1.0 / bf16))
    assert str(watch) == "close to fp16's limit: ff output 41000 of 65504 (step 1)"
    many = Magnitudes(tuple(map(str, range(12))), 30000.0 + 1000 * torch.arange(12), (FP16_LIMIT,) * 12)
    loop.watching.modules = lambda: (first, many)
    watch = watch_of(loop.step())
    assert [name for name, _ in watch.outputs] == ["ff", "11", "10", "9", "8", "7", "6", "5"]
    assert watch.near == ("ff", *map(str, range(11, 2, -1)))
    shown = "ff output 41000 of 65504 (step 1), 11 output 41000 of 65504 (step 3), 10 output 40000 of 65504 (step 3)"
    assert str(watch) == f"close to fp16's limit: {shown}, and 7 more"


def test_numbers_past_the_limit_and_formats() -> None:
    bf16 = numerics.FORMATS["bf16"].largest
    watch = Watch(1, modules=(Magnitudes(("a", "", "c"), torch.tensor([math.inf, bf16, math.nan]), (FP16_LIMIT, bf16, FP16_LIMIT), step=1),))
    assert [name for name, _ in watch.outputs] == ["c", "a", ""]
    assert watch.near == ("a", "")
    assert watch.close == [Close("a", "output", math.inf, FP16_LIMIT, 1), Close("", "output", bf16, bf16, 1)]
    assert str(watch) == ("close to fp16's and bf16's limit: a output inf of 65504 (step 1), the model output 3.38953e+38 of 3.38953e+38 (step 1)")
    assert (Watch(1).largest, Watch(1).outputs, Watch(1).underflow, Watch(1).stalled, str(Watch(1))) == ({}, (), None, None, "")


def test_a_name_measured_twice_comes_once_with_its_worst() -> None:
    m = Magnitudes(("a", "b", "a"), torch.tensor([1.0, 2.0, 3.0]), (4.0, 4.0, 4.0))
    assert m.shares == [("a", 0.75), ("b", 0.5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_largest_of_each_tensor(dtype: torch.dtype) -> None:
    tensors = [torch.tensor([1.0, -3.0]), torch.tensor([]), torch.tensor([math.nan, math.inf]), torch.tensor([[-math.inf]]), torch.tensor(0.5)]
    found = numerics.largest_of_each([t.to(dtype) for t in tensors], torch.device("cpu"))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([3.0, 0.0, math.nan, math.inf, 0.5]), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [True, False])
def test_evidence_has_what_was_asked_for(compiled: bool) -> None:
    gradients = [torch.tensor([1.0, -2.0]), torch.tensor([[3.0]])]
    seen = gather(gradients, 2.0, None, compiled=compiled, watch=True)
    assert seen.peaks is not None
    assert seen.peaks.tolist() == [2.0, 3.0]
    assert seen.share is not None
    assert not seen.sensed  # the loss scale has not asked
    assert gather(gradients, 1.0, None, watch=True).share is None
    assert gather(gradients, 2.0, None).peaks is None
