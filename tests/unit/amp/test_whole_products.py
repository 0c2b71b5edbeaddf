"""Products of models that are in 16 bits as a whole (`*-true`) on a CPU: where they are emulated, and that nothing else changes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import amp, optim
from halfstep.amp import autocast, bind, forward_context, linear_loss, pin
from halfstep.amp.emulation import FAMILIES, is_active
from halfstep.amp.mode import current
from halfstep.amp.recompute import recompute_blocks
from halfstep.policy import parse

CPU, HALF, BF16, FP32 = torch.device("cpu"), torch.float16, torch.bfloat16, torch.float32
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "dot", "vdot", "mv", "addmv", "linear", "convolution", "attention", "lstm", "rnn", "gru")


class Seen(TorchDispatchMode):
    """Notes the formats in which torch's products really run."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].strip("_")
        if any(name == p or name.startswith(f"{p}_") or (len(p) > 6 and p in name) for p in PRODUCTS):
            self.formats |= {a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()}
        return func(*args, **(kwargs or {}))


def whole(products: str = "emulated", form: str = "fp16") -> Any:
    return forward_context(parse(f"{form}-true,products={products}"), CPU)


def randoms(*shapes: tuple[int, ...], dtype: torch.dtype = HALF) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def bound(model: nn.Module, products: str = "emulated", form: str = "fp16", **options: str) -> nn.Module:
    bind(model, parse(",".join([f"{form}-true,products={products}", *(f"{k}={v}" for k, v in options.items())])), CPU)
    return model


OTHERS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {  # sums of products that torch's autocast on a CPU leaves alone
    "mv": (torch.mv, [(3, 5), (5,)]),
    "x.mv": (lambda a, b: a.mv(b), [(3, 5), (5,)]),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b, alpha=0.5), [(3,), (3, 5), (5,)]),
    "dot": (torch.dot, [(70,), (70,)]),
    "inner": (torch.inner, [(3, 5), (4, 5)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=1), [(3, 5), (5, 4)]),
    "bilinear": (F.bilinear, [(3, 5), (3, 4), (6, 5, 4), (6,)]),
    "einsum of three": (lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), [(3, 4), (4, 5), (5, 6)]),
    "lstm_cell": (lambda x, h, c, w, u: torch.lstm_cell(x, (h, c), w, u)[1], [(2, 3), (2, 4), (2, 4), (16, 3), (16, 4)]),
    "gru_cell": (torch.gru_cell, [(2, 3), (2, 4), (12, 3), (12, 4), (12,), (12,)]),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("form", "dtype"), [("bf16", BF16), ("fp16", HALF)])
