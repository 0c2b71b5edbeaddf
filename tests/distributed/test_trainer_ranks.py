"""The trainer on two gloo ranks, and what becomes of the others when one fails."""

import time
from pathlib import Path

from launched import checked, torchrun


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    assert len(checked("on_trainer.py", 2, tmp_path)) == 7


def test_an_error_on_one_rank_ends_all(tmp_path: Path) -> None:
    began = time.perf_counter()
    done = torchrun("failing.py", 2, str(tmp_path))
    assert done.returncode != 0
    assert "the data of rank 1 are gone" in done.stderr
    assert time.perf_counter() - began < 60  # and not the timeout of 600 seconds that the others were given
    assert not (tmp_path / "run" / "checkpoint-20").exists()
