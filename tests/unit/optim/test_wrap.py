"""A wrapped optimizer in the hands of its user: closures, schedulers, hooks, states, copies, and what is refused."""

import copy
import io
import logging
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep import amp
from halfstep.errors import CheckpointError, ConfigError
from halfstep.numerics import Noise, state_noise, stochastic
from halfstep.optim import attach, full_values, master_of
from halfstep.optim.wrap import Wrapped, wrap
from halfstep.policy import parse

SHAPES = ((4, 5), (6,), (2, 2, 3), ())


def tensors(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=draws).bfloat16().to(dtype)) for s in SHAPES]


def feed(held: list[Any], step: int = 0) -> None:
    draws = torch.Generator().manual_seed(step)
    for p in held:
        p.grad = torch.randn(p.shape, generator=draws).bfloat16().to(p.dtype)


def close(p: Tensor, q: Tensor) -> bool:
    """Within what split masters lose: an fp32 ulp where a value lies halfway between two 16-bit ones."""
    return float((p - full_values(q)).detach().abs().max()) <= 2.0**-22 * max(1.0, float(p.detach().abs().max()))


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(p, q) and torch.equal(full_values(p), full_values(q)) for p, q in zip(a, b, strict=True))


def adamw(held: Any, **options: Any) -> Wrapped:
    return wrap(optim.AdamW(held, lr=0.01), weights="split", **options)


class Schedulefree(optim.Optimizer):
    """Keeps the weights at a mix of two points while training, and at one of them for evaluation."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "training": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("z", p.detach().clone()).sub_(p.grad * group["lr"])
                    p.sub_(p.grad * group["lr"] * 0.5)

    def _mix(self, share: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    p.data.lerp_(self.state[p]["z"], share)
            group["training"] = share > 0

    def eval(self) -> None:
        self._mix(-0.5)

    def train(self) -> None:
        self._mix(1 / 3)


# closures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_closure_is_evaluated_once_before_the_buckets(dtype: torch.dtype) -> None:
    held = tensors(dtype)
    options = {"weights": "split"} if dtype == torch.bfloat16 else {}
    wrapped = wrap(optim.SGD(held, lr=0.1), bucket_bytes=1, **options)  # type: ignore[arg-type]
    calls = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        wrapped.zero_grad()
        loss = sum((p.float().square().sum() for p in held), torch.zeros(()))
        loss.backward()
        calls.append(float(loss.detach()))
        return loss

    with torch.no_grad():
        first = wrapped.step(closure)
    second = wrapped.step(closure)
    assert [float(first.detach()), float(second.detach())] == calls
    assert calls[1] == pytest.approx(calls[0] * 0.64, rel=1e-2)


def test_lbfgs_runs_on_fp32_weights_and_is_refused_on_16_bit_ones() -> None:
    target = torch.randn(5)

    def run(make: Callable[[Any], Any]) -> Tensor:
        weight = nn.Parameter(torch.zeros(5))
        optimizer = make(optim.LBFGS([weight], lr=0.5, max_iter=5))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (weight - target).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return weight.detach()

    assert torch.equal(run(wrap), run(lambda o: o))
    with pytest.raises(ConfigError, match="LBFGS evaluates the closure itself"):
        wrap(optim.LBFGS([nn.Parameter(torch.zeros(5).bfloat16())]))
    wrapped = wrap(optim.LBFGS([nn.Parameter(torch.zeros(5))]))
    with pytest.raises(ConfigError, match="LBFGS evaluates the closure itself"):
        wrapped.step(lambda: torch.zeros(()), factor=0.5)
    with pytest.raises(ConfigError, match="LBFGS evaluates the closure itself"):
        wrap(optim.LBFGS([nn.Parameter(torch.zeros(5))]), states="int8")


def test_an_optimizer_that_says_it_needs_a_closure_is_refused() -> None:
    class Asking(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is None:
                raise RuntimeError("Asking requires a closure")
            return super().step(closure)

    with pytest.raises(ConfigError, match="Asking evaluates the closure itself"):
        wrap(Asking(tensors(), lr=0.1))


# refusals


class Sam(optim.SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Around(optim.SGD):
    """Holds another optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.base = optim.SGD(self.param_groups[0]["params"], lr=0.1)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "class": (lambda: wrap(optim.SGD), r"a type is not a torch\.optim\.Optimizer"),  # type: ignore[arg-type]
    "differentiable": (lambda: wrap(optim.Adam(tensors(), differentiable=True)), "differentiable=True.*differentiable=False"),
    "two phases": (lambda: wrap(Sam(tensors(), lr=0.1)), "two phases.*wrap the optimizer that it is made around"),
    "twice": (lambda: wrap(adamw(tensors())), "Wrapped has masters already"),
    "inner again": (lambda: wrap(adamw(tensors()).optimizer), "AdamW has masters already"),
    "around another": (lambda: wrap(Around(tensors())), "Around holds a SGD.*Wrap the optimizer inside"),
    "no bucket": (lambda: wrap(optim.SGD(tensors()), bucket_bytes=0), "bucket_bytes=0"),
    "storage": (lambda: wrap(optim.SGD(tensors()), weights="splitt"), "'splitt' is not known.*'split'"),
    "codec": (lambda: wrap(optim.SGD(tensors()), states="int9"), "'int9' is not known"),
    "role": (lambda: wrap(optim.SGD(tensors()), states="int8", roles={"momentum_buffer": "third"}), "third.*'first'"),  # type: ignore[dict-item]
    "roles without states": (lambda: wrap(optim.SGD(tensors()), roles={"momentum_buffer": "first"}), "roles= has no effect with states=fp32"),
    "policy and weights": (lambda: wrap(optim.SGD(tensors()), "bf16-lean", weights="kahan"), "weights=kahan and a policy with weights=split"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_a_remedy(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)) as caught:
        make()
    assert caught.value.remedy


