"""The contenders take whole steps, one a turn, and train the same thing."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from benchmarks.suite import doors, nets, stage
from benchmarks.suite.__main__ import main
from benchmarks.suite.machine import Rates
from benchmarks.suite.method import Claim, take_turns
from benchmarks.suite.rows import ROWS, Given, Row

ROOT = Path(__file__).parents[3]
RATES = Rates(1e10, 1e11)
LOOPS = [doors.torch_loop, doors.halfstep_loop]


@pytest.fixture(autouse=True)
def _run_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def job():
    return nets.perceptron(4)


def weights_of(turn_maker, job, steps, monkeypatch):
    """All weights after so many steps, and the losses."""
    made = []
    seeded = nets.Job.seeded
    monkeypatch.setattr(nets.Job, "seeded", lambda self: made.append(seeded(self)) or made[-1])
    turn = turn_maker(job)
    losses = []
    for _ in range(steps):
        turn.run()
        losses.append(turn.loss())
    after = torch.cat([p.detach().float().flatten() for p in made[0].parameters()])
    turn.close()
    return after, losses


def test_a_trainer_is_left_after_every_step(job, monkeypatch):
    two, losses = weights_of(lambda j: doors.halfstep_trainer(j, "fp32"), job, 2, monkeypatch)
    three, more = weights_of(lambda j: doors.halfstep_trainer(j, "fp32"), job, 3, monkeypatch)
    assert len(set(losses)) == 2
    assert more[:2] == losses
    assert 0 < float((three - two).abs().max()) < 3e-4  # one step of Adam at a rate of 1e-4


def test_two_trainers_in_turns_do_not_meet(job):
    alone = doors.halfstep_trainer(job, "bf16-mixed")
    alone.run()
    alone.run()
    expected = alone.loss()
    one, other = doors.halfstep_trainer(job, "bf16-mixed"), doors.halfstep_trainer(job, "bf16-mixed")
    for turn in (one, other, other, one):
        turn.run()
    assert one.loss() == other.loss() == expected
    for turn in (alone, one, other):
        turn.close()


def test_a_trainer_whose_loop_has_ended_says_so(job):
    turn = doors.halfstep_trainer(job, "fp32")
    turn.run()
    turn.close()
    with pytest.raises(RuntimeError, match="has ended"):
        turn.run()


def test_a_setting_that_the_trainer_lacks_is_named(job):
    with pytest.raises(NotImplementedError, match="no_such_setting"):
        doors.halfstep_trainer(job, "fp32", no_such_setting=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_loops_by_hand_begin_with_the_same_loss_and_all_move(job, precision, monkeypatch):
    start = torch.cat([p.detach().flatten() for p in job.seeded().parameters()])
    for loop in LOOPS:
        after, losses = weights_of(lambda j, loop=loop: loop(j, precision), job, 3, monkeypatch)
        assert losses[0] == pytest.approx(2.31, abs=0.05)
        # three steps of Adam at 1e-4 move nearly every weight by about 3e-4
        assert float((after - start).abs().median()) > 1e-4, loop.__name__


def test_operations_are_those_of_the_products(job):
    sizes = [(64, 304), (304, 304), (304, 10)]
    forward = sum(2 * 4 * i * o for i, o in sizes)
    assert job.operations() == 3 * forward - 2 * 4 * 64 * 304  # the gradient of the data is not needed


def test_the_same_weights_every_time(job):
    one, other = (torch.cat([p.flatten() for p in job.seeded().parameters()]) for _ in range(2))
    assert torch.equal(one, other)


def test_the_step_stage_gives_every_entry_and_a_floor_by_bytes():
    entries = stage.contenders(2, 100, RATES)
    found, excluded = take_turns(entries[::2][:2], 1, 1.0)
    assert [t.name for t in found] == ["split, by GradScaler", stage.PEER]
    assert not excluded
    assert [c.floor for c in (entries[0], entries[2])] == [200 * 24 / 1e10, 200 * 54 / 1e10]


def test_slopes_are_found_round_by_round(monkeypatch):
    """A contender whose time is 5 + 3 n gets the slope 3."""
    monkeypatch.setattr(stage, "apart", list)  # nothing is run
    monkeypatch.setattr(stage, "take_turns", lambda made, *_, **__: ([stage.Taken(c.name, c.role, c.floor, [5 + 3 * c.n] * 2) for c in made], []))

    class Made:
        def __init__(self, name, role, n):
            self.name, self.role, self.floor, self.n = name, role, 0.1 * n, n

    monkeypatch.setattr(stage, "contenders", lambda n, *_: [Made("mine", "ours", n), Made("theirs", "peer", 2 * n)])
    row = stage.growth(Row("r", "R", "", stage.by_tensors, [Claim("mine", "theirs", 1.0)]), Given(RATES, 2), [10, 20], lambda n: (n, 1), 1.0)
    assert row["claims"][0]["ratio"] == pytest.approx(0.5)
    assert row["contenders"][0]["median"] == pytest.approx(3.0)
    assert row["contenders"][0]["floor"] == pytest.approx(0.1)
    assert row["series"][0]["median"] == [35, 65]


def test_the_names_of_the_rows_can_be_listed(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [row.name for row in ROWS]


def test_quick_numbers_are_not_kept(capsys):
    with pytest.raises(SystemExit):
        main(["--quick", "--write"])
    assert "leave --write away" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_a_row_can_be_measured(name, tmp_path):
    """With all the peers that are installed; one of ours that fails is an exit status of 1."""
    pytest.importorskip("lightning_fabric", reason="a peer of most rows: pip install 'halfstep[bench]'")
    out = tmp_path / "rows.json"
    words = [sys.executable, "-m", "benchmarks.suite", "--quick", "--threads", "2", "--rows", name, "--json", str(out)]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(out.read_text())["rows"][name]
    assert row["best"] is not None
    assert [e for e in row["not_run"] if "Error" in e["reason"]] == []
