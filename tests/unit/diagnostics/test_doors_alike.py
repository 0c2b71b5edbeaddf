"""What no look at a model can work with is refused by each of them in the same words, with a remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.errors import ConfigError


def squared(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


DOORS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "plan": lambda model, batch: halfstep.plan(model, [batch], precision="bf16-mixed", loss=squared, rounds=0),
    "compare": lambda model, batch: halfstep.compare(model, [batch], "bf16-mixed", loss=squared, steps=1, seeds=1),
    "audit": lambda model, batch: halfstep.audit(model, batch, precision="bf16-mixed", loss=squared, rounds=1),
    "memory": lambda model, batch: halfstep.memory(model, batch, precision="bf16-mixed", loss=squared, savings=False),
    "memory measured": lambda model, batch: halfstep.memory(model, batch, precision="bf16-mixed", loss=squared, measured=True),
    "trace": lambda model, batch: halfstep.trace(model, batch, precision="bf16-mixed", loss=squared),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.ones(2, 4), torch.ones(2, 4)), "a tuple of 2, does not fit Linear.forward: too many"),
        ([torch.ones(2, 4)] * 3, "a list of 3, does not fit Linear.forward: too many"),
        ({"x": torch.ones(2, 4)}, "a dict of 1, does not fit Linear.forward: .*'x'|a dict of 1, does not fit Linear.forward: missing"),
    ],
    ids=["labels", "several", "names"],
)
def test_a_batch_that_does_not_fit_the_models_forward(door: str, batch: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        DOORS[door](nn.Linear(4, 4), batch)
    assert "as the model takes it" in refused.value.remedy


def test_a_type_error_of_the_models_own_stays_one() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + self  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        halfstep.trace(Wrong(), torch.ones(2, 4))


@pytest.mark.parametrize("door", ["plan", "compare", "audit", "memory"])
def test_a_lazy_module(door: str) -> None:
    with pytest.raises(ConfigError, match="lazy") as refused:
        DOORS[door](nn.Sequential(nn.LazyLinear(4)), torch.ones(2, 4))
    assert refused.value.remedy


@pytest.mark.parametrize("door", ["plan", "compare", "audit"])
def test_weights_in_fp64_that_no_16_bits_would_touch(door: str) -> None:
    with pytest.raises(ConfigError, match=r"fp64|neither fp32 nor 16-bit"):
        DOORS[door](nn.Linear(4, 4).double(), torch.ones(2, 4).double())


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_states_of_fp64_weights_are_counted_in_full(optimizer: str) -> None:
    found = [
        halfstep.memory(nn.Linear(64, 64).double(), torch.ones(2, 64).double(), optimizer=optimizer, loss=squared, savings=False, measured=measured)
        for measured in (False, True)
    ]
    assert abs(found[0].states - found[1].states) <= 64


def test_memory_refuses_frozen_models_half_batches_and_what_cannot_be_copied() -> None:
    with pytest.raises(ConfigError, match="no parameter that is trained"):
        DOORS["memory"](nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4))
    with pytest.raises(ConfigError, match=r"accumulate=1\.5"):
        halfstep.memory(nn.Linear(4, 4), torch.ones(2, 4), loss=squared, accumulate=1.5)  # type: ignore[arg-type]
    keeps = nn.Linear(4, 4)
    keeps.kept = keeps(torch.ones(2, 4))  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="cannot be copied"):
        DOORS["memory measured"](keeps, torch.ones(2, 4))


def test_an_optimizer_that_decides_by_numbers_is_named_and_not_the_model() -> None:
    with pytest.raises(ConfigError, match="the step of Adafactor decides by numbers"):
        halfstep.memory(nn.Linear(4, 4), torch.ones(2, 4), optimizer=torch.optim.Adafactor, loss=squared)


def test_a_plan_says_which_batches_gave_no_loss() -> None:
    class Sometimes(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            y = super().forward(x)
            return {"loss": (y - labels).square().mean()} if labels is not None else {"logits": y}

    x = torch.ones(2, 4)
    found = halfstep.plan(Sometimes(4, 4), [{"x": x, "labels": x}, {"x": x}], precision="fp32", rounds=0)
    assert any("1 of 2 batches gave no loss" in note for note in found.notes)