def test_a_refused_optimizer_is_left_as_it_was() -> None:
    optimizer = optim.Adam(tensors(), differentiable=True)
    before = dict(vars(optimizer))
    with pytest.raises(ConfigError):
        wrap(optimizer)
    assert vars(optimizer) == before


def test_weights_without_effect_are_refused_at_the_first_step() -> None:
    held = tensors(torch.float32)
    wrapped = adamw(held)
    feed(held)
    with pytest.raises(ConfigError, match="weights=split has no effect"):
        wrapped.step()


def test_an_optimizer_around_another_works_on_fp32() -> None:
    held = tensors(torch.float32)
    wrapped = wrap(Around(held))
    feed(held)
    before = held[0].detach().clone()
    wrapped.step()
    assert torch.equal(held[0], before - 0.1 * held[0].grad)


# settings and groups


def test_groups_states_and_defaults_are_the_optimizers_own() -> None:
    held = tensors()
    inner = optim.AdamW(held, lr=0.01)
    wrapped = wrap(inner)
    assert isinstance(wrapped, optim.Optimizer)
    assert wrapped.param_groups is inner.param_groups
    assert wrapped.state is inner.state
    assert wrapped.defaults is inner.defaults
    assert wrapped.optimizer is inner
    assert wrapped.takes_factor


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)])
@pytest.mark.parametrize("through", ["wrapped", "inner"])
@pytest.mark.parametrize("before", [True, False])
def test_schedulers_act_on_every_bucket_and_do_not_warn(rate: Any, through: str, before: bool) -> None:
    """Made on either of the two, and on the inner one before it is wrapped, too."""
    one, other = tensors(torch.float32), tensors()
    plain = optim.Adam(one, lr=copy.deepcopy(rate), foreach=False)
    inner = optim.Adam(other, lr=copy.deepcopy(rate), foreach=False)

    def scheduled(optimizer: Any) -> Any:
        return optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))

    first = scheduled(plain)
    early = scheduled(inner) if before else None
    wrapped = wrap(inner, bucket_bytes=1)
    second = early or scheduled(wrapped if through == "wrapped" else inner)
    for step in range(3):
        feed(one, step)
        feed(other, step)
        plain.step()
        (wrapped if through == "wrapped" else inner).step()
        first.step()
        second.step()
    assert wrapped.buckets == 4
    assert wrapped.steps == 3
    assert float(wrapped.param_groups[0]["lr"]) == pytest.approx(0.01 / 4)
    assert all(close(p, q) for p, q in zip(one, other, strict=True))


