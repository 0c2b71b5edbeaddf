"""Scripts as people write them, where something happens in the middle: the scaler goes on, with right numbers."""

import gc
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep import Accelerator, amp
from halfstep.amp import GradScaler
from halfstep.errors import DivergedError, StepRefusedError


class Fails(torch.autograd.Function):
    """A function whose backward pass fails while it is told to."""

    repeatable = True
    failing = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fails.failing:
            raise MemoryError
        return grad


@pytest.fixture(autouse=True)
def _working():
    yield
    Fails.failing = False


def model_and_optimizer(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(4, 1)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1, **options)


def test_one_scaler_serves_model_after_model() -> None:
    """Cross-validation: parameters that join late are clipped, judged and told about like the first ones."""
    scaler = GradScaler()
    for fold in range(4):
        net, optimizer = model_and_optimizer()
        for _ in range(5):
            optimizer.zero_grad()
            loss = (net(torch.randn(8, 4)) * 10).square().mean()
            expected = torch.linalg.vector_norm(
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)])
            )
            scaler.scale(loss).backward()
            norm = amp.clip_grad_norm_(net.parameters(), 1.0)
            result = scaler.step(optimizer)
            scaler.update()
            assert float(norm) == result.grad_norm == pytest.approx(float(expected), rel=1e-5), fold
            assert result.loss == pytest.approx(loss.item())
            assert result.clipped == (float(expected) > 1.0)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_backward_pass_that_fails_is_forgotten(enabled: bool) -> None:
    net, optimizer = model_and_optimizer()
    scaler = GradScaler(enabled=enabled)
    for i in range(6):
        optimizer.zero_grad()
        Fails.failing = i == 2
        loss = Fails.apply(net(torch.randn(8, 4))).square().mean()
        if Fails.failing:
            scaled = scaler.scale(loss)
            with pytest.raises(MemoryError):
                scaled.backward()
            continue
        scaler.scale(loss).backward()
        result = scaler.step(optimizer)
        scaler.update()
        assert result.applied
        assert result.loss == pytest.approx(loss.item())


@pytest.mark.parametrize("error", [StepRefusedError, DivergedError])
def test_a_loop_that_catches_a_refusal_goes_on(error: type[Exception]) -> None:
    net, optimizer = model_and_optimizer()
    options: dict[str, Any] = {"on_overflow": "raise"} if error is StepRefusedError else {"patience": 1}
    scaler, told = GradScaler(**options), []
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(8, 4)).mean() * (float("inf") if i == 1 else 1.0)).backward()
        try:
            told.append(bool(scaler.step(optimizer)))
        except error:
            told.append(None)
            continue
        scaler.update()
    assert told == [True, None, True, True]


def test_an_accelerators_loop_that_catches_a_refusal_goes_on() -> None:
    accelerator, told = Accelerator("fp16", cpu=True, on_overflow="raise"), []
    net, optimizer = accelerator.prepare(*model_and_optimizer())
    for i in range(4):
        optimizer.zero_grad()
        accelerator.backward(net(torch.randn(8, 4)).mean() * (float("inf") if i == 1 else 1.0))
        try:
            told.append(bool(optimizer.step()))
        except StepRefusedError:
            told.append(None)
    assert told == [True, None, True, True]


def test_an_error_in_what_follows_a_step_does_not_stop_the_next() -> None:
    net, optimizer = model_and_optimizer()
    scaler, calls = GradScaler(), []

    def average() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("average")

    scaler.on_applied(optimizer, average)
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(8, 4)).mean()).backward()
        if i == 1:
            with pytest.raises(ValueError, match="average"):
                scaler.step(optimizer)
            continue
        assert scaler.step(optimizer)
        scaler.update()
    assert len(calls) == 4


@pytest.mark.parametrize("view", [True, False])
def test_gradients_that_ddp_writes_are_no_edits(view: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net, _ = model_and_optimizer()
        net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=view)
        optimizer, scaler = torch.optim.AdamW(net.parameters(), fused=True), GradScaler()
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(8, 4)).mean()).backward()
            scaler.clip_grad_norm_(net.parameters(), 1.0)
            assert scaler.step(optimizer)
            scaler.update()
    finally:
        dist.destroy_process_group()


def test_a_deferred_result_can_be_kept_and_a_scaler_leaves_no_hooks() -> None:
    net, optimizer = model_and_optimizer(fused=True)
    scaler = GradScaler(deferred=True)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(8, 4)).mean()).backward()
        result = scaler.step(optimizer)
        scaler.update()
    kept = pickle.loads(pickle.dumps(result))  # noqa: S301  made on this line
    assert kept == result
    assert kept.applied
    assert kept.loss == result.loss
    del scaler, result, kept
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())  # type: ignore[attr-defined]


def test_the_running_statistics_of_a_first_bad_batch_are_told_of() -> None:
    net = nn.BatchNorm1d(4)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), GradScaler()
    scaler.scale(net(torch.full((8, 4), float("nan"))).sum()).backward()
    with pytest.warns(UserWarning, match=r"running statistics .* not finite .* scaler.watch\(model\)"):
        assert not scaler.step(optimizer)


def test_clipping_can_raise_for_bad_gradients_as_torchs_does() -> None:
    net, optimizer = model_and_optimizer()
    scaler = GradScaler()
    scaler.watch(optimizer)
    scaler.scale(net(torch.randn(8, 4)).mean() * float("nan")).backward()
    for clip in (scaler.clip_grad_norm_, amp.clip_grad_norm_):
        with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
            clip(net.parameters(), 1.0, error_if_nonfinite=True)
    assert not scaler.step(optimizer)


@pytest.mark.parametrize("deferred", [True, False])
def test_a_fused_step_that_fails_can_be_taken_again(deferred: bool) -> None:
    """The gradients it did not come to divide are still known to be scaled."""
    net, twin = nn.Linear(4, 1), nn.Linear(4, 1)
    twin.load_state_dict(net.state_dict())
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True) for m in (net, twin))
    scaler = GradScaler(init_scale=1024.0, strategy="stock", deferred=deferred)
    for i in range(3):
        x = torch.randn(8, 4)
        twin(x).square().mean().backward()
        other.step()
        other.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        if i == 1:
            optimizer.param_groups[0]["lr"] = "fast"
            with pytest.raises(TypeError):
                scaler.step(optimizer)
            optimizer.param_groups[0]["lr"] = 0.1
        assert scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))


def test_clipping_everything_after_a_refused_step_clips_what_the_others_will_use() -> None:
    (first, one), (second, two) = model_and_optimizer(), model_and_optimizer()
    scaler = GradScaler(strategy="stock", init_scale=1024.0)
    scaler.watch(one)
    scaler.watch(two)
    scaler.scale((first(torch.randn(8, 4)) * float("inf")).mean()).backward()
    scaler.scale((second(torch.randn(8, 4)) * 1000).mean()).backward()
    assert not scaler.step(one)
    total = scaler.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.5)
    assert not float(total) < 1e18, "a bad gradient is among them"
    result = scaler.step(two)
    assert result.clipped
    assert float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in second.parameters()]))) == pytest.approx(0.5, rel=1e-4)  # type: ignore[union-attr]


def test_unscaling_after_the_gradients_were_cleared_does_nothing() -> None:
    net, optimizer = model_and_optimizer()
    scaler = GradScaler()
    for _ in range(3):
        scaler.scale(net(torch.randn(8, 4)).mean()).backward()
        scaler.unscale_(optimizer)
        optimizer.zero_grad()
        scaler.unscale_(optimizer)
        assert scaler.step(optimizer).reason == "no-gradients"
        scaler.update()
