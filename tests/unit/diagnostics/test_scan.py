"""`scan`: what does not fit 16 bits is named before the run, and a healthy model is left in peace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.amp import bind
from halfstep.diagnostics.scan import scan
from halfstep.errors import ConfigError
from halfstep.policy import parse
from halfstep.tracing import Finding, Trace

CPU = torch.device("cpu")
FREQUENCIES = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
PRECISIONS = ("fp16-mixed", "bf16-mixed", "bf16-lean", "fp16-true", "bf16-true")


class Net(nn.Module):
    """Two layers with something of the test between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.between = between
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.last(F.dropout(self.between(self.first(x)), 0.1))


def batch() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 16)


def faults(trace: Trace) -> list[str]:
    return [f.fault for f in trace.findings]


def masked(x: Tensor) -> Tensor:
    return (x + (1 - torch.ones_like(x).tril()) * -1e9).softmax(-1)


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "eps": (lambda x: x / (x.abs() + 1e-8), "eps"),
    "clamp": (lambda x: x.sigmoid().clamp(0.1, 1 - 1e-7), "clamp"),
    "mask": (masked, "mask"),
    "refused mask": (lambda x: x.masked_fill(x > 0, -1e9).softmax(-1), "mask"),
    "positions": (lambda x: x + torch.arange(5000).to(x.dtype)[:16], "table"),
    "norm": (lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3), "norm"),
    "overflow": (lambda x: x * 1e4 * 1e4, "overflow"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_the_first_finding_and_none_of_a_bf16_or_healthy_run(name: str) -> None:
    between, fault = FAULTS[name]
    trace = scan(Net(between), batch(), precision="fp16-mixed")
    assert trace.first is not None, str(trace)
    assert (trace.first.fault, trace.first.place.kind) == (fault, "Net"), str(trace)
    assert "test_scan.py:" in str(trace).splitlines()[0]
    if fault not in ("table", "clamp", "norm"):
        assert faults(scan(Net(between), batch(), precision="bf16-mixed")) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_healthy_model_has_no_findings(precision: str) -> None:
    trace = scan(Net(), batch(), precision=precision)
    assert faults(trace) == [], str(trace)
    assert str(trace).startswith("nothing found")
    assert faults(scan(Net(), precision=precision)) == []


def test_softmax_by_hand_in_a_whole_16_bit_model() -> None:
    model = Net(lambda x: x.exp() / x.exp().sum(-1, keepdim=True))
    assert faults(scan(model, batch(), precision="bf16-true")) == ["softmax"]
    assert faults(scan(model, batch(), precision="bf16-mixed")) == []  # exp and sum run in fp32 there


def test_nothing_of_the_model_is_changed() -> None:
    for precision in PRECISIONS:
        model = Net()
        model.first.weight.grad = gradient = torch.ones(16, 16)
        before = {name: (t.data_ptr(), t.dtype, t.clone()) for name, t in model.state_dict().items()}
        scan(model, batch(), precision=precision)
        after = {name: (t.data_ptr(), t.dtype, t.clone()) for name, t in model.state_dict().items()}
        assert before.keys() == after.keys()
        for name, (place, dtype, values) in before.items():
            assert (place, dtype) == after[name][:2]
            assert torch.equal(values, after[name][2])
        assert model.first.weight.grad is gradient
        assert "forward" not in model.__dict__


def test_random_states_are_put_back() -> None:
    model, x = Net(), batch()
    state = torch.get_rng_state()
    scan(model, x, precision="bf16-mixed")
    assert torch.equal(state, torch.get_rng_state())


def test_a_table_that_a_precision_keeps_in_fp32_is_told_last_as_fixed() -> None:
    class Rotary(Net):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.register_buffer(name, FREQUENCIES.clone())

    def told(name: str, precision: str) -> tuple[Finding, ...]:
        return scan(Rotary(name), precision=precision).findings

    (kept,) = told("inv_freq", "bf16-true")
    assert (kept.fault, kept.fixed, "inv_freq is kept in fp32" in kept.what) == ("table", True, True)
    assert told("inv_freq", "bf16-mixed") == ()  # nothing was done to it
    assert scan(Net(), precision="bf16-true").findings == ()


def test_weights_without_masters_an_optimizer_that_has_them_and_one_whose_eps_is_0() -> None:
    model = Net().half()
    assert faults(scan(model)) == ["masters"]
    told = scan(model, optimizer=torch.optim.Adam(model.parameters()))
    assert faults(told) == ["eps", "masters"]
    assert str(told).startswith("eps in optimizer (Adam), forward: eps=1e-08 becomes 0 in fp16")
    assert faults(scan(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))) == ["masters"]
    assert faults(scan(model, precision="fp16-mixed")) == []
    assert faults(scan(Net().bfloat16(), precision="bf16-mixed,weights=plain")) == []


