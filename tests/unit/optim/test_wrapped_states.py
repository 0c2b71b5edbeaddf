"""States of a wrapped optimizer: what is encoded, saved, copied, and drawn."""

import copy
import io
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd_optimizers import equal, feed
from odd_optimizers import tensors as made
from torch import nn, optim

from halfstep.errors import CheckpointError, ConfigError
from halfstep.numerics import Noise, state_noise, stochastic
from halfstep.optim import attach, master_of
from halfstep.optim.wrap import Wrapped, move_states, wrap
from halfstep.policy import parse

SHAPES = ((4, 5), (6,), (2, 2, 3), ())


def tensors(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return made(dtype, SHAPES)


def adamw(held: Any, **options: Any) -> Wrapped:
    return wrap(optim.AdamW(held, lr=0.01), weights="split", **options)


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


def test_states_that_the_optimizer_drops_are_gone() -> None:
    class Dropping(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if self.state[p].pop("first", None) is None:
                    self.state[p]["first"] = torch.ones(())
                p.sub_(p.grad)

    held = tensors()
    wrapped = wrap(Dropping(held, lr=0.1))
    state = wrapped.state[held[0]]
    for step in range(3):
        feed(held, step)
        wrapped.step()
        assert list(wrapped.state[held[0]]) == (["first"] if step % 2 == 0 else [])
    assert wrapped.state[held[0]] is state


def test_states_follow_their_weights_to_another_device() -> None:
    weight = nn.Parameter(torch.zeros(3, 2, device="meta"))
    optimizer = optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"mean": torch.zeros(3, 2), "step": torch.zeros(()), "codes": torch.zeros(6), "codes_scale": torch.zeros(1)}
    move_states(optimizer)
    devices = {key: value.device.type for key, value in optimizer.state[weight].items()}
    assert devices == {"mean": "meta", "step": "cpu", "codes": "meta", "codes_scale": "meta"}


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
    one, held = tensors(torch.float32), tensors()
    plain, wrapped = optim.Adam(one), wrap(optim.Adam(held), states="bf16", seed=9, bucket_bytes=1)
    feed(one, 1)
    feed(held, 1)
    plain.step()
    wrapped.step()
    for number, (p, q) in enumerate(zip(one, held, strict=True)):
        mixed = state_noise(Noise(9, number, 1).bits(q.numel(), q.device))
        for key, bits in (("exp_avg", mixed), ("exp_avg_sq", mixed >> 16)):
            expected = stochastic(plain.state[p][key].flatten(), torch.bfloat16, bits & 0xFFFF).view(q.shape)
            assert torch.equal(wrapped.state[q][key], expected), key


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


def test_a_role_of_a_state_that_is_not_kept_is_refused() -> None:
    p = nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigError, match=r"'momentum_bufer'.*momentum_buffer"):
        wrap(torch.optim.SGD([p], lr=0.1, momentum=0.9), states="int8", roles={"momentum_bufer": "first"})
