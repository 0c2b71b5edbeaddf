"""benchmarks/gpu.sh, rehearsed on the CPU with tiny models: what runs on a GPU later runs here, and every way in which a part can end is recorded."""

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
QUICK_LAWS = (
    "split_is_round_to_nearest",
    "noise_and_states_are_the_cpu_s",
    "adamw_steps_as_on_a_cpu",
    "wrapped_optimizer_steps_masters",
    "later_is_at_once",
    "overflowing_module_is_pinned",
)
SLOWER_LAWS = ("bad_gradients_change_nothing", "replayed_step_is_the_step", "lean_losses_are_stock_autocast_s", "resumed_run_is_the_run")


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.gpu.{name}")


@dataclass
class Output:
    loss: torch.Tensor


class Tiny(nn.Module):
    """In the place of transformers' models, whose import takes seconds. The slow tests have those."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 8, device=device)
        self.transformer = nn.ModuleDict({"h": nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"c_fc": nn.Linear(8, 8, device=device)})})])})
        self.head = nn.Linear(8, 64, device=device)

    def forward(self, input_ids, labels):
        hidden = self.transformer["h"][0]["mlp"]["c_fc"](self.table(input_ids)).relu()
        return Output(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten()))


@pytest.fixture
def tiny(load, monkeypatch):
    monkeypatch.setattr(load("models"), "made", lambda name, small, device, seed=0: Tiny(device))


@pytest.fixture
def setting(load, tmp_path):
    return load("setting").Setting(torch.device("cpu"), True, 2, tmp_path / "result.json")


@pytest.mark.parametrize("name", [*QUICK_LAWS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWER_LAWS)])
def test_each_law_holds_on_the_cpu(name, load, setting):
    laws = load("laws")
    assert {law.__name__ for law in laws.LAWS} == {*QUICK_LAWS, *SLOWER_LAWS}
    assert getattr(laws, name)(setting)


def test_a_law_that_does_not_hold_is_told_from_one_that_could_not_be_tried(load, setting, monkeypatch):
    laws = load("laws")

    def broken(_):
        laws.need(False, "3 of 4 differ")

    def impossible(_):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(laws, "LAWS", (broken, impossible))
    before = torch.are_deterministic_algorithms_enabled()
    try:
        laws.run(setting)
    finally:
        torch.use_deterministic_algorithms(before)
    found = json.loads(setting.result.read_text())
    assert found["laws"]["broken"] == {"holds": False, "seen": "3 of 4 differ"}
    assert found["laws"]["impossible"] == {"holds": None, "seen": "out of memory: no memory left"}
    assert (found["hold"], found["tried"]) == (0, 2)


def test_split_law_sees_a_weight_that_is_cut_off_and_not_rounded(load, setting, monkeypatch):
    laws = load("laws")
    plain = laws.numerics.split

    def cut(x, dtype, *others):
        high, low = plain(x, dtype, *others)
        return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16) if dtype == torch.bfloat16 else high, low

    monkeypatch.setattr(laws.numerics, "split", cut)
    with pytest.raises(laws.Broken, match="not its master rounded to nearest"):
        laws.split_is_round_to_nearest(setting)


def test_training_compares_contenders_and_records_those_that_fail(load, setting, tiny):
    setting.options = {"model": "gpt2-124m", "dtype": "bf16", "contenders": ("torch", "torch again", "halfstep trainer", "nobody", "flashoptim")}
    setting.options["rates"] = {"products": {"bf16": 1e12}}
    load("training").run(setting)
    found = json.loads(setting.result.read_text())
    measured = {"torch", "torch again", "halfstep trainer"}
    assert {*found["ms"]} == {*found["tokens_per_second"]} == {*found["memory"]} == {*found["waits_per_step"]} == measured
    assert {*found["left_out"]} == {"nobody", "flashoptim"}
    assert found["left_out"]["nobody"].startswith("KeyError")
    assert found["best_peer"] == "torch"
    assert {*found["over_best_peer"]} == {"halfstep trainer"}
    assert found["over_best_peer"]["halfstep trainer"]["median"] > 0
    assert found["floor_ms"] == round(1e3 * 6 * found["parameters_in_products"] * 32 / 1e12, 3)


def test_waits_are_counted_in_the_trainer_s_own_thread(load, setting, tiny):
    contenders, measure = load("contenders"), load("measure")
    runner = contenders.make("halfstep trainer", "gpt2-124m", "bf16", setting)
    runner.run(2)
    waits = measure.Waits(setting.device)
    runner.run(2, waits)
    runner.close()
    assert waits.per_step(2)["all"] >= 1  # on a CPU the verdict is read at once


def test_reads_of_a_loop_are_counted(load):
    measure, device = load("measure"), torch.device("cpu")
    waits = measure.Waits(device)
    x = torch.ones(3)
    measure.Loop(lambda: (float(x.sum()), bool(torch.equal(x, x + 1)), x * 2), device).run(4, waits)
    assert waits.per_step(4) == {"all": 2.0, "_local_scalar_dense": 1.0, "equal": 1.0}


def test_a_trainer_that_fails_tells_who_measures(load):
    trainers = load("trainers")
    gate = trainers.Gate(torch.device("cpu"))

    def fails():
        gate.on_train_begin(None, None, Namespace())
        raise ValueError("no data")

    runner = trainers.Driven(gate, fails, lambda: None)
    with pytest.raises(ValueError, match="no data"):
        runner.run(3)


def test_stage_measures_every_row_beside_torch(load, setting, monkeypatch, tiny):
    stage = load("stage")
    wanted = ("torch", "torch again", "torch fp16", "halfstep, torch's fused AdamW", "halfstep AdamW, split24, int8", "flashoptim")
    wanted += ("torch SGD", "halfstep SGD, split")
    monkeypatch.setattr(stage, "ROWS", {name: stage.ROWS[name] for name in wanted})
    setting.options["rates"] = {"copy_bytes": 1e9}
    stage.run(setting)
    found = json.loads(setting.result.read_text())
    assert {*found["ms"]} == {*wanted} - {"flashoptim"} == {*found["floor_ms"]}
    assert "flashoptim" in found["left_out"]
    assert {"halfstep SGD, split", "halfstep AdamW, split24, int8"} <= {*found["over_best_peer"]}
    split24 = found["elements"] * (2 * 2 + 2 * (3 + 2 + 1 / 16))  # gradient twice; weight, residual, codes and their scales read and written
    assert found["floor_ms"]["halfstep AdamW, split24, int8"] == pytest.approx(1e3 * split24 / 1e9, abs=1e-3)


def test_tf32_is_refused_on_a_cpu_and_the_switches_are_put_back(load, setting, tiny):
    load("switches").run(setting)
    found = json.loads(setting.result.read_text())
    assert "no tf32" in found["refused"]["tf32"]
    assert found["switches"]["fp32"]["put_back"]
    assert found["switches"]["fp32"]["error"] < 1e-5


def test_ratios_are_taken_round_by_round_and_say_whether_they_count(load):
    measure = load("measure")
    taken = {name: [measure.Timing(2, s, s / 2) for s in seconds] for name, seconds in {"a": (1, 2, 4), "b": (1, 2, 5), "ours": (0.5, 1, 2)}.items()}
    found = measure.compared(taken, ("a", "b"), ("a",), ("ours",))
    assert found["over_best_peer"]["ours"]["median"] == 0.5
    assert found["a_over_a"]["median"] == 1.0
    assert found["counts"]
    assert found["ms"]["a"]["median"] == 1000.0
    assert found["host_ms"]["a"]["median"] == 500.0
    other = measure.compared(taken | {"b": [measure.Timing(2, 1.1 * s, 0) for s in (1, 2, 4)]}, ("a", "b"), ("a",), ())
    assert not other["counts"]


def test_too_slow_a_part_and_one_for_which_no_time_is_left_are_recorded(load, tmp_path, monkeypatch):
    main = load("__main__")
    given = Namespace(out=tmp_path / "gpu.json", device="cpu", small=True, minutes=8.0, rounds=None, parts=["rates"])
    slow = main._run(main.PARTS[0], 0.05, given)
    assert (slow["status"], slow["result"]) == ("timeout", {})
    given.minutes = 0.1
    assert main._parent(given) == 1
    report = json.loads(given.out.read_text())
    assert [(p["name"], p["status"]) for p in report["parts"]] == [("rates", "no time left")]


@pytest.mark.slow
def test_whole_script_on_the_cpu(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--device", "cpu", "--small", "--minutes", "15", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000, check=False)
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(p["status"] == "done" for p in report["parts"])
    assert len(report["parts"]) == 9
    kernels = next(p["result"] for p in report["parts"] if p["name"] == "kernels")
    assert all(law["holds"] for law in kernels["laws"].values()), kernels["laws"]
    laws = next(p["result"] for p in report["parts"] if p["name"] == "laws")
    assert laws["hold"] == laws["tried"] == len(QUICK_LAWS) + len(SLOWER_LAWS)


@pytest.mark.slow
def test_a_part_without_its_device_fails_and_says_why(load, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    main = load("__main__")
    failed = main._run(main.PARTS[0], 60.0, Namespace(out=tmp_path / "gpu.json", device="cuda", small=True, rounds=None))
    assert failed["status"] == "failed"
    assert "finds no CUDA device" in failed["said"]
