"""Bits that must be equal on a GPU as they are on a CPU: each law is tried and said to hold or not, with what was seen."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import models
from benchmarks.gpu.setting import Setting, error_text
from halfstep import Accelerator, Trainer, TrainingArguments, numerics
from halfstep.amp import GradScaler, autocast
from halfstep.kernels.registry import SWITCH
from halfstep.optim import AdamW, master_of, wrap

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
Law = Callable[[Setting], str]


class Broken(AssertionError):  # noqa: N818  an answer
    """A law that does not hold; the text says what was seen."""


def run(setting: Setting) -> None:
    """The part `laws`."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for law in LAWS:
        try:
            seen = law(setting)
            setting.add("laws", law.__name__, {"holds": True, "seen": seen})
        except Broken as broken:
            setting.add("laws", law.__name__, {"holds": False, "seen": str(broken)})
        except Exception as error:  # noqa: BLE001  a law that cannot be tried stops no other
            setting.add("laws", law.__name__, {"holds": None, "seen": error_text(error)})
    setting.tell(hold=sum(found["holds"] is True for found in setting.found["laws"].values()), tried=len(LAWS))


def need(truth: bool, text: str) -> None:
    """Raise Broken unless it is true."""
    if not truth:
        raise Broken(text)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits, wherever they are; NaN equals NaN."""
    a, b = a.detach().cpu(), b.detach().cpu()
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def patterns(setting: Setting) -> Tensor:
    """fp32 numbers of every exponent and sign, with mantissas at, beside and between the ties of both 16-bit formats, and random ones."""
    generator = torch.Generator().manual_seed(0)
    tops = torch.arange(1 << 9, dtype=torch.int64) << 23
    edges = [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x18000, 0x7FFFFF]
    count = 1 << (8 if setting.small else 14)
    mantissas = torch.cat((torch.tensor(edges), torch.randint(0, 1 << 23, (count,), generator=generator)))
    return (tops[:, None] | mantissas[None]).flatten().to(torch.int32).view(torch.float32)


def split_is_round_to_nearest(setting: Setting) -> str:
    """The 16 bits of a split weight are the nearest ones of its master, the master is there again, and the device's bits are the CPU's."""
    x = patterns(setting)
    x = x[x.isfinite()]
    for name, dtype in FORMATS.items():
        given = x if dtype == torch.bfloat16 else x[(x.abs() <= 2.0**15) & ((x.abs() >= 2.0**-14) | (x == 0)) & ~((x == 0) & x.signbit())]
        high, low = numerics.split(given.to(setting.device), dtype)
        need(same(high, given.to(dtype)), f"{name}: the weight is not its master rounded to nearest")
        off = (numerics.join(high, low).cpu().view(torch.int32) - given.view(torch.int32)).abs()
        need(int(off.max()) <= 1, f"{name}: a master comes back {int(off.max())} ulps off")
        need(float((off != 0).float().mean()) < 0.1, f"{name}: {int((off != 0).sum())} of {len(off)} masters move")
        for width in (16, 8):
            bits = numerics.Noise(1, 2, 3).bits(given.numel(), setting.device)
            here, there = numerics.split(given.to(setting.device), dtype, width, bits), numerics.split(given, dtype, width, bits.cpu())
            need(all(map(same, here, there)), f"{name}, {width} bits: the device's bits are not the CPU's")
    return f"{len(x)} numbers, both formats, 16 and 8 bits"


def noise_and_states_are_the_cpu_s(setting: Setting) -> str:
    """The hash that rounding draws from, stochastic rounding and int8 states give the CPU's bits."""
    count = 1 << (10 if setting.small else 22)
    here, there = (numerics.Noise(7, 8, 9).bits(count, device) for device in (setting.device, "cpu"))
    need(same(here, there), "the noise is another")
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    for name, dtype in FORMATS.items():
        need(
            same(numerics.stochastic(x.to(setting.device), dtype, here), numerics.stochastic(x, dtype, there)), f"{name}: stochastic rounding differs"
        )
    for signed in (True, False):
        values, sixteen = (x if signed else x.square()), there & 0xFFFF
        codes = [numerics.encode(values.to(d), signed, sixteen.to(d)) for d in (setting.device, torch.device("cpu"))]
        need(all(map(same, *codes)), f"int8 codes differ (signed: {signed})")
        need(same(*(numerics.decode(*c, signed, x.shape) for c in codes)), f"int8 states are read otherwise (signed: {signed})")
    return f"{count} elements"


