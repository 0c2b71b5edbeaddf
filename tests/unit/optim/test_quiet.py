"""Optimizers without torch's compiler: nobody imports it for their sake, and once it is there it is told what not to look into."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from halfstep.optim import AdamW, FusedAdamW
from halfstep.optim.quiet import CACHED, METHODS, install
from halfstep.optim.quiet import _asked as asked

END = "\nimport sys\nprint('torch._dynamo' in sys.modules)"
STEP = """
layer(torch.ones(1, 4, dtype=layer.weight.dtype)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.zero_grad(set_to_none=False)
state = optimizer.state_dict()
optimizer.load_state_dict(state)
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5**i)
optimizer.step()
schedule.step()
"""
OPTIMIZERS = f"""
import torch
from halfstep.optim import AdamW, FusedAdamW
layer = torch.nn.Linear(4, 2)
optimizer = FusedAdamW(layer.parameters())
{STEP}
layer = torch.nn.Linear(4, 2).bfloat16()
optimizer = AdamW(layer.parameters())
{STEP}
"""
TRAINER = """
import tempfile
import torch
from halfstep import Trainer, TrainingArguments
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}
data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(8)]
for precision in ("fp32", "bf16-mixed"):
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(output_dir=folder + "/run", max_steps=1, precision=precision, use_cpu=True, disable_tqdm=True)
        Trainer(Net(), TrainingArguments(**settings), train_dataset=data).train()
"""


def compiler_is_there(code: str) -> bool:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code + END], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.split()[-1] == "True"


@pytest.mark.slow
def test_a_process_that_trains_never_imports_the_compiler() -> None:
    assert not compiler_is_there(OPTIMIZERS + TRAINER)


@pytest.mark.parametrize("make", [FusedAdamW, AdamW], ids=["fused", "halfstep"])
def test_while_the_compiler_is_not_there_nobody_imports_it(make: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just begun: the compiler is not among the modules, and the methods have not been told of it."""
    for name in METHODS:
        inner = getattr(torch.optim.Optimizer, name).__wrapped__
        monkeypatch.setattr(inner, CACHED, asked(inner), raising=False)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    layer = nn.Linear(4, 2)
    optimizer = make(layer.parameters())
    for _ in range(2):
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5**i)
    optimizer.step()
    schedule.step()
    assert "torch._dynamo" not in sys.modules


@pytest.mark.slow
def test_the_proof_above_would_fail_without_the_quiet_methods() -> None:
    assert compiler_is_there("import torch\ntorch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)")


@pytest.mark.filterwarnings("ignore")  # of the compiler, on its own doing
@pytest.mark.slow
@pytest.mark.parametrize(("make", "whole"), [(FusedAdamW, False), (FusedAdamW, True), (AdamW, False)], ids=["fused", "fused steps", "halfstep"])
def test_compiled_functions_may_call_them(make: Callable[..., torch.optim.Optimizer], whole: bool) -> None:
    """A round: gradients of the last one are cleared, the numbers go on; `whole`: with forward, backward and step inside."""
    layer, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(layer.state_dict())
    one, other = make(layer.parameters()), make(plain.parameters())

    def round_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        optimizer.zero_grad()
        if whole:
            model(y).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return y + len(optimizer.state_dict()["param_groups"])

    compiled = torch.compile(round_of, backend="eager")
    for i in range(2):
        for model, optimizer, call in ((layer, one, compiled), (plain, other, round_of)):
            model(torch.full((2, 3), 1.0 + i)).sum().backward()
            optimizer.step()
            assert torch.equal(call(model, optimizer, torch.ones(2, 3)), torch.full((2, 3), 3.0))
    assert torch.equal(layer.weight, plain.weight)
    assert [p.grad is None or not bool(p.grad.any()) for p in layer.parameters()] == [True, True]


def test_once_the_compiler_is_there_the_methods_are_disabled_for_it_as_torch_does() -> None:
    import torch._dynamo

    layer = nn.Linear(2, 1)
    optimizer = FusedAdamW(layer.parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad(set_to_none=False)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    for name in METHODS:
        inner = getattr(torch.optim.Optimizer, name).__wrapped__
        assert getattr(getattr(inner, CACHED), "_torchdynamo_disable", False), name


def test_installing_twice_changes_nothing() -> None:
    before = {name: getattr(getattr(torch.optim.Optimizer, name).__wrapped__, CACHED) for name in METHODS}
    install()
    assert {name: getattr(getattr(torch.optim.Optimizer, name).__wrapped__, CACHED) for name in METHODS} == before
