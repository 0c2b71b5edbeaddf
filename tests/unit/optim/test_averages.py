"""Averages of weights in fp32: they move, they are put in and taken out exactly, and they resume."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep import amp
from halfstep.errors import CheckpointError, ConfigError, StepOrderError
from halfstep.numerics import average_
from halfstep.optim import EMA, AdamW, attach, full_values, master_of
from halfstep.policy import parse


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).to(dtype)


def trained(net: nn.Module, average: EMA, steps: int, lr: float = 1e-5) -> None:
    optimizer = AdamW(net.parameters(), lr=lr)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        average.update()


def test_the_average_of_16_bit_weights_follows_their_masters() -> None:
    net, wide = model(), model(torch.float32)
    wide.load_state_dict({k: v.float() for k, v in net.state_dict().items()})
    average, reference = halfstep.ema(net, 0.99), halfstep.ema(wide, 0.99)
    trained(net, average, 50)
    trained(wide, reference, 50)
    for name, values in average.averages.items():
        assert values.dtype == torch.float32
        assert float((values - reference.averages[name]).abs().max()) <= 50 * 2.0**-23
        assert bool((values != dict(model().named_parameters())[name].float()).all())


@pytest.mark.parametrize("storage", ["split", "split24", "kahan"])
def test_what_is_put_in_is_taken_out_bit_for_bit(storage: str) -> None:
    net = model()
    for p in net.parameters():
        attach(p, storage)
    average = EMA(net, 0.5)
    trained(net, average, 5, lr=1e-2)
    before = [(p.detach().clone(), full_values(p)) for p in net.parameters()]
    with average.applied() as seen:
        assert seen is net
        for name, p in net.named_parameters():
            assert torch.equal(p.detach(), average.averages[name].bfloat16())
    for p, (weight, master) in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.detach(), weight)
        assert torch.equal(full_values(p), master)
    assert all(m._copy is None for p in net.parameters() if (m := master_of(p)) is not None), "no memory was taken for good"


def test_it_is_put_back_after_an_error_too() -> None:
    net = model(torch.float32)
    average = EMA(net)
    average.update()
    with torch.no_grad():
        net[0].weight.add_(1.0)
    weight = net[0].weight.detach().clone()

    def fail() -> None:
        with average.applied():
            assert not torch.equal(net[0].weight, weight)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert torch.equal(net[0].weight, weight)


def test_it_resumes_bit_for_bit() -> None:
    net = model()
    average = EMA(net, 0.9)
    trained(net, average, 3)
    saved = copy.deepcopy(average.state_dict())
    other = EMA(net, 0.5)
    other.load_state_dict(saved)
    average.update()
    other.update()
    assert other.decay == 0.9
    assert other.updates == average.updates == 4
    assert all(torch.equal(a, b) for a, b in zip(average.averages.values(), other.averages.values(), strict=True))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="decay=1"):
        EMA(model(), 1.0)
    for decay in ("0.9", None, True, float("nan")):
        with pytest.raises(ConfigError, match=f"decay={decay!r} is out of range"):
            EMA(model(), decay)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="of a list, which is no"):
        EMA(list(model().parameters()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ReLU without parameters has no weights to average"):
        EMA(nn.ReLU())
    average = EMA(model())
    with pytest.raises(ConfigError, match="no average yet"), average.applied():
        pass
    average.update()
    other = EMA(nn.Linear(6, 5))
    with pytest.raises(CheckpointError, match="another model"):
        other.load_state_dict(average.state_dict())
    with pytest.raises(CheckpointError, match="no averages"):
        other.load_state_dict({})
    assert not other.averages


def test_a_weight_that_came_later_stays_as_it_is() -> None:
    net = model(torch.float32)
    average = EMA(net)
    with torch.inference_mode():
        average.update()
    net.append(nn.Linear(2, 2))
    with average.applied():
        pass
    average.update()
    assert "2.weight" in average.averages


class Made(TorchDispatchMode):
    """Notes how many numbers the tensors have that torch's operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        self.numbers += sum(t.numel() for t in torch.utils._pytree.tree_leaves(out) if t.untyped_storage().data_ptr() not in known)
        return out


