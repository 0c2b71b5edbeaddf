"""What is decided once for a run: how its products run, which a resumed run keeps, and the precision when it is left to halfstep."""

import copy
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Accelerator
from halfstep.accelerator import decided
from halfstep.accelerator.decided import go_on_with, model_size, products_for
from halfstep.amp import autocast, large, pin, products_of
from halfstep.amp.emulation import is_active
from halfstep.amp.mode import current
from halfstep.checkpoint import Loaded
from halfstep.errors import CheckpointError, ConfigError
from halfstep.hardware import FAMILIES, probe, rates
from halfstep.hardware.race import Race
from halfstep.hardware.rates import Book
from halfstep.policy import parse

CPU = torch.device("cpu")
Machine = Callable[..., Book]
NATIVE, EMULATED = (1.0, 9.0, 1.0), (1.0, 0.1, 0.9)  # fp32, native, emulated


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Moves this process to a machine with these rates: of each family, or of every other one."""

    def move(every: tuple[float, float, float], fp16: tuple[float, float, float] | None = None, **families: tuple[float, float, float]) -> Book:
        own = every if fp16 is None else fp16
        folder = tmp_path / f"machine {len(list(tmp_path.iterdir()))}"
        book = Book(folder, lambda form: {f: Race(families.get(f, own if form == "fp16" else every)) for f in FAMILIES})
        monkeypatch.setattr(rates, "_book", book)
        return book

    return move


@pytest.fixture
def _unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(form: str) -> dict[str, Race]:
        raise AssertionError(f"{form} was measured")

    monkeypatch.setattr(rates, "_book", Book(tmp_path / "none", measure))


class Net(nn.Module):
    """Notes which of its products were emulated in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.convolved, self.last = nn.Linear(16, 32), nn.Conv1d(2, 2, 3, padding=1), nn.Linear(32, 4)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        mode = current("cpu")
        on = {**mode.tables.on, **(mode.tables.low or {})} if mode is not None else {}
        self.seen.append((on.get(F.linear, large.linear) is not large.linear, F.conv1d in on))
        hidden = self.first(x).relu()
        return self.last(self.convolved(hidden.view(-1, 2, 32)).view(hidden.shape))


