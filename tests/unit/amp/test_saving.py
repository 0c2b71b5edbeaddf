"""Activations in 8 bits: which saved tensors are packed, which stay exact, and how near the gradients come."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import amp
from halfstep.amp import saved, saving
from halfstep.errors import ConfigError
from halfstep.policy import parse

CPU = torch.device("cpu")
KINDS = ("int8", "fp8")


class Op(nn.Module):
    """A function as a module, with parameters or without."""

    def __init__(self, call, **parameters):
        super().__init__()
        self.call = call
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args):
        return self.call(self, *args)


def bound(module, text):
    amp.bind(module, parse(text), CPU)
    return module


def packs(module, *args, text="fp32,activations=int8"):
    """What the tensors saved by one forward pass have become: (kind, shape) of each."""
    found = []
    stock = saving.Saving._pack

    def pack(self, x):
        stored = stock(self, x)
        found.append((type(stored).__name__, tuple(x.shape)))
        return stored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.Saving, "_pack", pack)
        output = bound(module, text)(*args)
    return found, output


W, V = torch.randn(96, 64) / 8, torch.randn(64, 96) / 8
OPS = {
    "linear": (lambda m, x: F.linear(x, m.w), {"w": W}),
    "conv": (lambda m, x: F.conv1d(x.mT, m.w), {"w": torch.randn(32, 64, 3) / 8}),
    "addmm": (lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w), {"w": V, "b": torch.zeros(96)}),
    "matmul of two activations": (lambda m, x: x @ x.mT, {}),
    "einsum": (lambda m, x: torch.einsum("bth,bsh->bts", x, x), {}),
    "attention": (lambda m, x: F.scaled_dot_product_attention(x.view(4, 32, 2, 32).mT, x.view(4, 32, 2, 32).mT, x.view(4, 32, 2, 32).mT), {}),
    "layer norm": (lambda m, x: F.layer_norm(x, (64,), m.g, m.b), {"g": torch.ones(64), "b": torch.zeros(64)}),
    "rms norm": (lambda m, x: F.rms_norm(x, (64,), m.g), {"g": torch.ones(64)}),
    "batch norm": (lambda m, x: F.batch_norm(x.mT, None, None, m.g, None, True), {"g": torch.ones(64)}),
    "group norm": (lambda m, x: F.group_norm(x.mT, 4), {}),
    "relu": (lambda m, x: F.relu(x), {}),
    "relu in place": (lambda m, x: F.relu(x * 1, inplace=True), {}),
    "gelu": (lambda m, x: F.gelu(x), {}),
    "silu": (lambda m, x: F.silu(x), {}),
    "leaky relu": (lambda m, x: F.leaky_relu(x, 0.1), {}),
    "tanh": (lambda m, x: x.tanh(), {}),
    "sigmoid": (lambda m, x: x.sigmoid(), {}),
    "product": (lambda m, x: x * x.flip(0), {}),
    "cube": (lambda m, x: x**3, {}),
    "dropout": (lambda m, x: F.dropout(x, 0.3), {}),
    "max pool": (lambda m, x: F.max_pool2d(x[:, None], 2), {}),
}
EXACT = ("relu", "relu in place", "leaky relu", "dropout", "max pool")  # signs, masks and places


def gradients(name, text, dtype=torch.float32, seed=0):
    """Gradients of an op's input and parameters, weighed by fixed numbers, as one fp64 vector; and what was packed."""
    call, parameters = OPS[name]
    torch.manual_seed(3)
    x = torch.randn(4, 32, 64).to(dtype).requires_grad_()
    module = Op(call, **{k: v.to(dtype) for k, v in parameters.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "SEED", seed)
        found, y = packs(module, x * 1, text=text) if text else ([], module(x * 1))
    above = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (y * above.to(y.dtype)).sum().backward()
    return torch.cat([t.grad.double().flatten() for t in (x, *module.parameters())]), found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPS)
def test_gradients_of_each_op_are_as_near_as_the_format_allows(name, kind):
    exact, _ = gradients(name, None, torch.float64 if name != "dropout" else torch.float32)
    found, kinds = gradients(name, f"fp32,activations={kind}")
    assert {"View", "Places"} & {k for k, _ in kinds}  # something was packed
    error = float((found - exact).norm() / exact.norm())
    if name in EXACT:
        assert error < 1e-6
    else:
        assert 1e-5 < error < (0.025 if kind == "int8" else 0.09)