def adamw_steps_as_on_a_cpu(setting: Setting) -> str:
    """halfstep's AdamW, in every storage and format of states, gives the CPU's bits; on a CPU its plain definition gives the compiled kernel's."""
    tried = [(w, s) for w in (None, "split", "split24", "kahan", "stochastic") for s in ("fp32", "bf16", "int8")]
    for weights, states in tried:
        with without_kernels():
            ends = [_adamw(weights, states, setting.device)]
            if setting.is_cuda:
                ends.append(_adamw(weights, states, torch.device("cpu")))
        if not setting.is_cuda:  # beside a GPU they need not be compiled: they give the CPU's bits, as is tried there
            ends.append(_adamw(weights, states, setting.device))
        need(all(map(same, *ends)), f"weights {weights or 'fp32'}, states {states}: other bits after 4 steps")
    return f"{len(tried)} pairs of formats"


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, optimizers step by their plain definitions."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "off"
    try:
        yield
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


def _adamw(weights: str | None, states: str, device: torch.device) -> list[Tensor]:
    draws = torch.Generator().manual_seed(3)
    held = [
        nn.Parameter((torch.randn(n, 7, generator=draws) * 0.1).to(torch.float32 if weights is None else torch.bfloat16).to(device))
        for n in (5, 40, 129)
    ]
    optimizer = AdamW(held, lr=1e-2, weights=weights, states=states)
    for _ in range(4):
        for p in held:
            p.grad = torch.randn(p.shape, generator=draws).to(p.dtype).to(device)
        optimizer.step(factor=0.5)
    masters = [m.residual for p in held if (m := master_of(p)) is not None and m.residual is not None]
    kept = [t for p in held for key, t in sorted(optimizer.state[p].items()) if key != "step"]
    return [p.detach() for p in held] + masters + kept


