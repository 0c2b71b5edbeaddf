"""The largest outputs of modules, looked at in every N-th forward pass and in no other, without a trace in what is computed."""

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from halfstep.amp import autocast
from halfstep.amp.casting import bind
from halfstep.amp.sampling import Sampler, _eager_parts
from halfstep.errors import ConfigError
from halfstep.numerics import FORMATS
from halfstep.policy import parse

CPU = torch.device("cpu")
FP16, BF16, FP32 = (FORMATS[f].largest for f in ("fp16", "bf16", "fp32"))


class Times(nn.Module):
    """Multiplies by a constant, in a dtype."""

    def __init__(self, factor: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.factor, self.dtype = factor, dtype

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).to(self.dtype)


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3)))


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) for part in model.modules())


def values(sampler: Sampler) -> dict[str, float]:
    """Largest outputs by module."""
    return {name: value for m in sampler.sampled() for name, value in zip(m.names, m.numbers, strict=True)}


def test_the_first_forward_pass_and_every_nth_are_looked_at_and_hooks_do_not_stay() -> None:
    model, sampler = tiny(), Sampler(every=3)
    sampler.watch(model)
    sampler.watch(model)
    assert sampler.outputs() == ()
    changed, last = [], None
    for k in range(7):
        model(torch.full((2, 4), float(k + 1)))
        changed.append(sampler.sampled()[0] is not last)
        last = sampler.sampled()[0]
        assert hooks(model) == 0
    assert changed == [True, False, True, False, False, True, False]
    assert sum(len(part._forward_pre_hooks) for part in model.modules()) == 1


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, FP16), (torch.bfloat16, BF16), (torch.float32, FP32)])
def test_outputs_are_held_against_the_limit_of_their_own_format(dtype: torch.dtype, limit: float) -> None:
    model, sampler = nn.Sequential(Times(1.0), Times(-40960.0, dtype), Times(0.25, dtype)), Sampler()
    sampler.watch(model)
    model(torch.tensor([1.0, -0.5, 0.0]))
    assert sampler.outputs()[:2] == (("1", 40960.0 / limit), ("2", 10240.0 / limit))
    assert values(sampler) == {"0": 1.0, "1": 40960.0, "2": 10240.0}


def test_only_the_eight_worst_are_told_and_what_is_not_finite_comes_first() -> None:
    model, sampler = nn.Sequential(*[Times(0.5) for _ in range(8)], Times(1e39), Times(0.0)), Sampler()
    sampler.watch(model)
    model(torch.ones(2))
    told = sampler.outputs()
    assert len(told) == 8
    assert [name for name, _ in told[:3]] == ["9", "8", "0"]  # inf times 0 is NaN
    assert told[1][1] == torch.inf


def test_evaluation_no_grad_and_other_models_are_not_counted() -> None:
    model, sampler = tiny(), Sampler(every=2)
    sampler.watch(model)
    model.eval()(torch.ones(2, 4))
    with torch.no_grad():
        model.train()(torch.ones(2, 4))
    model[0](torch.ones(2, 4))
    assert sampler.outputs() == ()
    model(torch.ones(2, 4))
    assert len(sampler.outputs()) == 3


def test_a_module_called_twice_tells_its_largest_output_and_one_that_hands_on_tells_none() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Times(2.0)
            self.same = self.part
            self.body = nn.Sequential(nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.part(self.same(x)) - 3.5)

    model, sampler = Twice(), Sampler()
    sampler.watch(model)
    model(torch.ones(2))
    assert values(sampler) == {"part": 4.0, "body.0": 0.5}  # not "same", "body" and "" again


def test_a_change_in_place_is_an_output_of_its_own() -> None:
    model, sampler = nn.Sequential(Times(-1.0), nn.ReLU(inplace=True)), Sampler()
    sampler.watch(model)
    model(torch.tensor([1.0, -0.5]))
    assert values(sampler) == {"0": 1.0, "1": 0.5}


