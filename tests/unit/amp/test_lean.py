"""When weights go to 16 bits: at the first call, when the model is bound, or not at all."""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from lean_models import CPU, KEPT, Net, X, equal, gradients, masters, net
from torch import Tensor, nn

from halfstep import amp
from halfstep.amp.mode import inside
from halfstep.errors import PolicyError
from halfstep.optim import master_of
from halfstep.policy import parse


@pytest.mark.parametrize("storage", ["split", "split24", "kahan", "stochastic"])
@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_the_first_call_puts_castable_weights_into_16_bits(form: str, storage: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "halfstep")
    model, plain = net(f"{form}-lean,weights={storage}"), net(None)
    assert amp.layout(model) == {"16bit": [], "loaded": dict.fromkeys([*dict(plain.named_parameters()), "shift"], "float32")}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(X)
    assert amp.layout(model)["16bit"] == KEPT
    dtype = parse(f"{form}-lean").dtype
    for name, p in model.named_parameters():
        original = plain.get_parameter(name)
        master = master_of(p)
        rounded = p if storage == "split24" and name in KEPT else original.to(dtype) if name in KEPT else original
        assert torch.equal(p, rounded)  # split24 may take the other neighbour close to a tie, which its 8 bits do not hold
        assert master is None or storage == "stochastic" or (master.read() - original).abs().max() <= 2**-14
        assert (master is not None) == (name in KEPT)
        assert master is None or master.storage.name == storage
    gradients(model, X)
    assert {name: p.grad.dtype for name, p in model.named_parameters()} == {
        name: dtype if name in KEPT else torch.float32 for name, _ in model.named_parameters()
    }
    lines = [r.getMessage() for r in caplog.records if r.name == "halfstep"]
    assert len(lines) == 1
    assert f"4 of 6 parameters (87.1 % of the weights) are kept in {form} with {storage} masters" in lines[0]


def test_nothing_to_keep_in_16_bits_is_refused_at_the_first_call_with_the_remedy() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.PReLU())
    amp.bind(model, parse("fp16-lean"), CPU)
    with pytest.raises(PolicyError, match=r"this Sequential has none\. Use fp16-mixed"):
        model(X)
    held = net("bf16-lean,fp32=one|two")
    with pytest.raises(PolicyError, match=r"has none outside fp32=one\|two"):
        held(X)


def test_what_the_first_forward_pass_raises_comes_through_and_nothing_is_decided() -> None:
    model = net("bf16-lean")
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(3, 5))
    assert amp.layout(model)["16bit"] == []
    model(X)
    assert amp.layout(model)["16bit"] == KEPT


def test_weights_used_directly_stay_fp32() -> None:
    model = net("bf16-lean", lambda m: m.one.weight.norm() + (m.two.bias * 2).sum())
    model(X)
    assert amp.layout(model)["16bit"] == ["one.bias", "two.weight"]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), gradients(net("bf16-mixed", model.extra), X), strict=True))


def test_the_first_call_runs_the_forward_pass_with_the_random_numbers_and_statistics_of_one() -> None:
    def made(precision: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        amp.bind(model, parse(precision), CPU)
        return model

    lean, mixed = made("bf16-lean"), made("bf16-mixed")
    outputs = []
    for model in (lean, mixed):
        torch.manual_seed(1)
        outputs.append(model(X))
    assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(lean.buffers(), mixed.buffers(), strict=True))


def test_a_forward_pass_that_differentiates_is_rehearsed_too() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            return force

    torch.manual_seed(0)
    lean = Force()
    mixed = copy.deepcopy(lean)
    amp.bind(lean, parse("bf16-lean"), CPU)
    amp.bind(mixed, parse("bf16-mixed"), CPU)
    for _ in range(2):
        assert torch.equal(lean(X), mixed(X))
    assert len(amp.layout(lean)["16bit"]) == 4


def test_an_iterator_among_the_arguments_is_read_once() -> None:
    class Reads(Net):
        def forward(self, batches: Any) -> Tensor:
            return super().forward(next(batches)) + self.one.weight.sum()

    model = Reads()
    amp.bind(model, parse("bf16-lean"), CPU)
    batches = iter([X, X + 1])
    with pytest.warns(UserWarning, match=r"one\.weight .* kept in 16 bits, and sum uses it"):
        model(batches)
    assert amp.layout(model)["16bit"] == KEPT
    assert torch.equal(next(batches), X + 1)