def test_sums_of_products_are_rounded_once(name: str, form: str, dtype: torch.dtype) -> None:
    function, shapes = OTHERS[name]
    inputs = randoms(*shapes, dtype=dtype)
    with whole(form=form), Seen() as seen:
        output = function(*inputs)
    above = torch.ones_like(output)
    got = [output, *torch.autograd.grad(output, inputs, above)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    true = function(*exact)
    expected = [true, *torch.autograd.grad(true, exact, above.double())]
    assert HALF not in seen.formats
    assert BF16 not in seen.formats
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        other = other.detach()
        torch.testing.assert_close(one.double(), other, rtol=torch.finfo(dtype).eps / 2, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_are_those_of_fp32_rounded_once(kind: Callable[..., nn.Module]) -> None:
    net = kind(6, 8, num_layers=2, bidirectional=True, batch_first=True).to(HALF)
    (x,) = randoms((3, 5, 6))
    with whole(), Seen() as seen:
        output, _ = net(x)
    torch.autograd.backward(output, torch.ones_like(output))
    exact, given = kind(6, 8, num_layers=2, bidirectional=True, batch_first=True).double(), x.detach().double().requires_grad_()
    exact.load_state_dict(net.state_dict())
    true, _ = exact(given)
    torch.autograd.backward(true, torch.ones_like(true))
    assert HALF not in seen.formats
    pairs = [(output, true), (x.grad, given.grad), *((p.grad, q.grad) for p, q in zip(net.parameters(), exact.parameters(), strict=True))]
    for one, other in pairs:
        assert one.dtype == HALF
        other = other.detach()
        torch.testing.assert_close(one.double(), other, rtol=2**-11, atol=2e-5 * float(other.abs().max()))


def test_what_is_no_product_of_the_format_is_torchs_own_to_the_bit_and_to_the_word() -> None:
    a, b = (t.detach() for t in randoms((3, 5), (5, 4)))
    calls: list[Callable[[], Any]] = [
        lambda: F.softmax(a, -1),
        lambda: F.layer_norm(a, (5,)),
        lambda: torch.einsum("i,j->ij", a[0], b[0]),
        lambda: a.float() @ b.float(),
        lambda: a.bfloat16() @ b.bfloat16(),
        lambda: a.double() @ b.double(),
        lambda: a.sum(0) + b.mean(),
        lambda: a @ b.float(),
        lambda: F.linear(a, b.mT, b.float()[0]),
        lambda: torch.mm(a, b.bfloat16()),
        lambda: a @ a,
        lambda: F.conv1d(a[None], b.float()[:, :, None]),
    ]

    def told(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            return type(error), str(error).splitlines()[0]

    for call in calls:
        expected = told(call)
        with whole():
            got = told(call)
        if isinstance(expected, Tensor):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
        elif "mat1 and mat2 shapes" not in expected[1]:
            assert got == expected
        else:
            assert "mat1 and mat2 shapes cannot be multiplied" in got[1]
    assert sum(not isinstance(told(call), Tensor) for call in calls) == 5


@pytest.mark.parametrize(
    "products", ["native", "emulated:matmul", "emulated:convolution", "emulated:attention", "emulated:matmul|attention", "emulated"]
)
def test_the_families_that_are_asked_for_are_emulated_and_no_others(products: str) -> None:
    asked = () if products == "native" else tuple(FAMILIES) if products == "emulated" else tuple(products.partition(":")[2].split("|"))
    x, w, q = (t.detach() for t in randoms((2, 4, 6), (3, 4, 1), (1, 2, 4, 8)))
    calls = {"matmul": lambda: x @ x.mT, "convolution": lambda: F.conv1d(x, w), "attention": lambda: F.scaled_dot_product_attention(q, q, q)}
    for family, call in calls.items():
        with whole(products), Seen() as seen:
            call()
        assert seen.formats == ({FP32} if family in asked else {HALF})


Blocks = tuple[Callable[[], Any], ...]
AUTO, TORCHS = (lambda: autocast("cpu", BF16, products="native")), (lambda: torch.autocast("cpu", BF16))
OFF, TORCHS_OFF = (lambda: autocast("cpu", enabled=False)), (lambda: torch.autocast("cpu", enabled=False))
NESTED: dict[str, tuple[Blocks, Blocks, tuple[torch.dtype, ...]]] = {
    # blocks around and inside; the formats of a 16-bit product, an fp32 product, a 16-bit sum and a 16-bit softmax
    "alone": ((), (), (HALF, FP32, HALF, HALF)),
    "off": ((), (OFF,), (HALF, FP32, HALF, HALF)),
    "torch's off": ((), (TORCHS_OFF,), (HALF, FP32, HALF, HALF)),
    "on": ((), (AUTO,), (BF16, BF16, HALF, FP32)),
    "torch's on": ((), (TORCHS,), (BF16, BF16, HALF, HALF)),
    "off in on": ((), (AUTO, OFF), (FP32, FP32, FP32, FP32)),
    "off in torch's on": ((), (TORCHS, OFF), (FP32, FP32, FP32, FP32)),
    "torch's off in on": ((), (AUTO, TORCHS_OFF), (HALF, FP32, HALF, HALF)),
    "in on": ((AUTO,), (), (BF16, BF16, HALF, FP32)),
    "in an island": ((AUTO, OFF), (), (FP32, FP32, FP32, FP32)),
    "in torch's off": ((AUTO, TORCHS_OFF), (), (HALF, FP32, HALF, HALF)),
}


@pytest.mark.parametrize("products", ["native", "emulated"])
@pytest.mark.parametrize("name", NESTED)
def test_blocks_around_it_and_inside_mean_what_they_mean_without_it(name: str, products: str) -> None:
    around, inside, formats = NESTED[name]
    a, b = (t.detach() for t in randoms((3, 5), (5, 4)))

    def found(block: Any) -> list[Tensor]:
        with ExitStack() as stack:
            for enter in (*around, block, *inside):
                stack.enter_context(enter())
            return [a @ b, a.float() @ b.float(), a + a, F.softmax(a, -1)]

    got, without = found(lambda: whole(products)), found(nullcontext)
    assert [t.dtype for t in got] == [t.dtype for t in without] == list(formats)
    for one, other in zip(got, without, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)
    with ExitStack() as stack:
        for enter in (*around, lambda: whole(products), *inside, Seen):
            seen = stack.enter_context(enter())
        assert (a @ b).dtype == formats[0]
    emulates = formats[0] == HALF and products == "emulated" and name not in ("torch's off in on",)
    assert seen.formats == {FP32 if emulates else formats[0]}
    assert current("cpu") is None


def test_the_innermost_of_two_models_says_how_products_run() -> None:
    a, b = (t.detach() for t in randoms((3, 5), (5, 4)))
    for outer, inner, form in (("emulated", "native", "fp16"), ("native", "emulated", "fp16"), ("emulated", "emulated", "bf16")):
        x, y = (a, b) if form == "fp16" else (a.bfloat16(), b.bfloat16())
        with whole(outer):
            with whole(inner, form), Seen() as seen:
                x @ y
            with Seen() as after:
                a @ b
        assert seen.formats == {FP32 if inner == "emulated" else HALF}
        assert after.formats == {FP32 if outer == "emulated" else HALF}


class Net(nn.Module):
    """Layers of every family, blocks that can be computed again, and plain functions between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(8, 16), nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.conv, self.cell, self.last = nn.Conv1d(16, 16, 3, padding=1), nn.GRU(16, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.conv(x.mT).mT
        x = (x @ x.mT) @ x / 16
        return self.last(self.cell(x)[0][:, -1])


X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3))


def trained(model: nn.Module) -> list[Tensor]:
    output = model(X)
    output.float().square().sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def close(got: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert float((one.float() - other.float()).abs().max()) <= bound * float(other.float().abs().max())


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_a_model_is_that_of_torchs_kernels_but_for_roundings_and_multiplies_in_fp32(form: str) -> None:
    with Seen() as seen:
        got = trained(bound(Net(), form=form))
    assert seen.formats == {FP32}
    close(got, trained(bound(Net(), "native", form)), 40 * torch.finfo(parse(f"{form}-true").dtype).eps)
    assert {g.dtype for g in got[1:]} == {parse(f"{form}-true").dtype}
    again = trained(bound(Net(), form=form))
    assert all(map(torch.equal, got, again))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_has_the_numbers_of_training(mode: Callable[[], Any]) -> None:
    """torch's fused encoder layer is for evaluation, and its products would be seen by nobody."""
    model = bound(Net())
    expected = model(X).detach()
    with mode(), Seen() as seen:
        got = model.eval()(X)
    assert seen.formats == {FP32}
    assert torch.equal(got, expected)


def test_parts_called_alone_and_other_threads_have_them_too_and_nobody_else() -> None:
    model = bound(Net())
    expected = model.last(X).detach()
    found: list[Tensor] = []

    def run() -> None:
        with Seen() as seen:
            found.append(model.last(X).detach())
        assert seen.formats == {FP32}

    def other() -> None:
        found.append(model.last.weight @ model.last.weight.mT)
        assert not is_active()

    failed: list[Any] = []

    def guarded(call: Callable[[], None]) -> Callable[[], None]:
        def inner() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  told to the test, which is in another thread
                failed.append(error)

        return inner

    with whole():
        assert is_active()
        threads = [threading.Thread(target=guarded(call)) for call in (run, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert any(torch.equal(t, expected) for t in found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_computed_again_have_the_bits_of_those_that_were_kept(reentrant: bool) -> None:
    kept, again = bound(Net()), bound(Net())
    recompute_blocks(again, {"use_reentrant": reentrant})
    expected = trained(kept)
    with Seen() as seen:
        got = trained(again)
    assert all(map(torch.equal, got, expected))
    assert seen.formats == {FP32}


@pytest.mark.parametrize("held", ["fp32", "pin"])
def test_modules_held_in_fp32_compute_in_fp32(held: str) -> None:
    model = bound(Net(), fp32="conv") if held == "fp32" else bound(Net())
    if held == "pin":
        pin(model, "conv")
    seen: list[tuple[Tensor, Tensor]] = []
    model.conv.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    model(X)
    ((x, y),) = seen
    assert y.dtype == FP32
    exact = F.conv1d(x.float(), *(optim.full_values(p) for p in model.conv.parameters()), padding=1)
    assert torch.equal(y, exact), "nothing is rounded: not the operands, not the result"


def test_gradients_of_a_shared_weight_and_of_a_changed_one_are_as_torch_has_them() -> None:
    (x, w) = randoms((4, 6), (6, 6))
    with whole():
        once, twice = F.linear(x, w), F.linear(F.linear(x, w), w)
    torch.autograd.backward(twice, torch.ones_like(twice), retain_graph=True)
    assert w.grad is not None
    assert w.grad.dtype == HALF
    assert w.grad.is_contiguous()
    with torch.no_grad():
        w.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        once.sum().backward()


def test_functional_calls_and_transforms_go_through() -> None:
    model = bound(Net())
    values = {name: p.detach() for name, p in model.named_parameters()}
    expected = trained(model)
    got = torch.func.functional_call(model, values, (X,))
    assert torch.equal(got, expected[0])
    w, x = (t.detach() for t in randoms((5, 4), (3, 5)))
    with whole():
        batched = torch.func.vmap(lambda one: one @ w)(x)
        slope = torch.func.grad(lambda w: (x @ w).float().square().sum())(w)
    torch.testing.assert_close(batched, (x.float() @ w.float()).half(), rtol=2**-10, atol=1e-3)
    assert slope.dtype == HALF


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_activations_in_8_bits_go_with_it(kind: str) -> None:
    expected = trained(bound(Net()))
    torch.manual_seed(0)
    got = trained(bound(Net(), activations=kind))
    assert torch.equal(got[0], expected[0])
    close(got[1:], expected[1:], 0.2)


@contextmanager
def measured(monkeypatch: pytest.MonkeyPatch, families: tuple[str, ...]) -> Iterator[None]:
    monkeypatch.setattr(linear_loss, "emulated_families", lambda form: families)
    yield


@pytest.mark.parametrize("families", [(), ("matmul",)], ids=str)
@pytest.mark.parametrize("products", ["native", "emulated"])
def test_a_loss_in_chunks_multiplies_as_the_policy_says(products: str, families: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    h, w = randoms((4, 8), (16, 8), dtype=BF16)
    with measured(monkeypatch, families), whole(products, "bf16"):
        assert linear_loss._products(h, w, None) == (BF16, products == "emulated")
    with measured(monkeypatch, families):
        assert linear_loss._products(h, w, None) == (BF16, bool(families)), "where no policy is in force what was measured decides"


def test_a_backward_pass_under_the_policy_computes_plain_functions_again_in_the_same_way() -> None:
    (x, w) = randoms((4, 6), (6, 6))
    policy = parse("fp16-true,products=emulated")

    def plain(x: Tensor) -> Tensor:
        return (x @ w).relu() @ w

    for reentrant in (False, True):
        with forward_context(policy, CPU):
            output = torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=reentrant)
        with Seen() as seen, amp.backward_context(policy, CPU):
            output.sum().backward()
        assert seen.formats == {FP32}
