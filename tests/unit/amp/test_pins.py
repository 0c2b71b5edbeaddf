"""A pinned part runs as it would in fp32, bit for bit, and nothing else of the model changes."""

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from pinned_models import CPU, PARTS, Net, X, equal, gradients, held_to_fp32, in_fp32, net, out
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import amp
from halfstep.amp import pin, pins, unpin
from halfstep.errors import ConfigError
from halfstep.optim import master_of
from halfstep.policy import parse

POLICIES = ["bf16-mixed", "fp16-mixed", "bf16-lean", "fp16-lean", "bf16-true", "fp16-true"]


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("precision", POLICIES)
def test_a_pinned_part_of_a_bound_model_is_that_part_in_fp32(precision: str, kind: str) -> None:
    model = net(precision, kind)
    pin(model, "part")
    held_to_fp32(model, kind)


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("block", [lambda: torch.autocast("cpu", torch.bfloat16), lambda: amp.autocast("cpu", torch.float16)], ids=["torch", "ours"])
def test_blocks_of_autocast_around_an_unbound_model_do_not_reach_in(block, kind: str) -> None:
    model = net(None, kind)
    pin(model, "part")
    with block():
        held_to_fp32(model, kind)


def test_16_bit_weights_without_masters_are_cast_up() -> None:
    model = net(None).bfloat16()
    pin(model, "part")
    y = model.part(X)
    wide = in_fp32(model, "feed")
    torch.manual_seed(3)
    want = wide(X)
    torch.manual_seed(3)
    y = model.part(X)
    assert torch.equal(y, want)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("precision", POLICIES)
def test_nothing_else_changes_and_removal_undoes_it(precision: str) -> None:
    model, twin = net(precision), net(precision)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    handle = pin(model, "part", "because", 7)
    assert [(p.module, p.why, p.step) for p in pins(model)] == [("part", "because", 7)]
    out(model)
    after = model.state_dict()
    assert list(after) == list(state)
    assert equal(after, state)
    assert all(after[k].dtype == v.dtype for k, v in state.items())
    handle.remove()
    assert pins(model) == ()
    assert torch.equal(out(model), out(twin))
    assert equal(gradients(model), gradients(twin))
    assert set(model.__dict__) == set(twin.__dict__)