def test_a_one_cycle_scheduler_moves_momentum_too() -> None:
    one, other = tensors(torch.float32), tensors()
    plain, wrapped = optim.SGD(one, lr=0.1, momentum=0.9), wrap(optim.SGD(other, lr=0.1, momentum=0.9), bucket_bytes=1)
    schedules = [optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6) for o in (plain, wrapped)]
    for step in range(5):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
        for schedule in schedules:
            schedule.step()
    assert all(close(p, q) for p, q in zip(one, other, strict=True))


def test_hooks_run_once_a_step_with_the_optimizer_that_they_were_registered_on() -> None:
    held = tensors()
    inner = optim.SGD(held, lr=0.1)
    wrapped = wrap(inner, bucket_bytes=1)
    called: list[tuple[str, Any]] = []
    for o in (inner, wrapped):
        o.register_step_pre_hook(lambda o, args, kwargs: called.append(("before", o)))
        o.register_step_post_hook(lambda o, args, kwargs: called.append(("after", o)))
    everywhere = [
        register_optimizer_step_pre_hook(lambda o, args, kwargs: called.append(("all before", o))),
        register_optimizer_step_post_hook(lambda o, args, kwargs: called.append(("all after", o))),
    ]
    try:
        for o in (wrapped, inner):
            called.clear()
            feed(held)
            o.step()
            assert called == [
                ("all before", wrapped),
                ("before", wrapped),
                ("before", inner),
                ("after", inner),
                ("after", wrapped),
                ("all after", wrapped),
            ]
    finally:
        for handle in everywhere:
            handle.remove()


def test_a_hook_may_change_the_closure() -> None:
    held = tensors()
    inner = optim.SGD(held, lr=0.1)
    wrapped = wrap(inner)
    inner.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 7), {}))
    feed(held)
    assert wrapped.step() == 7


@pytest.mark.parametrize("through", ["wrapped", "inner"])
def test_groups_may_be_added(through: str) -> None:
    one, other = tensors(torch.float32), tensors()
    plain, wrapped = optim.SGD(one[:2], lr=0.1, momentum=0.9), wrap(optim.SGD(other[:2], lr=0.1, momentum=0.9), bucket_bytes=1)
    for step in range(4):
        if step == 2:
            plain.add_param_group({"params": one[2:], "lr": 0.3})
            (wrapped if through == "wrapped" else wrapped.optimizer).add_param_group({"params": other[2:], "lr": 0.3})
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    assert wrapped.buckets == 4
    assert len(wrapped.param_groups) == 2
    assert all(close(p, q) for p, q in zip(one, other, strict=True))


def test_zero_grad_clears_the_gradients() -> None:
    held = tensors()
    wrapped = adamw(held)
    feed(held)
    wrapped.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in held)
    wrapped.zero_grad()
    assert all(p.grad is None for p in held)


def test_attributes_of_the_optimizer_are_seen_and_its_methods_are_not_run_on_16_bits() -> None:
    class Own(optim.SGD):
        note = "mine"

        def shrink(self) -> None: ...

    wrapped = wrap(Own(tensors(), lr=0.1))
    assert wrapped.note == "mine"
    with pytest.raises(AttributeError, match=r"if that is meant, \.optimizer\.shrink"):
        _ = wrapped.shrink
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = wrapped.nothing
    with pytest.raises(AttributeError, match=r"Own has no eval\(\)"):
        wrapped.eval()


