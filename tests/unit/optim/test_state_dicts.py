"""States of optimizers with masters: a run that is saved and loaded goes on bit for bit, and what does not fit is refused whole."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from saved_runs import STORAGES, Run, equal, raw
from torch import nn

from halfstep.errors import CheckpointError
from halfstep.optim import CODECS, HALF, AdamW, full_values

# --- the same formats


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("states", CODECS)
@pytest.mark.parametrize(("storage", "dtype"), [(None, torch.float32), *((s, d) for s in STORAGES for d in HALF)])
def test_ten_steps_saved_and_ten_more_are_twenty(storage: str | None, dtype: torch.dtype, states: str, order: str) -> None:
    whole = Run(storage, states, dtype).steps(0, 20)
    saved = Run(storage, states, dtype).steps(0, 10).save()
    resumed = Run(storage, states, dtype, seed=9).load(saved, order)
    assert equal(resumed.steps(10, 20).bits(), whole.bits())


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("storage", STORAGES)
def test_an_optimizer_that_asks_for_no_storage_takes_that_of_the_state(storage: str, order: str) -> None:
    whole = Run(storage, "int8").steps(0, 12)
    resumed = Run(None, "int8", seed=9).load(Run(storage, "int8").steps(0, 6).save(), order).steps(6, 12)
    if storage in ("stochastic", "plain"):  # nothing lies beside their weights, so a state tells nothing of them that must be kept
        assert len(resumed.bits()) >= len(whole.bits())
    else:
        assert equal(resumed.bits(), whole.bits())


@pytest.mark.parametrize("storage", ["split", "split24", "kahan"])
def test_masters_that_were_there_before_loading_are_replaced(storage: str) -> None:
    saved = Run(storage, "bf16").steps(0, 6).save()
    for order in ("model first", "optimizer first"):
        resumed = Run(storage, "bf16", seed=9).steps(0, 3).load(saved, order).steps(6, 12)
        assert equal(resumed.bits(), Run(storage, "bf16").steps(0, 12).bits())


def test_loading_into_the_run_that_saved_goes_back_in_time() -> None:
    run = Run("split24", "int8").steps(0, 6)
    saved = run.save()
    first = run.steps(6, 12).bits()
    assert equal(run.load(saved).steps(6, 12).bits(), first)


def test_saving_changes_nothing_and_can_be_repeated() -> None:
    run = Run("split24", "int8").steps(0, 5)
    before = run.bits()
    one, two = run.save(), run.save()
    assert equal(run.bits(), before)
    assert one["optimizer"]["format"] == two["optimizer"]["format"] == {"weights": "split24", "states": "int8", "seed": 0, "steps": 5}
    assert equal(run.steps(5, 9).bits(), Run("split24", "int8").steps(0, 9).bits())


def test_a_state_that_was_loaded_and_not_yet_used_is_saved_as_it_came() -> None:
    saved = Run("split24", "int8").steps(0, 6).save()
    through = Run("split24", "int8", seed=9).load(saved).save()
    assert equal(Run("split24", "int8", seed=8).load(through).steps(6, 10).bits(), Run("split24", "int8").steps(0, 10).bits())


def test_the_seed_of_the_noise_comes_with_the_state() -> None:
    made = Run("stochastic", "bf16")
    made.optimizer.seed = 77
    saved = made.steps(0, 4).save()
    resumed = Run("stochastic", "bf16").load(saved)
    assert resumed.optimizer.seed == 77
    assert equal(resumed.steps(4, 8).bits(), made.steps(4, 8).bits())


def test_a_state_is_torchs_with_masters_and_formats_beside_it() -> None:
    run = Run("split", "int8").steps(0, 2)
    state = run.optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "masters", "format"}
    assert [g["params"] for g in state["param_groups"]] == [[0, 1], [2, 3, 4]]
    assert set(state["masters"]) == {0, 1, 2, 3}
    assert set(state["masters"][0]) == {"storage", "residual", "digest", "dtype"}
    assert state["masters"][0]["residual"].dtype == torch.int16
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_states_of_fp64_and_complex_weights_are_loaded_as_they_are(dtype: torch.dtype) -> None:
    def made() -> tuple[nn.Parameter, AdamW]:
        p = nn.Parameter(torch.linspace(-1, 1, 5).to(dtype))
        return p, AdamW([p], states="int8")

    def stepped(p: nn.Parameter, optimizer: AdamW, first: int, last: int) -> None:
        for step in range(first, last):
            p.grad = torch.randn(5, generator=torch.Generator().manual_seed(step), dtype=dtype)
            optimizer.step()

    p, optimizer = made()
    stepped(p, optimizer, 0, 3)
    q, other = made()
    with torch.no_grad():
        q.copy_(p)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(p, optimizer, 3, 6)
    stepped(q, other, 3, 6)
    assert torch.equal(p.detach(), q.detach())
    assert other.state[q]["exp_avg"].dtype == dtype


@pytest.mark.parametrize("states", CODECS)
@pytest.mark.parametrize("ways", [(torch.channels_last, torch.contiguous_format), (torch.contiguous_format, torch.channels_last)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_memory_format_takes_up_a_state(dtype: torch.dtype, ways: tuple[Any, Any], states: str) -> None:
    def made(way: Any) -> tuple[nn.Parameter, AdamW]:
        p = nn.Parameter(torch.linspace(-1, 1, 4 * 3 * 2 * 2).view(4, 3, 2, 2).to(dtype).to(memory_format=way))
        return p, AdamW([p], states=states)

    def stepped(p: nn.Parameter, optimizer: AdamW, step: int) -> None:
        p.grad = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.step()

    p, optimizer = made(ways[0])
    stepped(p, optimizer, 0)
    q, other = made(ways[1])
    with torch.no_grad():
        q.copy_(p)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in (1, 2):
        stepped(p, optimizer, step)
        stepped(q, other, step)
    assert torch.equal(full_values(p), full_values(q))


# --- torch's own states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_of_torchs_adamw_is_taken_up(dtype: torch.dtype) -> None:
    def made(cls: Any, **settings: Any) -> tuple[nn.Parameter, Any]:
        p = nn.Parameter(torch.linspace(-1, 1, 60).to(dtype))
        return p, cls([p], lr=1e-3, weight_decay=0.1, **settings)

    def stepped(p: nn.Parameter, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            p.grad = torch.randn(60, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.step()

    p, stock = made(torch.optim.AdamW)
    stepped(p, stock, 0, 5)
    q, ours = made(AdamW)
    with torch.no_grad():
        q.copy_(p)
    ours.load_state_dict(copy.deepcopy(stock.state_dict()))
    assert float(ours.state[q]["step"]) == 5
    assert ours.state[q]["exp_avg"].dtype == torch.float32
    assert torch.equal(ours.state[q]["exp_avg"], stock.state[p]["exp_avg"].float())
    before = full_values(p)
    stepped(p, stock, 5, 8)
    stepped(q, ours, 5, 8)
    bound = {"rtol": 0.0, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2.0**-6, "atol": 2e-4}
    torch.testing.assert_close(full_values(q), p.detach().float(), **bound)
    assert not torch.equal(full_values(q), before)


def test_a_state_of_amsgrad_is_not_taken_for_one_without() -> None:
    p = nn.Parameter(torch.randn(4))
    stock = torch.optim.AdamW([p], amsgrad=True)
    p.grad = torch.ones(4)
    stock.step()
    with pytest.raises(CheckpointError, match="amsgrad"):
        AdamW([p]).load_state_dict(stock.state_dict())


def test_our_state_is_taken_up_by_torchs_adamw() -> None:
    p = nn.Parameter(torch.randn(30))
    ours, stock = AdamW([p]), torch.optim.AdamW([p])
    p.grad = torch.ones(30)
    ours.step()
    stock.load_state_dict(ours.state_dict())
    assert torch.equal(stock.state[p]["exp_avg"], ours.state[p]["exp_avg"])
    stock.step()
    assert float(stock.state[p]["step"]) == 2


def test_hooks_see_and_change_the_whole_state() -> None:
    p = nn.Parameter(torch.randn(4).bfloat16())
    optimizer, seen = AdamW([p]), []
    p.grad = torch.ones(4).bfloat16()
    optimizer.step()
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(set(state)))

    def later(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"state": {0: state["state"][0] | {"step": torch.tensor(7.0)}}}

    optimizer.register_load_state_dict_pre_hook(later)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [{"state", "param_groups", "masters", "format"}]
    assert float(optimizer.state[p]["step"]) == 7


# --- copies


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("together", [True, False])
def test_copies_go_on_bit_for_bit_and_by_themselves(together: bool, storage: str, way: str) -> None:
    def copied(x: Any) -> Any:
        return copy.deepcopy(x) if way == "deepcopy" else pickle.loads(pickle.dumps(x))  # noqa: S301

    run, reference = Run(storage, "int8").steps(0, 4), Run(storage, "int8").steps(0, 8)
    twin = Run(storage, "int8")
    if together:
        twin.net, twin.optimizer = copied((run.net, run.optimizer))
    else:
        twin.optimizer = copied(run.optimizer)
        params = iter([p for g in twin.optimizer.param_groups for p in g["params"]])
        for name, _ in list(twin.net.named_parameters()):
            setattr(twin.net, name, next(params))
    before = run.bits()
    assert equal(twin.bits(), before)
    assert equal(twin.steps(4, 8).bits(), reference.bits())
    assert equal(run.bits(), before)
    assert equal(run.steps(4, 8).bits(), reference.bits())


@pytest.mark.parametrize("written", [False, True])
def test_a_copy_after_a_write_of_others_has_what_was_written(written: bool) -> None:
    run = Run("split").steps(0, 4)
    if written:
        with torch.no_grad():
            run.net.w0.fill_(0.5)
    net, optimizer = copy.deepcopy((run.net, run.optimizer))
    assert equal([full_values(p) for p in net.parameters()], run.values())
    assert optimizer.param_groups[0]["params"][0] is net.w0


def test_a_saved_model_carries_its_masters() -> None:
    run = Run("split").steps(0, 3)
    buffer = io.BytesIO()
    torch.save(run.net, buffer)
    buffer.seek(0)
    net = torch.load(buffer, weights_only=False)
    assert equal([full_values(p) for p in net.parameters()], run.values())


def test_saved_weights_are_loaded_without_trust() -> None:
    run = Run("split").steps(0, 3)
    buffer = io.BytesIO()
    torch.save(list(run.net.parameters()), buffer)
    buffer.seek(0)
    found = torch.load(buffer, weights_only=True)
    assert all(torch.equal(raw(p.detach()), raw(q.detach())) for p, q in zip(found, run.net.parameters(), strict=True))
