"""A model that is as it was is not looked through at each step, and every change that is refused at the first step is refused at any later one."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import Accelerator
from halfstep.accelerator import facts
from halfstep.errors import ConfigError


def ready(precision: str = "fp32") -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(precision=precision, cpu=True)
    model = nn.Sequential(nn.Linear(30, 30), nn.Sequential(nn.Linear(30, 4), nn.Linear(4, 4)), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32) -> Any:
    accelerator.backward(model(torch.randn(8, 30, dtype=dtype)).float().square().mean())
    result = optimizer.step()
    optimizer.zero_grad()
    return result


def there_and_back(part: nn.Module, dtype: torch.dtype) -> None:
    before = [p.data for p in part.parameters()]  # held: the memory they come back to is another
    part.to(dtype)
    part.float()
    assert all(p.data_ptr() != t.data_ptr() for p, t in zip(part.parameters(), before, strict=True))


def grow(part: nn.Module) -> None:
    part.register_parameter("extra", nn.Parameter(torch.ones(1)))
    part.register_forward_hook(lambda module, _, out: out * module.extra)


def retable(part: nn.Module, table: str, **items: Any) -> None:
    part.__dict__[table] = {**part.__dict__[table], **items}


def new_weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(1, 4))


FAULTS: dict[str, tuple[Callable[[Any], Any], str, torch.dtype]] = {
    "fp16 and back": (lambda m: there_and_back(m, torch.float16), "rounded to 16 bits", torch.float32),
    "bf16 and back": (lambda m: there_and_back(m, torch.bfloat16), "rounded to 16 bits", torch.float32),
    "a part there and back": (lambda m: there_and_back(m[1], torch.bfloat16), r"1\.0\.weight have been rounded", torch.float32),
    "fp64": (lambda m: m.double(), "was fp32 when the model was prepared and is float64", torch.float64),
    "bf16": (lambda m: m.bfloat16(), "was fp32 when the model was prepared and is bf16", torch.bfloat16),
    "a parameter replaced": (lambda m: setattr(m[2], "weight", new_weight()), r"2\.weight was replaced", torch.float32),
    "a parameter added": (lambda m: grow(m[2]), r"2\.extra was added", torch.float32),
    "a module replaced": (lambda m: m[1].__setitem__(1, nn.Linear(4, 4)), r"1\.1\.weight was replaced", torch.float32),
    "a block replaced": (lambda m: m.__setitem__(1, nn.Sequential(nn.Linear(30, 4))), r"1\.0\.weight was replaced", torch.float32),
    "a module added": (lambda m: m.append(nn.Linear(1, 1)), r"3\.weight was added", torch.float32),
    "a module wrapped": (lambda m: m.__setitem__(0, nn.Sequential(nn.Linear(30, 30))), r"0\.0\.weight was added", torch.float32),
    "weight norm": (lambda m: nn.utils.parametrizations.weight_norm(m[2]), "was added", torch.float32),
    "another table of parameters": (lambda m: retable(m[2], "_parameters", weight=new_weight()), r"2\.weight was replaced", torch.float32),
    "another table of modules": (lambda m: retable(m[1], "_modules", **{"0": nn.Linear(30, 4)}), r"1\.0\.weight was replaced", torch.float32),
    "a state set": (lambda m: m[2].__setstate__(copy.deepcopy(m[2].__dict__)), r"2\.weight was replaced", torch.float32),
    "a weight untied": (lambda m: setattr(m[2], "weight", nn.Parameter(m[1][1].weight.detach()[:1].clone())), r"2\.weight was repl", torch.float32),
}


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_at_whatever_step_it_comes(fault: str, steps: int) -> None:
    accelerator, model, optimizer = ready()
    for _ in range(steps):
        assert step(accelerator, model, optimizer)
    act, said, dtype = FAULTS[fault]
    act(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=said):
        step(accelerator, model, optimizer, dtype)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16-lean"])
@pytest.mark.parametrize("fault", ["a parameter replaced", "a module added", "another table of parameters"])
def test_under_other_precisions_too(fault: str, precision: str) -> None:
    accelerator, model, optimizer = ready(precision)
    for _ in range(3):
        assert step(accelerator, model, optimizer)
    FAULTS[fault][0](model)
    with pytest.raises(ConfigError, match=FAULTS[fault][1]):
        step(accelerator, model, optimizer)


def test_a_fault_that_was_refused_is_refused_again() -> None:
    accelerator, model, optimizer = ready()
    step(accelerator, model, optimizer)
    model.double()
    for _ in range(2):
        with pytest.raises(ConfigError, match="float64"):
            step(accelerator, model, optimizer, torch.float64)
        optimizer.zero_grad()


def test_two_changes_at_two_steps_are_both_seen() -> None:
    accelerator, model, optimizer = ready()
    step(accelerator, model, optimizer)
    model.append(nn.Identity())
    assert step(accelerator, model, optimizer)
    assert step(accelerator, model, optimizer)
    model[2].weight = new_weight()
    with pytest.raises(ConfigError, match=r"2\.weight was replaced"):
        step(accelerator, model, optimizer)


def test_in_a_second_model_too() -> None:
    accelerator, model, optimizer = ready()
    other = nn.Linear(30, 1)
    other, of_other = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    for _ in range(3):
        step(accelerator, model, optimizer)
        step(accelerator, other, of_other)
    other.weight = nn.Parameter(torch.randn(1, 30))
    with pytest.raises(ConfigError, match="weight was replaced"):
        step(accelerator, other, of_other)


def test_what_was_welcome_still_is() -> None:
    """Parts that have no parameters, frozen ones, an optimizer for new ones, parts taken away, weights written in place, buffers."""
    accelerator, model, optimizer = ready()
    step(accelerator, model, optimizer)
    model.append(nn.Identity())
    assert step(accelerator, model, optimizer)
    model.register_buffer("seen", torch.zeros(3))
    assert step(accelerator, model, optimizer)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(30, 30))
    assert step(accelerator, model, optimizer)
    model[0].weight.data = torch.randn(30, 30)
    assert step(accelerator, model, optimizer)
    model[2] = nn.Linear(4, 1).requires_grad_(False)
    assert step(accelerator, model, optimizer)
    model[2] = nn.Linear(4, 1)
    added = accelerator.prepare(torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert step(accelerator, model, optimizer)
    added.zero_grad()
    del model[1][1]
    assert step(accelerator, model, optimizer)


def test_a_model_as_it_was_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = ready()
    looks: list[int] = []
    whole = facts._refuse_changed
    monkeypatch.setattr(facts, "_refuse_changed", lambda *args: looks.append(1) or whole(*args))
    for _ in range(5):
        step(accelerator, model, optimizer)
    assert len(looks) == 1
    model.append(nn.Identity())
    for _ in range(5):
        step(accelerator, model, optimizer)
    assert len(looks) == 2


def test_a_part_on_the_meta_device_can_be_remembered() -> None:
    """It has no memory of its own."""
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "meta": nn.Linear(2, 1, device="meta")})
    signature = facts.Signature(model)
    facts.refuse_changed(model, signature, [])
    assert signature.is_as_it_was()
    model["used"].double()
    with pytest.raises(ConfigError, match=r"used\.weight was fp32"):
        facts.refuse_changed(model, signature, [])


def test_a_model_that_is_let_go_by_all_others_can_go() -> None:
    """Parts that were taken out of a model are not kept alive longer than its next look."""
    accelerator, model, optimizer = ready()
    step(accelerator, model, optimizer)
    gone = weakref.ref(model[1][1])
    del model[1][1]
    step(accelerator, model, optimizer)
    gc.collect()
    assert gone() is None