def test_train_and_eval_of_schedule_free_optimizers_act_on_masters() -> None:
    one, other, third = tensors(torch.float32), tensors(), tensors(torch.float32)
    plain, wrapped, direct = Schedulefree(one), wrap(Schedulefree(other), bucket_bytes=1), wrap(Schedulefree(third))
    for step in range(3):
        for held, o in ((one, plain), (other, wrapped), (third, direct)):
            feed(held, step)
            o.step()
    for o in (plain, wrapped, direct):
        o.eval()  # type: ignore[union-attr]
    assert all(close(p, q) and torch.equal(p, r) for p, q, r in zip(one, other, third, strict=True))
    assert not wrapped.param_groups[0]["training"]
    for o in (plain, wrapped, direct):
        o.train()  # type: ignore[union-attr]
    assert all(close(p, q) and torch.equal(p, r) for p, q, r in zip(one, other, third, strict=True))
    assert wrapped.param_groups[0]["training"]


# gradients


def test_parameters_without_a_gradient_and_frozen_ones_stay() -> None:
    held = tensors()
    frozen, idle = held[0].requires_grad_(False), held[1]
    kept = [p.detach().clone() for p in held]
    wrapped = adamw(held, bucket_bytes=1)
    for step in range(2):
        feed(held, step)
        frozen.grad = idle.grad = None
        wrapped.step()
    assert torch.equal(frozen, kept[0])
    assert torch.equal(idle, kept[1])
    assert master_of(frozen) is None
    assert frozen not in wrapped.state
    assert not torch.equal(held[2], kept[2])


def test_a_step_with_no_gradients_at_all_changes_nothing() -> None:
    held = tensors()
    wrapped = adamw(held)
    kept = [p.detach().clone() for p in held]
    wrapped.step()
    assert all(torch.equal(p, q) for p, q in zip(held, kept, strict=True))
    assert not wrapped.state


@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)])
def test_a_factor_multiplies_gradients_on_the_way_in(factor: Any) -> None:
    one, other = tensors(torch.float32), tensors()
    plain, wrapped = optim.Adam(one, lr=0.01, eps=1e-3), wrap(optim.Adam(other, lr=0.01, eps=1e-3))
    feed(one)
    feed(other)
    for p in one:
        p.grad *= 0.25
    kept = [(p.grad, p.grad.clone()) for p in other]
    plain.step()
    wrapped.step(factor=factor)
    assert all(close(p, q) for p, q in zip(one, other, strict=True))
    assert all(p.grad is g and torch.equal(g, was) for p, (g, was) in zip(other, kept, strict=True))


def test_a_small_factor_loses_nothing_of_fp16_gradients() -> None:
    """2^-20 of an fp16 gradient is no fp16 number: the product is made in fp32."""
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float16))
    wrapped = wrap(optim.SGD([weight], lr=2.0**8))
    weight.grad = torch.tensor([2.0**-12], dtype=torch.float16)
    wrapped.step(factor=2.0**-20)
    assert float(full_values(weight)) == 1.0 - 2.0**-24


def test_fp32_gradients_of_16_bit_weights_are_taken_as_they_are() -> None:
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    wrapped = wrap(optim.SGD([weight], lr=1.0))
    weight.grad = torch.tensor([2.0**-20 + 2.0**-23])
    wrapped.step()
    assert float(full_values(weight)) == 1.0 - 2.0**-20 - 2.0**-23


def test_complex_and_double_weights_stay_what_they_are() -> None:
    def held() -> list[Any]:
        draws = torch.Generator().manual_seed(0)
        return [
            nn.Parameter(torch.randn(3, 2, generator=draws, dtype=torch.complex64)),
            nn.Parameter(torch.randn(4, generator=draws, dtype=torch.float64)),
            nn.Parameter(torch.randn(5, generator=draws)),
        ]

    one, other = held(), held()
    plain, wrapped = optim.AdamW(one, lr=0.01), wrap(optim.AdamW(other, lr=0.01), states="int8", bucket_bytes=1)
    for _ in range(3):
        for p, q in zip(one, other, strict=True):
            p.grad = torch.ones_like(p) * 0.5
            q.grad = torch.ones_like(q)
        plain.step()
        wrapped.step(factor=0.5)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert torch.allclose(one[2], other[2], atol=1e-4)
    assert wrapped.state[other[0]]["exp_avg"].dtype == torch.complex64
    assert wrapped.state[other[2]]["exp_avg"].dtype == torch.int8


