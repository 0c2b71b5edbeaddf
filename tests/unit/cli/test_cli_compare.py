"""`halfstep compare`: its exit status, its text and its JSON."""

import json
from types import SimpleNamespace

import pytest
import torch

from halfstep import Plan
from halfstep.cli.main import main
from halfstep.cli.subject import from_training

SCRIPT = """
import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.first, self.last, self.fault = nn.Linear(4, 4), nn.Linear(4, 1), fault

    def forward(self, x, labels):
        x = x + self.first(x)
        x = x.half().float() if self.fault else x
        return (self.last(x) - labels).square().mean()


def batches():
    made = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, 4, generator=made), "labels": torch.randn(8, 1, generator=made)} for _ in range(3)]


def healthy():
    return Residual(False), batches()


def faulty(seed):
    return {"model": Residual(True), "batches": batches(), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compared.py").write_text(SCRIPT)


@pytest.mark.usefixtures("script")
def test_a_healthy_target_ends_with_0(capsys):
    assert main(["compare", "--target", "compared.py:healthy", "--precision", "bf16-mixed", "--steps", "2", "--seeds", "2"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "compared.py:healthy"
    assert second.startswith("alike: bf16-mixed against fp32, 2 steps")


@pytest.mark.usefixtures("script")
def test_a_faulty_target_ends_with_1_and_names_the_place(capsys):
    options = ["--target", "compared.py:faulty", "--precision=bf16-mixed", "--steps=1", "--seeds=1"]
    assert main(["compare", *options]) == 1
    assert "diverged: the model (Residual), forward, step 0, compared.py:13: its code goes through fp16" in capsys.readouterr().out
    assert main(["compare", *options, "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert (plain["alike"], plain["first"]["source"], plain["model"]) == (False, "compared.py:13", "compared.py:faulty")
    assert main(["compare", *options, "--as_written"]) == 0


def test_the_small_gpt_takes_the_options_of_train(capsys):
    line = ["compare", "--layers", "1", "--width", "8", "--heads", "1", "--precision", "fp16-mixed", "--steps", "1", "--seeds", "1"]
    assert main([*line, "--per_device_train_batch_size", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("alike: fp16-mixed against fp32, 1 steps")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--target", "nowhere.py:make"], "there is no file nowhere.py"),
        (["--target", "nowhere.py:make", "--layers", "2"], "--layers has no effect beside --target"),
        (["--layers", "1", "--reference", "bf16-true", "--steps", "1"], "does not keep weights"),
        (["--steps", "many"], "invalid int value"),
        (["--stepz", "2"], "no option --stepz"),
    ],
)
def test_wrong_usage_ends_with_2(line, said, capsys):
    assert main(["compare", *line]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"), [(["--fp16"], "fp16-mixed"), (["--bf16"], "bf16-mixed"), (["--plan", "plan.yaml"], "bf16-lean"), ([], "bf16-mixed")]
)
def test_the_precision_is_that_of_halfstep_train(options, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Plan("bf16-lean").save("plan.yaml")
    asked = []
    monkeypatch.setattr("halfstep.cli.compare.compare", lambda *given, **settings: asked.append(given[2]) or SimpleNamespace(status=0))
    assert main(["compare", "--layers", "1", "--width", "8", "--heads", "1", "--block_size", "16", "--steps", "1", *options]) == 0
    assert asked == [expected]


def test_the_demo_is_on_the_device_that_it_would_train_on(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("halfstep.cli.subject.default_device", lambda cpu: torch.device("cpu" if cpu else "meta"))
    small = ["--layers", "1", "--width", "8", "--heads", "1", "--block_size", "16"]
    for options, kind in ((small, "meta"), ([*small, "--use_cpu"], "cpu")):
        found = from_training(options, 1)
        assert {t.device.type for t in (*found.model.parameters(), *found.batches[0].values())} == {kind}
