"""Laws over random sequences: whatever comes between steps, and in them, 16-bit weights do what fp32 weights do."""

import copy
import io
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.amp import GradScaler
from halfstep.optim import HALF, AdamW, attach, detach, full_values, keep, master_of

# --- whatever comes between steps


class Pair:
    """Split weights and fp32 weights that live through the same things. Differences may grow by an ulp of fp32 a step and no more."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.random, self.dtype = random.Random(seed), dtype
        self.draws = torch.Generator().manual_seed(seed)
        shapes = ((7, 9), (130,), (2, 3, 2, 2))
        self.net = nn.ParameterList([nn.Parameter((self.drawn(shape) * 0.1).to(dtype)) for shape in shapes])
        self.wide = nn.ParameterList([nn.Parameter(p.detach().float()) for p in self.net])
        for p in self.net:
            attach(p, "split")
        self.optimizer, self.other = self.made(self.net), AdamW(self.wide.parameters(), lr=1e-3, weight_decay=0.1)
        self.steps = 0
        self.largest = [p.detach().abs() for p in self.wide]

    def drawn(self, shape: Any) -> Tensor:
        return torch.randn(tuple(shape), generator=self.draws)

    def made(self, net: nn.ParameterList) -> AdamW:
        return AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)

    def step(self) -> None:
        for p, q in zip(self.net, self.wide, strict=True):
            p.grad = q.grad = None
            if self.random.random() < 0.8:
                g = (self.drawn(p.shape) * 0.01).to(p.dtype)
                p.grad, q.grad = g, g.float()
        undo = [keep(p) for p in self.net] if self.random.random() < 0.2 else []
        if undo:
            state = copy.deepcopy(self.optimizer.state_dict()["state"])
            self.optimizer.step()
            for back in undo:
                back()
            for i, p in enumerate(self.net):
                self.optimizer.state.pop(p, None)
                if i in state:
                    self.optimizer.state[p] = state[i]
        self.optimizer.step()
        self.other.step()
        self.steps += 1

    def write(self) -> None:
        for p, q in zip(self.net, self.wide, strict=True):
            before = p.detach().clone()
            with torch.no_grad():
                way = self.random.choice(["row", "clamp", "copy", "nothing"])
                if way == "row":
                    p[0].mul_(0.5)
                elif way == "clamp":
                    p.clamp_(-0.15, 0.15)
                elif way == "copy":
                    p.copy_(before)
                changed = p.detach() != before
                master = master_of(p)
                assert master is not None
                cleared = way != "nothing" and master.nbytes() == 2 * p.numel()  # no copy of the 16 bits is kept yet
                q.copy_(torch.where(changed | cleared, p.detach().float(), q))

    def move(self) -> None:
        p = self.net[2]
        p.data = p.data.to(memory_format=self.random.choice([torch.channels_last, torch.contiguous_format]))

    def copies(self) -> None:
        for p in self.net:
            p.grad = None
        self.net, self.optimizer = copy.deepcopy((self.net, self.optimizer))

    def reload(self) -> None:
        buffer = io.BytesIO()
        torch.save((self.net.state_dict(), self.optimizer.state_dict()), buffer)
        buffer.seek(0)
        model, optimizer = torch.load(buffer, weights_only=True)
        self.net = nn.ParameterList([nn.Parameter(torch.zeros_like(p)) for p in self.net])
        self.optimizer = self.made(self.net)
        first, second = lambda: self.net.load_state_dict(model), lambda: self.optimizer.load_state_dict(optimizer)
        for load in (first, second) if self.random.random() < 0.5 else (second, first):
            load()
        if self.random.random() < 0.5:
            self.optimizer = copy.deepcopy(self.optimizer)  # of a state that waits for its weights
            self.net = nn.ParameterList(self.optimizer.everybody())
        self.optimizer.state_dict()  # takes up masters whose weights came later, as a step does

    def widen(self) -> None:
        for p in self.net:
            p.grad = None
        if self.random.random() < 0.5:
            for p in self.net:
                detach(p)
        else:
            self.net.float()
        assert all(master_of(p) is None and p.dtype == torch.float32 for p in self.net)
        for p in self.net:
            attach(p, "split", self.dtype)

    def check(self) -> None:
        for p, q, most in zip(self.net, self.wide, self.largest, strict=True):
            torch.maximum(most, q.detach().abs(), out=most)
            off = (full_values(p).double() - q.detach().double()).abs()
            assert bool((off <= (self.steps + 1) * 2.0**-23 * most.double() + 2.0**-38).all())


def sequence(seed: int, length: int) -> None:
    pair = Pair(seed, HALF[seed % 2])
    things = [pair.write, pair.move, pair.copies, pair.reload, pair.widen]
    for _ in range(length):
        (pair.step if pair.random.random() < 0.6 else pair.random.choice(things))()
        pair.check()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_between_steps_split_weights_stay_fp32_weights(seed: int) -> None:
    sequence(seed, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_whatever_comes_between_many_steps_split_weights_stay_fp32_weights(seed: int) -> None:
    sequence(seed, 200)


# --- the whole protocol: micro-batches, scale, overflows, clips


BAD = {4: float("nan"), 9: 1e4, 13: float("nan")}  # what losses are multiplied by: 1e4 overflows fp16 gradients and not bf16 ones


class Loop:
    """16-bit weights under a scaler; each step is compared with one by hand on fp32 sums of the same 16-bit gradients."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        self.random, self.dtype = random.Random(seed), dtype
        self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
        for p in self.net.parameters():
            attach(p, self.random.choice(["split", "kahan", "split24"]), dtype)
        self.optimizer = AdamW(self.net.parameters(), lr=1e-2, states=self.random.choice(["fp32", "bf16", "int8"]))
        mode: Any = self.random.choice(["skip", "replay"])
        settings = {"strategy": "stock", "init_scale": 2.0 ** self.random.choice([4, 10, 17, 24]), "on_overflow": mode}
        self.scaler = GradScaler(**settings) if dtype == torch.float16 else GradScaler(enabled=False)

    def loss(self, net: nn.Module, data: tuple[Tensor, float]) -> Tensor:
        x, size = data
        return (net(x.to(self.dtype)).float() * size).square().mean()

    def by_hand(self, batches: list[tuple[Tensor, float]], scale: float, max_norm: float | None) -> list[Tensor]:
        """The masters after a step on the same gradients."""
        net, optimizer = copy.deepcopy((self.net, self.optimizer))
        params = list(net.parameters())
        sums = [torch.zeros(p.shape) for p in params]
        for p in params:
            p.grad, p.grad_dtype = None, p.dtype
        for data in batches:
            for total, g in zip(sums, torch.autograd.grad(self.loss(net, data) * scale, params), strict=True):
                total.add_(g.float())
        for p, total in zip(params, sums, strict=True):
            p.grad_dtype = torch.float32
            p.grad = total / scale
        if max_norm is not None:
            nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        return [full_values(p) for p in params]

    def step(self, number: int) -> str:
        batches = [(torch.randn(5, 6), self.random.choice([0.3, 3.0])) for _ in range(self.random.choice([1, 1, 2, 3]))]
        way, max_norm = self.random.choice(["none", "late", "scaler", "torch"]), self.random.choice([0.1, 1.0])
        if number in BAD:
            batches[-1] = (batches[-1][0], BAD[number])
        finite = all(size == size for _, size in batches)
        for data in batches:
            self.scaler.scale(self.loss(self.net, data)).backward()
        if way == "scaler":
            self.scaler.clip_grad_norm_(self.net.parameters(), max_norm)
        elif way == "torch":
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), max_norm)
        before = [full_values(p) for p in self.net.parameters()]
        twin = copy.deepcopy((self.net, self.optimizer))
        result = self.scaler.step(self.optimizer, max_norm=max_norm if way == "late" else None)
        after = [full_values(p) for p in self.net.parameters()]
        if not result:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert result.reason == ("overflow" if finite else "nonfinite-loss")
        else:
            assert finite
            now, (self.net, self.optimizer) = (self.net, self.optimizer), twin
            expected = self.by_hand(batches, result.scale, None if way == "none" else max_norm)
            self.net, self.optimizer = now
            for p, a, b, c in zip(self.net.parameters(), after, expected, before, strict=True):
                coarse = b.abs() * 2.0**-15 + 1e-6  # split24 may round another way where a number differs by an ulp
                if self.dtype == torch.bfloat16 and way in ("scaler", "torch") and len(batches) == 1:
                    coarse = coarse + 2.0**-7 * (b - c).abs() + 1e-4  # such a clip rounds bf16 gradients
                assert bool(((a - b).abs() <= coarse).all()), (way, p.shape)
        self.scaler.update()
        self.optimizer.zero_grad(self.random.random() < 0.7)
        return result.reason


@pytest.mark.parametrize("seed", range(16))
def test_steps_of_16_bit_weights_are_those_by_hand_whatever_happens(seed: int) -> None:
    loop = Loop(seed, HALF[seed % 2])
    assert {"applied", "nonfinite-loss"} <= {loop.step(number) for number in range(15)}