@pytest.mark.parametrize("precision", POLICIES)
def test_a_part_called_by_itself_and_one_computed_again_are_pinned_too(precision: str) -> None:
    model = net(precision)
    pin(model, "part")
    twin = in_fp32(model, "feed")
    torch.manual_seed(3)
    want = twin(X)
    torch.manual_seed(3)
    assert torch.equal(model.part(X), want)
    torch.manual_seed(3)
    checkpoint(model.part, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    want.sum().backward()
    for name, p in model.part.named_parameters():
        assert torch.equal(p.grad, dict(twin.named_parameters())[name].grad.to(p.grad.dtype)), name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["part", "part.i"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-lean", "bf16-true"])
def test_activation_checkpointing_changes_nothing(precision: str, name: str, reentrant: bool) -> None:
    model, twin = net(precision, again=True, reentrant=reentrant), net(precision)
    pin(model, name)
    pin(twin, name)
    assert torch.equal(out(model), out(twin))
    assert equal(gradients(model), gradients(twin))


@pytest.mark.parametrize("first", ["part", "part.i"])
@pytest.mark.parametrize("removed", ["part", "part.i"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-lean", "bf16-true"])
def test_pins_inside_of_pins_come_and_go_in_any_order(precision: str, removed: str, first: str) -> None:
    plain, outer = net(precision), net(precision)
    pin(outer, "part")
    model = net(precision)
    second = {"part": "part.i", "part.i": "part"}[first]
    pin(model, first)
    pin(model, second)
    assert torch.equal(out(model), out(outer))
    unpin(model, [removed])
    left = net(precision)
    (stays,) = {"part", "part.i"} - {removed}
    pin(left, stays)
    assert torch.equal(out(model), out(left))
    unpin(model, [stays])
    assert pins(model) == ()
    assert torch.equal(out(model), out(plain))
    assert equal(gradients(model), gradients(plain))


@pytest.mark.parametrize("precision", POLICIES)
def test_copies_are_pinned_and_independent(precision: str) -> None:
    model, plain = net(precision), net(precision)
    pin(model, "part", "why", 3)
    twin, before = copy.deepcopy(model), out(model)
    assert pins(twin) == pins(model)
    assert torch.equal(out(twin), before)
    with torch.no_grad():
        for p in twin.part.parameters():
            p.zero_()
            if (master := master_of(p)) is not None:
                master.write(torch.zeros_like(p, dtype=torch.float32))
    assert not torch.equal(out(twin), before)
    assert torch.equal(out(model), before)
    unpin(twin, ["part"])
    assert len(pins(model)) == 1
    again = copy.deepcopy(model)
    unpin(again, ["part"])
    assert torch.equal(out(again), out(plain))


def test_a_pickled_model_tells_the_truth_about_its_pins() -> None:
    """Bound methods do not go through pickle; a pin that is gone is not told, and can be set again."""
    model = net(None)
    pin(model, "part")
    loaded = pickle.loads(pickle.dumps(model))  # noqa: S301  our own bytes
    with torch.autocast("cpu", torch.bfloat16):
        if not pins(loaded):
            pin(loaded, "part")
        held_to_fp32(loaded, "feed")


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-lean", "bf16-true"])
def test_a_model_that_is_bound_after_a_pin_keeps_it_or_says_that_it_has_none(precision: str) -> None:
    model, twin = net(None), net(precision)
    pin(model, "part")
    amp.bind(model, parse(precision), CPU)
    pin(twin, "part")
    assert [p.module for p in pins(model)] in (["part"], [])
    if pins(model):
        assert torch.equal(out(model), out(twin))


@pytest.mark.parametrize("precision", POLICIES)
def test_pins_before_the_first_call_are_those_after_it(precision: str) -> None:
    model, twin = net(None), net(precision)
    amp.bind(model, parse(precision), CPU)
    pin(model, "part")
    pin(twin, "part")
    assert torch.equal(out(model), out(twin))


def test_unbinding_removes_the_pins_too() -> None:
    torch.manual_seed(0)
    model = Net()
    binding = amp.bind(model, parse("bf16-lean"), CPU)
    out(model)
    pin(model, "part")
    pin(model, "part.i")
    binding.remove()
    assert pins(model) == ()
    assert not any("forward" in part.__dict__ for part in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", POLICIES)
def test_without_a_graph_too(precision: str) -> None:
    model = net(precision).eval()
    pin(model, "part")
    want = out(model)
    with torch.no_grad():
        assert torch.equal(out(model), want)
    with torch.inference_mode():
        assert torch.equal(out(model), want)
    assert out(model).requires_grad


def test_hooks_of_a_pinned_part_run_as_ever() -> None:
    model, seen = net("fp16-mixed"), []
    model.part.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    model.part.register_forward_hook(lambda _, given, gave: seen.append((given[0].dtype, gave.dtype)))
    model.part.i.register_full_backward_hook(lambda *_: seen.append("backward"))
    pin(model, "part")
    out(model).sum().backward()
    assert seen == [(torch.float16, torch.float32), "backward"]


def test_keywords_and_mappings_are_cast_up() -> None:
    model = net("bf16-mixed")
    pin(model, "part")
    extra = torch.full((6, 8), 0.3, dtype=torch.bfloat16)
    twin = in_fp32(model, "feed")
    torch.manual_seed(1)
    want = twin(X.bfloat16().float(), extra={"e": extra.float()})
    torch.manual_seed(1)
    assert torch.equal(model.part(X.bfloat16(), extra={"e": extra}), want)


def test_an_error_inside_puts_the_16_bit_weights_back() -> None:
    model = net("bf16-lean")
    pin(model, "part")
    held = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="shapes"):
        model.part(torch.ones(3, 5))
    assert model.part.i.weight is held["part.i.weight"]
    assert model.part.i.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-lean", "bf16-true"])
def test_tied_weights_stay_one(precision: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mid, self.head = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.mid(self.table(ids)))

    model, ids, seen = Tied(), torch.arange(5), []
    amp.bind(model, parse(precision), CPU)
    model(ids)
    pin(model, "head")
    model.head.register_forward_pre_hook(lambda _, given: seen.append(given[0].float()))
    y = model(ids)
    weight = model.table.weight
    wide = m.read() if (m := master_of(weight)) is not None else weight.detach().float()
    assert torch.equal(y, seen[0] @ wide.t())
    y.sum().backward()
    assert model.head.weight is weight
    assert weight.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself, when it compiles
@pytest.mark.parametrize("precision", [None, pytest.param("fp16-mixed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models_follow(precision: str | None, when: str) -> None:
    block = contextlib.nullcontext if precision else lambda: torch.autocast("cpu", torch.bfloat16)
    torch._dynamo.reset()
    model, twin = net(precision).eval(), net(precision).eval()
    pin(twin, "part")
    with block():
        want, plain = twin(X), net(precision).eval()(X)
        if when == "before":
            pin(model, "part")
        compiled = torch.compile(model, backend="eager")
        if when == "after":
            assert torch.equal(compiled(X), plain)
            handle = pin(model, "part")
        assert torch.equal(compiled(X), want)
        assert not torch.equal(want, plain)
        if when == "after":
            handle.remove()
            assert torch.equal(compiled(X), plain)


@pytest.mark.parametrize(
    ("name", "cause", "remedy"),
    [
        ("", "whole model", "fp32 precision"),
        ("prat", "no module 'prat'", "part"),
        ("many", "container that is never called", "many.0"),
        ("attend.out_proj", "never called", "attention module itself"),
        ("part", "pinned already", "remove"),
    ],
)
def test_what_cannot_be_pinned_is_refused_and_leaves_no_trace(name: str, cause: str, remedy: str) -> None:
    model = net(None)
    model.many, model.attend = nn.ModuleList([nn.Linear(2, 2)]), nn.MultiheadAttention(8, 2)
    if name == "part":
        pin(model, "part")
    before = set(model.__dict__)
    with pytest.raises(ConfigError) as caught:
        pin(model, name)
    assert cause in str(caught.value)
    assert remedy in str(caught.value)
    assert set(model.__dict__) == before


def test_unpinning_what_is_not_pinned_is_refused() -> None:
    model = net(None)
    pin(model, "part")
    with pytest.raises(ConfigError, match="part"):
        unpin(model, ["a"])
    assert len(pins(model)) == 1


@pytest.mark.parametrize(("model", "name"), [(None, "0"), (nn.Sequential(nn.Linear(2, 2)), 0), (nn.Linear(2, 2), "0")])
def test_what_cannot_be_pinned_is_refused(model: Any, name: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        pin(model, name)
    assert caught.value.remedy


def test_a_part_of_a_fused_transformer_layer_is_pinned_in_evaluation_too() -> None:
    """torch's fused layer reads the weights of its parts and calls none of them, unless one has a hook."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    with torch.no_grad():
        layer.linear1.weight.mul_(3e3)
        layer.linear2.weight.mul_(3e3)
    model, x = nn.Sequential(layer).eval(), torch.randn(2, 4, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        handle = pin(model, "0.linear2")
        assert bool(model(x).isfinite().all())
        handle.remove()
        assert not layer.linear2._forward_hooks
