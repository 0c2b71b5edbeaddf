"""A training loop inside one block, and forward passes that are computed again outside theirs."""

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from halfstep import amp
from halfstep.amp.emulation import Emulation
from halfstep.amp.mode import current
from halfstep.policy import PRESETS

DTYPES = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


@pytest.mark.parametrize("op_list", ["cuda", "device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_loop_in_one_block_trains(op_list: str, dtype: torch.dtype) -> None:
    """torch's cache of cast weights would repeat the first loss for ever."""

    def losses(one_block: bool) -> list[float]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), 0.05)
        found: list[float] = []

        def step() -> None:
            loss = layer(torch.ones(1, 4)).float().pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())

        if one_block:
            with amp.autocast("cpu", dtype, ops=op_list):
                for _ in range(5):
                    step()
        else:
            for _ in range(5):
                with amp.autocast("cpu", dtype, ops=op_list):
                    step()
        return found

    together = losses(True)
    assert together == losses(False)
    assert all(later < earlier for earlier, later in itertools.pairwise(together))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_forward_pass_without_gradients_first_does_not_stop_them(guard: Callable[[], Any]) -> None:
    layer = nn.Linear(4, 4)
    with amp.autocast("cpu"):
        with guard():
            layer(torch.ones(1, 4))
        loss = layer(torch.ones(1, 4)).sum()
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None


class Parts(nn.Module):
    """Everything that the op policy treats in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.conv, self.norm = nn.Linear(8, 16), nn.Conv1d(2, 2, 3, padding=1), nn.LayerNorm(16)
        self.recurrent, self.last = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 4)


def function_of(net: Parts) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        h = net.conv(F.gelu(net.first(x)))
        h = net.norm(F.softmax(h, -1) * h.pow(2))
        h = h + F.scaled_dot_product_attention(h, h, h)
        h = net.recurrent(h)[0]
        with amp.autocast("cpu", enabled=False):
            h = h * h
        return F.gelu(net.last(h))

    return function


Recompute = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def gradients(block: Callable[[], AbstractContextManager[Any]], recompute: Recompute | None, backward: Callable[[Tensor], None]) -> list[Tensor]:
    net = Parts()
    x = torch.linspace(-1, 1, 48).reshape(3, 2, 8).requires_grad_()
    with block():
        output = function_of(net)(x) if recompute is None else recompute(function_of(net), x)
        loss = output.float().square().mean()
    backward(loss)
    assert x.grad is not None
    return [x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


def plainly(loss: Tensor) -> None:
    loss.backward()


def in_a_thread(loss: Tensor) -> None:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def in_an_empty_mode(loss: Tensor) -> None:
    with Emulation():
        loss.backward()


def in_the_policys(loss: Tensor) -> None:
    with amp.backward_context(PRESETS["bf16-mixed"], CPU):
        loss.backward()


def twice(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Recomputation inside a recomputation."""
    return checkpoint(lambda y: checkpoint(f, y, use_reentrant=False), x, use_reentrant=False)


def selective(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def choose(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten._softmax.default else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(f, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(choose))


RECOMPUTES: dict[str, Recompute] = {
    "checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "twice": twice,
    "whole": lambda f, x: checkpoint(f, x, use_reentrant=False, early_stop=False),
    "selective": selective,
}
BACKWARDS = {
    "plain": plainly,
    "in a thread": in_a_thread,
    "in a mode that does nothing now": in_an_empty_mode,
    "in the policy's block": in_the_policys,
}
BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16": lambda: amp.autocast("cpu", torch.bfloat16),
    "fp16": lambda: amp.autocast("cpu", torch.float16),
    "device": lambda: amp.autocast("cpu", torch.bfloat16, ops="device"),
    "lists": lambda: amp.autocast("cpu", torch.float16, fp32_ops=("conv1d", "gelu"), half_ops=("layer_norm",)),
}


@pytest.mark.parametrize("backward", list(BACKWARDS))
@pytest.mark.parametrize("recompute", list(RECOMPUTES))
@pytest.mark.parametrize("block", list(BLOCKS))
def test_a_plain_function_computed_again_outside_gives_the_same_bits(block: str, recompute: str, backward: str) -> None:
    expected = gradients(BLOCKS[block], None, plainly)
    got = gradients(BLOCKS[block], RECOMPUTES[recompute], BACKWARDS[backward])
    assert len(got) == len(expected) == 1 + len(list(Parts().parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert current("cpu") is None


@pytest.mark.parametrize("block", ["bf16", "fp16"])
def test_a_decorated_function_is_computed_again_as_it_was_with_reentrant_checkpoints_too(block: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[block]
    expected = gradients(BLOCKS[block], None, plainly)
    got = gradients(BLOCKS[block], lambda f, x: checkpoint(amp.autocast("cpu", dtype)(f), x, use_reentrant=True), plainly)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_policys_backward_block_covers_reentrant_checkpoints_of_plain_functions() -> None:
    expected = gradients(BLOCKS["bf16"], None, plainly)
    got = gradients(BLOCKS["bf16"], lambda f, x: checkpoint(f, x, use_reentrant=True), in_the_policys)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_recomputation_under_torchs_own_block_is_torchs() -> None:
    """A block of ours that was open before leaves no trace in checkpoints that torch.autocast alone makes."""
    found = []
    for ours_first in (False, True):
        net = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
        torch.manual_seed(1)
        nn.init.normal_(net[0].weight)
        nn.init.zeros_(net[0].bias)
        x = torch.linspace(-1, 1, 8)[None].requires_grad_()
        if ours_first:
            with amp.autocast("cpu", torch.float16):
                net(x)
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            loss = checkpoint(net, x, use_reentrant=False).square().sum()
        loss.backward()
        found.append([x.grad, net[0].weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_other_hooks_for_saved_tensors_are_left_alone() -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    def unpack(kept: Tensor) -> Tensor:
        seen.append((current("cpu") is None, (kept * 1).dtype))
        return kept

    x = torch.linspace(0, 1, 4).half().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack), amp.autocast("cpu", torch.float16):
        y = (x * x).softmax(0).sum()
    y.backward()
    assert seen
    assert all(outside for outside, _ in seen)


def test_a_block_with_torchs_state_restored_exactly() -> None:
    def state() -> tuple[Any, ...]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()

    before = state()
    with torch.autocast("cpu", torch.float16):
        inner = state()
        with amp.autocast("cpu", torch.bfloat16):
            assert state() == (True, torch.bfloat16, False)
        assert state() == inner
        with amp.autocast("cpu", enabled=False):
            assert state()[0] is False
        assert state() == inner
    assert state() == before