@pytest.mark.parametrize("name", ["linear", "layer norm", "attention", "gelu", "cube"])
def test_gradients_are_right_in_the_mean(name):
    exact, _ = gradients(name, None, torch.float64)
    count = 24
    errors = torch.stack([gradients(name, "fp32,activations=int8", seed=seed)[0] - exact for seed in range(count)])
    one, mean = errors.square().sum(1).mean().sqrt(), errors.mean(0).norm()
    assert float(mean / one) < 1.35 / count**0.5  # what is left would shrink no further if there were a bias


TEXTS = [
    "fp32",
    "bf16-mixed,products=emulated",
    "bf16-mixed,products=native",
    "fp16-mixed,products=emulated",
    "bf16-true,products=native",
    "bf16-lean",
]
TEXTS += ["bf16-true,products=emulated"]


@pytest.mark.parametrize("text", TEXTS)
def test_weights_are_exact_so_the_gradient_of_a_linear_nets_input_is_too(text):
    def run(text):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 96, bias=False), nn.Unflatten(1, (6, 16)), nn.Conv1d(6, 32, 3))
        net[1].weight.requires_grad_(False)  # its 16-bit copy is told by its numbers
        x = torch.randn(96, 64, requires_grad=True)
        bound(net, text)(x).sum().backward()  # a lean model decides on its weights
        x.grad = None
        net(x).sum().backward()
        return x.grad, net[0].weight.grad

    (exact, weight), (ours, rounded) = run(text), run(f"{text},activations=int8")
    assert torch.equal(ours, exact)
    assert torch.equal(rounded, weight)  # of a leaf and a gradient that comes through weights alone
    assert run(f"{text},activations=fp8")[0].equal(exact)


def test_16_bit_copies_of_weights_are_made_again():
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False))
    net[2].weight.requires_grad_(False)
    for products in ("native", "emulated"):
        found, _ = packs(copy.deepcopy(net), torch.randn(70, 64, requires_grad=True), text=f"bf16-mixed,activations=int8,products={products}")
        assert sorted(kind for kind, shape in found if set(shape) == {64, 96}) == ["Cast", "Cast"]


def test_what_is_alive_or_must_be_exact_is_not_packed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.rand(64, 64))
            self.linear = nn.Linear(64, 64)

        def forward(self, x, mask):
            h = self.linear(x) * self.table * mask
            h = h / (h.abs() + 1)  # not listed: a division is exact
            h = F.layer_norm(h, (64,))
            return (h * h.mean(-1, keepdim=True)).float()

    found, y = packs(Net(), torch.randn(32, 64, 64), torch.rand(32, 64, 64))
    assert ("View", (64, 64)) not in found  # weights and tables
    assert [k for k, shape in found if shape == (32, 64, 1)] == ["Kept"] * 3  # mean and rstd of the norm, an operand that is broadcast
    kept = [shape for k, shape in found if k == "Kept"]
    assert kept.count((32, 64, 64)) == 1  # the mask; the input of the linear layer is seen flat
    assert ("Kept", (2048, 64)) in found
    y.sum().backward()


@pytest.mark.parametrize(("way", "looked_at"), [(lambda x: x.softmax(-1), []), (lambda x: F.softmax(x, -1), []), (torch.tanh, ["View"])])
def test_softmax_by_itself_stays_exact(way, looked_at):
    found, _ = packs(Op(lambda m, x: way(x.exp())), torch.randn(4, 32, 64, requires_grad=True))
    assert [k for k, _ in found] == looked_at


def test_a_tensor_that_several_functions_save_is_packed_once():
    count = []

    def call(m, x):
        h = F.relu(x)
        return F.linear(h, m.w).sum() + F.silu(h).sum() + (h * h).sum() + (h.view(-1, 64) @ m.w.mT).sum()

    stock = saved.Packed.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved.Packed, "__init__", lambda self, *args: (count.append(1), stock(self, *args))[1])
        x = torch.randn(4, 32, 64, requires_grad=True)
        bound(Op(call, w=W), "fp32,activations=int8")(x * 1).backward()
    assert len(count) == 1
    assert x.grad is not None


def test_memory_of_a_tensor_that_is_gone_is_not_taken_for_that_of_another():
    def call(m, x):
        total = 0
        for i in range(20):
            total = total + F.gelu(x + i).sum()  # each of these is freed and its memory used again
        return total

    x = torch.randn(4, 32, 64)
    results = []
    for text in ("fp32", "fp32,activations=int8"):
        leaf = x.clone().requires_grad_()
        bound(Op(call), text)(leaf).backward()
        results.append(leaf.grad)
    assert float((results[0] - results[1]).norm() / results[0].norm()) < 0.02


