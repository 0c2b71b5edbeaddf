"""torch.compile sees the op policy: inside and outside the compiled function, and in a bound model."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.amp.emulation import Emulation
from halfstep.policy import parse

# torch warns about itself when it compiles
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("fresh_compiler")]
CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16]
INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor compiles C++, and there is no g++ on this machine")
)


class Net(nn.Module):
    """A product, an attention, ops of the fp32 list by method, function and operator, and an island."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        low = self.up(x)
        h = self.norm(F.gelu(low))
        h = h + F.scaled_dot_product_attention(h, h, h)
        with amp.autocast("cpu", enabled=False):
            h = h + 0.1 * low.pow(2)
        return (self.down(h) ** 2).softmax(-1)


def run(net: nn.Module, call: Callable[[Tensor], Tensor], block: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[Tensor]:
    """The output and the gradients."""
    x = torch.linspace(-2, 2, 80).reshape(2, 5, 8).requires_grad_()
    with block():
        output = call(x)
    net.zero_grad()
    output.float().pow(2).sum().backward()
    return [output.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None), x.grad]  # type: ignore[list-item]


def ways(text: str, backend: str) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """How a model meets the policy: the name, what is computed without compilation, and with."""
    policy = parse(text)

    def block() -> AbstractContextManager[Any]:
        return amp.forward_context(policy, CPU)

    net = Net()
    yield "around", run(net, net, block), run(net, torch.compile(net, backend=backend, fullgraph=True), block)

    def inside(x: Tensor) -> Tensor:
        with amp.autocast("cpu", policy.dtype, ops=policy.ops, fp32_ops=policy.fp32_ops):
            output: Tensor = net(x)
        return output

    yield "inside", run(net, inside), run(net, torch.compile(inside, backend=backend, fullgraph=True))
    amp.bind(net, policy, CPU)
    yield "bound", run(net, net), run(net, torch.compile(net, backend=backend, fullgraph=True))
    yield "a part of a bound model", run(net, net.up), run(net, torch.compile(net.up, backend=backend, fullgraph=True))


POLICIES = ["bf16-mixed", "fp16-mixed,output=compute,ops=device,fp32_ops=gelu"]


@pytest.mark.parametrize("text", [POLICIES[0], pytest.param(POLICIES[1], marks=pytest.mark.slow)])
def test_compiled_without_code_generation_the_bits_are_the_same(text: str) -> None:
    """One graph without a break. Where the block is around the compiled function, torch traces the backward pass under the same autocast as the
    forward pass (torch._functorch.config.backward_pass_autocast), so its products are 16-bit too: within some roundings.
    """
    for way, expected, got in ways(text, "aot_eager"):
        assert [t.dtype for t in got] == [t.dtype for t in expected], way
        assert torch.equal(got[0], expected[0]), way
        for one, other in zip(got[1:], expected[1:], strict=True):
            if way == "around":
                assert float((one - other).abs().max()) <= 4 * torch.finfo(parse(text).dtype).eps * float(other.abs().max())
            else:
                assert torch.equal(one, other), way
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("text", POLICIES)
def test_the_block_around_is_bit_equal_with_a_backward_pass_traced_as_torch_runs_it(text: str) -> None:
    net = Net()
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        got = run(net, torch.compile(net, backend="aot_eager"), lambda: amp.forward_context(parse(text), CPU))
    expected = run(net, net, lambda: amp.forward_context(parse(text), CPU))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [INDUCTOR])
