"""A model as if in another format: the numbers of the real one, every place that is rounded, and no trace afterwards."""

import gc

import pytest
import torch
import torch.nn.functional as F
from compare_models import Net, Recurrent, texts
from torch import nn

import halfstep
from halfstep.amp import bind
from halfstep.amp.as_written import as_written
from halfstep.diagnostics.simulate import Rounded, simulate
from halfstep.errors import ConfigError
from halfstep.numerics import FORMATS, Format, nearest, ulp
from halfstep.policy import parse

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def run(model: nn.Module, x=X):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def equal(a, b) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_the_format_of_all_bits_is_the_identity_bit_for_bit():
    model = Recurrent()
    batch = texts(1)[0]

    def once():
        torch.manual_seed(0)
        model.zero_grad()
        model(**batch)["loss"].backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = once()
    with simulate(model, "e8m23") as seen:
        assert equal(once(), plain)
    assert {r.what for r in seen.seen} == {"inputs", "weights", "outputs", "gradients"}
    assert all(r.error == r.overflow == r.underflow == 0 for r in seen.seen)


@pytest.mark.parametrize(("fmt", "policy"), [("bf16", "bf16-mixed"), ("fp16", "fp16-mixed")])
def test_a_net_of_products_has_the_bits_of_emulated_16_bit_products(fmt, policy):
    """Outputs and the gradients of weights and biases: halfstep's emulation rounds operands, sums in fp32 and rounds results."""
    real = net()
    bind(real, parse(f"{policy},products=emulated,output=compute"), torch.device("cpu"))
    with simulate(model := net(), fmt):
        got = run(model)
    wanted = [t.float() for t in run(real)]
    assert equal(got[:1] + got[2:], wanted[:1] + wanted[2:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_product_is_torchs_own_in_16_bits_up_to_the_order_of_fp32_sums(dtype):
    """Both are within half an ulp, and the error of an fp32 sum of so many terms, of the exact product of the rounded operands."""
    layer = nn.Linear(64, 32)
    x = torch.randn(32, 64)
    name = "fp16" if dtype == torch.float16 else "bf16"
    with simulate(layer, name):
        got = layer(x).detach()
    w, b = (t.detach().to(dtype).double() for t in (layer.weight, layer.bias))
    exact = x.to(dtype).double() @ w.t() + b
    sums = 65 * 2.0**-24 * (x.to(dtype).double().abs() @ w.abs().t() + b.abs())
    allowed = ulp(exact, FORMATS[name]) / 2 + sums
    real = F.linear(x.to(dtype), layer.weight.detach().to(dtype), layer.bias.detach().to(dtype))
    assert bool(((got.double() - exact).abs() <= allowed).all())
    assert bool(((real.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("what", ["inputs", "weights", "outputs", "gradients"])
def test_each_kind_of_number_is_rounded_by_itself(what):
    model, form = nn.Linear(16, 4), FORMATS["e4m3"]
    with simulate(model, "e4m3", what=what) as seen:
        y, gx, gw, gb = run(model)
    w, b = model.weight.detach(), model.bias.detach()

    def maybe(t, kind):
        return nearest(t, form) if what == kind else t

    wanted = maybe(F.linear(maybe(X, "inputs"), maybe(w, "weights"), maybe(b, "weights")), "outputs")
    assert torch.equal(y, wanted)
    back = maybe(2 * wanted, "gradients")
    assert torch.allclose(gx, maybe(back @ maybe(w, "weights"), "gradients"), atol=0 if what == "gradients" else 1e-5)
    assert torch.allclose(gb, maybe(back.sum(0), "gradients"), atol=0 if what == "gradients" else 1e-5)
    assert torch.allclose(gw, maybe(back.t() @ maybe(X, "inputs"), "gradients"), atol=0 if what == "gradients" else 1e-5)
    assert {r.what for r in seen.seen} == {what}


def test_a_saturating_format_stops_at_the_largest_and_another_overflows():
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(100.0)
    for fmt, wanted in (("e4m3", 448.0), (Format("ieee", None, 4, 3), torch.inf), ("e5m2", 2048.0)):
        with simulate(model, fmt) as seen:
            assert float(model(torch.full((1, 2), 10.0)).detach()) == wanted
        over = {r.what: r.overflow for r in seen.seen}
        assert over["outputs"] == (0.0 if fmt == "e5m2" else 1.0)
        assert over["inputs"] == 0.0


def test_what_broke_is_counted_and_told_worst_first():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Identity())
    model[0].weight.data = torch.diag(torch.tensor([1.0, 1.0, 1000.0, 1e-3]))
    model[1].weight.data = torch.eye(4)
    with simulate(model, "e4m3", what=("outputs", "weights")) as seen:
        model(torch.ones(2, 4))
    assert seen.broken == (Rounded("0", "Linear", "weights", 16, 1 / 16, 0.0, pytest.approx(0.552, abs=0.001)),)
    assert str(seen).splitlines()[0] == "e4m3: 1 of 2 modules have numbers that overflowed or became 0"
    assert "0 (Linear), weights: 6.25% are beyond 448 and became it" in str(seen)
    assert seen.as_dict()["modules"][0]["overflow"] == 1 / 16


def test_names_choose_modules_with_all_that_is_inside():
    model = Net()
    with simulate(model, "e4m3", modules="blocks.0|head") as seen:
        model(**texts(1)[0])["loss"].backward()
    names = {r.module for r in seen.seen}
    assert "head" in names
    assert "blocks.0.attention.qkv" in names
    assert all(name == "head" or name.startswith("blocks.0") for name in names)


def test_products_without_a_module_norms_and_tables_are_rounded_too():
    model = Net()
    with simulate(model, "e3m2") as seen:
        model(**texts(1)[0])["loss"].backward()
    kinds = {(r.module, r.what) for r in seen.seen}
    assert {("blocks.0.attention", "inputs"), ("blocks.0.before", "weights"), ("words", "weights"), ("", "outputs")} <= kinds


def test_attention_of_torch_is_looked_into():
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    with simulate(model, "e3m2") as seen:
        model(x, x, x)
    assert {r.what for r in seen.seen} == {"inputs", "weights", "outputs"}


def test_it_removes_itself_without_a_trace():
    model = net()
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    hooks = {n: {k: len(v) for k, v in d.items() if k.endswith(("hooks", "hooks_with_kwargs", "always_called"))} for n, d in before.items()}
    plain = run(model)
    handle = simulate(model, "e2m1")
    assert not equal(run(model), plain)
    handle.remove()
    handle.remove()
    assert equal(run(model), plain)
    for name, part in model.named_modules():
        assert {k: len(v) for k, v in vars(part).items() if k.endswith(("hooks", "hooks_with_kwargs", "always_called"))} == hooks[name]
        assert set(vars(part)) == set(before[name])


def test_an_error_inside_leaves_nothing_open():
    class Breaks(nn.Module):
        def forward(self, x):
            raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(16, 4), Breaks())
    with simulate(model, "e4m3"):
        for _ in range(2):
            with pytest.raises(ValueError, match="on purpose"):
                model(X)
        torch.manual_seed(0)
        x, w = torch.randn(3, 3), torch.randn(3, 3)
        assert torch.equal(x @ w, torch.mm(x, w))  # a product outside of the model is not rounded
        assert not torch.equal(nearest(x @ w, FORMATS["e4m3"]), x @ w)


def test_a_trace_inside_of_it_names_the_module_that_overflows():
    model = net()
    model[0].weight.data *= 1e6
    with simulate(model, "fp16"):
        first = halfstep.trace(model, (X,), loss=lambda y: y.square().mean()).first
    assert first is not None
    assert first.place.module == "0"
    assert halfstep.trace(model, (X,), loss=lambda y: y.square().mean()).first is None


def test_double_backward_goes_through():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 4, requires_grad=True)
    with simulate(model, "bf16"):
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        first.square().sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


def under_autocast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(X)


REFUSED = {
    "a format": lambda: simulate(net(), "int4"),
    "a pattern": lambda: simulate(net(), "fp16", modules="nowhere*"),
    "a kind": lambda: simulate(net(), "fp16", what="activations"),
    "nothing": lambda: simulate(net(), "fp16", what=()),
    "no model": lambda: simulate(torch.zeros(1), "fp16"),
    "16-bit weights": lambda: simulate(net().half(), "e4m3"),
    "fp64 weights": lambda: simulate(net().double(), "e4m3"),
    "a bound model": lambda: simulate(bind(net(), parse("bf16-mixed"), torch.device("cpu")).module, "e4m3"),
    "autocast": lambda: under_autocast(simulated()),
}


def simulated():
    model = net()
    simulate(model, "e4m3")
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_simulated_is_refused_with_a_remedy(case):
    with pytest.raises(ConfigError) as refused:
        REFUSED[case]()
    assert refused.value.remedy
    assert as_written._inside <= 1
    del refused
    gc.collect()
    assert not as_written._inside, "the handle of a model that is gone leaves nothing behind"


def test_a_handle_that_is_forgotten_ends_with_its_model():
    """A compiled model runs as written under it, and torch keeps that for the whole process."""
    model = net()
    handle = simulate(model, "e4m3")
    assert as_written._inside == 1
    del model
    handle = None
    gc.collect()
    assert (handle, as_written._inside) == (None, 0)


@pytest.mark.parametrize(("fmt", "fits", "over"), [("e4m3", 463.0, 465.0), ("e5m2", 61439.0, 61440.0), ("fp16", 65519.0, 65520.0)])
def test_overflow_is_counted_from_half_a_step_beyond_the_largest(fmt, fits, over):
    model = nn.Linear(1, 1, bias=False)
    for weight, share in ((fits, 0.0), (over, 1.0)):
        model.weight.data.fill_(weight)
        with simulate(model, fmt, what="weights") as seen:
            model(torch.zeros(1, 1))
        assert [r.overflow for r in seen.seen] == [share]
