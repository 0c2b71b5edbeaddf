"""The weight cache, recompute, threads, submodules, custom functions (kind J)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from conformance.adapter import Library, NotOffered, Record, collector
from conformance.tools import BF16, dtype_here, near, read

RECORDS: list[Record] = []
record = collector(RECORDS, "J")


def _outputs_after(library: Library, change: Callable[[nn.Linear], None]) -> list[float]:
    """The output of a layer before and after its weights change, all inside one block with gradients."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 2.0)
    with library.autocast(BF16):
        before = layer(torch.ones(1, 1))
        change(layer)
        return [*read(before, layer(torch.ones(1, 1)))]


def _in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.fill_(10.0)


def _loaded(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": torch.full((1, 1), 10.0)})


def _stepped(layer: nn.Linear) -> None:
    layer.weight.grad = torch.full((1, 1), -8.0)
    SGD(layer.parameters(), lr=1.0).step()


def _through_data(layer: nn.Linear) -> None:
    layer.weight.data.mul_(5.0)


def _swapped(layer: nn.Linear) -> None:
    layer.weight.data = torch.full((1, 1), 10.0)


def _stale(name: str, how: str, change: Callable[[nn.Linear], None]) -> None:
    @record(
        f"weights-changed-in-a-block-{name}",
        f"weights change inside one block: {how}",
        today="the cached cast of the old weights is used: 2 instead of 10",
        right="2 before, 10 after",
        check=lambda v: near(v, [2.0, 10.0]),
        refs=("F6", "case 56"),
    )
    def stale(library: Library) -> Any:
        return _outputs_after(library, change)


for _name, _how, _change in (
    ("in-place", "in place under no_grad", _in_place),
    ("by-load-state-dict", "load_state_dict (a swap of EMA weights)", _loaded),
    ("by-an-optimizer", "an optimizer steps", _stepped),
    ("through-data", "weight.data.mul_ (which bumps no version)", _through_data),
    ("data-swapped", "weight.data = another tensor", _swapped),
):
    _stale(_name, _how, _change)


@record(
    "training-loop-in-one-block",
    "five steps inside one block",
    today="the loss never changes: every step trains on the first weights",
    right="five different losses, falling",
    check=lambda v: sorted(set(v), reverse=True) == v and len(set(v)) == 5,
    refs=("F6", "case 56"),
)
def loop_in_one_block(library: Library) -> Any:
    layer = nn.Linear(4, 1, bias=False)
    nn.init.constant_(layer.weight, 0.5)
    optimizer, losses = SGD(layer.parameters(), lr=0.05), []
    with library.autocast(BF16):
        for _ in range(5):
            optimizer.zero_grad()
            loss = layer(torch.ones(1, 4)).float().square().sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def _after(library: Library, first: Callable[[], Any]) -> dict[str, Any]:
    layer = nn.Linear(4, 4)
    with library.autocast(BF16):
        with first():
            layer(torch.ones(1, 4))
        out = layer(torch.ones(1, 4))
    out.float().sum().backward()
    return {"dtype": out.dtype, "gradients": [p.grad is not None for p in layer.parameters()]}


@record(
    "no-grad-forward-first",
    "a no_grad forward pass, then a training one in the same block",
    today="right in this torch (older ones kept the graphless cast: no gradient)",
    right="bf16, and weight and bias have gradients",
    check=lambda v: v["dtype"] is BF16 and v["gradients"] == [True, True],
    refs=("case 57",),
    stock="right",
)
def no_grad_first(library: Library) -> Any:
    return _after(library, torch.no_grad)


@record(
    "inference-mode-forward-first",
    "an inference_mode forward pass, then a training one in the same block",
    today="right in this torch",
    right="bf16, and weight and bias have gradients",
    check=lambda v: v["dtype"] is BF16 and v["gradients"] == [True, True],
    refs=("case 57",),
    stock="right",
)
def inference_mode_first(library: Library) -> Any:
    return _after(library, torch.inference_mode)


@record(
    "block-inside-inference-mode",
    "a block inside inference_mode, and inference_mode inside a block",
    today="right",
    right="bf16 in both",
    check=lambda v: v == [BF16, BF16],
    stock="right",
)
def inside_inference_mode(library: Library) -> Any:
    with torch.inference_mode(), library.autocast(BF16):
        one = dtype_here()
    with library.autocast(BF16), torch.inference_mode():
        return [one, dtype_here()]


class _Block(nn.Module):
    """A layer whose recompute can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        self.seen.append(h.dtype)
        return F.gelu(self.two(F.gelu(h)))


def _recompute(reentrant: bool) -> None:
    @record(
        f"recompute-outside-the-block-{'reentrant' if reentrant else 'saved-hooks'}",
        f"activation checkpointing (use_reentrant={reentrant}) in a block, backward outside it",
        today="right",
        right="the recompute runs in bf16 too, and gradients equal those without checkpointing bit for bit",
        check=lambda v: v["seen"] == [BF16, BF16] and v["equal"],
        refs=("case 57",),
        stock="right",
    )
    def recompute(library: Library) -> Any:
        block, inputs = _Block(), torch.randn(4, 8, requires_grad=True)

        def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
            block.zero_grad()
            block.seen.clear()
            scaler = library.scaler(1.0, enabled=False)
            with library.autocast(BF16):
                out = run(inputs)
            scaler.scale(out.float().square().mean()).backward()
            return [p.grad.clone() for p in block.parameters() if p.grad is not None]

        plain = gradients(block)
        again = gradients(lambda x: checkpoint(block, x, use_reentrant=reentrant))
        equal = len(plain) == 4 and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
        return {"seen": list(block.seen), "equal": equal}


for _reentrant in (False, True):
    _recompute(_reentrant)


@record(
    "prepared-model-in-another-thread",
    "a model prepared by an accelerator, called in a thread",
    today="right (Accelerate wraps forward)",
    right="the layers run in bf16 there too",
    check=lambda v: v == [BF16, BF16],
    stock="right",
    doors=("accelerator",),
)
def in_a_thread(library: Library) -> Any:
    block = _Block()
    model, seen = library.accelerator("bf16").prepare(block), []
    model(torch.ones(1, 8))
    worker = threading.Thread(target=lambda: seen.append(model(torch.ones(1, 8))))
    worker.start()
    worker.join()
    assert len(seen) == 1
    return list(block.seen)


@record(
    "submodule-of-a-prepared-model-called-alone",
    "model.one(x) of a prepared model, called by itself (an encoder, a head)",
    today="fp32: Accelerate wraps the forward of the whole model only",
    right="the numbers that it has inside the model: bf16 products",
    check=lambda v: v,
    doors=("accelerator",),
)
def submodule_alone(library: Library) -> Any:
    block = _Block()
    inputs, inside = torch.randn(3, 8), []
    model = library.accelerator("bf16").prepare(block)
    handle = block.one.register_forward_hook(lambda *args: inside.append(args[2].detach().float()))
    model(inputs)
    handle.remove()
    return torch.equal(model.one(inputs).float(), inside[0])


@record(
    "custom-function-without-decorators",
    "a torch.autograd.Function without custom_fwd, saved inputs multiplied in its backward pass",
    today="RuntimeError about dtypes in backward, which names neither the function nor the cure",
    right="the gradient 4, or the library's own diagnosis of the batch names the layer and the two dtypes",
    check=lambda v: near(v, 4.0) if isinstance(v, float) else names_a_mismatch(v, "gate"),
    refs=("case 58",),
)
def custom_function(library: Library) -> Any:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            a, b = ctx.saved_tensors
            return grads[0] @ b.t(), a.t() @ grads[0]

    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)

    class Gate(nn.Module):
        def forward(self) -> Tensor:
            return Product.apply(a, b)  # type: ignore[no-any-return,no-untyped-call]

    model = nn.ModuleDict({"gate": Gate()})

    def forward() -> Tensor:
        with library.autocast(BF16):
            return model["gate"]().float().sum()  # type: ignore[no-any-return]

    try:
        forward().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return _diagnosed(library, model, forward, error)
    assert a.grad is not None
    return float(a.grad[0, 0])


def _diagnosed(library: Library, model: nn.Module, call: Callable[[], Any], error: RuntimeError) -> str:
    """What the library says of a call in which torch raised; torch's own words where it has no such thing."""
    try:
        return library.trace(model, None, call=call)
    except NotOffered:
        return str(error)


def names_a_mismatch(told: Any, module: str) -> bool:
    """Whether the first line of a diagnosis says that two dtypes met, in which module, and which."""
    first = str(told).splitlines()[0]
    return first.startswith("mismatch") and module in first and "bf16" in first and "fp32" in first


def _indexed(name: str, write: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    @record(
        f"indexed-write-by-{name}",
        f"a bf16 result is written into an fp32 buffer by {name}",
        today="RuntimeError about dtypes (a write by slice is converted)",
        right="written, converted to the buffer's dtype, or the library's own diagnosis of the batch names the module and the two dtypes",
        check=lambda v: near(v, 4.0) if isinstance(v, float) else names_a_mismatch(v, "cache"),
        refs=("case 61",),
    )
    def indexed(library: Library) -> Any:
        class Cache(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.buffer = nn.Linear(4, 4, bias=False), torch.zeros(4, 4)
                nn.init.ones_(self.layer.weight)

            def forward(self) -> None:
                write(self.buffer, torch.tensor([0, 1]), self.layer(torch.ones(2, 4)))

        model = nn.ModuleDict({"cache": Cache()})

        def forward() -> None:
            with torch.no_grad(), library.autocast(BF16):
                model["cache"]()

        try:
            forward()
        except RuntimeError as error:
            return _diagnosed(library, model, forward, error)
        return float(model["cache"].buffer[0, 0])


for _name, _write in (
    ("index", lambda buffer, rows, value: buffer.__setitem__(rows, value)),
    ("index_add", lambda buffer, rows, value: buffer.index_add_(0, rows, value)),
    ("scatter_add", lambda buffer, rows, value: buffer.scatter_add_(0, rows[:, None].expand(2, 4), value)),
):
    _indexed(_name, _write)
