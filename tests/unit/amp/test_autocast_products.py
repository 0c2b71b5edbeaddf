"""Which products a block runs emulated: as it is told, else as this machine was measured."""

import copy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.amp.emulation import FAMILIES, ROUTES, rounded
from halfstep.amp.mode import current
from halfstep.amp.ops import LOW_ON_CUDA_ONLY, every_form
from halfstep.errors import ConfigError
from halfstep.hardware import FAMILIES as NAMES
from halfstep.hardware import rates
from halfstep.hardware.race import Race
from halfstep.hardware.rates import Book
from halfstep.policy import families_of, parse

CPU = torch.device("cpu")
TEXTS = ["native", "emulated", "emulated:matmul", "emulated:convolution", "emulated:attention", "emulated:convolution|attention"]


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine whose bf16 matmul alone is fast, and nothing in fp16."""

    def measure(form: str) -> dict[str, Race]:
        return {family: Race((1.0, 2.0 if (family, form) == ("matmul", "bf16") else 0.1, 1.0)) for family in NAMES}

    monkeypatch.setattr(rates, "_book", Book(tmp_path, measure))


def emulated_now() -> tuple[str, ...]:
    """The families whose functions are all emulated here; a family of which only some are fails.

    Functions that CUDA's list rounds on a CPU in any case, where torch's own list leaves them, tell nothing.
    """
    mode = current("cpu")
    on = mode.tables.on if mode is not None else {}
    in_any_case = set(every_form(LOW_ON_CUDA_ONLY)) | {function for function in ROUTES if ROUTES[function] is rounded}
    telling = {family: set(functions) - in_any_case for family, functions in FAMILIES.items()}
    found = {family: {function for function in functions if on.get(function) is ROUTES[function]} for family, functions in telling.items()}
    assert all(part in (set(), telling[family]) for family, part in found.items())
    return tuple(family for family in NAMES if found[family])


class Look(nn.Module):
    """Notes what is emulated in its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: list[tuple[str, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(emulated_now())
        return x * self.weight


def test_the_families_are_all_the_routes_each_once() -> None:
    assert tuple(FAMILIES) == NAMES
    assert sorted(map(id, (f for functions in FAMILIES.values() for f in functions))) == sorted(map(id, ROUTES))


@pytest.mark.parametrize("ops", ["cuda", "device"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_block_emulates_what_it_is_told(text: str, ops: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with amp.autocast("cpu", dtype, products=text, ops=ops) as block:
            assert emulated_now() == families_of(text)
            assert block.products == text
            with amp.autocast("cpu", dtype, products="native"):
                assert emulated_now() == ()
            assert emulated_now() == families_of(text)
        assert emulated_now() == ()


def test_untold_it_goes_by_what_was_measured_for_its_format() -> None:
    with amp.autocast("cpu", torch.bfloat16):
        assert emulated_now() == ("convolution", "attention")
        with amp.autocast("cpu", torch.float16):
            assert emulated_now() == NAMES
    with amp.autocast("cpu", torch.float16, enabled=False):
        assert emulated_now() == ()


def test_a_decorated_function_keeps_them() -> None:
    assert amp.autocast("cpu", torch.bfloat16, products="emulated:matmul")(emulated_now)() == ("matmul",)


@pytest.mark.parametrize("text", TEXTS)
def test_a_policys_block_and_a_bound_model_go_by_the_policy(text: str) -> None:
    policy = parse(f"bf16-mixed,products={text}")
    with amp.forward_context(policy, CPU):
        assert emulated_now() == families_of(text)
    model = nn.Sequential(Look())
    amp.bind(model, policy, CPU)
    model(torch.ones(2, 4))
    model[0](torch.ones(2, 4))
    assert model[0].seen == [families_of(text)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_the_same_whichever_runs(dtype: torch.dtype) -> None:
    x, q = torch.randn(2, 4, 8), torch.randn(2, 2, 6, 8)
    functions: list[Any] = [
        (F.linear, (x, torch.randn(3, 8))),
        (F.conv1d, (x, torch.randn(3, 4, 3))),
        (F.scaled_dot_product_attention, (q, q + 1, q - 1)),
    ]
    for function, args in functions:
        results = []
        for text in ("native", "emulated"):
            given = [a.clone().requires_grad_() for a in args]
            with amp.autocast("cpu", dtype, products=text):
                y = function(*given)
            y.float().square().sum().backward()
            results.append([y, *(a.grad for a in given)])
        for one, other in zip(*results, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=16 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("text", ["fast", "emulated:rnn", "native:matmul"])
def test_a_text_that_says_nothing_is_refused_also_where_autocast_is_off(text: str) -> None:
    for enabled in (True, False):
        with pytest.raises(ConfigError, match="products="):
            amp.autocast("cpu", torch.bfloat16, enabled, products=text)


def test_on_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["halfstep.amp.autocast"], "probe", lambda device: None)  # as if there were one
    amp.autocast("cuda", torch.float16)
    with pytest.raises(ConfigError, match="products=native has no effect on a GPU"):
        amp.autocast("cuda", torch.float16, products="native")


def test_a_bound_models_products_can_be_changed_and_its_copies_follow() -> None:
    model = nn.Sequential(Look())
    amp.bind(model, parse("bf16-mixed"), CPU)
    twin = copy.deepcopy(model)
    products = amp.products_of(model)
    assert products is amp.products_of(twin)
    assert products is not None
    assert products.settled(parse("bf16-mixed"), CPU) == "emulated:convolution|attention"
    for text in ("native", "emulated", "auto"):
        products.text = text
        twin(torch.ones(1, 4))
        thread = threading.Thread(target=model, args=(torch.ones(1, 4),))
        thread.start()
        thread.join()
        expected = families_of(text)
        for one in (model[0], twin[0]):
            assert one.seen[-1] == (("convolution", "attention") if expected is None else expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself, when it compiles
def test_a_compiled_block_runs_what_the_eager_one_runs() -> None:
    torch._dynamo.reset()
    weight, kernel = torch.randn(8, 8), torch.randn(4, 4, 3)

    def run(x: Tensor) -> Tensor:
        with amp.autocast("cpu", torch.bfloat16):
            return F.conv1d(F.linear(x, weight), kernel)

    graphs = list[str]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    x = torch.randn(2, 4, 8)
    assert torch.equal(torch.compile(run, backend=backend, fullgraph=True)(x), run(x))
    (graph,) = graphs
    assert graph.count("narrow") > 0, "a part of it is emulated"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_follows_when_its_products_change() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    amp.bind(model, parse("bf16-mixed,output=compute"), CPU)
    products, graphs = amp.products_of(model), list[bool]()
    assert products is not None

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append("narrow" in graph.print_readable(print_output=False))
        return graph.forward

    compiled, x = torch.compile(model, backend=backend), torch.randn(2, 8)
    for text, emulated in (("native", False), ("emulated", True)):
        products.text = text
        assert torch.equal(compiled(x), model(x))
        assert graphs[-1] == emulated
    assert len(graphs) == 2


@pytest.mark.parametrize("ops", ["cuda", "device"])
def test_an_einsum_of_matrices_saves_16_bit_operands_under_either_list(ops: str) -> None:
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 6, requires_grad=True)
    saved = list[Tensor]()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)  # type: ignore[func-returns-value]
    with amp.autocast("cpu", torch.bfloat16, products="emulated", ops=ops), hooks:
        y = torch.einsum("bij,bjk->bik", a, b)
        assert y.dtype == torch.bfloat16
        assert torch.equal(torch.einsum("bij,bjk->bik", [a, b]), y)
    assert saved
    assert {t.dtype for t in saved} == {torch.bfloat16}


def test_an_einsum_that_sums_nothing_is_rounded_as_cudas_list_has_it() -> None:
    a, b = torch.randn(4), torch.randn(4)
    with amp.autocast("cpu", torch.bfloat16, products="emulated"):
        y = torch.einsum("i,i->i", a, b)
    assert torch.equal(y, (a.bfloat16().float() * b.bfloat16().float()).bfloat16())