def batch(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


class Run:
    """A run of a few steps. before: called on the model before it is prepared."""

    def __init__(self, precision: str, before: Callable[[nn.Module], object] = lambda model: None) -> None:
        self.accelerator = Accelerator(precision=precision, cpu=True)
        self.net = Net()
        before(self.net)
        self.optimizer: torch.optim.Optimizer
        self.model, self.optimizer = self.accelerator.prepare(self.net, torch.optim.AdamW(self.net.parameters(), lr=1e-2))

    def steps(self, *numbers: int) -> list[float]:
        losses = []
        for number in numbers:
            loss = self.model(batch(number)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def weights(self) -> list[Tensor]:
        return list(self.accelerator.get_state_dict(self.model).values())


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-lean", "fp16-true"])
@pytest.mark.parametrize(("began", "goes_on"), [(NATIVE, EMULATED), (EMULATED, NATIVE)], ids=["native", "emulated"])
def test_a_resumed_run_keeps_the_products_it_began_with_to_the_bit(
    machine: Machine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    precision: str,
    began: tuple[float, float, float],
    goes_on: tuple[float, float, float],
) -> None:
    machine(began, convolution=goes_on)
    linear, convolution = began is EMULATED, goes_on is EMULATED
    whole, first = Run(precision), Run(precision)
    losses = whole.steps(0, 1, 2, 3, 4)
    assert first.steps(0, 1) == losses[:2]
    first.accelerator.save_state(tmp_path / "two")
    machine(goes_on, convolution=began)
    second = Run(precision)
    second.accelerator.load_state(tmp_path / "two")
    (line,) = [record.getMessage() for record in caplog.records if "products run" in record.getMessage()]
    assert str(tmp_path / "two") in line
    assert second.steps(2, 3) == losses[2:4]
    second.accelerator.save_state(tmp_path / "four")
    third = Run(precision)
    third.accelerator.load_state(tmp_path / "four")
    assert third.steps(4) == losses[4:]
    assert all(map(torch.equal, third.weights(), whole.weights()))
    for run in (whole, second, third):
        assert set(run.net.seen) == {(linear, convolution)}


def test_nothing_is_said_where_this_machine_would_choose_the_same(machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine(NATIVE)
    first = Run("bf16-mixed")
    first.accelerator.save_state(tmp_path / "zero")
    machine(NATIVE)
    with caplog.at_level(logging.DEBUG, "halfstep"):
        Run("bf16-mixed").accelerator.load_state(tmp_path / "zero")
    assert "products run" not in caplog.text


def test_the_products_that_were_taken_over_hold_for_parts_pins_copies_and_blocks(machine: Machine, tmp_path: Path) -> None:
    machine(NATIVE)
    Run("bf16-mixed").accelerator.save_state(tmp_path / "zero")
    machine(EMULATED)
    run = Run("bf16-mixed", lambda net: pin(net, "last"))
    before = copy.deepcopy(run.net)  # such as an average of the weights
    run.accelerator.load_state(tmp_path / "zero")
    seen = list[bool]()
    run.net.first.register_forward_hook(lambda *_: seen.append(is_active()))
    run.net.first(batch(0))
    for net in (run.net, before, copy.deepcopy(run.net)):
        net(batch(0))
        assert net.seen[-1] == (False, False)
    with run.accelerator.autocast():
        seen.append(is_active())
    assert seen
    assert not any(seen)
    with autocast("cpu", torch.bfloat16):
        assert is_active(), "blocks of others follow this machine"


def test_another_accelerator_for_the_same_model_goes_on_as_it_did(machine: Machine, tmp_path: Path) -> None:
    """The trainer makes a new one at each call of train()."""
    machine(NATIVE)
    Run("bf16-mixed").accelerator.save_state(tmp_path / "zero")
    machine(EMULATED)
    run = Run("bf16-mixed")
    run.accelerator.load_state(tmp_path / "zero")
    again = Accelerator(precision="bf16-mixed", cpu=True)
    again.prepare(run.net)
    with again.autocast():
        assert not is_active()


@pytest.mark.parametrize("preset", ["bf16-mixed", "fp16-true"])
def test_a_policy_that_says_how_products_run_is_obeyed(machine: Machine, preset: str) -> None:
    machine(NATIVE)
    run = Run(f"{preset},products=emulated:convolution")
    run.steps(0)
    assert run.net.seen == [(False, True)]
    assert "(emulated:convolution)" in str(run.accelerator.resolution)


@pytest.mark.usefixtures("_unmeasured")
@pytest.mark.parametrize("precision", ["fp32", "bf16-true,products=native", "bf16-mixed,products=emulated", "fp16-mixed,products=native"])
def test_nothing_is_measured_where_nothing_is_left_open(precision: str, tmp_path: Path) -> None:
    run = Run(precision)
    run.steps(0)
    run.accelerator.save_state(tmp_path / "one")
    run.accelerator.load_state(tmp_path / "one")


@pytest.mark.parametrize("about", [{}, {"products": ""}])
def test_a_checkpoint_that_does_not_say_is_gone_on_with_as_measured(machine: Machine, about: dict[str, str]) -> None:
    machine(NATIVE)
    products = products_for(parse("bf16-mixed"))
    go_on_with(Loaded(Path("checkpoint-1"), about, {}), parse("bf16-mixed"), CPU, products, [])
    assert products.text == "auto"


@pytest.mark.parametrize(("about", "text"), [({}, "native"), ({"products": ""}, "native"), ({"products": "", "device": "cuda"}, "auto")])
def test_a_whole_16_bit_run_from_before_its_products_were_emulated_goes_on_natively(
    machine: Machine, caplog: pytest.LogCaptureFixture, about: dict[str, str], text: str
) -> None:
    machine(EMULATED)
    products = products_for(parse("fp16-true"))
    go_on_with(Loaded(Path("checkpoint-1"), about, {}), parse("fp16-true"), CPU, products, [])
    assert products.text == text
    assert ("products run native as in the run of checkpoint checkpoint-1" in caplog.text) == (text == "native")


def test_a_checkpoint_that_says_what_is_not_known_is_refused(machine: Machine) -> None:
    machine(NATIVE)
    products = products_for(parse("bf16-mixed"))
    with pytest.raises(CheckpointError, match=r"checkpoint-1 says products='emulated:rnn'"):
        go_on_with(Loaded(Path("checkpoint-1"), {"products": "emulated:rnn"}, {}), parse("bf16-mixed"), CPU, products, [])
    assert products.text == "auto"


@pytest.mark.parametrize(
    ("bf16", "fp16", "chosen"), [(EMULATED, EMULATED, "fp32"), (NATIVE, EMULATED, "bf16-mixed"), (EMULATED, NATIVE, "fp16-mixed")]
)
def test_auto_is_chosen_when_the_model_is_prepared(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    bf16: tuple[float, float, float],
    fp16: tuple[float, float, float],
    chosen: str,
) -> None:
    machine(bf16, fp16)
    with caplog.at_level(logging.INFO, "halfstep"):
        run = Run("auto")
    assert str(run.accelerator.policy) == str(run.accelerator.resolution.policy) == chosen
    assert caplog.text.count("precision auto: ") == 1
    assert "times fp32's rate" in str(run.accelerator.resolution)
    assert run.accelerator.scaler.is_enabled() == (chosen == "fp16-mixed")
    twin = Run(chosen)
    assert run.steps(0, 1) == twin.steps(0, 1)
    assert all(map(torch.equal, run.weights(), twin.weights()))
    run.accelerator.save_state(tmp_path / "two")
    for precision in ("auto", chosen):
        resumed = Run(precision)
        resumed.accelerator.load_state(tmp_path / "two")
        assert all(map(torch.equal, resumed.weights(), run.weights()))


def test_auto_keeps_the_precision_of_a_model_that_is_prepared(machine: Machine) -> None:
    machine(NATIVE)
    run = Run("auto")
    machine(EMULATED)
    again = Accelerator(precision="auto", cpu=True)
    again.prepare(run.net)
    assert str(again.policy) == "bf16-mixed"
    assert "prepared under it before" in str(again.resolution)


def test_auto_goes_by_memory_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(EMULATED)
    size = model_size(Net(), CPU)
    assert size.families == ("matmul", "convolution")
    assert sum(castable for _, castable in size.trained) == 6
    for text, more in (("fp32", 0), ("bf16-lean", -2), ("bf16-lean,weights=split24", None)):
        memory = 2 * size.bytes_under(parse("fp32" if more is not None else "bf16-lean")) + (more if more is not None else -2)
        monkeypatch.setattr(decided, "probe", lambda device, memory=memory: dataclasses.replace(probe(device), memory_bytes=memory))
        assert str(Run("auto").accelerator.policy) == text


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_auto_keeps_the_format_that_a_model_was_loaded_in(machine: Machine, form: str) -> None:
    machine(EMULATED)
    run = Run("auto", lambda net: net.to(parse(f"{form}-mixed").dtype))
    assert str(run.accelerator.policy) == f"{form}-mixed"
    run.steps(0)


def test_before_a_model_is_prepared_auto_is_refused_where_a_precision_is_needed() -> None:
    accelerator = Accelerator(precision="auto", cpu=True)
    assert str(accelerator.policy) == "auto"
    with pytest.raises(ConfigError, match="chosen when the model is prepared"):
        accelerator.autocast()
    with pytest.raises(ConfigError, match="chosen when the model is prepared"):
        accelerator.prepare(torch.optim.AdamW(nn.Linear(2, 2).parameters()))


@pytest.mark.parametrize(
    ("model", "families"),
    [
        (nn.Sequential(nn.Linear(2, 2)), ("matmul",)),
        (nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1)), ("convolution",)),
        (nn.TransformerEncoderLayer(4, 2, 8), ("matmul", "attention")),
        (nn.Sequential(nn.LayerNorm(4)), FAMILIES),
        (nn.LSTM(2, 2), ("matmul",)),
    ],
    ids=["linear", "convolution", "transformer", "neither", "recurrent"],
)
def test_the_products_of_a_model_are_told_by_its_modules(model: nn.Module, families: tuple[str, ...]) -> None:
    assert model_size(model, CPU).families == families


def test_frozen_weights_and_buffers_are_counted_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False).requires_grad_(False), nn.BatchNorm1d(4))
    size = model_size(model, CPU)
    assert size.frozen == 4 * 16 + 4 * 8 + 8, "a frozen matrix, running mean and variance, and the count of batches"
    assert [shape for shape, _ in size.trained] == [(4,), (4,)]


def test_a_module_that_is_not_bound_has_no_products() -> None:
    assert products_of(nn.Linear(2, 2)) is None