def test_a_non_finite_activation_still_shows_in_the_gradients():
    for bad in (torch.inf, -torch.inf, torch.nan):
        grads = []
        for text in ("fp32", "fp32,activations=int8", "fp32,activations=fp8"):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
            x[3, 5] = bad
            module = bound(Op(lambda m, x: F.linear(x * 1, m.w), w=W), text)
            module(x.requires_grad_()).sum().backward()
            grads.append(module.w.grad)
        for other in grads[1:]:
            assert torch.equal(other.isfinite(), grads[0].isfinite())
            assert not other.isfinite().all()


@pytest.mark.parametrize("text", ["fp32", "bf16-mixed"])
def test_the_backward_pass_can_be_repeated_and_two_runs_give_the_same_bits(text):
    def run():
        torch.manual_seed(0)
        net = bound(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 64)), f"{text},activations=int8")
        y = net(torch.randn(128, 64)).sum()
        first = torch.autograd.grad(y, list(net.parameters()), retain_graph=True)
        again = torch.autograd.grad(y, list(net.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        return first

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_weights_changed_before_the_backward_pass_are_refused():
    net = bound(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), "bf16-mixed,activations=int8")
    y = net(torch.randn(64, 64)).sum()
    with torch.no_grad():
        net[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_second_derivatives_are_those_of_the_rounded_activations():
    def penalty(text):
        torch.manual_seed(0)
        net = bound(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), text)
        x = torch.randn(64, 64, requires_grad=True)
        (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        g.square().sum().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    exact, ours = penalty("fp32"), penalty("fp32,activations=int8")
    assert 1e-5 < float((ours - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_computed_again_exactly(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    grads = []
    for text in ("bf16-mixed", "bf16-mixed,activations=int8"):
        torch.manual_seed(0)
        net = bound(Net(), text)
        net(torch.randn(64, 64, requires_grad=True)).sum().backward()
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_nothing_is_done_without_a_backward_pass():
    net = Op(lambda m, x: F.linear(x, m.w), w=W)
    with torch.no_grad():
        assert packs(net, torch.randn(64, 64))[0] == []


def test_hooks_of_the_user_hold_inside_and_around_and_it_is_said(caplog):
    saving._say_foreign.cache_clear()
    seen = []
    module = Op(lambda m, x: F.linear(F.gelu(x), m.w), w=W)
    with (
        caplog.at_level(logging.WARNING, "halfstep"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.detach(), lambda t: t),
    ):
        found, y = packs(module, torch.randn(64, 64, requires_grad=True))
    assert found == []
    assert len(seen) == 3
    assert "nothing is compressed inside them" in caplog.text
    y.sum().backward()


def test_a_part_with_a_policy_of_its_own_keeps_to_it():
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    bound(net[1], "fp32")
    found, _ = packs(net, torch.randn(64, 64, requires_grad=True) * 1)
    assert [shape for kind, shape in found if kind == "View"] == [(64, 64)]  # the input of the first layer alone


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torch_func_goes_by():
    net = bound(Op(lambda m, x: F.gelu(F.linear(x, m.w)), w=W), "fp32,activations=int8")
    x = torch.randn(64, 64)
    plain = torch.func.grad(lambda x: F.gelu(F.linear(x, net.w)).sum())(x)
    assert torch.equal(torch.func.grad(lambda x: net(x).sum())(x), plain)
    assert torch.func.jvp(net, (x,), (x,))[0].shape == (64, 96)


@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_is_refused_with_the_remedy():
    net = bound(Op(lambda m, x: F.linear(x, m.w), w=W), "fp32,activations=int8")
    with pytest.raises(ConfigError, match=r"Leave out torch\.compile"):
        torch.compile(net, backend="eager")(torch.randn(64, 64))


def test_multi_head_attention_is_looked_into():
    attention = nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(4, 32, 64, requires_grad=True)
    found, _ = packs(attention, x * 1, x * 1, x * 1)
    assert sum(kind == "View" for kind, _ in found) >= 4


def test_channels_last_and_slices_come_back_in_place():
    def call(m, x):
        y = F.gelu(F.conv2d(x.contiguous(memory_format=torch.channels_last), m.w))
        a, b = y.chunk(2, 1)
        return a * b

    grads = []
    for text in ("fp32", "fp32,activations=int8"):
        x = torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        bound(Op(call, w=torch.ones(16, 8, 3, 3) / 8), text)(x * 1).sum().backward()
        grads.append(x.grad)
    assert 0 < float((grads[0] - grads[1]).norm() / grads[0].norm()) < 0.03


def test_places_of_maxima_are_exact_in_planes_of_any_size():
    for plane in (1 << 15, 1 << 16, 1 << 17):
        x = torch.randint(0, plane, (5000,))
        stored = saved.Places(x, plane)
        assert torch.equal(stored.tensor(), x)
        assert stored._places.element_size() == (2 if plane <= 1 << 16 else 4)
