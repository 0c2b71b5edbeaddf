"""Gradient release on two gloo ranks, and what becomes of the others when one fails inside its backward pass."""

from pathlib import Path

import pytest
from launched import checked, torchrun


def test_two_ranks_release_as_the_plain_step(tmp_path: Path) -> None:
    assert len(checked("on_release.py", 2, tmp_path)) == 12


@pytest.mark.slow
def test_four_ranks_release_as_the_plain_step(tmp_path: Path) -> None:
    few = ["the_plain_step_on_the_same_ranks_bit_for_bit", "one_process_within_rounding"]
    assert checked("on_release.py", 4, tmp_path, *few) == few


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "released"])
def test_an_error_in_the_backward_pass_of_one_rank_ends_all(way: str, tmp_path: Path) -> None:
    done = torchrun("on_failure.py", 2, str(tmp_path), way)
    assert "rank 1 has had enough" in done.stderr
    step, seconds, kind = (tmp_path / "seen").read_text().split()
    assert (step, kind) == ("1", "RuntimeError")
    assert float(seconds) < 30  # the timeout is 600
