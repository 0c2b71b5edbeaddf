"""Two dtypes meet and torch raises: writes by index, custom functions, models cast by hand (kind K)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.adapter import Library, NotOffered, Record, collector
from conformance.tools import BF16, F32, near

RECORDS: list[Record] = []
record = collector(RECORDS, "K")

NAMED = "or the library's diagnosis names the mismatch, the module and both dtypes, and has a remedy"


def _worked_or_told(library: Library, model: nn.Module, call: Callable[[], Tensor]) -> Any:
    """The first element of what `call` gives and of the input's gradient; where torch raises, what the library says of the same call."""
    try:
        return float(call().detach().flatten()[0])
    except RuntimeError as error:
        try:
            return library.trace(model, call=lambda: call().float().sum())
        except NotOffered:
            return str(error)


def _told(text: Any, module: str) -> bool:
    """Whether a diagnosis names the fault and the module in its first line, and both dtypes and a remedy somewhere."""
    if not isinstance(text, str) or not text:
        return False
    first = text.splitlines()[0]
    narrow, wide = any(n in text for n in ("bf16", "bfloat16")), any(n in text for n in ("fp32", "float32", "fp64", "float64"))
    return "mismatch" in first and module in first and narrow and wide and "remedy" in text


class _Inside(nn.Module):
    """A layer whose 16-bit result (all elements 4) is given to an op together with fp32 tensors."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.op = nn.Linear(4, 4, bias=False), op
        nn.init.ones_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.layer(x))


def _in_a_block(library: Library, op: Callable[[Tensor], Tensor]) -> Any:
    model, inputs = nn.Sequential(), torch.ones(2, 4)
    model.add_module("mixer", _Inside(op))

    def call() -> Tensor:
        with library.autocast(BF16):
            return model(inputs)  # type: ignore[no-any-return]

    with torch.no_grad():
        return _worked_or_told(library, model, call)


# --- writes into fp32 tensors ---------------------------------------------------------------------------------------

ROWS = torch.tensor([0, 1])
WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "index_copy": lambda y: torch.zeros(4, 4).index_copy_(0, ROWS, y),
    "scatter": lambda y: torch.zeros(4, 4).scatter_(0, ROWS[:, None].expand(2, 4), y),
    "scatter_reduce": lambda y: torch.zeros(4, 4).scatter_reduce(0, ROWS[:, None].expand(2, 4), y, "sum"),
    "masked_scatter": lambda y: torch.zeros(2, 4).masked_scatter_(torch.ones(2, 4, dtype=torch.bool), y),
    "put": lambda y: torch.zeros(4, 4).put_(ROWS, y[0, :2]),
    "index_add-out-of-place": lambda y: torch.zeros(4, 4).index_add(0, ROWS, y),
}


def _write(name: str, op: Callable[[Tensor], Tensor]) -> None:
    @record(
        f"written-by-{name}",
        f"a bf16 result is written into an fp32 tensor by {name}, in a layer `mixer`",
        today="RuntimeError about dtypes, which names no module (a write by slice is converted)",
        right=f"written, converted to the tensor's dtype, {NAMED}",
        check=lambda v: near(v, 4.0) if isinstance(v, float) else _told(v, "mixer"),
        refs=("case 61",),
    )
    def write(library: Library) -> Any:
        return _in_a_block(library, op)


for _name, _op in WRITES.items():
    _write(_name, _op)

# --- ops of two dtypes ----------------------------------------------------------------------------------------------

MEETINGS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "dot": (lambda y: torch.dot(y[0], torch.ones(4)), 16.0),
    "tensordot": (lambda y: torch.tensordot(y, torch.ones(4, 4), 1), 16.0),
    "bilinear": (lambda y: F.bilinear(y, torch.ones(2, 4), torch.ones(1, 4, 4)), 64.0),
    "cross": (lambda y: torch.linalg.cross(y[:, :3], torch.tensor([[1.0, 0.0, 0.0]]))[:, 1:], 4.0),
    "inner": (lambda y: torch.inner(y[0], torch.ones(4)), 16.0),
    "lerp": (lambda y: torch.lerp(torch.zeros(2, 4), y, 0.5), 2.0),
    "complex": (lambda y: torch.complex(y, torch.zeros(2, 4)).real, 4.0),
    "embedding_bag": (lambda y: F.embedding_bag(torch.zeros(2, 4, dtype=torch.long), torch.ones(3, 4), per_sample_weights=y, mode="sum"), 16.0),
    "baddbmm-in-place": (lambda y: torch.zeros(1, 2, 4).baddbmm_(y[None], torch.ones(1, 4, 4)), 16.0),
}


def _meeting(name: str, op: Callable[[Tensor], Tensor], wanted: float) -> None:
    @record(
        f"two-dtypes-in-{name}",
        f"a bf16 result meets an fp32 tensor in {name}, in a layer `mixer`",
        today="RuntimeError about dtypes, each op in words of its own",
        right=f"the product, {NAMED}",
        check=lambda v: near(v, wanted) if isinstance(v, float) else _told(v, "mixer"),
        refs=("case 61", "case 67"),
    )
    def meeting(library: Library) -> Any:
        return _in_a_block(library, op)


for _name, (_op, _wanted) in MEETINGS.items():
    _meeting(_name, _op, _wanted)

# --- custom functions -----------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """A product without custom_fwd: its backward pass multiplies a 16-bit gradient with what it saved."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        return grads[0] @ b.t(), a.t() @ grads[0]


