"""The accelerator on two and four gloo ranks. Each file of checks is started once under torchrun; a check that fails names itself."""

from pathlib import Path

import pytest
from launched import checked, torchrun


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    assert len(checked("on_accelerator.py", 2, tmp_path)) == 14


def test_four_ranks_train_as_one(tmp_path: Path) -> None:
    few = ["ranks_equal_one_process_in_fp32", "an_overflow_on_one_rank_is_replayed_on_all", "parameters_that_some_ranks_do_not_use"]
    assert checked("on_accelerator.py", 4, tmp_path, *few) == few


def test_a_checkpoint_that_one_rank_saves_alone_names_the_others(tmp_path: Path) -> None:
    said = torchrun("on_absence.py", 2, str(tmp_path)).stdout
    assert "refused: rank 0 called save_state(), and not every rank did within 1 seconds" in said
    assert "Call save_state() on every rank, and not under is_main_process" in said
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_run_ends_well_while_a_thread_still_holds_a_tensor(tmp_path: Path) -> None:
    done = torchrun("on_exit.py", 2)
    assert done.returncode == 0, done.stderr[-3000:]
