"""accelerate's names on two gloo ranks, in one start."""

from pathlib import Path

from launched import checked


def test_accelerates_names_mean_the_same_on_two_ranks(tmp_path: Path) -> None:
    assert len(checked("on_names.py", 2, tmp_path)) == 8
