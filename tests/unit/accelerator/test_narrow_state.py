"""`save_state`, `load_state` and `save_model` with 16-bit weights: residuals and encoded states go on bit for bit, exports come from the masters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import halfstep
from halfstep import Accelerator
from halfstep.checkpoint import load, seed_everything
from halfstep.errors import CheckpointError, StepOrderError
from halfstep.optim import full_values, master_of

LOADED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRESETS = ["bf16-lean", "fp16-lean", "bf16-true", "fp16-true"]
COMBINATIONS = [
    *(f"bf16-lean,weights={w},states={s}" for w in ("split", "split24", "kahan", "stochastic") for s in ("fp32", "bf16", "int8")),
    *(f"fp16-lean,weights={w}" for w in ("split24", "kahan", "stochastic")),
    *(f"bf16-true,weights={w}" for w in ("split", "split24", "stochastic", "plain")),
    "bf16-mixed,states=int8",
    "fp16-mixed,states=bf16",
    "fp32,states=int8",
]
ADAMW = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "halfstep": lambda p: halfstep.optim.AdamW(p, lr=1e-2, seed=3),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 150), nn.LayerNorm(150), nn.Dropout(0.3), nn.Linear(150, 4))


class Run:
    """A model, its optimizer, and a loop that can be left and entered anywhere: what a new process would build."""

    def __init__(self, precision: str, loaded: str = "fp32", make: str = "halfstep", seed: int = 0) -> None:
        seed_everything(seed)
        self.accelerator = Accelerator(precision=precision, cpu=True)
        net = build().to(LOADED[loaded])
        self.net, self.optimizer = self.accelerator.prepare(net, ADAMW[make](net.parameters()))

    def go(self, steps: int, micro_batches: int = 1) -> list[float]:
        losses = []
        for _ in range(steps):
            for _ in range(micro_batches):
                with self.accelerator.accumulate(self.net):
                    x = torch.randn(8, 6)
                    loss = nn.functional.cross_entropy(self.net(x).float(), (x.sum(1) > 0).long())
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    losses.append(loss.item())
        return losses

    def masters(self) -> dict[str, torch.Tensor]:
        return {name: full_values(p) for name, p in self.net.named_parameters()}

    def everything(self) -> dict[str, torch.Tensor]:
        """Weights, residuals and states, as copies."""
        kept = {f"weight {name}": t.detach().clone() for name, t in self.net.state_dict().items()}
        for name, p in self.net.named_parameters():
            master = master_of(p)
            if master is not None and master.residual is not None:
                kept[f"residual {name}"] = master.residual.clone()
            kept |= {f"{key} {name}": v.clone() for key, v in self.optimizer.state.get(p, {}).items() if torch.is_tensor(v)}
        return kept


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def goes_on(place: Path, precision: str, loaded: str = "fp32", make: str = "halfstep", steps: int = 10) -> None:
    first = Run(precision, loaded, make)
    first.go(steps)
    first.accelerator.save_state(place / "state")
    expected = first.go(steps)
    second = Run(precision, loaded, make, seed=99)
    second.accelerator.load_state(place / "state")
    assert second.go(steps) == expected
    assert same(second.everything(), first.everything())


@pytest.mark.parametrize("make", ADAMW)
@pytest.mark.parametrize("precision", PRESETS)
def test_a_run_in_every_preset_goes_on_bit_for_bit(tmp_path: Path, precision: str, make: str) -> None:
    goes_on(tmp_path, precision, make=make)


@pytest.mark.parametrize("precision", COMBINATIONS)
def test_a_run_in_every_combination_goes_on_bit_for_bit(tmp_path: Path, precision: str) -> None:
    goes_on(tmp_path, precision, steps=5)


@pytest.mark.parametrize("loaded", ["bf16", "fp16"])
@pytest.mark.parametrize("precision", [*PRESETS, "bf16-mixed", "fp16-mixed"])
def test_a_run_of_a_model_loaded_in_16_bits_goes_on_bit_for_bit(tmp_path: Path, precision: str, loaded: str) -> None:
    goes_on(tmp_path, precision, loaded, steps=5)


@pytest.mark.parametrize(
    ("precision", "saved", "now"),
    [*((p, *pair) for p in ("bf16-lean", "fp16-lean", "bf16-true", "fp16-true") for pair in (("fp32", "bf16"), ("bf16", "fp32")))],
)
def test_a_run_goes_on_when_the_model_is_loaded_in_another_format_first(tmp_path: Path, precision: str, saved: str, now: str) -> None:
    """The checkpoint holds all weights: what the model was built with does not matter."""
    first = Run(precision, saved)
    first.go(5)
    first.accelerator.save_state(tmp_path / "state")
    expected = first.go(5)
    second = Run(precision, now, seed=99)
    second.accelerator.load_state(tmp_path / "state")
    assert second.go(5) == expected
    assert same(second.everything(), first.everything())


@pytest.mark.parametrize(("saved", "now"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_under_mixed_the_format_that_a_model_was_loaded_in_matters_and_a_refusal_says_so(tmp_path: Path, saved: str, now: str) -> None:
    """Either it goes on bit for bit, or it is refused with the format to load, and nothing was changed."""
    first = Run("bf16-mixed", saved)
    first.go(3)
    first.accelerator.save_state(tmp_path / "state")
    second = Run("bf16-mixed", now, seed=99)
    before = second.everything()
    try:
        second.accelerator.load_state(tmp_path / "state")
    except CheckpointError as error:
        assert {"bf16": "bfloat16", "fp32": "float32"}[saved] in f"{error.cause} {error.remedy}"  # noqa: PT017
        assert same(second.everything(), before)
    else:
        assert second.go(3) == first.go(3)
        assert same(second.everything(), first.everything())


OTHERS = ["fp32", "bf16-mixed", "fp16-lean", "bf16-true", "bf16-lean,weights=kahan", "bf16-lean,states=fp32"]


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_storage_or_codec_is_refused_before_anything_changes(tmp_path: Path, other: str, trained: int) -> None:
    first = Run("bf16-lean")
    first.go(2)
    first.accelerator.save_state(tmp_path / "state")
    second = Run(other, seed=5)
    second.go(trained)
    before, random = second.everything(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=rf"was made under precision bf16-lean, and this run has {other}. Resume with the same precision"):
        second.accelerator.load_state(tmp_path / "state")
    assert same(second.everything(), before)
    assert torch.equal(torch.get_rng_state(), random)
    second.go(1)  # and the run can go on


def test_saving_inside_a_window_is_refused_and_at_its_end_it_goes_on(tmp_path: Path) -> None:
    run = Run("bf16-lean")
    run.accelerator.gradient_accumulation_steps = 2
    run.go(1, micro_batches=1)
    with pytest.raises(StepOrderError, match="after 1 of 2 micro-batches"):
        run.accelerator.save_state(tmp_path / "state")
    run.go(1, micro_batches=1)
    run.accelerator.save_state(tmp_path / "state")
    expected = run.go(2, micro_batches=2)
    again = Run("bf16-lean", seed=9)
    again.accelerator.gradient_accumulation_steps = 2
    again.accelerator.load_state(tmp_path / "state")
    assert again.go(2, micro_batches=2) == expected
    assert same(again.everything(), run.everything())


@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-true", "fp16-lean", "bf16-lean,weights=split24"])
def test_masters_are_there_as_soon_as_a_checkpoint_is_loaded(tmp_path: Path, precision: str) -> None:
    first = Run(precision)
    first.go(3)
    first.accelerator.save_state(tmp_path / "state")
    second = Run(precision, seed=9)
    second.accelerator.load_state(tmp_path / "state")
    assert same(second.masters(), first.masters())
    assert same(second.accelerator.get_state_dict(second.net), first.accelerator.get_state_dict(first.net))
    second.accelerator.save_state(tmp_path / "again")
    a, b = load(tmp_path / "state"), load(tmp_path / "again")
    assert a.parts.keys() == b.parts.keys()
    assert all((tmp_path / "state" / f).read_bytes() == (tmp_path / "again" / f).read_bytes() for f in ("model.safetensors", "optimizer.safetensors"))


@pytest.mark.parametrize("precision", ["bf16-lean", "bf16-true"])
def test_weights_that_no_optimizer_has_keep_their_masters(tmp_path: Path, precision: str) -> None:
    """Only the head is trained, and nobody froze the rest."""

    def made(seed: int) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
        seed_everything(seed)
        accelerator, net = Accelerator(precision=precision, cpu=True), build()
        return accelerator, *accelerator.prepare(net, torch.optim.AdamW(net[3].parameters(), lr=1e-2))

    accelerator, net, optimizer = made(0)
    body = net[0].weight.detach().clone() if precision == "bf16-lean" else None
    accelerator.backward(net(torch.randn(4, 6)).sum())
    optimizer.step()
    if body is not None:
        assert torch.equal(full_values(net[0].weight), body)
    accelerator.save_state(tmp_path / "state")
    expected = {name: full_values(p) for name, p in net.named_parameters()}
    accelerator, net, _ = made(1)
    accelerator.load_state(tmp_path / "state")
    assert same({name: full_values(p) for name, p in net.named_parameters()}, expected)


# --- the weights for use elsewhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", LOADED)
@pytest.mark.parametrize("precision", [*PRESETS, "bf16-mixed", "fp16-mixed"])
def test_a_model_is_saved_in_the_format_it_was_loaded_in_from_its_masters(tmp_path: Path, precision: str, loaded: str) -> None:
    run = Run(precision, loaded)
    run.go(5)
    masters, state = run.masters(), run.accelerator.get_state_dict(run.net)
    assert list(state) == list(run.net.state_dict())
    assert {t.dtype for t in state.values()} == {LOADED[loaded]}
    run.accelerator.save_model(run.net, tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    for name, master in masters.items():
        assert torch.equal(state[name], master.to(LOADED[loaded]))
        assert torch.equal(written[name], state[name])
    build().to(LOADED[loaded]).load_state_dict(written)  # under the names of the model


def test_saving_a_model_leaves_it_as_it_is(tmp_path: Path) -> None:
    run = Run("bf16-lean")
    run.go(3)
    before = run.everything()
    run.accelerator.save_model(run.net, tmp_path / "model")
    run.accelerator.get_state_dict(run.net)
    assert same(run.everything(), before)


def test_tied_weights_are_one_tensor_in_what_is_saved(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    accelerator = Accelerator(precision="bf16-lean", cpu=True)
    net = accelerator.prepare(Tied())
    net(torch.randn(2, 5))
    state = accelerator.get_state_dict(net)
    assert state["first.weight"].data_ptr() == state["second.weight"].data_ptr()
    accelerator.save_model(net, tmp_path / "model")
    assert sorted(load_file(tmp_path / "model" / "model.safetensors")) == ["first.bias", "first.weight", "second.bias"]


def test_a_model_that_was_never_called_is_saved_as_it_is(tmp_path: Path) -> None:
    accelerator = Accelerator(precision="bf16-lean", cpu=True)
    net = accelerator.prepare(build())
    expected = {k: v.clone() for k, v in net.state_dict().items()}
    assert same(accelerator.get_state_dict(net), expected)
    accelerator.save_model(net, tmp_path / "model")
    assert same(dict(sorted(load_file(tmp_path / "model" / "model.safetensors").items())), dict(sorted(expected.items())))