def test_lazy_modules_and_stand_ins_put_the_decision_off() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    amp.bind(lazy, parse("bf16-lean"), CPU)
    lazy(X)
    assert amp.layout(lazy)["16bit"] == []
    lazy(X)
    assert amp.layout(lazy)["16bit"] == ["0.weight", "0.bias"]
    model = net("bf16-lean")
    torch.vmap(model)(X)
    assert amp.layout(model)["16bit"] == []
    torch.func.functional_call(model, {k: v.detach() for k, v in model.named_parameters()}, (X,))
    assert amp.layout(model)["16bit"] == []
    model(X)
    assert amp.layout(model)["16bit"] == KEPT


def test_the_first_call_may_be_in_inference_mode_and_in_several_threads() -> None:
    model, outputs = net("fp16-lean"), list[Tensor]()

    def call() -> None:
        with torch.inference_mode():
            outputs.append(model(X))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = net("fp16-mixed")
    assert [torch.equal(y, expected(X)) for y in outputs] == [True] * 4
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), gradients(expected, X), strict=True))


def test_a_part_called_alone_gives_the_numbers_of_autocast_before_and_after() -> None:
    model, mixed = net("bf16-lean"), net("bf16-mixed")
    assert torch.equal(model.one(X), mixed.one(X))
    assert amp.layout(model)["16bit"] == []
    model(X)
    assert torch.equal(model.one(X), mixed.one(X))
    assert inside.joins is None


def test_a_part_with_a_policy_of_its_own_is_left_alone() -> None:
    model = net(None)
    amp.bind(model.one, parse("fp16-mixed"), CPU)
    amp.bind(model, parse("bf16-lean"), CPU)
    model(X)
    assert amp.layout(model)["16bit"] == ["two.weight", "two.bias"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself, when it compiles
@pytest.mark.parametrize("how", ["compile-bound", "bind-compiled", "in-place"])
def test_compiled_models_decide_as_written_and_give_the_same_numbers(how: str) -> None:
    torch._dynamo.reset()
    model = net("bf16-lean" if how != "bind-compiled" else None)
    run: Any = model
    if how == "in-place":
        model.compile(backend="aot_eager")
    else:
        run = torch.compile(model, backend="aot_eager")
    if how == "bind-compiled":
        amp.bind(run, parse("bf16-lean"), CPU)
    mixed = net("bf16-mixed")
    for _ in range(3):
        assert torch.equal(run(X), mixed(X))
        assert all(torch.equal(a, b) for a, b in zip(gradients(run, X), gradients(mixed, X), strict=True))
    assert amp.layout(run if how == "bind-compiled" else model)["16bit"] == [("_orig_mod." if how == "bind-compiled" else "") + n for n in KEPT]
    torch._dynamo.reset()


# --- loaded in 16 bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-lean", "bf16-lean,weights=kahan", "fp16-mixed", "fp16-lean"])
def test_a_model_loaded_in_16_bits_computes_as_one_loaded_in_fp32(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "halfstep")
    policy = parse(precision)
    model = net(precision, loaded=policy.dtype)
    reference = net(None, loaded=policy.dtype).float()
    amp.bind(reference, parse(f"{policy.autocast}-mixed"), CPU)
    assert amp.layout(model)["16bit"] == KEPT
    assert set(amp.layout(model)["loaded"].values()) == {str(policy.dtype).removeprefix("torch.")}
    assert {name for name, p in model.named_parameters() if p.dtype == policy.dtype} == set(KEPT)
    assert model.shift.dtype == torch.float32
    storage = "split" if policy.weights == "fp32" else policy.weights
    assert {master_of(model.get_parameter(n)).storage.name for n in KEPT} == {storage}
    assert "6 parameters were loaded in 16 bits; 4 that autocast only casts stay" in caplog.text
    for _ in range(2):
        assert torch.equal(model(X), reference(X))
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), gradients(reference, X), strict=True))


def test_a_model_loaded_in_the_other_16_bit_format_goes_up_to_fp32() -> None:
    model = net("bf16-mixed", loaded=torch.float16)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    assert amp.layout(model)["16bit"] == []
    model(X)
    assert set(amp.model_state(model)) == set(model.state_dict())
    assert {t.dtype for t in amp.model_state(model).values()} == {torch.float16}
    lean = net("bf16-lean", loaded=torch.float16)
    lean(X)
    assert amp.layout(lean)["16bit"] == KEPT


def test_weights_loaded_in_16_bits_that_are_used_directly_go_up_at_the_first_call() -> None:
    def extra(m: Net) -> Tensor:
        return m.one.weight.norm()

    model = net("bf16-mixed", extra, torch.bfloat16)
    reference = net(None, extra, torch.bfloat16).float()
    amp.bind(reference, parse("bf16-mixed"), CPU)
    for _ in range(2):
        assert torch.equal(model(X), reference(X))
    assert amp.layout(model)["16bit"] == KEPT[1:]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), gradients(reference, X), strict=True))


