"""States of optimizers with masters: a run that is saved and loaded goes on bit for bit, and what does not fit is refused whole."""

import copy
import io
import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import CheckpointError
from halfstep.optim import CODECS, HALF, AdamW, attach, full_values, master_of

STORAGES = ["split", "split24", "kahan", "stochastic", "plain"]
SHAPES = ((20, 13), (300,), (), (2, 3, 2, 2))


class Net(nn.Module):
    """Weights of several shapes, in 16 bits or fp32, and one that stays fp32."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        for i, shape in enumerate(SHAPES):
            self.register_parameter(f"w{i}", nn.Parameter((torch.randn(shape, generator=g) * 0.1).to(dtype)))
        self.norm = nn.Parameter(torch.randn(5, generator=g))


class Run:
    """A model and its optimizer. kind: the dtype of its weights; storage: None for fp32 ones, or for masters of a loaded state."""

    def __init__(self, storage: str | None, states: str | None = None, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        self.net = Net(dtype, seed)
        params = list(self.net.parameters())
        groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.2}]
        self.optimizer = AdamW(groups, lr=3e-4, weights=storage, states=states)

    def steps(self, first: int, last: int) -> "Run":
        for step in range(first, last):
            g = torch.Generator().manual_seed(step)
            for i, p in enumerate(self.net.parameters()):
                drawn = torch.randn(p.shape, generator=g).bfloat16() * 0.1  # numbers that fp16 and fp32 hold too
                p.grad = None if (i + step) % 4 == 0 else drawn.to(p.dtype)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def save(self) -> dict[str, Any]:
        """Through a file, as torch loads what it does not trust."""
        buffer = io.BytesIO()
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        buffer.seek(0)
        found: dict[str, Any] = torch.load(buffer, weights_only=True)
        return found

    def load(self, saved: Mapping[str, Any], order: str = "model first") -> "Run":
        if order == "model first":
            self.net.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if order != "model first":
            self.net.load_state_dict(saved["model"])
        return self

    def bits(self) -> list[Tensor]:
        found: list[Tensor] = []
        for p in self.net.parameters():
            master = master_of(p)
            found += [p.detach(), *([] if master is None or master.residual is None else [master.residual])]
            found += [t for _, t in sorted(self.optimizer.state[p].items())] if p in self.optimizer.state else []
        return [t.clone() for t in found]

    def values(self) -> list[Tensor]:
        return [full_values(p) for p in self.net.parameters()]


def raw(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(raw(x), raw(y)) for x, y in zip(a, b, strict=True))


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


# --- other formats


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_a_split24_run_goes_on_as_a_split_run_with_the_same_masters(dtype: torch.dtype, attached: bool, order: str) -> None:
    net = [nn.Parameter((torch.randn(5000) * 0.1).to(dtype)) for _ in range(2)]  # enough for residuals at the end of their range
    first = AdamW([net[0]], lr=1e-3, weights="split24")
    for step in range(5):
        net[0].grad = torch.randn(5000, generator=torch.Generator().manual_seed(step)).to(dtype)
        first.step()
    expected, bits, state = full_values(net[0]), net[0].detach().clone(), copy.deepcopy(first.state_dict())
    made = master_of(net[0])
    assert made is not None
    assert made.residual is not None
    assert int(made.residual.min()) == -128
    if attached:
        attach(net[1], "split")
    second = AdamW([net[1]], weights="split")
    if order == "optimizer first":
        second.load_state_dict(state)
    with torch.no_grad():
        net[1].copy_(bits)
    if order == "model first":
        second.load_state_dict(state)
    second.param_groups[0].update(lr=0.0, weight_decay=0.0)
    net[1].grad = torch.zeros(5000).to(dtype)
    second.step()
    off = (full_values(net[1]).double() - expected.double()).abs()
    ulp = torch.finfo(torch.float32).eps * expected.abs().double()
    assert bool((off <= ulp).all())  # a step writes masters anew, and split moves the tie above an even number by an ulp of fp32
    assert float((off == 0).double().mean()) > 0.99
    now = master_of(net[1])
    assert now is not None
    assert now.storage.name == "split"


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_16_bit_run_goes_on_in_fp32_from_its_masters(storage: str, dtype: torch.dtype, order: str) -> None:
    run = Run(storage, dtype=dtype).steps(0, 6)
    saved, expected = run.save(), run.values()
    resumed = Run(None, dtype=torch.float32).load(saved, order)
    resumed.optimizer.state_dict()  # takes the masters up, as the next step does
    assert equal([p.detach() for p in resumed.net.parameters()], expected)
    reference = Run(None, dtype=torch.float32)
    reference.net.load_state_dict(dict(zip(reference.net.state_dict(), expected, strict=True)))
    reference.optimizer.load_state_dict({k: v for k, v in saved["optimizer"].items() if k != "masters"})
    assert equal(resumed.steps(6, 9).bits(), reference.steps(6, 9).bits())


def test_an_fp32_run_goes_on_in_16_bits() -> None:
    run = Run(None, dtype=torch.float32).steps(0, 4)
    saved = run.save()
    resumed = Run("split", dtype=torch.bfloat16).load(saved).steps(4, 6)
    assert all(p.dtype == torch.bfloat16 for name, p in resumed.net.named_parameters() if name != "norm")
    for (name, p), q in zip(resumed.net.named_parameters(), run.steps(4, 6).net.parameters(), strict=True):
        assert bool(((full_values(p) - q.detach()).abs() <= 2.0**-8 * q.detach().abs() + 1e-4).all()), name


@pytest.mark.parametrize("kept", ["bf16", "int8"])
def test_encoded_states_go_on_in_fp32_with_the_same_values(kept: str) -> None:
    run = Run("split", kept).steps(0, 5)
    saved = run.save()
    resumed = Run("split", "fp32").load(saved)
    for p, q in zip(run.net.parameters(), resumed.net.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            if p not in run.optimizer.state:
                continue
            values = resumed.optimizer.state[q][key]
            assert values.dtype == torch.float32
            assert torch.equal(values, run.optimizer.decoded(run.optimizer.state[p], key, p))
    resumed.steps(5, 6)
    assert all(t.dtype == torch.float32 for s in resumed.optimizer.state.values() for t in s.values())


REFUSED = {
    "fp32 states in int8": (("split", "fp32"), ("split", "int8"), "int8 would round"),
    "fp32 states in bf16": (("split", "fp32"), ("split", "bf16"), "bf16 would round"),
    "bf16 states in int8": (("split", "bf16"), ("split", "int8"), "int8 would round"),
    "int8 states in bf16": (("split", "int8"), ("split", "bf16"), "bf16 would round"),
    "split masters in split24": (("split", "fp32"), ("split24", "fp32"), "split24 would round"),
    "split masters in kahan": (("split", "fp32"), ("kahan", "fp32"), "kahan would round"),
    "split masters without": (("split", "fp32"), ("plain", "fp32"), "plain would round"),
    "kahan masters by chance": (("kahan", "fp32"), ("stochastic", "fp32"), "stochastic would round"),
    "kahan masters in split": (("kahan", "fp32"), ("split", "fp32"), "split would round"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("begun", [True, False])
def test_a_conversion_that_would_round_is_refused_and_changes_nothing(case: str, begun: bool) -> None:
    one, other, words = REFUSED[case]
    saved = Run(*one).steps(0, 4).save()
    target = Run(*other).steps(0, 2 if begun else 0)
    refused_whole(target, saved["optimizer"], words)


def refused_whole(target: Run, state: Mapping[str, Any], words: str) -> None:
    before, settings = target.bits(), [{k: v for k, v in g.items() if k != "params"} for g in copy.deepcopy(target.optimizer.param_groups)]
    about = target.optimizer.steps, target.optimizer.seed
    with pytest.raises(CheckpointError, match=words) as caught:
        target.optimizer.load_state_dict(state)
    assert caught.value.remedy
    assert equal(target.bits(), before)
    assert [{k: v for k, v in g.items() if k != "params"} for g in target.optimizer.param_groups] == settings
    assert (target.optimizer.steps, target.optimizer.seed) == about
    twin = copy.deepcopy(target)
    assert equal(target.steps(2, 5).bits(), twin.steps(2, 5).bits())


def damaged(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    state: dict[str, Any] = copy.deepcopy(Run("split", "int8").steps(0, 4).save()["optimizer"])
    change(state)
    return state


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "one group less": lambda s: s["param_groups"].pop(),
    "one weight less": lambda s: s["param_groups"][1]["params"].pop(),
    "no groups": lambda s: s.pop("param_groups"),
    "another shape": lambda s: s["state"][0].update(exp_avg=s["state"][0]["exp_avg"][:-1]),
    "another shape of fp32 states": lambda s: s["state"].update(
        {0: {"step": torch.ones(()), "exp_avg": torch.ones(13, 20), "exp_avg_sq": torch.ones(13, 20)}}
    ),
    "too few scales": lambda s: s["state"][0].update(exp_avg_scale=s["state"][0]["exp_avg_scale"][:-1]),
    "a residual of another shape": lambda s: s["masters"][0].update(residual=torch.zeros(3, dtype=torch.int16)),
    "a master of nobody": lambda s: s["masters"].update({99: s["masters"][0]}),
    "an unknown storage": lambda s: s["masters"][0].update(storage="splat"),
    "a missing residual": lambda s: s["masters"][0].pop("residual"),
    "a master without its digest": lambda s: s["masters"][0].pop("digest"),
    "a master of an unknown dtype": lambda s: s["masters"][0].update(dtype="float8"),
    "a master of an fp32 dtype": lambda s: s["masters"][0].update(dtype="float32"),
    "one moment only": lambda s: s["state"][0].pop("exp_avg_sq"),
    "no step count": lambda s: s["state"][0].pop("step"),
    "signed codes of a second moment": lambda s: s["state"][0].update(exp_avg_sq=s["state"][0]["exp_avg_sq"].to(torch.int8)),
    "a residual of another dtype": lambda s: s["masters"][0].update(residual=s["masters"][0]["residual"].to(torch.int8)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: str) -> None:
    refused_whole(Run("split", "int8").steps(0, 2), damaged(DAMAGES[damage]), ".")


def test_weights_of_another_step_begin_at_themselves_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = Run("split").steps(0, 5)
    weights = copy.deepcopy(run.net.state_dict())
    state = run.steps(5, 8).save()["optimizer"]
    resumed = Run("split", seed=9)
    resumed.net.load_state_dict(weights)
    resumed.optimizer.load_state_dict(state)
    with caplog.at_level(logging.WARNING, "halfstep"):
        resumed.steps(8, 9)
    assert [r for r in caplog.records if "weights are others now" in r.message and "same step" in r.message]
    begun = Run("split", seed=9)
    begun.net.load_state_dict(weights)
    begun.optimizer.load_state_dict({k: v for k, v in state.items() if k != "masters"})
    assert equal(resumed.values()[:2], begun.steps(8, 9).values()[:2])  # a scalar may be where it was


def test_right_weights_are_taken_up_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    saved = Run("split").steps(0, 5).save()
    with caplog.at_level(logging.WARNING, "halfstep"):
        Run("split", seed=9).load(saved, "optimizer first").steps(5, 6)
    assert not [r for r in caplog.records if "others now" in r.message]


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
