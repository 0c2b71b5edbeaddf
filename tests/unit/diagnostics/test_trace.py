from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.amp import bind, bound_policy
from halfstep.diagnostics.ranking import ranked
from halfstep.diagnostics.trace import loss_in, named, trace
from halfstep.errors import ConfigError, PolicyError
from halfstep.optim import wrap
from halfstep.policy import parse
from halfstep.tracing import Finding, Place

EVERY = ["fp32", "bf16-mixed", "fp16-mixed", "bf16-lean", "fp16-lean", "bf16-true", "fp16-true"]


class Net(nn.Module):
    """Everything that a run can leave a trace on: statistics, a counter, dropout, gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.drop, self.calls = nn.Dropout(0.2), 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        self.calls += 1
        out = self.b(self.drop(F.relu(self.norm(self.a(x)))))
        return out if y is None else {"logits": out, "loss": F.cross_entropy(out.float(), y)}


def data() -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 128).reshape(8, 16), "y": torch.arange(8)}


def state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        yield name, (t.dtype, t.data_ptr(), t.detach().clone(), t.grad, None if t.grad is None else t.grad.clone())
    yield "training", [m.training for m in model.modules()]
    yield "hooks", [(len(m._forward_hooks), len(m._state_dict_hooks), len(m._load_state_dict_post_hooks)) for m in model.modules()]
    yield "attributes", [sorted(m.__dict__) for m in model.modules()]
    yield "calls", model.calls
    yield "random", torch.get_rng_state()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return all(same(i, j) for i, j in zip(a, b, strict=True)) if isinstance(a, tuple) else bool(a == b)


@pytest.mark.parametrize("precision", EVERY)
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_nothing_is_changed(precision: str, loaded: torch.dtype) -> None:
    model = Net()
    model(**data())["loss"].backward()
    model.b.bias.grad = None
    model.a.eval()
    for name in ("a", "b"):
        model.get_submodule(name).to(loaded)
    if loaded != torch.float32 and precision == "fp32":
        return
    before = dict(state(model))
    trace(model, {"x": data()["x"], "y": data()["y"]}, precision=precision)
    after = dict(state(model))
    assert before.keys() == after.keys()
    wrong = [name for name in before if not same(before[name], after[name])]
    assert wrong == []
    assert bound_policy(model) is None


def test_a_bound_model_stays_bound_and_is_traced_as_it_is() -> None:
    model = Net()
    binding = bind(model, parse("fp16-mixed"), torch.device("cpu"))
    assert str(trace(model, data())).startswith("nothing found: loss ")
    assert str(trace(model, data(), precision="fp16-mixed")).startswith("nothing found")
    assert str(bound_policy(model)) == "fp16-mixed"
    with pytest.raises(ConfigError, match="is bound to fp16-mixed, and precision='bf16-mixed'"):
        trace(model, data(), precision="bf16-mixed")
    binding.remove()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "neither batch nor call"),
        ({"batch": 1, "call": lambda: None}, "both batch and call"),
        ({"call": lambda: None, "loss": lambda y: y}, "loss= has no effect"),
        ({"batch": torch.ones(2, 16), "scale": 0.0}, "scale=0.0"),
        ({"batch": torch.ones(8, 16), "loss": lambda y: y}, "a tensor of shape"),
        ({"batch": torch.ones(8, 16), "loss": lambda y: 3.0}, "a float"),
        ({"batch": torch.ones(8, 16), "precision": "fp17"}, "fp17"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], says: str) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=says):
        trace(model, **arguments)
    assert bound_policy(model) is None
    assert str(trace(model, data())).startswith("nothing found")  # nothing stayed open
    with pytest.raises(ConfigError, match="in the place of the model"):
        trace(data(), model)  # type: ignore[arg-type]


def test_masters_that_are_there_already_are_not_thrown_away() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), weights="split")
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="masters beside them already"):
        trace(model, torch.ones(2, 4), precision="bf16-mixed")
    assert "masters" not in str(trace(model, torch.ones(2, 4, dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        (data(), None),
        ((data()["x"], data()["y"]), None),
        ([data()["x"]], lambda out: out.square().mean()),
        (data()["x"], lambda out, batch: F.mse_loss(out, batch)),
        ({"x": data()["x"]}, lambda out, batch: F.mse_loss(out, batch["x"])),
    ],
)
def test_batches_and_losses(batch: Any, loss: Any) -> None:
    found = trace(Net(), batch, loss=loss)
    assert found.loss is not None
    assert found.findings == ()
    assert found.ops > 30
    forward = trace(Net(), data()["x"])
    assert forward.loss is None
    assert 10 < forward.ops < found.ops


def test_what_is_a_loss() -> None:
    one = torch.ones(())
    assert loss_in(one) is one
    assert loss_in({"loss": one, "logits": torch.ones(3)}) is one
    assert loss_in((one, torch.ones(3))) is one
    for none in (torch.ones(3), {"loss": None}, (torch.ones(3), one), None, 3.0, []):
        assert loss_in(none) is None


def test_names_of_a_batch() -> None:
    x, i = torch.ones(2), torch.ones(2).long()
    assert list(named({"x": x, "ids": i, "more": [x, (i, {"deep": x})]})) == ["batch['x']", "batch['more'][0]", "batch['more'][1][1]['deep']"]
    assert list(named(x)) == ["batch"]


class TestScale:
    """The backward pass overflows above some scale; the loss scale is not the model's fault."""

    @staticmethod
    def model() -> nn.Module:
        return Net().eval()

    def test_a_scale_that_only_is_too_large_is_gone_down_from(self) -> None:
        found = trace(self.model(), {"x": data()["x"]}, loss=lambda out: out.float().square().sum() * 100, precision="fp16-mixed")
        assert found.findings == (), str(found)

    def test_a_scale_that_is_given_is_taken(self) -> None:
        loud = lambda out: out.float().square().sum() * 100  # noqa: E731
        found = trace(self.model(), {"x": data()["x"]}, loss=loud, precision="fp16-mixed", scale=2.0**20, step=41)
        assert found.first is not None
        assert (found.first.fault, found.first.place.direction, found.first.step) == ("overflow", "backward", 41)
        assert "lower the loss scale" in found.first.remedy
        assert ", step 41: " in str(found).splitlines()[0]

    def test_a_backward_pass_that_overflows_at_scale_1_is_named(self) -> None:
        class Steep(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 1e-3 * 600.0 * 600.0 * 600.0 * 600.0 * 1e-6

        model = nn.Sequential(nn.Linear(4, 4), Steep())
        with torch.no_grad():
            model[0].weight.fill_(1e-4)
            model[0].bias.zero_()
        found = trace(model, torch.ones(2, 4), loss=lambda y: y.float().sum(), precision="fp16-true")
        assert found.first is not None
        assert (found.first.fault, found.first.place.direction, found.first.place.module) == ("overflow", "backward", "1")


class Wide(nn.Module):
    """A feed-forward part whose hidden values reach `size`."""

    def __init__(self, size: float, again: bool | None = None) -> None:
        super().__init__()
        self.wi, self.wo, self.norm, self.again = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.LayerNorm(8), again
        with torch.no_grad():
            self.wi.weight.fill_(size / 8)
            self.wo.weight.fill_(0.5)

    def body(self, x: Tensor) -> Tensor:
        return self.wo(F.relu(self.wi(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x) if self.again is None else checkpoint(self.body, x, use_reentrant=self.again))


@pytest.mark.parametrize("again", [None, True, False])
@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-lean", "fp16-true"])
def test_an_overflow_under_activation_checkpointing(precision: str, again: bool | None) -> None:
    x = torch.ones(2, 8, requires_grad=True)
    for size, fault in ((30000.0, "overflow"), (100.0, None)):
        found = trace(Wide(size, again), x, loss=lambda y: y.float().square().mean(), precision=precision)
        assert (found.first and found.first.fault) == fault, str(found)
        if fault:
            assert found.first is not None
            assert (found.first.place.module, found.first.place.direction) == ("wo", "forward")
            assert "the product reaches 1.2e+05" in found.first.what


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true"])
def test_a_near_miss_is_told_with_the_module(precision: str) -> None:
    found = trace(Wide(10000.0), torch.ones(2, 8), loss=lambda y: y.float().square().mean(), precision=precision)
    assert found.first is not None
    assert (found.first.fault, found.first.place.module) == ("near", "wo")
    assert found.closest[0][0] == "wo (Linear)"
    assert found.closest[0][1] == pytest.approx(40000 / 65504, rel=1e-3)
    assert "closest to the limit of its format: wo (Linear) 61.1%" in str(found)
    assert trace(Wide(10000.0), torch.ones(2, 8), precision="bf16-mixed").findings == ()


def test_an_overflow_that_the_code_makes_finite_again_is_told_as_near() -> None:
    class Clamped(Wide):
        def body(self, x: Tensor) -> Tensor:
            return super().body(x).clamp(-60000.0, 60000.0)

    found = trace(Clamped(30000.0), torch.ones(2, 8), precision="fp16-mixed")
    assert found.first is not None
    assert (found.first.fault, found.first.place.module) == ("near", "wo")
    assert "what follows has made it finite again" in found.first.what
    assert "wo (Linear) beyond it" in str(found)


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-true", "bf16-mixed"])
def test_a_mask_that_a_product_adds_is_none(precision: str) -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(4).to(x.dtype)
            return self.attention(x, x, x, attn_mask=mask)[0]

    assert trace(Causal(), torch.ones(2, 4, 16), loss=lambda y: y.float().square().mean(), precision=precision).findings == ()


def test_what_the_backward_pass_makes_of_an_overflow_is_not_told() -> None:
    found = trace(Wide(30000.0), torch.ones(2, 8), loss=lambda y: y.float().sum() * 1e9, precision="fp16-true")
    assert [f.fault for f in found.findings] == ["overflow"]


def test_a_compiled_model_is_told_by_the_names_it_was_written_with() -> None:
    compiled = torch.compile(Wide(30000.0), backend="eager")
    found = trace(compiled, torch.ones(2, 8), precision="fp16-mixed")
    assert found.first is not None
    assert found.first.place.module == "wo"


class TestErrors:
    def test_an_unknown_error_is_raised_with_the_module(self) -> None:
        class Part(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                raise KeyError("no such thing")

        model = nn.Sequential(nn.Linear(4, 4), Part())
        with pytest.raises(KeyError) as caught:
            trace(model, torch.ones(2, 4), precision="bf16-mixed")
        assert caught.value.__notes__[0].startswith("raised in 1 (Part), forward, test_trace.py:")
        assert bound_policy(model) is None

    def test_one_about_values_that_are_not_finite_is_answered(self) -> None:
        class Strict(Wide):
            def forward(self, x: Tensor) -> Tensor:
                x = super().forward(x)
                if not x.isfinite().all():
                    raise FloatingPointError("NaN in the output")
                return x

        found = trace(Strict(30000.0), torch.ones(2, 8), precision="fp16-mixed")
        assert found.first is not None
        assert (found.first.fault, found.first.place.module) == ("overflow", "wo")
        assert found.error == "FloatingPointError: NaN in the output"

    def test_a_missing_cast_is_a_finding(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())
        for call in (None, lambda: model(torch.ones(2, 4))):
            found = trace(model, torch.ones(2, 4) if call is None else None, call=call)
            assert found.first is not None
            assert (found.first.fault, found.first.place.module) == ("mismatch", "1")
            assert "1.weight" in found.first.what


class TestCall:
    def test_it_may_do_the_whole_step(self) -> None:
        model, x = Net(), data()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

        def call() -> Tensor:
            loss = model(**x)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        before = copy.deepcopy([*model.parameters()])
        found = trace(model, call=call)
        assert found.findings == ()
        assert found.loss is not None
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(p.grad is None for p in model.parameters())
        assert not optimizer.state

    def test_gradients_that_it_makes_are_looked_at(self) -> None:
        model = nn.Linear(4, 4)

        def call() -> None:
            (model(torch.ones(2, 4)) * 0).square().sum().sqrt().backward()

        found = trace(model, call=call)
        assert found.first is not None
        assert (found.first.fault, found.first.place.direction) == ("nonfinite", "backward")
        assert "division by 0" in found.first.what

    def test_what_leaves_torch_is_said_to(self) -> None:
        model = nn.Linear(4, 4)
        found = trace(model, call=lambda: model(torch.ones(2, 4)).sum() * float("nan"))
        assert found.first is not None
        assert found.first.fault in ("nonfinite", "mask")


class TestRanking:
    @staticmethod
    def one(fault: Any, module: str = "a", at: int = 0, what: str = "", direction: Any = "forward", source: str = "") -> Finding:
        return Finding(fault, Place(module, "M", "op", direction, source), what or f"{fault} {at}", "", at=at)

    @pytest.mark.parametrize(
        ("constant", "birth", "first"),
        [
            (("eps", "a", 3), ("nonfinite", "a", 4, "div gives NaN"), "eps"),
            (("eps", "a", 3), ("nonfinite", "b", 4, "div gives NaN"), "nonfinite"),
            (("eps", "a", 5), ("nonfinite", "a", 4, "div gives NaN"), "nonfinite"),
            (("eps", "a", 3), ("overflow", "a", 4, "the product reaches 1e5"), "overflow"),
            (("mask", "a", 3), ("nonfinite", "a", 4), "mask"),
            (("mask", "a", 3), ("overflow", "a", 4), "mask"),
            (("clamp", "a", 3), ("nonfinite", "a", 4, "the logarithm of 0"), "clamp"),
            (("eps", "a", 3), ("data", "a", 4), "data"),
        ],
    )
    def test_a_cause_comes_first(self, constant: Any, birth: Any, first: str) -> None:
        cause, born = self.one(*constant), self.one(*birth)
        found = ranked([self.one("shape"), cause, born], [born])
        assert found[0].fault == first
        assert len(found) == 3

    def test_one_fault_of_one_line_is_told_once(self) -> None:
        twice = [self.one("mask", source="m.py:3"), self.one("mask", at=4, source="m.py:3"), self.one("mask", at=5, source="m.py:4")]
        assert [f.at for f in ranked(twice, [])] == [0, 5]


def test_a_precision_that_cannot_work_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    before = sorted(model.__dict__)
    with pytest.raises(PolicyError, match="has none"):
        trace(model, torch.ones(2, 4), precision="bf16-lean")
    assert sorted(model.__dict__) == before


def test_a_call_may_run_its_own_backward_pass_and_return_the_loss() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)), torch.randn(4, 8)

    def call() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    assert halfstep.trace(model, call=call).findings == ()
    assert all(p.grad is None for p in model.parameters())
    x[0, 0] = float("nan")
    assert halfstep.trace(model, call=call).first.fault == "data"


@pytest.mark.parametrize("wrong", [{"call": 3}, {"batch": torch.ones(1, 8), "loss": "mse"}])
def test_what_is_no_function_is_refused(wrong: dict) -> None:
    with pytest.raises(halfstep.errors.ConfigError, match="is no function"):
        halfstep.trace(torch.nn.Linear(8, 1), **wrong)