def test_plain_leaves_a_model_as_it_was_loaded() -> None:
    model = net("bf16-mixed,weights=plain", loaded=torch.bfloat16)
    model(X)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert masters(model) == {}
    assert amp.layout(model) == {"16bit": [], "loaded": {}}


# --- whole -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "storage"), [("bf16-true", "kahan"), ("fp16-true", "split"), ("bf16-true,weights=stochastic", "stochastic")])
def test_true_puts_everything_into_16_bits_when_it_is_bound(precision: str, storage: str) -> None:
    model, policy = net(precision), parse(precision)
    plain = net(None).to(policy.dtype)
    assert {t.dtype for t in model.state_dict().values()} == {policy.dtype}
    assert {master_of(p).storage.name for p in model.parameters()} == {storage}
    assert amp.layout(model)["16bit"] == [*dict(model.named_parameters())]
    outputs = model(X)
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, plain(X.to(policy.dtype)).float())
    assert torch.equal(net(f"{precision},output=compute")(X), plain(X.to(policy.dtype)))
    assert torch.equal(model.one(X), plain.one(X.to(policy.dtype)).float())
    if storage == "split":
        assert equal(masters(model), dict(net(None).named_parameters()))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, X), gradients_of_true(plain, policy.dtype), strict=True))


def gradients_of_true(plain: Net, dtype: torch.dtype) -> list[Tensor]:
    plain.zero_grad()
    plain(X.to(dtype)).float().square().sum().backward()
    return [p.grad.float() for p in plain.parameters() if p.grad is not None]


def test_true_holds_named_modules_and_running_statistics_in_fp32() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.inner, self.head = nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Linear(6, 6), nn.Linear(6, 3)
            self.rotary = nn.Module()
            self.rotary.register_buffer("inv_freq", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(self.norm(self.conv(x)))
            return self.head(torch.relu(y)) + self.conv(x).sum()

    model = Images()
    amp.bind(model, parse("bf16-true,fp32=inner,output=compute"), CPU)
    wide = {name for name, t in model.state_dict().items() if t.dtype == torch.float32}
    assert wide == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "inner.weight", "inner.bias", "rotary.inv_freq"}
    x = torch.randn(5, 2, 6)
    assert model(x).dtype == torch.bfloat16
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    assert not torch.equal(model.norm.running_mean, torch.zeros(4))


def test_true_refuses_what_it_cannot_hold() -> None:
    model = net(None)
    with torch.no_grad():
        model.one.weight[0, 0] = 40000
    with pytest.raises(PolicyError, match=r"one\.weight has weights of a magnitude above 2\^15.*fp32=one"):
        amp.bind(model, parse("fp16-true"), CPU)
    tied = nn.Sequential(OrderedDict(table=nn.Embedding(4, 4), head=nn.Linear(4, 4, bias=False)))
    tied.head.weight = tied.table.weight
    with pytest.raises(PolicyError, match=r"head\.weight is tied to a weight of table, which fp32= holds in fp32.*\|head"):
        amp.bind(tied, parse("bf16-true,fp32=table"), CPU)


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-true"])
def test_tables_that_16_bits_would_spoil_stay_fp32_whatever_they_are_called(precision: str) -> None:
    """Frequencies by name or value, positions that a bf16 cannot count, sines of which rows would become one; what 16 bits hold goes to 16 bits."""
    tables = {
        "sliding_attention_inv_freq": 10000.0 ** (-torch.arange(0, 16, 2) / 16),
        "theta": 10000.0 ** (-torch.arange(0, 64, 2) / 64),
        "betas": torch.linspace(1e-4, 2e-2, 1000).cumsum(0),
    }
    model = nn.Sequential(nn.Linear(4, 4))
    for name, table in tables.items():
        model.register_buffer(name, table.clone())
    model.register_buffer("mask", (torch.arange(128.0) > 64).float())
    amp.bind(model, parse(precision), CPU)
    kept = {name for name, b in model.named_buffers() if b.dtype == torch.float32}
    assert kept == {"sliding_attention_inv_freq", "theta"} | ({"betas"} if precision == "bf16-true" else set())
    assert all(torch.equal(b, tables[name]) for name, b in model.named_buffers() if name in kept)


def test_the_rotary_tables_of_gemma_3_stay_fp32() -> None:
    transformers = pytest.importorskip("transformers", reason="its models need transformers: pip install 'halfstep[hf]'")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(vocab_size=96, **sizes))
    before = {name: b.clone() for name, b in model.named_buffers() if "inv_freq" in name}
    amp.bind(model, parse("fp16-true"), CPU)
    assert before
    assert all(torch.equal(model.get_buffer(name), b) for name, b in before.items())