def test_an_update_makes_no_tensors() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        net = model(dtype)
        average = EMA(net)
        trained(net, average, 1)
        with Made() as made:
            average.update()
        assert made.numbers == 0
        assert average.nbytes() == 4 * sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_compiled_pass_gives_the_bits_of_the_definition(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    storages = ["fp32"] if dtype == torch.float32 else ["split", "split24", "kahan", "stochastic", "plain"]
    for storage in storages:
        torch.manual_seed(0)
        net = nn.ParameterList([torch.randn(n) for n in (1, 511, 513, 70000)]).to(dtype)
        for p in net:
            if storage != "fp32":
                attach(p, storage).write(torch.randn_like(p, dtype=torch.float32))
        average = EMA(net, 0.9)
        average.update()
        expected = {name: values.clone() for name, values in average.averages.items()}
        for p in net:
            master = master_of(p)
            values = torch.randn_like(p, dtype=torch.float32)
            _ = p.data.copy_(values) if master is None else master.write(values)
        plain = copy.deepcopy(average.state_dict())
        average.update()
        monkeypatch.setenv("HALFSTEP_KERNELS", "off")
        other = EMA(net)
        other.load_state_dict(plain)
        other.update()
        monkeypatch.undo()
        for name, p in net.named_parameters():
            average_(expected[name], full_values(p), 1 - 0.9)
            for found in (average, other):
                assert torch.equal(found.averages[name].view(torch.int32), expected[name].view(torch.int32)), storage


def test_averages_of_other_layouts_and_formats() -> None:
    torch.manual_seed(0)
    net = nn.Module()
    net.wide = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    net.turning = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    net.last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    net.narrow = nn.Parameter(torch.randn(4, 3).t().bfloat16())
    average, before = EMA(net, 0.5), {n: p.detach().clone() for n, p in net.named_parameters()}
    average.update()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(4)
    average.update()
    for name, p in net.named_parameters():
        assert average.averages[name].dtype == (torch.float32 if p.dtype == torch.bfloat16 else p.dtype)
        assert torch.allclose(average.averages[name], full_values(before[name]) * 2.5), name
    with average.applied():
        assert torch.equal(net.turning, average.averages["turning"])
    assert all(torch.equal(p.detach(), before[name] * 4) for name, p in net.named_parameters())


@pytest.mark.parametrize(("warmup", "formula"), [("ratio", lambda n: (1 + n) / (10 + n)), ("power", lambda n: 1 - (1 + n) ** (-2 / 3))])
def test_a_warm_up_lowers_the_decay_of_the_first_updates(warmup: str, formula: Any) -> None:
    net = nn.Linear(1, 1, bias=False).double()
    average, expected = halfstep.ema(net, 0.9, warmup=warmup), math.nan
    decays = set()
    for n in range(200):
        with torch.no_grad():
            net.weight.fill_(float(n))
        average.update()
        decay = min(0.9, formula(n))
        decays.add(decay)
        expected = float(n) if n == 0 else expected + (1 - decay) * (n - expected)
        assert float(average.averages["weight"]) == pytest.approx(expected, rel=1e-12)
    assert 0.9 in decays
    assert len(decays) > 20
    other = EMA(net, 0.9)
    other.load_state_dict(average.state_dict())
    assert (other.warmup, other.updates) == (warmup, 200)
    with pytest.raises(ConfigError, match="'ratio'"):
        EMA(net, warmup="ration")


def test_running_statistics_are_averaged_or_kept() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net.register_buffer("table", torch.ones(5), persistent=False)
    both, weights = halfstep.ema(net, 0.5), halfstep.ema(net, 0.5, buffers="keep")
    means = []
    for _ in range(2):
        net(torch.randn(8, 3))
        means.append(net[1].running_mean.clone())
        both.update()
        weights.update()
    assert set(both.buffer_averages) == {"1.running_mean", "1.running_var"}
    assert not weights.buffer_averages
    with both.applied():
        assert torch.allclose(net[1].running_mean, (means[0] + means[1]) / 2)
        assert int(net[1].num_batches_tracked) == 2
    assert torch.equal(net[1].running_mean, means[1])
    with weights.applied():
        assert torch.equal(net[1].running_mean, means[1])
    other = EMA(net)
    other.load_state_dict(copy.deepcopy(both.state_dict()))
    assert torch.equal(other.buffer_averages["1.running_mean"], both.buffer_averages["1.running_mean"])
    weights.load_state_dict(copy.deepcopy(both.state_dict()))  # statistics that nothing would update any more
    assert not weights.buffer_averages
    with weights.applied():
        assert torch.equal(net[1].running_mean, means[1])


def test_tied_weights_are_averaged_once_and_frozen_ones_when_they_are_trained() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    net[2].requires_grad_(False)
    average = EMA(net, 0.5)
    average.update()
    assert list(average.averages) == ["0.weight"]
    assert average.nbytes() == 4 * 16
    first = net[0].weight.detach().clone()
    with torch.no_grad():
        net[0].weight.add_(2.0)
    average.update()
    with average.applied():
        assert net[1].weight is net[0].weight
        assert torch.allclose(net[1].weight, first + 1)
    net[2].requires_grad_(True)
    net[0].requires_grad_(False)
    average.update()
    assert list(average.averages) == ["0.weight", "2.weight"]
    assert torch.allclose(average.averages["0.weight"], first + 1.5), "a weight that was frozen later is followed"


@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-lean,weights=kahan", "fp16-lean,weights=split24"])
def test_weights_that_go_to_16_bits_while_the_averages_are_in_the_model_get_their_own_values_back(precision: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    amp.bind(net, parse(precision), torch.device("cpu"))
    average = EMA(net, 0.5)
    average.update()
    for values in average.averages.values():
        values.add_(0.125)
    with torch.no_grad(), average.applied():
        net(torch.randn(2, 16))
        assert net[0].weight.dtype in (torch.bfloat16, torch.float16)
    twin = copy.deepcopy(before)
    for name, p in net.named_parameters():
        fresh = nn.Parameter(twin[name])
        if master_of(p) is not None:
            attach(fresh, master_of(p).storage.name, p.dtype)
        assert torch.equal(full_values(p), full_values(fresh)), name
    expected = average.averages["0.weight"].clone()
    average.update()
    average_(expected, full_values(net[0].weight), 0.5)
    assert torch.equal(average.averages["0.weight"], expected)


def test_weights_that_go_back_to_fp32_while_the_averages_are_in_the_model_get_their_own_values_back() -> None:
    net = model()
    average = EMA(net, 0.5)
    trained(net, average, 3, lr=1e-2)
    before = {n: full_values(p) for n, p in net.named_parameters()}
    with average.applied():
        for p in net.parameters():
            halfstep.optim.detach(p)
    assert all(torch.equal(p.detach(), before[n]) for n, p in net.named_parameters())


def test_the_block_leaves_the_grad_mode_alone_and_refuses_an_update() -> None:
    net = model(torch.float32)
    average = EMA(net)
    average.update()
    with torch.no_grad(), average.applied():
        assert not torch.is_grad_enabled()
    with torch.inference_mode(), average.applied():
        net(torch.ones(1, 6))
    assert not any(p.is_inference() for p in net.parameters())
    with average.applied(), average.applied(), pytest.raises(StepOrderError, match="inside applied"):
        average.update()
    average.update()
    net(torch.ones(1, 6)).sum().backward()


def test_a_model_and_its_average_are_copied_together() -> None:
    net = model()
    average = EMA(net, 0.9)
    trained(net, average, 3, lr=1e-2)
    twin, other = copy.deepcopy((net, average))
    assert other.model is twin
    assert other.averages["0.weight"].data_ptr() != average.averages["0.weight"].data_ptr()
    with other.applied():
        assert not torch.equal(twin[0].bias, net[0].bias)
    average.update()
    assert other.updates == 3


def test_it_averages_the_module_inside_a_compiled_one() -> None:
    net = nn.Linear(3, 3)
    compiled = torch.compile(net, backend="eager")
    average = halfstep.ema(compiled, 0.5)
    average.update()
    assert set(average.averages) == {"weight", "bias"}
    with torch.no_grad():
        average.averages["weight"].zero_()
        before = compiled(torch.ones(1, 3))
        with average.applied():
            assert torch.equal(compiled(torch.ones(1, 3))[0], net.bias)
        assert torch.equal(compiled(torch.ones(1, 3)), before)


def test_the_averages_can_become_the_weights() -> None:
    net = model()
    average = EMA(net, 0.5)
    with pytest.raises(ConfigError, match="no average yet"):
        average.copy_to_model()
    trained(net, average, 3, lr=1e-2)
    average.copy_to_model()
    for name, p in net.named_parameters():
        assert float((full_values(p) - average.averages[name]).abs().max()) <= 2.0**-24


def test_a_weight_of_another_shape_is_refused() -> None:
    net = nn.Embedding(4, 2)
    average = EMA(net)
    average.update()
    net.weight = nn.Parameter(torch.zeros(5, 2))
    with pytest.raises(ConfigError, match=r"\(4, 2\).*\(5, 2\)"):
        average.update()
    whole = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2))
    whole[0].requires_grad_(False)
    average = EMA(whole)
    average.update()
    whole[0].requires_grad_(True)
    whole[1].weight = nn.Parameter(torch.zeros(5, 2))
    with pytest.raises(ConfigError, match=r"1.weight had the shape"):
        average.update()
    assert list(average.averages) == ["1.weight"], "a refused update begins no average"