class Net(nn.Module):
    """A net whose loss has a factor, which makes gradients of fp16 overflow."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16))
        self.to(device)

    def forward(self, x: Tensor, factor: float) -> Tensor:  # noqa: D102
        return ((self.body(x).float() - 1.0).square() * factor).mean()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "foreach AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
    "fused SGD": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, fused=True),
    "halfstep AdamW": lambda ps: AdamW(ps, lr=1e-3),
}


def replayed_step_is_the_step(setting: Setting) -> str:
    """A step that overflows and is replayed at scale s leaves the bits of one first taken at s: weights, buffers, states."""
    for name, make in OPTIMIZERS.items():
        scales: list[float] = []
        first = _replays(make, setting, scales, None)
        need(first[1] > 0, f"{name}: nothing overflowed, so nothing was tried")
        second = _replays(make, setting, [], scales)
        need(second[1] == 0, f"{name}: the second run overflowed too")
        need(all(map(same, first[0], second[0])), f"{name}: other bits")
    return ", ".join(OPTIMIZERS)


def _replays(make: Callable[[Any], Any], setting: Setting, scales: list[float], told: list[float] | None) -> tuple[list[Tensor], int]:
    """Six steps, of which one overflows; with `told` each is taken at the scale of that list."""
    accelerator = Accelerator(precision="fp16-mixed,scale=dynamic:8192", cpu=not setting.is_cuda)
    net = Net(setting.device)
    net, optimizer = accelerator.prepare(net, make(net.parameters()))
    draws, replays = torch.Generator().manual_seed(5), 0
    for number in range(6):
        x, factor = torch.randn(32, 16, generator=draws).to(setting.device), 4096.0 if number == 3 else 1.0
        if told is not None:
            accelerator.scaler.update(told[number])
        result = accelerator.run_step(optimizer, lambda x=x, factor=factor: accelerator.backward(net(x, factor)))
        need(bool(result), f"step {number} was not applied: {result.reason}")
        replays += result.replays
        scales.append(result.scale)
        optimizer.zero_grad()
    states = [t for p in net.parameters() for t in optimizer.state[p].values() if isinstance(t, Tensor)]
    return [*net.state_dict().values(), *states], replays


def bad_gradients_change_nothing(setting: Setting) -> str:
    """inf, NaN and 1e21 in a gradient leave weights and states as they are, in every precision, whether the verdict is read at once or later."""
    count = 0
    for name, make in OPTIMIZERS.items():
        for bad in (float("inf"), float("nan"), 1e21):
            for deferred in (False, True):
                scaler = GradScaler(enabled=False, deferred=deferred)
                p = nn.Parameter(torch.ones(300, device=setting.device))
                optimizer = make([p])
                for value in (0.5, bad, 0.25):
                    before = [t.clone() for t in (p.detach(), *(s for s in optimizer.state[p].values() if isinstance(s, Tensor)))]
                    scaler.scale(p.sum()).backward()
                    p.grad.fill_(0.5)[7] = value
                    result = scaler.step(optimizer)
                    scaler.update()
                    now = [p.detach(), *(s for s in optimizer.state[p].values() if isinstance(s, Tensor))]
                    if value is bad:
                        need(all(map(same, before, now)), f"{name}, {bad}, read {'later' if deferred else 'at once'}: something moved")
                    need(result.applied == (value is not bad), f"{name}, {bad}: reported as {result.reason}")
                    optimizer.zero_grad()
                    count += 1
    return f"{count} steps"


def later_is_at_once(setting: Setting) -> str:
    """Verdicts that are read after the step end in the bits of those that are read before it."""
    ends = []
    for deferred in (False, True):
        net = Net(setting.device)
        optimizer = OPTIMIZERS["fused AdamW"](net.parameters())
        scaler = GradScaler(init_scale=2.0**13, strategy="stock", deferred=deferred)
        scaler.watch(net)
        draws = torch.Generator().manual_seed(5)
        torch.manual_seed(1)
        for number in range(8):
            with autocast(setting.device.type, torch.float16):
                loss = net(torch.randn(32, 16, generator=draws).to(setting.device), 4096.0 if number == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append([*net.state_dict().values(), torch.tensor(scaler.get_scale())])
    need(float(ends[0][-1]) < 2.0**13, "no step was refused, so nothing was tried")
    need(all(map(same, *ends)), "other weights, buffers or scale")
    return "8 steps, one refused"


def _gpt(setting: Setting) -> nn.Module:
    net = models.made("gpt2-124m", True, setting.device)
    net.set_attn_implementation("eager")  # its backward pass adds up in one order
    return net


def resumed_run_is_the_run(setting: Setting) -> str:
    """Six steps, and three, a checkpoint and three more in another trainer, end in the same bits."""
    data = models.Tokens(models.VOCABULARY_SMALL, models.SMALL["length"], 64)
    tried = ("bf16-mixed", "fp16-mixed", "bf16-lean,weights=split24")
    for precision in tried:

        def trained(folder: str, steps: int, resume: bool, precision: str = precision) -> list[Tensor]:
            args = TrainingArguments(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=2, precision=precision, save_steps=3, lr_scheduler_type="constant",
                disable_tqdm=True, logging_strategy="no", learning_rate=1e-3, use_cpu=not setting.is_cuda,
            )  # fmt: skip
            trainer = Trainer(_gpt(setting), args, data_collator=models.stacked, train_dataset=data)
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
            return [t.clone() for t in trainer.accelerator.get_state_dict(trainer.model).values()]

        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            whole, again = trained(one, 6, False), trained(other, 6, False)
            need(all(map(same, whole, again)), f"{precision}: two runs with one seed differ, so nothing can be said of resuming")
            need(all(map(same, whole, trained(one, 6, True))), f"{precision}: the resumed run ends otherwise")
    return ", ".join(tried)


def overflowing_module_is_pinned(setting: Setting) -> str:
    """A linear layer that overflows fp16 in a later step is found, held in fp32, and the step taken: nothing is lost."""
    accelerator = Accelerator(precision="fp16-mixed", heal="pin", cpu=not setting.is_cuda)
    net = accelerator.prepare(Loud(setting.device))
    optimizer = accelerator.prepare(OPTIMIZERS["fused AdamW"](net.parameters()))
    x = torch.ones(4, 16, device=setting.device)
    for number in range(4):
        result = accelerator.run_step(optimizer, lambda gain=8192.0 if number == 2 else 1.0: accelerator.backward(net(x, gain)))
        need(bool(result), f"step {number}: {result.reason}, {result.detail or 'no module named'}")
        need((result.pinned == ("last",)) == (number == 2), f"step {number}: pinned {result.pinned}")
        optimizer.zero_grad()
    return "pinned: last, in the third of 4 steps"


class Loud(nn.Module):
    """Its last layer gives what fp16 does not hold once `gain` is large."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)
        nn.init.constant_(self.first.weight, 0.1)
        nn.init.constant_(self.last.weight, 1.0)
        self.to(device)

    def forward(self, x: Tensor, gain: float) -> Tensor:  # noqa: D102
        return (self.last(self.first(x) * gain).float() * 1e-6 - 1.0).square().mean()