# states


def test_one_line_says_what_is_encoded(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad * 0.1
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                    p.sub_(state["mean"] * group["lr"])

    with caplog.at_level(logging.INFO, "halfstep"):
        adamw(tensors(), states="int8")
        wrap(Mine(tensors()), states="bf16")
        wrap(Mine(tensors()), states="bf16", roles={"mean": "first"})
        wrap(optim.Adagrad(tensors(torch.float32)), states="bf16")
        wrap(optim.RMSprop(tensors(), centered=True), states="int8")
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("states of")]
    assert said == [
        "states of AdamW: exp_avg, exp_avg_sq in int8, step as they are",
        "states of Mine: none in bf16, mean, sum as they are. What they mean is not known here: roles={'NAME': 'first' or 'second'} says it",
        "states of Mine: mean in bf16, sum as they are",
        "states of Adagrad: none in bf16, sum, step as they are. None of them can be rounded without harm",
        "states of RMSprop: none in int8, square_avg, grad_avg, step as they are. None of them can be rounded without harm",
    ]


def test_given_roles_are_used() -> None:
    held = tensors()
    wrapped = wrap(optim.RMSprop(held, lr=0.01), states="int8", roles={"square_avg": "second"})
    feed(held)
    wrapped.step()
    assert wrapped.state[held[0]]["square_avg"].dtype == torch.uint8
    assert wrapped.state[held[0]]["square_avg_scale"].dtype == torch.float32


def test_states_made_before_in_16_bits_go_on_in_fp32(caplog: pytest.LogCaptureFixture) -> None:
    held = tensors()
    inner = optim.AdamW(held, lr=0.01)
    feed(held)
    inner.step()
    assert inner.state[held[0]]["exp_avg"].dtype == torch.bfloat16
    kept = inner.state[held[0]]["exp_avg"].clone()
    with caplog.at_level(logging.INFO, "halfstep"):
        wrapped = wrap(inner)
    assert "8 states of 16-bit parameters were 16-bit themselves" in caplog.text
    assert torch.equal(wrapped.state[held[0]]["exp_avg"], kept.float())
    feed(held, 1)
    wrapped.step()
    assert int(wrapped.state[held[0]]["step"]) == 2


def test_states_in_fp32_become_encoded_in_a_run_that_goes_on() -> None:
    held = tensors(torch.float32)
    inner = optim.AdamW(held, lr=0.01)
    feed(held)
    inner.step()
    wrapped = wrap(inner, states="bf16")
    feed(held, 1)
    wrapped.step()
    assert wrapped.state[held[0]]["exp_avg"].dtype == torch.bfloat16
    assert int(wrapped.state[held[0]]["step"]) == 2


@pytest.mark.parametrize("states", ["fp32", "int8"])
@pytest.mark.parametrize("through", ["wrapped", "inner"])
def test_a_state_dict_goes_round(states: str, through: str) -> None:
    held = tensors()
    wrapped = adamw(held, states=states, seed=4)
    feed(held)
    wrapped.step()
    saved = (wrapped if through == "wrapped" else wrapped.optimizer).state_dict()
    assert set(saved) == {"state", "param_groups", "masters", "format"}
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    again = [nn.Parameter(p.detach().clone()) for p in held]
    other = adamw(again, states=states)
    (other if through == "wrapped" else other.optimizer).load_state_dict(torch.load(buffer, weights_only=True))
    assert other.seed == 4
    assert other.param_groups is other.optimizer.param_groups
    for o, ps in ((wrapped, held), (other, again)):
        feed(ps, 1)
        o.step()
    assert equal(held, again)