def test_fp32_weights_that_fp16_cannot_hold_are_named() -> None:
    model = Net()
    with torch.no_grad():
        model.last.weight[0, 0] = 70000.0
    (finding,) = scan(model, precision="fp16-mixed").findings
    assert (finding.fault, finding.place.module) == ("overflow", "last")
    assert faults(scan(model, precision="bf16-mixed")) == []


def test_a_bound_model_and_code_under_torch_autocast_are_looked_at_as_they_are() -> None:
    model = Net(FAULTS["eps"][0])
    with torch.autocast("cpu", dtype=torch.float16):
        assert faults(scan(model, batch())) == ["eps"]
    bind(model, parse("fp16-mixed"), CPU)
    assert faults(scan(model, batch())) == ["eps"]
    with pytest.raises(ConfigError, match="bound to fp16-mixed"):
        scan(model, batch(), precision="bf16-mixed")


def test_mappings_tuples_and_a_loss() -> None:
    class WithLoss(Net):
        def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": F.mse_loss(super().forward(x), target)}

    model, x = WithLoss(), batch()
    for given in ({"x": x, "target": x}, (x, x)):
        trace = scan(model, given, precision="bf16-mixed")
        assert trace.loss == pytest.approx(1.0, abs=0.8)
        assert trace.ops > 5


def test_where_nothing_is_in_16_bits_scan_refuses() -> None:
    for how in ({}, {"precision": "fp32"}):
        with pytest.raises(ConfigError, match="in 16 bits"):
            scan(Net(), batch(), **how)
    with pytest.raises(ConfigError, match="in 16 bits"):
        scan(Net())
    with pytest.raises(ConfigError, match="in the place of the model"):
        scan(batch())  # type: ignore[arg-type]


def test_an_error_of_the_users_code_is_raised_as_it_is_with_its_place() -> None:
    def broken(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        scan(Net(broken), batch(), precision="bf16-mixed")
    assert any("Net" in note for note in caught.value.__notes__)


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers says at import and at construction what is no warning of ours."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def model_of(family: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers", reason="needs halfstep[hf]")
    torch.manual_seed(0)
    ids = torch.arange(24).reshape(2, 12) % 90
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    text = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    small: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
        ), text
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=1)), text
    if family == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**small)), {**text, "labels": torch.tensor([0, 1])}
    if family == "t5":
        config = transformers.T5Config(
            vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config), text
    config = transformers.ViTConfig(**{k: v for k, v in small.items() if k != "vocab_size"}, image_size=16, patch_size=4)
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def healthy(family: str, precision: str) -> None:
    with quiet():
        model, inputs = model_of(family)
        trace = scan(model, inputs, precision=precision)
    assert [str(f) for f in trace.findings if f.fault != "shape" and not f.fixed] == []


@pytest.mark.parametrize(("family", "precision"), [("llama", "fp16-mixed"), ("t5", "fp16-mixed"), ("llama", "bf16-true")])
def test_healthy_models_of_transformers_have_no_findings(family: str, precision: str) -> None:
    healthy(family, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed", "bf16-lean", "fp16-true", "bf16-true"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5", "vit"])
def test_all_healthy_models_of_transformers_have_no_findings(family: str, precision: str) -> None:
    healthy(family, precision)
