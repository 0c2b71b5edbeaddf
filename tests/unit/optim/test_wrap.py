"""A wrapped optimizer in the hands of its user: closures, schedulers, hooks, groups, and what is refused."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd_optimizers import Around, Sam, Schedulefree, close, feed
from odd_optimizers import tensors as made
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.errors import ConfigError
from halfstep.optim.wrap import Wrapped, wrap

SHAPES = ((4, 5), (6,), (2, 2, 3), ())


def tensors(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return made(dtype, SHAPES)


def adamw(held: Any, **options: Any) -> Wrapped:
    return wrap(optim.AdamW(held, lr=0.01), weights="split", **options)


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


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "class": (lambda: wrap(optim.SGD), r"a type is not a torch\.optim\.Optimizer"),  # type: ignore[arg-type]
    "differentiable": (lambda: wrap(optim.Adam(tensors(), differentiable=True)), "differentiable=True.*differentiable=False"),
    "two phases": (lambda: wrap(Sam(tensors(), lr=0.1)), "two phases.*wrap the optimizer that it is made around"),
    "twice": (lambda: wrap(adamw(tensors())), "Wrapped has masters already"),
    "inner again": (lambda: wrap(adamw(tensors()).optimizer), "AdamW has masters already"),
    "around another": (lambda: wrap(Around(tensors())), "Around holds a SGD.*Keep weights and states in fp32 with Around"),
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
        o.zero_grad()  # weights without a gradient are switched too
        o.eval()  # type: ignore[union-attr]
    assert all(close(p, q) and torch.equal(p, r) for p, q, r in zip(one, other, third, strict=True))
    assert not wrapped.param_groups[0]["training"]
    for o in (plain, wrapped, direct):
        o.train()  # type: ignore[union-attr]
    assert all(close(p, q) and torch.equal(p, r) for p, q, r in zip(one, other, third, strict=True))
    assert wrapped.param_groups[0]["training"]