class _Projected(torch.autograd.Function):
    """Passes on in the forward pass; its backward pass projects the gradient by an fp32 matrix that it keeps."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(b)
        return a.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (b,) = ctx.saved_tensors
        return torch.mm(grads[0], b), None


class _Custom(nn.Module):
    """A layer and a function of the user's own after it."""

    def __init__(self, function: Any, after: bool) -> None:
        super().__init__()
        self.layer, self.function, self.after = nn.Linear(4, 4, bias=False), function, after
        self.weight = nn.Parameter(torch.ones(4, 4))
        nn.init.ones_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.layer(x) if self.after else x, self.weight)  # type: ignore[no-any-return]


def _custom(name: str, title: str, function: Any, after: bool) -> None:
    @record(
        f"custom-function-{name}",
        title,
        today="RuntimeError about dtypes out of backward(): neither the function nor its module is named",
        right=f"the gradient of the input, {NAMED}",
        check=lambda v: near(v, 16.0 if after else 4.0) if isinstance(v, float) else _told(v, "gate"),
        refs=("case 58",),
    )
    def custom(library: Library) -> Any:
        model, inputs = nn.Sequential(), torch.ones(2, 4, requires_grad=True)
        model.add_module("gate", _Custom(function, after))

        def forward() -> Tensor:
            with library.autocast(BF16):
                return model(inputs).float().sum()  # type: ignore[no-any-return]

        try:
            forward().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            try:
                return library.trace(model, call=forward)
            except NotOffered:
                return str(error)
        assert inputs.grad is not None
        return float(inputs.grad[0, 0])


_custom("that-saves-its-inputs", "a product without custom_fwd in a layer `gate`: its backward pass multiplies what it saved", _Product, False)
_custom("projecting-a-gradient", "a function in a layer `gate` whose backward pass multiplies the gradient with an fp32 matrix", _Projected, True)

# --- models that are 16 bits wide -----------------------------------------------------------------------------------


