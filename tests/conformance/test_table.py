"""The published table: cells, pages, and the adapters behind its columns."""

import pytest
import torch

from conformance import __main__ as command
from conformance.adapter import Outcome, Record, carry_out
from conformance.libraries.bare import TorchAmp
from conformance.libraries.huggingface import Accelerate, Transformers
from conformance.registry import RECORDS
from conformance.table import COLUMNS, Column, Row, counts, measure, missing, page, worst

BY_NAME = {record.name: record for record in RECORDS}
TORCH = [c for c in COLUMNS if c.key in ("halfstep", "torch")]


def _row(status: str, other: str = "right") -> Row:
    record = BY_NAME["scale-collapses"]
    return Row(record, {"halfstep": Outcome(other, "seen"), "torch": Outcome(status, "torch has none of it")})  # type: ignore[arg-type]


def test_a_cell_is_the_worst_of_its_ways() -> None:
    right, wrong, none = Outcome("right", ""), Outcome("wrong", ""), Outcome("not offered", "")
    assert worst([right, wrong, none]) is wrong
    assert worst([none, right]) is right
    assert worst([none, none]) is none


def test_a_page_counts_its_cells_and_gives_reasons() -> None:
    rows = [_row("wrong"), _row("right"), _row("not offered")]
    text = page(rows, TORCH, 2.0)
    assert "| torch.amp | 1 | 1 | 1 |" in text
    assert "| halfstep | 3 | 0 | 0 |" in text
    assert text.count("| - [1] |") == 1
    assert "1. torch has none of it" in text
    assert counts(rows, "torch") == {"wrong": 1, "right": 1, "not offered": 1}


def test_what_halfstep_has_wrong_is_on_the_page_with_its_reason() -> None:
    assert BY_NAME["clipping-16-bit-gradients"].pending
    row = Row(BY_NAME["clipping-16-bit-gradients"], {"halfstep": Outcome("wrong", "0.0"), "torch": Outcome("wrong", "0.0")})
    assert f"- clipping-16-bit-gradients: {row.record.pending}" in page([row], TORCH, 2.0)


def test_measuring_puts_a_record_through_every_column() -> None:
    row = measure(BY_NAME["a-detached-loss"], TORCH)
    assert (row.outcomes["halfstep"].status, row.outcomes["torch"].status) == ("right", "wrong")


def test_a_record_that_leaves_the_process_changed_is_found() -> None:
    def leave(library: object) -> bool:
        torch.set_default_dtype(torch.float64)
        return True

    try:
        with pytest.raises(RuntimeError, match="a default dtype behind"):
            measure(Record("leaves", "E", "", "", "", leave, bool), TORCH)
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_error_of_the_library_with_the_words_is_a_refusal_and_one_of_an_operator_is_not() -> None:
    def refused(words: tuple[str, ...], action: object) -> str:
        return carry_out(Record("r", "E", "", "", "", action, bool, refused=words), TorchAmp()).status  # type: ignore[arg-type]

    def unscale_half(library: TorchAmp) -> None:
        scaler, w = library.scaler(), torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
        scaler.scale(w.float().sum()).backward()
        scaler.unscale_(torch.optim.SGD([w]))

    assert refused(("FP16",), unscale_half) == "right"
    assert refused(("float32",), unscale_half) == "wrong"
    assert refused(("dtype",), lambda library: torch.ones(1, 1) @ torch.ones(1, 1, dtype=torch.float16)) == "wrong"


def test_accelerate_is_measured_in_bf16_and_has_no_words_for_a_scale() -> None:
    assert carry_out(BY_NAME["weight-decay-is-lost-in-bf16"], Accelerate()).status == "wrong"
    assert carry_out(BY_NAME["no-safety-net-in-bf16"], Accelerate()).status == "wrong"
    answer = carry_out(BY_NAME["scale-collapses"], Accelerate())
    assert (answer.status, "on a CPU" in answer.seen) == ("not offered", True)


def test_the_trainer_owns_the_loop() -> None:
    answer = carry_out(BY_NAME["scale-collapses"], Transformers())
    assert (answer.status, "owns the loop" in answer.seen) == ("not offered", True)


def test_fabric_scales_losses_by_its_plugin_only() -> None:
    pytest.importorskip("lightning_fabric", reason="the Fabric column needs the extra 'conformance'")
    from conformance.libraries.fabric import LightningFabric

    assert carry_out(BY_NAME["scale-collapses"], LightningFabric("plugin"), quiet=True).status == "wrong"
    assert carry_out(BY_NAME["scale-collapses"], LightningFabric("typed"), quiet=True).status == "not offered"


def test_a_library_that_is_not_there_is_named_with_what_to_install() -> None:
    absent = Column("absent", "Absent", "absent-library", "no_such_module", "", lambda record: [])
    assert missing([*TORCH]) == ""
    assert missing([*TORCH, absent]) == (
        "absent-library is not installed: pip install 'halfstep[conformance]', or leave the column out with --without absent"
    )


def test_the_command_prints_a_line_per_record_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    without = [word for key in ("accelerate", "transformers", "fabric") for word in ("--without", key)]
    threads = torch.get_num_threads()
    assert command.main(["a-detached-loss", "--seen", *without]) == 0
    assert torch.get_num_threads() == threads
    said = capsys.readouterr().out
    assert "D a-detached-loss: halfstep right, torch.amp wrong" in said
    assert "    torch.amp: RuntimeError" in said


def test_a_part_of_the_table_is_not_written(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    with pytest.raises(SystemExit):
        command.main(["a-detached-loss", "--without", "fabric", "--write", "page.md"])
    assert "leave the words away" in capsys.readouterr().err