def test_a_stock_state_dict_can_be_loaded() -> None:
    one, other = tensors(torch.float32), tensors(torch.float32)
    plain, wrapped = optim.AdamW(one, lr=0.01), wrap(optim.AdamW(other, lr=0.5))
    feed(one)
    plain.step()
    for p, q in zip(one, other, strict=True):
        q.data.copy_(p.detach())
    wrapped.load_state_dict(plain.state_dict())
    feed(one, 1)
    feed(other, 1)
    plain.step()
    wrapped.step()
    assert equal(one, other)


def test_encoded_states_of_unknown_meaning_are_refused() -> None:
    held, again = tensors(), tensors()
    roles = {"exp_avg": "first"}
    wrapped = wrap(optim.NAdam(held), states="int8", roles=roles)  # type: ignore[arg-type]
    feed(held)
    wrapped.step()
    saved = wrapped.state_dict()
    with pytest.raises(CheckpointError, match=r"exp_avg is encoded.*roles="):
        wrap(optim.Adagrad(again)).load_state_dict(saved)


def test_hooks_of_states_run_once_wherever_they_were_registered() -> None:
    held = tensors()
    inner = optim.SGD(held, lr=0.1)
    wrapped = wrap(inner)
    called = []
    inner.register_state_dict_post_hook(lambda o, state: called.append("inner"))
    wrapped.register_load_state_dict_post_hook(lambda o: called.append("loaded"))
    wrapped.load_state_dict(wrapped.state_dict())
    assert called == ["inner", "loaded"]


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])  # noqa: S301  made a line before
def test_a_copy_goes_on_by_itself_bit_for_bit(states: str, copied: Callable[[Any], Any]) -> None:
    held = tensors()
    wrapped = adamw(held, states=states, bucket_bytes=1)
    for step in range(2):
        feed(held, step)
        wrapped.step()
    twin = copied(wrapped)
    theirs = twin.everybody()
    assert not {id(p) for p in theirs} & {id(p) for p in held}
    for o, ps in ((wrapped, held), (twin, theirs)):
        feed(ps, 2)
        o.step()
    assert equal(held, theirs)
    assert twin.buckets == 4
    assert twin.optimizer.step.__self__ is twin.optimizer
    feed(theirs, 3)
    twin.optimizer.step()
    assert twin.steps == 4
    assert wrapped.steps == 3


def test_model_and_optimizer_are_copied_together() -> None:
    model = nn.Linear(3, 2).bfloat16()
    for p in model.parameters():
        attach(p, "split")
    wrapped = wrap(optim.AdamW(model.parameters(), lr=0.01))
    feed(list(model.parameters()))
    wrapped.step()
    other, twin = copy.deepcopy((model, wrapped))
    assert [id(p) for p in other.parameters()] == [id(p) for p in twin.everybody()]
    assert equal(list(model.parameters()), list(other.parameters()))


def test_repr_names_the_optimizer_and_the_formats() -> None:
    text = repr(adamw(tensors(), states="int8", seed=2))
    assert text.startswith("Wrapped (AdamW (")
    assert "weights=split, states=int8, seed=2" in text


def test_a_wrapped_optimizer_is_freed_with_its_names() -> None:
    import gc

    held = tensors()
    wrapped = adamw(held)
    feed(held)
    wrapped.step()
    gone = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    assert gone() is None


# with the rest of halfstep


def test_a_policy_names_the_formats() -> None:
    held = tensors()
    wrapped = wrap(optim.AdamW(held), "bf16-lean,weights=kahan")
    feed(held)
    wrapped.step()
    master = master_of(held[0])
    assert master is not None
    assert master.storage.name == "kahan"
    assert wrapped.state[held[0]]["exp_avg"].dtype == torch.int8


