"""The accelerator on two and four gloo ranks. Each file of checks is started once under torchrun; a check that fails names itself."""

from pathlib import Path

from launched import checked


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    assert len(checked("on_accelerator.py", 2, tmp_path)) == 12


def test_four_ranks_train_as_one(tmp_path: Path) -> None:
    few = ["ranks_equal_one_process_in_fp32", "an_overflow_on_one_rank_is_replayed_on_all", "parameters_that_some_ranks_do_not_use"]
    assert checked("on_accelerator.py", 4, tmp_path, *few) == few
