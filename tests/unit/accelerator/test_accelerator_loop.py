"""A loop with the accelerator does what a hand-written one does, bit for bit, and its steps tell the truth."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from halfstep import Accelerator, StepResult, amp
from halfstep.errors import DivergedError

PRECISIONS = ["no", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(count: int = 8, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, generator=generator), torch.randint(0, 2, (), generator=generator)) for _ in range(count)]


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def by_hand(precision: str, epochs: int = 3) -> tuple[list[torch.Tensor], list[float]]:
    """The loop as one writes it with `halfstep.amp` alone."""
    net, losses = model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scaler = amp.GradScaler("cpu", enabled=precision == "fp16")
    for _ in range(epochs):
        for x, y in DataLoader(data(), batch_size=4):
            with amp.autocast("cpu", DTYPES[precision]) if precision in DTYPES else contextlib.nullcontext():
                logits = net(x)
            loss = F.cross_entropy(logits.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    return weights(net), losses


def with_accelerator(accelerator: Accelerator, epochs: int = 3) -> tuple[list[torch.Tensor], list[float]]:
    net, losses = model(), []
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05), DataLoader(data(), batch_size=4))
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return weights(net), losses


@pytest.mark.parametrize("precision", PRECISIONS)
def test_equals_the_hand_written_loop_bit_for_bit(precision: str) -> None:
    expected, expected_losses = by_hand(precision)
    found, losses = with_accelerator(Accelerator(precision, cpu=True))
    assert losses == expected_losses
    assert equal(found, expected)
    assert not equal(found, weights(model())), "something was trained"


def test_precisions_differ_so_the_comparison_above_can_fail() -> None:
    results = [by_hand(p)[1] for p in PRECISIONS]
    assert results[0] != results[1] != results[2] != results[0]


def test_accelerators_of_different_policies_in_one_process_do_not_disturb_each_other() -> None:
    alone = [with_accelerator(Accelerator(p, cpu=True)) for p in PRECISIONS]
    nets, runs = [], []
    for precision in PRECISIONS:
        accelerator, net = Accelerator(precision, cpu=True), model()
        nets.append(net)
        runs.append((accelerator, *accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05)), []))
    for _ in range(3):
        for x, y in DataLoader(data(), batch_size=4):
            for accelerator, net, optimizer, losses in runs:  # one step of each in turn
                loss = F.cross_entropy(net(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    for net, run, (expected, expected_losses) in zip(nets, runs, alone, strict=True):
        assert run[3] == expected_losses
        assert equal(weights(net), expected)


def test_autocast_is_off_outside_the_forward_pass() -> None:
    net = Accelerator("bf16", cpu=True).prepare(model())
    net(torch.randn(2, 4))
    assert not torch.is_autocast_enabled("cpu")
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_the_autocast_block_runs_under_the_policy() -> None:
    with Accelerator("fp16", cpu=True).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    with Accelerator("no", cpu=True).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


# --- accumulation ---------------------------------------------------------------------------------------------------------


def accumulated(precision: str, samples: int, size: int, window: int) -> tuple[list[list[torch.Tensor]], list[StepResult]]:
    """The gradients at every step taken, over one pass in micro-batches of `size`."""
    accelerator, net = Accelerator(precision=precision, cpu=True, gradient_accumulation_steps=window), model()
    loader = DataLoader(data(samples), batch_size=size)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0), loader)
    gradients, results = [], []
    for x, y in loader:
        with accelerator.accumulate(net):
            accelerator.backward(F.cross_entropy(net(x), y))
            accelerator.clip_grad_norm_(net.parameters(), 1e9)
            results.append(optimizer.step())
            if results[-1]:
                gradients.append([p.grad.clone() for p in net.parameters()])
            optimizer.zero_grad()
    return gradients, results


def big_batch(samples: list) -> list[torch.Tensor]:
    net = model()
    x, y = (torch.stack(t) for t in zip(*samples, strict=True))
    F.cross_entropy(net(x), y).backward()
    return [p.grad for p in net.parameters()]


def close(a: list[torch.Tensor], b: list[torch.Tensor], share: float) -> bool:
    return all(torch.allclose(x, y, rtol=share, atol=share * float(y.abs().max())) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("precision", "share"), [("fp32", 1e-6), ("bf16-mixed", 2e-2), ("fp16-mixed,scale=static:1024", 2e-3)])
def test_four_micro_batches_equal_the_big_batch(precision: str, share: float) -> None:
    gradients, results = accumulated(precision, samples=16, size=2, window=4)
    assert [r.reason for r in results] == ["accumulating"] * 3 + ["applied"] + ["accumulating"] * 3 + ["applied"]
    assert close(gradients[0], big_batch(data(16)[:8]), share)
    assert close(gradients[1], big_batch(data(16)[8:]), share)
    assert not close(gradients[0], gradients[1], share), "the windows differ, so the comparison can fail"


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_last_window_that_is_not_full_equals_its_big_batch(left: int) -> None:
    samples = 8 + 2 * left
    gradients, results = accumulated("fp32", samples, size=2, window=4)
    assert [bool(r) for r in results] == [False, False, False, True] + [False] * (left - 1) + [True]
    assert close(gradients[0], big_batch(data(samples)[:8]), 1e-6)
    assert close(gradients[1], big_batch(data(samples)[8:]), 1e-6)


def test_a_new_pass_begins_a_new_window() -> None:
    accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=2), model()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(data(6), batch_size=2))
    reasons = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(x), y))
                reasons.append(optimizer.step().reason)
                optimizer.zero_grad()
    assert reasons == ["accumulating", "applied", "applied"] * 2


def test_zero_grad_inside_a_window_keeps_the_gradients_and_clipping_there_does_nothing() -> None:
    accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=2), model()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    (x, y), *_ = DataLoader(data(4), batch_size=4)
    with accelerator.accumulate(net):
        accelerator.backward(F.cross_entropy(net(x), y))
        before = [p.grad.clone() for p in net.parameters()]
        assert accelerator.clip_grad_norm_(net.parameters(), 1e-6) is None
        assert optimizer.step().reason == "accumulating"
        optimizer.zero_grad()
    assert equal([p.grad for p in net.parameters()], before)
    with accelerator.accumulate(net):
        accelerator.backward(F.cross_entropy(net(x), y))
        assert float(accelerator.clip_grad_norm_(net.parameters(), 1e-6)) > 1e-6
        assert optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


# --- steps that are refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_is_said_and_moves_neither_weights_nor_states(precision: str, fused: bool) -> None:
    accelerator, net = Accelerator(precision, cpu=True), model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05, fused=fused))
    (x, y), *_ = DataLoader(data(), batch_size=8)
    for _ in range(2):
        accelerator.backward(F.cross_entropy(net(x), y))
        assert optimizer.step()
        optimizer.zero_grad()
    before, states = weights(net), copy.deepcopy(optimizer.state_dict())
    handle = net[2].weight.register_hook(lambda g: g * float("inf"))
    accelerator.backward(F.cross_entropy(net(x), y))
    result = optimizer.step()
    handle.remove()
    assert isinstance(result, StepResult)
    assert not result
    assert result.reason == "overflow"
    assert [c.name for c in result.culprits] == ["2.weight"]
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.last_step is optimizer.last_step is result
    assert optimizer.applied == 2
    assert equal(weights(net), before)
    for name, state in states["state"].items():
        assert all(torch.equal(v, optimizer.state_dict()["state"][name][k]) for k, v in state.items())
    assert accelerator.scaler.get_scale() == result.next_scale == (result.scale / 2 if precision == "fp16" else 1.0)
    optimizer.zero_grad()
    accelerator.backward(F.cross_entropy(net(x), y))
    assert optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert not equal(weights(net), before)


def test_a_loss_that_is_not_finite_does_not_lower_the_scale() -> None:
    accelerator, net = Accelerator("fp16", cpu=True), model()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    accelerator.backward(net(torch.randn(2, 4)).sum() * float("nan"))
    result = optimizer.step()
    assert result.reason == "nonfinite-loss"
    assert result.culprits[0].name == "loss"
    assert accelerator.scaler.get_scale() == 65536.0


def test_patience_ends_the_run_with_the_cause() -> None:
    accelerator, net = Accelerator(cpu=True, patience=3), model()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    before = weights(net)

    def bad_step() -> StepResult:
        accelerator.backward(net(torch.randn(2, 4)).sum() * float("nan"))
        return optimizer.step()

    assert [bool(bad_step()) for _ in range(2)] == [False, False]
    with pytest.raises(DivergedError, match=r"3 steps in a row could not be applied .nonfinite-loss, .* not finite: loss .forward: nan."):
        bad_step()
    assert equal(weights(net), before)


def test_without_gradients_nothing_is_taken_and_nothing_is_called_a_skip() -> None:
    accelerator, net = Accelerator("fp16", cpu=True), model()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    assert optimizer.step().reason == "no-gradients"
    assert not accelerator.optimizer_step_was_skipped


def test_two_models_with_two_optimizers_are_judged_apart() -> None:
    accelerator, one, two = Accelerator(precision="fp16-mixed,scale=dynamic:1024", cpu=True), model(0), model(1)
    first, second = torch.optim.AdamW(one.parameters(), lr=0.05), torch.optim.AdamW(two.parameters(), lr=0.05)
    one, two, first, second = accelerator.prepare(one, two, first, second)
    (x, y), *_ = DataLoader(data(), batch_size=8)
    for bad in (False, True, False):
        before = weights(one), weights(two)
        handle = one[0].weight.register_hook(lambda g, bad=bad: g * float("inf") if bad else g)
        accelerator.backward(F.cross_entropy(one(x), y) + F.cross_entropy(two(x), y))
        assert bool(first.step()) is not bad
        assert second.step()
        handle.remove()
        first.zero_grad()
        second.zero_grad()
        assert equal(weights(one), before[0]) is bad
        assert not equal(weights(two), before[1])
    assert (first.applied, second.applied) == (2, 3)


def test_two_models_stepped_together_equal_each_trained_alone() -> None:
    alone = [with_accelerator(Accelerator("no", cpu=True), epochs=1)[0]]
    accelerator, one, two = Accelerator("no", cpu=True), model(0), model(1)
    optimizers = [torch.optim.AdamW(n.parameters(), lr=0.05) for n in (one, two)]
    one, two, *optimizers = accelerator.prepare(one, two, *optimizers)
    for x, y in DataLoader(data(), batch_size=4):
        for net, optimizer in zip((one, two), optimizers, strict=True):
            accelerator.backward(F.cross_entropy(net(x), y))
            accelerator.clip_grad_norm_(net.parameters(), 0.1)
            assert optimizer.step()
            optimizer.zero_grad()
    assert equal(weights(one), alone[0])


# --- clipping -------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1.0, 256.0, 4096.0]), st.sampled_from([1e-3, 0.1, 1e3]), st.integers(0, 50))
def test_the_norm_is_that_of_unscaled_gradients_under_any_loss_scale(scale: float, largest: float, seed: int) -> None:
    accelerator, net = Accelerator(precision=f"fp16-mixed,scale=static:{scale:g}", cpu=True), model(seed)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    x, y = (torch.stack(t) for t in zip(*data(8, seed), strict=True))
    accelerator.backward(F.cross_entropy(net(x), y))
    plain = model(seed)
    F.cross_entropy(plain(x), y).backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain.parameters()]))
    norm = accelerator.clip_grad_norm_(net.parameters(), largest)
    assert torch.isclose(norm, expected, rtol=1e-2)
    clipped = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert torch.isclose(clipped, torch.minimum(norm, torch.tensor(largest)), rtol=1e-3)
    result = optimizer.step()
    assert result.grad_norm == pytest.approx(float(norm))
    assert result.clipped == (float(norm) > largest)