def test_formats_of_a_policy_are_followed_later(caplog: pytest.LogCaptureFixture) -> None:
    held = tensors()
    wrapped = wrap(optim.AdamW(held), bucket_bytes=500)
    with caplog.at_level(logging.INFO, "halfstep"):
        wrapped.follow(parse("bf16-lean,weights=split24"))
    assert "exp_avg, exp_avg_sq in int8" in caplog.text
    feed(held)
    wrapped.step()
    assert wrapped.state[held[0]]["exp_avg"].dtype == torch.int8
    assert wrapped.temporary_bytes <= 500
    with pytest.raises(ConfigError, match="states=fp32, and the precision bf16-lean has states=int8"):
        wrap(optim.AdamW(held), states="fp32").follow(parse("bf16-lean"))


@pytest.mark.parametrize("storage", ["split24", "stochastic"])
def test_noise_is_that_of_seed_number_and_step(storage: str) -> None:
    """Whatever bucket a weight lies in: what is written is what its master would write under the noise of its number."""
    held, twins = tensors(), tensors()
    for p in twins:
        attach(p, storage)
    wrapped = wrap(optim.SGD(held, lr=0.001), weights=storage, seed=9, bucket_bytes=1)
    for step in (1, 2):
        feed(held, step)
        feed(twins, step)
        wrapped.step()
        for number, p in enumerate(twins):
            master = master_of(p)
            assert master is not None
            master.write(master.read() - p.grad.float() * 0.001, Noise(9, number, step))
        assert wrapped.buckets == 4
        assert equal(held, twins)


def test_states_draw_the_noise_of_their_role() -> None:
    held = tensors()
    wrapped = wrap(optim.Adam(held), states="bf16", seed=9, bucket_bytes=1)
    feed(held, 1)
    wrapped.step()
    for number, p in enumerate(held):
        mixed = state_noise(Noise(9, number, 1).bits(p.numel(), p.device))
        gradient = p.grad.float()
        for key, values, bits in (("exp_avg", gradient * (1 - 0.9), mixed), ("exp_avg_sq", (1 - 0.999) * gradient * gradient, mixed >> 16)):
            expected = stochastic(values.flatten(), torch.bfloat16, bits & 0xFFFF).view(p.shape)
            assert torch.allclose(wrapped.state[p][key].float(), expected.float(), rtol=0, atol=0), key


def test_a_master_made_before_keeps_its_storage() -> None:
    held = tensors()
    for p in held:
        attach(p, "split24")
    wrapped = wrap(optim.SGD(held, lr=0.1))
    feed(held)
    wrapped.step()
    master = master_of(held[0])
    assert master is not None
    assert master.storage.name == "split24"
    other = wrap(optim.SGD(held, lr=0.1), weights="kahan")
    with pytest.raises(ConfigError, match="split24 master already"):
        other.step()


def test_a_scaled_step_is_applied_or_refused() -> None:
    model = nn.Linear(4, 3)
    attach(model.weight, "split", torch.float16)
    wrapped = wrap(optim.AdamW(model.parameters(), lr=0.01), weights="split")
    scaler = amp.GradScaler("cpu")
    before = full_values(model.weight).clone()
    for bad in (False, True):
        with amp.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(5, 4)).square().mean() * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        was = full_values(model.weight).clone()
        result = scaler.step(wrapped)
        assert bool(result) is not bad
        assert torch.equal(full_values(model.weight), was) is bad
        scaler.update()
        wrapped.zero_grad()
    assert not torch.equal(full_values(model.weight), before)
    assert wrapped.steps == 1


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"capturable": False, "maximize": True}])
def test_flags_act_on_the_fp32_copy(flags: dict[str, bool]) -> None:
    one, other = tensors(torch.float32), tensors()
    plain, wrapped = optim.Adam(one, lr=0.01, **flags), wrap(optim.Adam(other, lr=0.01, **flags))  # type: ignore[arg-type]
    for step in range(3):
        feed(one, step)
        feed(other, step)
        plain.step()
        wrapped.step()
    assert all(close(p, q) for p, q in zip(one, other, strict=True))