@pytest.mark.parametrize("text", ["bf16-mixed"])
def test_compiled_to_code_the_formats_are_the_same_and_the_numbers_as_near(text: str, backend: str) -> None:
    """Inductor keeps chains of element-wise operations in fp32 that eager rounds one by one: nearer to fp32, and not the same bits."""
    net = Net()
    exact = run(net, net)
    for way, expected, got in ways(text, backend):
        assert [t.dtype for t in got] == [t.dtype for t in expected], way
        if way == "a part of a bound model":
            assert torch.equal(got[0], expected[0])
            continue
        for one, other, true in zip(got, expected, exact, strict=True):
            size = float(true.abs().max())
            assert float((one - other).abs().max()) <= 4 * torch.finfo(parse(text).dtype).eps * size, way
        assert not torch.equal(got[0], exact[0]), "the policy is not lost"


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "matmul": lambda x, w: x @ w.mT,
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
}
SLOW = pytest.param("inductor", marks=[*INDUCTOR.marks, pytest.mark.slow])


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [(n, d, "aot_eager") for n in PRODUCTS for d in DTYPES]
    + [pytest.param("linear", torch.bfloat16, *INDUCTOR.values, marks=INDUCTOR.marks)]
    + [pytest.param(n, torch.float16, *SLOW.values, marks=SLOW.marks) for n in PRODUCTS],
)
def test_emulated_products_keep_their_roundings(name: str, dtype: torch.dtype, backend: str) -> None:
    """A compiler that fused fp32 -> 16 bits -> fp32 away would multiply in fp32."""
    x, w = torch.linspace(-1, 1, 96).reshape(4, 24), torch.linspace(1, 2, 72).reshape(3, 24).requires_grad_()
    found, product = [], PRODUCTS[name]
    for call in (product, torch.compile(product, backend=backend, fullgraph=True)):
        w.grad = None
        with torch.autocast("cpu", dtype, cache_enabled=False), Emulation():
            y = call(x, w)
        y.float().square().sum().backward()
        found.append([y.detach(), w.grad])
    eager, compiled = found
    assert compiled[0].dtype == dtype
    assert torch.equal(compiled[0], eager[0])
    assert torch.equal(eager[0].float(), (x.to(dtype).float() @ w.to(dtype).float().mT).to(dtype).float().detach())
    torch.testing.assert_close(compiled[1], eager[1], rtol=torch.finfo(dtype).eps, atol=0.0)


def test_a_change_of_the_block_is_noticed() -> None:
    """A compiled function that is called under another policy later is compiled again and not run under the first one."""
    compiled = torch.compile(lambda x: x.softmax(-1), backend="aot_eager")
    half = torch.ones(2, 3, dtype=torch.bfloat16)
    seen = []
    for block in (
        amp.autocast("cpu", torch.bfloat16),
        amp.autocast("cpu", torch.bfloat16, ops="device"),
        amp.autocast("cpu", torch.bfloat16, half_ops=("softmax",)),
        nullcontext(),
        amp.autocast("cpu", torch.bfloat16),
    ):
        with block:
            seen.append(compiled(half).dtype)
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32]


def test_state_is_put_back_after_a_compiled_block() -> None:
    def inside(x: Tensor) -> Tensor:
        with amp.autocast("cpu", torch.float16):
            return x @ x

    x = torch.ones(2, 2)
    compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert compiled(x).dtype == torch.float16
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
        assert not torch.overrides._get_current_function_mode_stack()
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype == torch.float16
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_torch_still_marks_constant_functions_as_halfstep_does() -> None:
    """`torch.compiler.assume_constant_result` would import a second's worth of compiler."""
    assert torch.compiler.assume_constant_result(lambda: 1)._dynamo_marked_constant


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_bound_model_may_be_compiled_before_anything_else_has_run_in_a_thread(backend: str | None) -> None:
    """torch.compile guards on the attributes that the thread's state has at the first call: they are all there from the start."""
    from halfstep.amp.mode import inside

    seen: list[Any] = []

    def first() -> None:
        seen.append(set(vars(inside)))
        if backend is not None:
            net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
            amp.bind(net, parse("fp16-mixed"), CPU)
            amp.GradScaler().watch(net)
            seen.append(torch.compile(net, backend=backend, fullgraph=True)(torch.randn(4, 8)).shape)

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert seen == [{"policy", "joins", "backward", "around", "begun_under", "unread", "loss_alone"}, *([(4, 1)] if backend is not None else [])]