@dataclass
class Outputs:
    logits: Tensor
    aux: Tensor | None = None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: {"logits": t, "ids": torch.ones(2, dtype=torch.long)},
        lambda t: (t, [t * 0.5, None], "text"),
        lambda t: Outputs(t),
        lambda t: [{"deep": (t,)}, torch.ones(0), torch.ones(2, dtype=torch.complex64), torch.ones(2).to_sparse(), torch.ones(2, device="meta")],
    ],
)
def test_outputs_in_containers_are_found_and_what_has_no_such_numbers_is_left_out(wrap: Callable[[Tensor], Any]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return wrap(x * 3)

    model, sampler = Model(), Sampler()
    sampler.watch(model)
    model(torch.ones(2))
    assert values(sampler) == {"": 3.0}


def test_an_error_in_the_forward_pass_takes_the_hooks_away() -> None:
    class Fails(nn.Module):
        error: type[BaseException] = ValueError

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() < 0:
                raise self.error("bad input")
            return x * 2

    model, sampler = nn.Sequential(Times(1.0), Fails()), Sampler(every=1)
    sampler.watch(model)
    with pytest.raises(ValueError, match="bad input"):
        model(-torch.ones(2))
    model.eval()(torch.ones(2))
    assert hooks(model) == 0, "the next call takes them off"
    model.train()
    model[1].error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        model(-torch.ones(2))
    model(torch.ones(2))
    assert (hooks(model), values(sampler)) == (0, {"0": 1.0, "1": 2.0})


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed", "bf16-lean", "fp16-true"])
@pytest.mark.parametrize("first", ["bind", "watch"])
def test_it_works_on_models_bound_before_or_after(first: str, precision: str) -> None:
    model, sampler, policy = tiny(), Sampler(every=1), parse(precision)
    if first == "watch":
        sampler.watch(model)
    bind(model, policy, CPU)
    sampler.watch(model)
    limit = FP16 if precision.startswith("fp16") else BF16
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        found = dict(sampler.outputs())
        with torch.no_grad():
            expected = float(model[0](torch.ones(2, 4)).abs().max())
        assert found["0"] == expected / limit
        assert set(found) >= {"0", "1.0", "1.1"}
    assert hooks(model) == 0


def test_what_is_computed_is_the_same_bit_for_bit() -> None:
    ends = []
    for watched in (True, False):
        model = tiny()
        bind(model, parse("fp16-mixed"), CPU)
        sampler = Sampler(every=1)
        if watched:
            sampler.watch(model)
        for k in range(3):
            model(torch.full((2, 4), k + 0.3)).square().sum().backward()
        ends.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Checkpointed(nn.Module):
    """A block that is computed again in the backward pass, all of it or but for what a policy keeps."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        how = {"context_fn": lambda: create_selective_checkpoint_contexts(lambda *a, **k: CheckpointPolicy.MUST_SAVE)} if self.keeps else {}
        with autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(self.block, x, use_reentrant=False, **how)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_block_computed_again_is_neither_counted_nor_disturbed(keeps: bool) -> None:
    ends = []
    for watched in (True, False):
        model, sampler = Checkpointed(keeps), Sampler(every=1)
        if watched:
            sampler.watch(model)
            sampler.watch(model.block)
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        model(x).float().square().sum().backward()
        ends.append([x.grad, *(p.grad for p in model.parameters())])
        assert [m.calls for m in sampler._models] == [1, 1] * watched
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_copies_of_a_model_tell_nobody_and_a_dead_sampler_leaves_nothing() -> None:
    model, sampler = tiny(), Sampler(every=1)
    sampler.watch(model)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]  # noqa: S301  our own
    for twin in twins:
        twin(torch.ones(2, 4))
        assert hooks(twin) == 0
    assert sampler.outputs() == ()
    assert copy.deepcopy(sampler).every == 1
    kind = type("Counts", (Sampler,), {})
    assert type(copy.deepcopy(kind(2))) is kind
    for twin in twins:
        sampler.watch(twin)
        twin(torch.ones(2, 4))
    assert len(sampler.sampled()) == 2
    del twin, twins, sampler
    gc.collect()
    assert not model._forward_pre_hooks
    model(torch.ones(2, 4))


def test_a_model_that_is_gone_is_forgotten() -> None:
    sampler = Sampler()
    sampler.watch(tiny())
    gc.collect()
    sampler.watch(tiny())
    assert len(sampler._models) <= 1


def test_inside_vmap_and_for_subclasses_nothing_is_measured() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Times(2.0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(self.part)(x)

    model, sampler = Mapped(), Sampler()
    sampler.watch(model)
    model(torch.ones(3, 2))
    assert values(sampler) == {"": 2.0}


def test_scripts_and_traces_are_left_alone() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        script = torch.jit.script(nn.Linear(4, 4))
    sampler = Sampler(every=1)
    sampler.watch(script)
    model = nn.Sequential(script, Times(2.0))
    sampler.watch(model)
    model(torch.ones(2, 4))
    assert set(values(sampler)) == {"1"}
    plain, other = tiny(), Sampler(every=1)
    other.watch(plain)
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        torch.jit.trace(plain, torch.ones(2, 4))
    assert other.outputs() == ()


def test_parts_that_torch_compiles_get_no_hooks() -> None:
    model = nn.Sequential(Times(1.0), nn.Sequential(Times(2.0)), nn.Sequential(Times(3.0)), Times(4.0))
    model[1].compile(backend="eager")
    model[2] = torch.compile(model[2], backend="eager")
    assert [name for name, _ in _eager_parts(model)] == ["0", "3", ""]
    model.compile(backend="eager")
    assert list(_eager_parts(model)) == []


def test_a_period_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="every 0 forward passes"):
        Sampler(every=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["whole", "method", "part", "part in place"])
def test_compiled_models_and_parts_are_left_alone_in_one_graph(way: str) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    model, sampler = nn.Sequential(Inner(), nn.Linear(3, 4), Times(2.0)), Sampler(every=2)
    called: Any = model
    if way == "part":
        model[0] = torch.compile(model[0], backend=backend, fullgraph=True)
    elif way == "part in place":
        model[0].compile(backend=backend, fullgraph=True)
    sampler.watch(model)
    if way == "whole":
        called = torch.compile(model, backend=backend, fullgraph=True)
    elif way == "method":
        model.compile(backend=backend, fullgraph=True)
    for _ in range(5):
        called(torch.ones(2, 4)).sum().backward()
    assert len(graphs) == 1
    assert all(node.target is not torch.aminmax for node in graphs[0].graph.nodes)
    assert set(values(sampler)) == (set() if way in ("whole", "method") else {"1", "2"})