class _Constant(nn.Module):
    """A layer on the sum of its input and numbers that are made in the forward pass, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.linspace(0, 1, 4))  # type: ignore[no-any-return]


def _attention(model: nn.Module) -> Tensor:
    x = torch.ones(2, 3, 4, dtype=BF16)
    return model(x, x, x, attn_mask=torch.zeros(2, 2))[0]  # type: ignore[no-any-return]


CAST: dict[str, tuple[str, Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "recurrent-state": (
        "an LSTM with fp32 inputs and an fp32 first state",
        lambda: nn.LSTM(4, 4),
        lambda m: m(torch.ones(2, 3, 4), (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)))[0],
    ),
    "attention-mask": ("attention with a mask of fp32 numbers", lambda: nn.MultiheadAttention(4, 1), _attention),
    "constant-in-forward": ("numbers made in the forward pass", _Constant, lambda m: m(torch.ones(2, 4, dtype=BF16))),
    "convolution-before-a-norm": (
        "a convolution and a BatchNorm on fp32 images",
        lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)),
        lambda m: m(torch.ones(2, 2, 4)),
    ),
    "loss-on-fp32-targets": (
        "F.binary_cross_entropy on fp32 targets, outside of the model",
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()),
        lambda m: F.binary_cross_entropy(m(torch.ones(2, 4, dtype=BF16)), torch.ones(2, 4)),
    ),
    "product-outside": (
        "the output multiplied with an fp32 matrix outside of the model",
        lambda: nn.Linear(4, 4),
        lambda m: m(torch.ones(2, 4, dtype=BF16)) @ torch.ones(4, 2),
    ),
}


def _cast(name: str, title: str, make: Callable[[], nn.Module], run: Callable[[nn.Module], Tensor]) -> None:
    @record(
        f"16-bit-model-{name}",
        f"a model whose weights are all bf16: {title}",
        today="RuntimeError or ValueError about dtypes",
        right="the result of the same model in fp32, to bf16's rounding",
        check=lambda error: error < 0.05,
        refs=("case 67",),
    )
    def cast(library: Library) -> Any:
        model = make()
        with torch.no_grad():
            wanted = run(_Widened(model))
            got = run(library.cast_model(model, BF16))
        return float((got.float() - wanted.float()).abs().max())


class _Widened(nn.Module):
    """A model in fp32, that takes what a 16-bit one is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*(a.float() if isinstance(a, Tensor) else a for a in args), **kwargs)


for _name, (_title, _make, _run) in CAST.items():
    _cast(_name, _title, _make, _run)


def _left(name: str, title: str, change: Callable[[nn.Module], Any], inputs: torch.dtype, fine: Callable[[Any], bool]) -> None:
    @record(
        f"16-bit-model-{name}",
        title,
        today="RuntimeError about two dtypes: no module, no remedy",
        right=f"works, a refusal that names the weight and both dtypes, {NAMED}",
        check=fine,
        refused=("head.weight", "float32", "bfloat16"),
        refs=("case 67",),
    )
    def left(library: Library) -> Any:
        net = nn.Sequential()
        net.add_module("body", nn.Linear(4, 4))
        net.add_module("head", nn.Linear(4, 4))
        model = library.cast_model(net, BF16)
        change(model)
        x = torch.ones(2, 4, dtype=inputs)
        return _worked_or_told(library, model, lambda: model(x))


def _works_or(module: str) -> Callable[[Any], bool]:
    return lambda v: (isinstance(v, float) and v == v) or _told(v, module)


_left("one-layer-back-in-fp32", "a bf16 model of which one layer was put back: model.head.float()", lambda m: m.head.float(), BF16, _works_or("head"))
_left(
    "a-layer-added-later",
    "a bf16 model that is given a new head, in fp32 as every new layer is",
    lambda m: setattr(m, "head", nn.Linear(4, 4)),
    BF16,
    _works_or("head"),
)


@record(
    "fp64-inputs-in-a-block",
    "inputs straight from numpy, in fp64, into a layer `head` inside a block",
    today="RuntimeError: mat1 and mat2 must have the same dtype; no module is named",
    right=f"works, {NAMED}",
    check=_works_or("head"),
    refs=("case 67",),
)
def fp64_inputs(library: Library) -> Any:
    model, inputs = nn.Sequential(), torch.ones(2, 4, dtype=torch.float64)
    model.add_module("head", nn.Linear(4, 4))

    def call() -> Tensor:
        with library.autocast(BF16):
            return model(inputs)  # type: ignore[no-any-return]

    return _worked_or_told(library, model, call)


@record(
    "fp32-weights-stay-fp32-in-a-block",
    "the way around all of these: fp32 weights, fp32 inputs, a block",
    today="right",
    right="a bf16 product, fp32 gradients",
    check=lambda v: v == [BF16, F32],
    refs=("case 67",),
    stock="right",
)
def plain_block(library: Library) -> Any:
    layer = nn.Linear(4, 4)
    with library.autocast(BF16):
        out = layer(torch.ones(2, 4))
    out.float().sum().backward()
    assert layer.weight.grad is not None
    return [out.dtype, layer.weight.grad.dtype]
