"""Nothing of the masters is lost: copies, pickles, saved and loaded states, removal, frozen weights, optimizer steps."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from lean_models import CPU, KEPT, X, equal, gradients, masters, net, trained

from halfstep import amp
from halfstep.errors import PolicyError
from halfstep.optim import AdamW, master_of
from halfstep.policy import parse


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean", "bf16-lean,weights=split24", "bf16-lean,weights=kahan", "bf16-true"])
def test_masters_go_with_copies_and_pickles(precision: str) -> None:
    model = trained(precision)
    before = masters(model)
    twin, back = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301  made on this line
    amp.bind(back, parse(precision), CPU)
    expected = gradients(model, X)
    for other in (twin, back):
        assert equal(masters(other), before)
        assert amp.layout(other) == amp.layout(model)
        assert all(torch.equal(a, b) for a, b in zip(gradients(other, X), expected, strict=True))
        assert {id(p) for p in other.parameters()}.isdisjoint(id(p) for p in model.parameters())
    optimizer = AdamW(twin.parameters(), lr=0.1)
    optimizer.step()
    assert equal(masters(model), before)
    assert not equal(masters(twin), before)


@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-true,weights=split"])
def test_a_loaded_fp32_state_becomes_the_masters_in_full(precision: str) -> None:
    state = {k: v + 1e-3 / 3 for k, v in net(None).state_dict().items()}
    model, part, other = trained(precision), trained(precision), trained(precision)
    model.load_state_dict(state)
    expected = {k: state[k] for k in masters(model)}
    for name, values in masters(model).items():
        torch.testing.assert_close(values, expected[name], rtol=2**-23, atol=0)
        assert torch.equal(model.get_parameter(name), expected[name].to(parse(precision).dtype))
    part.one.load_state_dict({k.removeprefix("one."): v for k, v in state.items() if k.startswith("one.")})
    torch.testing.assert_close(masters(part)["one.weight"], state["one.weight"], rtol=2**-23, atol=0)
    half = {k: v.to(parse(precision).dtype) for k, v in state.items()}
    other.load_state_dict(half)
    assert torch.equal(masters(other)["one.weight"], half["one.weight"].float())
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({**state, "one.weight": torch.zeros(2, 2)})
    assert torch.equal(masters(other)["one.weight"], half["one.weight"].float())


def test_a_state_that_is_assigned_gets_masters() -> None:
    model, state = trained(), {k: v.clone() for k, v in net(None).state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert equal(masters(model), {k: net(None).state_dict()[k] for k in KEPT})
    assert torch.equal(model(X), net("bf16-mixed")(X))
    assert equal(masters(copy.deepcopy(model)), masters(model))


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_the_state_to_be_saved_has_the_dtypes_that_were_loaded(loaded: torch.dtype) -> None:
    model = net("bf16-lean", loaded=loaded)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        gradients(model, X)
        optimizer.step()
    state, full = amp.model_state(model), masters(model)
    assert list(state) == list(model.state_dict())
    assert {v.dtype for v in state.values()} == {loaded}
    for name, values in full.items():
        assert torch.equal(state[name], values.to(loaded))
    assert amp.model_state(net(None)).keys() == state.keys()


def test_removing_the_binding_gives_fp32_weights_back() -> None:
    for precision in ("bf16-lean", "bf16-true,weights=split"):
        model = net(precision)
        before = {name: set(part.__dict__) for name, part in net(None).named_modules()}
        binding = amp.bind(other := net(None), parse(precision), CPU)
        other(X)
        binding.remove()
        assert {k: v.dtype for k, v in other.state_dict().items()} == dict.fromkeys(other.state_dict(), torch.float32)
        assert masters(other) == {}
        assert {name: set(part.__dict__) for name, part in other.named_modules()} == before
        if precision == "bf16-lean":
            assert torch.equal(other(X), net(None)(X))
        model(X)


def test_a_list_of_a_checkpoint_decides_instead_of_the_first_call() -> None:
    model = net("bf16-lean")
    amp.convert(model, parse("bf16-lean"), ["two.weight"])
    assert amp.layout(model)["16bit"] == ["two.weight"]
    assert torch.equal(model(X), net("bf16-mixed")(X))
    assert amp.layout(model)["16bit"] == ["two.weight"]
    amp.convert(model, parse("bf16-lean"), ["one.weight", "one.bias"])
    assert sorted(amp.layout(model)["16bit"]) == ["one.bias", "one.weight"]
    assert torch.equal(model.two.weight, net(None).two.weight)
    with pytest.raises(PolicyError, match=r"three\.weight is to be 16-bit"):
        amp.convert(model, parse("bf16-lean"), ["three.weight"])
    with pytest.raises(PolicyError, match="is not bound to a policy that keeps any so"):
        amp.convert(net(None), parse("bf16-lean"), ["one.weight"])


def test_frozen_weights_go_to_16_bits_when_they_fit_and_get_masters_when_they_are_trained() -> None:
    model = net(None)
    with torch.no_grad():
        model.one.weight.copy_(model.one.weight.bfloat16())
    model.one.requires_grad_(False)
    amp.bind(model, parse("bf16-lean"), CPU)
    model(X)
    assert amp.layout(model)["16bit"] == ["one.weight", "two.weight", "two.bias"]
    assert master_of(model.one.weight).nbytes() == 0
    before = model.one.weight.float()
    model.one.requires_grad_(True)
    gradients(model, X)
    assert master_of(model.one.weight).storage.name == "split"
    AdamW(model.parameters(), lr=1e-6).step()
    assert not torch.equal(masters(model)["one.weight"], before)
    frozen = net(None)
    frozen.one.requires_grad_(False)
    frozen.one.weight.data = frozen.one.weight.data.bfloat16().float()
    amp.bind(frozen, parse("bf16-lean"), CPU)
    frozen(X)
    state = {**frozen.state_dict(), "one.weight": torch.full((8, 8), 1 / 3)}
    frozen.load_state_dict(state)
    assert torch.equal(frozen.one.weight, state["one.weight"])  # which bf16 does not hold: it is fp32 again


def test_steps_with_split_masters_are_those_with_fp32_weights() -> None:
    lean, mixed = net("bf16-lean"), net("bf16-mixed")
    lean(X)
    ours, theirs = AdamW(lean.parameters(), lr=1e-3), AdamW(mixed.parameters(), lr=1e-3)
    for _, (model, optimizer) in itertools.product(range(3), ((lean, ours), (mixed, theirs))):
        gradients(model, X)
        optimizer.step()
    for name, values in masters(lean).items():
        reference = mixed.get_parameter(name).detach()
        torch.testing.assert_close(values, reference, rtol=0, atol=3 * 2**-23 * float(reference.abs().max()))