def lean_losses_are_stock_autocast_s(setting: Setting) -> str:
    """The first loss under `*-lean` is that of torch.autocast on fp32 weights, bit for bit, and the gradients are its, rounded to 16 bits."""
    ids = models.Tokens(models.VOCABULARY_SMALL, models.SMALL["length"])[0]["input_ids"][None].to(setting.device)
    stock = _gpt(setting).train()
    accelerator = Accelerator(precision="bf16-lean", cpu=not setting.is_cuda)
    ours = accelerator.prepare(_gpt(setting).train())
    block = torch.autocast(setting.device.type, torch.bfloat16) if setting.is_cuda else autocast("cpu", torch.bfloat16)
    with block:
        theirs = stock(input_ids=ids, labels=ids).loss
    theirs.backward()
    loss = ours(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    need(same(theirs.float(), loss.float()), f"losses {float(theirs.detach())} and {float(loss.detach())}")
    pairs = [(p.grad, q.grad.to(p.grad.dtype)) for p, q in zip(ours.parameters(), stock.parameters(), strict=True) if p.grad is not None]
    off = sum(not same(a, b) for a, b in pairs)
    need(off == 0, f"{off} of {len(pairs)} gradients differ")
    return f"loss {float(loss.detach()):.6f}, {len(pairs)} gradients"


def wrapped_optimizer_steps_masters(setting: Setting) -> str:
    """torch's fused AdamW wrapped around split weights moves the masters as it moves fp32 weights, to the bit of the stored master."""
    draws = torch.Generator().manual_seed(3)
    start = (torch.randn(500, generator=draws) * 0.1).to(torch.bfloat16)
    wide, narrow = nn.Parameter(start.float().to(setting.device)), nn.Parameter(start.to(setting.device))
    plain = torch.optim.AdamW([wide], lr=1e-3, fused=True)
    wrapped = wrap(torch.optim.AdamW([narrow], lr=1e-3, fused=True), weights="split")
    for _ in range(20):
        gradient = torch.randn(500, generator=draws).to(torch.bfloat16).to(setting.device)
        wide.grad, narrow.grad = gradient.float(), gradient
        plain.step()
        wrapped.step()
    master = master_of(narrow)
    need(master is not None, "no master")
    assert master is not None
    off = float(((master.read() - wide.detach()) / wide.detach().abs().clamp(min=1e-6)).abs().max())
    need(off <= 20 * 2.0**-23, f"{off} relative after 20 steps")
    return f"largest relative difference {off:.1e} after 20 steps"


LAWS: tuple[Law, ...] = (
    split_is_round_to_nearest,
    noise_and_states_are_the_cpu_s,
    adamw_steps_as_on_a_cpu,
    wrapped_optimizer_steps_masters,
    bad_gradients_change_nothing,
    later_is_at_once,
    replayed_step_is_the_step,
    overflowing_module_is_pinned,
    lean_losses_are_stock_autocast_s,
    resumed_run_is_the_run,
)
