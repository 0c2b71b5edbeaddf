"""User lists: ops moved to fp32 or to 16 bits by name, in a block and in a policy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep import Accelerator, amp
from halfstep.amp.mode import Applied, Switched
from halfstep.amp.routes import bare_island, tables
from halfstep.errors import ConfigError
from halfstep.policy import parse

DTYPES = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(0.1, 0.9, 16).reshape(4, 4).to(dtype)


FORMS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "softmax": [
        lambda t: torch.softmax(t, -1),
        lambda t: t.softmax(-1),
        lambda t: F.softmax(t, -1),
        nn.Softmax(-1),
        lambda t: torch.special.softmax(t, -1),
    ],
    "pow": [lambda t: t**2, lambda t: t.pow(2), lambda t: torch.pow(t, 2)],
    "layer_norm": [lambda t: F.layer_norm(t, (4,)), nn.LayerNorm(4), lambda t: torch.layer_norm(t, (4,))],
    "gelu": [F.gelu, nn.GELU()],
    "mul": [lambda t: t * 3, lambda t: 3 * t, lambda t: t.mul(3), lambda t: torch.mul(t, 3)],
    "linear": [lambda t: F.linear(t, t), nn.Linear(4, 4)],
    "matmul": [lambda t: t @ t, lambda t: torch.matmul(t, t), lambda t: t.matmul(t)],
    "mean": [lambda t: t.mean(), torch.mean],
    "conv1d": [lambda t: F.conv1d(t[None], t[:, :, None]), nn.Conv1d(4, 4, 1)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op_list", ["cuda", "device"])
@pytest.mark.parametrize("name", list(FORMS))
def test_a_name_moves_every_form(name: str, op_list: str, dtype: torch.dtype) -> None:
    for form in FORMS[name]:
        wide, low = form(x(dtype).float()), form(x().to(dtype).float())
        with amp.autocast("cpu", dtype, ops=op_list, fp32_ops=(name,)):
            got = form(x(dtype))
        assert got.dtype == torch.float32
        assert torch.equal(got, wide)
        with amp.autocast("cpu", dtype, ops=op_list, half_ops=[name]):
            got = form(x())
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), low, rtol=2**-6, atol=2**-6)


def test_lists_hold_inside_attention_and_for_nested_blocks_and_decorated_functions() -> None:
    attention, given = nn.MultiheadAttention(4, 2, batch_first=True), x()[None]
    with amp.autocast("cpu", torch.bfloat16, half_ops=("softmax",)):
        assert attention(given, given, given)[1].dtype == torch.bfloat16
        with amp.autocast("cpu", torch.bfloat16):
            assert attention(given, given, given)[1].dtype == torch.float32
            assert x().bfloat16().softmax(-1).dtype == torch.float32
        assert x().softmax(-1).dtype == torch.bfloat16

    @amp.autocast("cpu", torch.float16, ops="device", fp32_ops=("matmul",))
    def product(t: Tensor) -> tuple[torch.dtype, torch.dtype]:
        return (t @ t).dtype, t.half().softmax(-1).dtype

    assert product(x()) == (torch.float32, torch.float16)


@pytest.mark.parametrize("outer", ["cuda", "device"])
def test_an_inner_block_has_its_own_list(outer: str) -> None:
    inner = {"cuda": "device", "device": "cuda"}[outer]
    expected = {"cuda": torch.float32, "device": torch.bfloat16}
    half = x(torch.bfloat16)
    with amp.autocast("cpu", torch.bfloat16, ops=outer):
        with amp.autocast("cpu", torch.bfloat16, ops=inner):
            assert half.softmax(-1).dtype == expected[inner]
        assert half.softmax(-1).dtype == expected[outer]


@pytest.mark.parametrize(
    ("lists", "cause", "remedy"),
    [
        ({"fp32_ops": ("softmx",)}, "fp32_ops has 'softmx'", "Did you mean 'softmax'?"),
        ({"half_ops": ("layernorm",)}, "half_ops has 'layernorm'", "Did you mean 'layer_norm'?"),
        ({"half_ops": ("exp_",)}, "'exp_'", "Did you mean"),
        ({"fp32_ops": ("F.softmax",)}, "'F.softmax'", "Did you mean"),
        ({"fp32_ops": ("zzzzz",)}, "'zzzzz'", "without torch."),
        ({"fp32_ops": ("manual_seed",)}, "'manual_seed'", ""),
        ({"fp32_ops": ("exp", "softmax"), "half_ops": ("softmax",)}, "'softmax' stands in fp32_ops and in half_ops", "Leave it out of one"),
        ({"fp32_ops": "softmax"}, "fp32_ops='softmax' is not a list", "fp32_ops=('softmax',)"),
        ({"half_ops": (torch.softmax,)}, "is not a list of names", "half_ops=('softmax',)"),
        ({"ops": "gpu"}, "ops='gpu'", "cuda"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(lists: dict[str, Any], cause: str, remedy: str) -> None:
    for enabled in (True, False):
        with pytest.raises(ConfigError) as caught:
            amp.autocast("cpu", torch.bfloat16, enabled, **lists)
        assert cause in caught.value.cause
        assert remedy in caught.value.remedy
        assert caught.value.remedy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [F.binary_cross_entropy, nn.BCELoss(), torch.binary_cross_entropy_with_logits], ids=["F", "module", "logits"])
def test_the_loss_of_16_bit_probabilities_is_refused(form: Any, dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, 10.0)
    target = torch.zeros(1, 1)
    with amp.autocast("cpu", dtype):
        logits = layer(torch.ones(1, 4))
        if form is torch.binary_cross_entropy_with_logits:
            loss = form(logits, target)
            assert loss.item() == pytest.approx(10.0, rel=1e-3)
            return
        with pytest.raises(ConfigError) as caught:
            form(torch.sigmoid(logits), target)
        assert str(dtype) in caught.value.cause
        assert "binary_cross_entropy_with_logits" in caught.value.remedy
        assert form(torch.sigmoid(logits.float()), target).item() == pytest.approx(10.0, rel=1e-3), "fp32 probabilities are fine"
        with pytest.raises(ConfigError):
            form(torch.full((1, 1), 0.5), target.to(dtype))
    with amp.autocast("cpu", dtype, fp32_ops=("binary_cross_entropy",)):
        probability = torch.sigmoid(layer(torch.ones(1, 4)))
        assert torch.equal(form(probability, target), form(probability.float(), target))
    with amp.autocast("cpu", dtype, ops="device"):
        assert form(torch.sigmoid(logits), target).dtype == torch.float32


@pytest.mark.parametrize(("text", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)])
def test_a_policy_carries_the_lists(text: str, dtype: torch.dtype) -> None:
    with amp.forward_context(parse(f"{text},ops=device,fp32_ops=gelu|mean,half_ops=exp"), CPU):
        half = x(dtype)
        assert [half.softmax(-1).dtype, F.gelu(half).dtype, half.mean().dtype, x().exp().dtype] == [dtype, torch.float32, torch.float32, dtype]
    with amp.forward_context(parse(text), CPU):
        assert [half.softmax(-1).dtype, F.gelu(half).dtype, half.mean().dtype, x().exp().dtype] == [torch.float32, dtype, dtype, torch.float32]


def test_a_policy_with_a_name_that_is_no_op_is_refused_when_it_is_bound() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="softmx"):
        amp.bind(model, parse("bf16-mixed,fp32_ops=softmx"), CPU)
    assert "forward" not in model.__dict__
    with pytest.raises(ConfigError, match="softmx"):
        Accelerator(precision="bf16-mixed,half_ops=softmx", cpu=True).prepare(nn.Linear(2, 2))


def test_on_cuda_lists_and_islands_act_and_nothing_else_does() -> None:
    """On CUDA tensors without data: the formats, without a GPU."""
    assert not tables("cuda", "cuda", (), (), ()).acts_on
    assert not tables("cuda", "device", (), (), ()).acts_on
    moved = tables("cuda", "cuda", ("gelu", "linear"), ("softmax",), ())
    with FakeTensorMode(allow_non_fake_inputs=True), Switched("cuda", True, torch.float16, False), Applied("cuda", moved):
        half = torch.empty(4, 4, dtype=torch.float16, device="cuda")
        wide = half.float()
        assert [F.gelu(half).dtype, (half @ wide).dtype, F.linear(half, wide).dtype] == [torch.float32, torch.float16, torch.float32]
        assert [wide.softmax(-1).dtype, F.softmax(wide, -1).dtype, half.exp().dtype] == [torch.float16, torch.float16, torch.float32]
        on_cpu = torch.empty(4, 4, dtype=torch.float16)
        assert F.gelu(on_cpu).dtype == torch.float16, "tensors of another device are left alone"
        with Switched("cuda", False, torch.float16, False), Applied("cuda", bare_island("cuda")):
            assert [(half * half).dtype, F.linear(half, wide).dtype, half.softmax(-1).dtype] == [torch.float32] * 3
            assert (on_cpu * on_cpu).dtype == torch.float16


def test_an_accelerator_runs_the_lists() -> None:
    model = Accelerator(precision="bf16-mixed,output=compute,half_ops=softmax", cpu=True).prepare(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)))
    assert model(x()).dtype == torch.bfloat16
