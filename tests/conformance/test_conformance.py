"""Every record: halfstep has it right through each of its doors, and a control shows that the check can fail."""

from pathlib import Path
from typing import Any

import pytest

from conformance.adapter import Record, carry_out
from conformance.ledger import CASES, KINDS, LEDGER
from conformance.ours import Halfstep
from conformance.registry import RECORDS
from conformance.stock import Careless, Stock
from conformance.table import strategies


def _ours() -> list[Any]:
    """Every record with every door it concerns; in the loop with both ways of finding the loss scale."""
    cases = []
    for record in RECORDS:
        for door in record.doors:
            for strategy in strategies(record, door):
                waits = record.pending and record.pending_under in ("", strategy)
                marks = [pytest.mark.xfail(strict=True, reason=record.pending)] if waits else []
                cases.append(pytest.param(record, Halfstep(door, strategy), id=f"{record.name}-{door}-{strategy}", marks=marks))
    return cases


@pytest.mark.parametrize(("record", "library"), _ours())
def test_halfstep_has_it_right(record: Record, library: Halfstep) -> None:
    outcome = carry_out(record, library)
    assert outcome.status == "right", f"{record.title}: wanted {record.right}; saw {outcome.seen}"


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.name)
def test_the_control_comes_out_as_recorded(record: Record) -> None:
    """What torch has wrong today is seen as wrong, so the check can fail; where a newer torch has mended it this test says so."""
    outcome = carry_out(record, Stock(record.doors[0]), quiet=True)
    assert outcome.status == record.stock, f"{record.title}: today {record.today}; saw {outcome.seen}"


@pytest.mark.parametrize("record", [r for r in RECORDS if r.stock == "right"], ids=lambda r: r.name)
def test_what_torch_has_right_a_careless_library_has_wrong(record: Record) -> None:
    """So those checks can fail too."""
    outcome = carry_out(record, Careless(record.doors[0]), quiet=True)
    assert outcome.status == "wrong", f"{record.title}: saw {outcome.seen}"


def test_every_fault_of_the_ledger_has_a_record() -> None:
    referred = {ref for record in RECORDS for ref in record.refs}
    assert referred == LEDGER.keys() | CASES.keys()


def test_names_are_told_apart() -> None:
    names = [record.name for record in RECORDS]
    assert len(set(names)) == len(names)


def test_every_kind_has_records() -> None:
    assert {record.kind for record in RECORDS} == KINDS.keys()


def test_the_page_has_every_record() -> None:
    """`make conformance` writes it anew."""
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
    written = {line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")}
    assert not {record.name for record in RECORDS} - written
