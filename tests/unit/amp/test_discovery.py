"""Which weights autocast only ever casts: the owner rule module by module, the use rule, and a rehearsal that leaves no trace."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from halfstep import amp
from halfstep.amp.discovery import castable, owned
from halfstep.amp.rehearsal import Rehearsal
from halfstep.policy import parse

CPU = torch.device("cpu")
BF16 = "bf16-lean"


def names(module: nn.Module, precision: str = BF16) -> set[str]:
    return set(owned(module, parse(precision), CPU))


class Overriding(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 2, self.bias)


class Named(nn.Linear):
    """A subclass without a forward of its own."""


def with_own_forward() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x @ layer.weight.abs()  # type: ignore[method-assign]
    return layer


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 4))


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Double())
    return layer


def tied(one: nn.Module, two: nn.Module) -> nn.Module:
    two.weight = one.weight  # type: ignore[assignment]
    return nn.Sequential(OrderedDict(one=one, two=two))


def views_of_each_other() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    model[1].weight.data = model[0].weight.data[:2]
    return model


def frozen(exact: bool) -> nn.Module:
    layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
    layer.weight.fill_(1.5 if exact else 1 / 3)
    return layer


def large() -> nn.Module:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight[0, 0] = 2.0**15 + 16
    return layer


ALL = {"weight", "bias"}
RNN = {f"{kind}_{part}_l0" for kind in ("weight", "bias") for part in ("ih", "hh")}
CELL = {f"{kind}_{part}" for kind in ("weight", "bias") for part in ("ih", "hh")}
OWNERS: list[tuple[str, Callable[[], nn.Module], str, set[str]]] = [
    ("linear", lambda: nn.Linear(4, 4), BF16, ALL),
    *((f"conv{n}", lambda n=n: getattr(nn, f"Conv{n}d")(2, 2, 1), BF16, ALL) for n in (1, 2, 3)),
    *((f"transposed{n}", lambda n=n: getattr(nn, f"ConvTranspose{n}d")(2, 2, 1), BF16, ALL) for n in (1, 2, 3)),
    ("lstm", lambda: nn.LSTM(4, 4), BF16, RNN),
    ("lstm-projected", lambda: nn.LSTM(4, 4, proj_size=2), BF16, RNN | {"weight_hr_l0"}),
    ("lstm-device", lambda: nn.LSTM(4, 4), "bf16-lean,ops=device", RNN),
    ("gru", lambda: nn.GRU(4, 4), BF16, RNN),
    ("gru-device", lambda: nn.GRU(4, 4), "bf16-lean,ops=device", set()),
    ("rnn", lambda: nn.RNN(4, 4), BF16, RNN),
    ("lstm-cell", lambda: nn.LSTMCell(4, 4), BF16, CELL),
    ("gru-cell", lambda: nn.GRUCell(4, 4), BF16, CELL),
    ("rnn-cell", lambda: nn.RNNCell(4, 4), BF16, CELL),
    ("attention", lambda: nn.MultiheadAttention(4, 2), BF16, {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}),
    (
        "attention-apart",
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
        BF16,
        {"q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"},
    ),
    ("bilinear", lambda: nn.Bilinear(4, 4, 4), BF16, set()),
    ("embedding", lambda: nn.Embedding(4, 4), BF16, set()),
    ("layer-norm", lambda: nn.LayerNorm(4), BF16, set()),
    ("batch-norm", lambda: nn.BatchNorm1d(4), BF16, set()),
    ("prelu", lambda: nn.PReLU(), BF16, set()),
    ("overriding", lambda: Overriding(4, 4), BF16, set()),
    ("subclass", lambda: Named(4, 4), BF16, ALL),
    ("own-forward", with_own_forward, BF16, set()),
    ("parametrized", parametrized, BF16, {"bias"}),
    ("weight-norm", lambda: parametrizations.weight_norm(nn.Linear(4, 4)), BF16, {"bias"}),
    ("old-weight-norm", old_weight_norm, BF16, {"bias"}),
    ("spectral-norm", lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), BF16, {"bias"}),
    ("held", lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "bf16-lean,fp32=1", {"0.weight", "0.bias"}),
    ("op-in-fp32", lambda: nn.Sequential(nn.Linear(4, 4), nn.Conv1d(1, 1, 1)), "bf16-lean,fp32_ops=linear", {"1.weight", "1.bias"}),
    ("tied-embedding", lambda: tied(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)), BF16, {"one.weight"}),
    ("tied-linear", lambda: tied(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), BF16, {"one.weight"}),
    ("views", views_of_each_other, BF16, set()),
    ("frozen", lambda: frozen(exact=False), BF16, set()),
    ("frozen-exact", lambda: frozen(exact=True), BF16, {"weight"}),
    ("large-fp16", large, "fp16-lean", {"bias"}),
    ("large-bf16", large, BF16, ALL),
    ("double", lambda: nn.Linear(4, 4).double(), BF16, set()),
    ("complex", lambda: nn.Linear(4, 4, dtype=torch.complex64), BF16, set()),
]


@pytest.mark.parametrize(("make", "precision", "expected"), [row[1:] for row in OWNERS], ids=[row[0] for row in OWNERS])
def test_the_owner_rule(make: Callable[[], nn.Module], precision: str, expected: set[str]) -> None:
    assert names(make(), precision) == expected


def test_the_owner_rule_sees_below_what_binding_puts_around_a_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Overriding(4, 4))
    before = names(model)
    amp.bind(model, parse("bf16-mixed"), CPU)
    assert names(model) == before == {"0.weight", "0.bias"}


def test_the_linear_layer_of_transformers_is_known_by_its_name() -> None:
    transformers = pytest.importorskip("transformers")
    layer = transformers.pytorch_utils.Conv1D(4, 4)
    assert names(layer) == ALL
    other = type("Conv1D", (type(layer),), {"forward": lambda self, x: x * self.weight.sum()})(4, 4)
    assert names(other) == set()
    stranger = type("Conv1D", (nn.Module,), {"__module__": "mine"})()
    stranger.weight = nn.Parameter(torch.ones(2, 2))
    assert names(stranger) == set()


def found(module: nn.Module, run: Callable[[], Any], precision: str = BF16) -> set[str]:
    policy = parse(precision)
    with torch.no_grad(), amp.forward_context(policy, CPU):
        return set(castable(module, policy, CPU, run))


USES: dict[str, tuple[Callable[[nn.Linear, Tensor], Any], bool]] = {
    "module": (lambda m, x: m(x), True),
    "transposed": (lambda m, x: x @ m.weight.t(), True),
    "chunks": (lambda m, x: [F.linear(x, w) for w in m.weight.chunk(2)], True),
    "cast": (lambda m, x: m.weight.bfloat16() * 2, True),
    "unused": (lambda m, x: x, True),
    "asked": (lambda m, x: (m.weight.shape, m.weight.dtype, m.weight.detach()), True),
    "multiplied": (lambda m, x: F.linear(x, m.weight * 2), False),
    "norm": (lambda m, x: m(x) + m.weight.norm(), False),
    "row": (lambda m, x: x + m.weight[0], False),
    "view-of-view": (lambda m, x: m.weight.t()[1:].exp(), False),
    "copied": (lambda m, x: m.weight.clone(), False),
    "other-format": (lambda m, x: m.weight.half(), False),
    "written": (lambda m, x: m.weight.clamp_(-1, 1), False),
}


@pytest.mark.parametrize(("use", "passes"), USES.values(), ids=USES)
def test_the_use_rule(use: Callable[[nn.Linear, Tensor], Any], passes: bool) -> None:
    layer = nn.Linear(4, 4)
    assert ("weight" in found(layer, lambda: use(layer, torch.ones(2, 4)))) == passes


def test_the_two_rules_hold_with_torchs_own_autocast() -> None:
    """Where the CPU has 16-bit instructions torch casts inside its dispatcher, and no mode of ours sees it."""
    model = nn.Sequential(OrderedDict(one=nn.Linear(4, 4), two=nn.Linear(4, 4)))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got = castable(model, parse(BF16), CPU, lambda: model(torch.ones(2, 4)) + model.one.weight.sum())
    assert got == ("one.bias", "two.weight", "two.bias")


# --- no trace -------------------------------------------------------------------------------------------------------------


@dataclass
class Counter:
    """A state that a forward pass keeps outside its module's own attributes."""

    count: int = 0
    seen: list[int] = field(default_factory=list)


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Untidy(nn.Module):
    """A forward pass that changes everything it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.embedding = nn.Embedding(8, 4, max_norm=0.5)
        self.calls, self.inputs, self.named, self.kept = 0, list[Any](), dict[str, Any](), set[int]()
        self.counter, self.slotted = Counter(), Slotted()
        self.generator, self.own_random, self.rng = torch.Generator(), random.Random(1), np.random.default_rng(0)
        self.last: Tensor | None = None
        self.memory = torch.full((4,), float("nan"))
        self.register_buffer("running", torch.zeros(4))
        self.linear.register_forward_hook(self.hook())

    def hook(self) -> Callable[..., None]:
        noted: list[int] = []
        self.hooked = lambda: len(noted)
        return lambda *_: noted.append(1)

    def forward(self, x: Tensor, cache: list[Tensor], told: dict[str, Any]) -> Tensor:
        self.calls += 1
        self.inputs.append(x)
        self.named["x"] = x
        self.kept.add(self.calls)
        self.counter.count += 1
        self.counter.seen.append(self.calls)
        self.slotted.value += 1
        self.running = self.running + 1
        self.memory.add_(1).nan_to_num_()
        self.new = x
        self.train(not self.training)
        self.own_random.random(), self.rng.random(), random.random(), np.random.rand()
        noise = torch.rand(4, generator=self.generator) + torch.rand(4)
        y = F.dropout(self.linear(self.norm(x)), 0.5) + noise + self.embedding(torch.arange(3))
        self.last = y
        cache.append(y)
        cache[0].add_(1)
        told["inner"].append(y)
        told["at"] = 1
        del told["gone"]
        return y


def state_of(model: Untidy, cache: list[Any], told: dict[str, Any]) -> list[Any]:
    attributes = {name: {k: id(v) for k, v in m.__dict__.items()} for name, m in model.named_modules()}
    values = [{k: v.clone() for k, v in model.state_dict().items()}, model.memory.clone(), [t.clone() for t in cache]]
    plain = [model.calls, len(model.inputs), dict(model.named), set(model.kept), model.counter.count, list(model.counter.seen), model.slotted.value]
    draws = [model.generator.get_state(), model.own_random.getstate(), str(model.rng.bit_generator.state), torch.get_rng_state(), random.getstate()]
    return [attributes, values, plain, draws, str(np.random.get_state()), model.hooked(), list(told), [len(told["inner"])], model.training]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(itertools.starmap(same, zip(a, b, strict=True)))
    return bool(a == b)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rehearsal_leaves_no_trace(fails: bool) -> None:
    model, cache, told = Untidy(), [torch.zeros(2)], {"inner": list[Any](), "gone": 1}
    arguments = (torch.randn(3, 4), cache)
    before = state_of(model, cache, told)

    def run() -> None:
        with torch.no_grad(), Rehearsal([model], (arguments, {"told": told})):
            model(*arguments, told=told)
            assert not same(before, state_of(model, cache, told))
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            run()
    else:
        run()
    for ours, theirs in zip(state_of(model, cache, told), before, strict=True):
        assert same(ours, theirs)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the argument has another name from some version on
def test_a_rehearsal_does_not_advance_the_cache_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for cache in (transformers.DynamicCache(config=config), transformers.StaticCache(config=config, max_cache_len=8)):
        model(input_ids=torch.ones(1, 2, dtype=torch.long), past_key_values=cache)
        before = [cache.get_seq_length(), cache.layers[0].keys.clone()]
        with torch.no_grad(), Rehearsal([model], {"past_key_values": cache}):
            model(input_ids=torch.ones(1, 3, dtype=torch.long), past_key_values=cache)
            assert not same(before, [cache.get_seq_length(), cache.layers[0].keys])
        assert same(before, [cache.get_seq_length(), cache.layers[0].keys])


def test_a_rehearsal_copies_only_what_is_written_to() -> None:
    layer, made = nn.Linear(64, 64), list[int]()
    rehearsal = Rehearsal([layer], None)
    with torch.no_grad(), rehearsal:
        y = layer(torch.ones(1, 64)).add_(1)
        y.mul_(2)
        made += [before.nbytes for _, before in rehearsal._writes.before.values()]
        layer.bias.zero_()
        made += [before.nbytes for _, before in rehearsal._writes.before.values()]
    assert made == [layer.bias.nbytes]
    assert layer.bias.abs().sum() > 0
