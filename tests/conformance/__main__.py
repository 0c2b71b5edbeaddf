"""`python -m conformance` in the folder `tests`: the table of all records against every library and door, as Markdown."""

from __future__ import annotations

import sys

from conformance.adapter import carry_out
from conformance.ours import Halfstep
from conformance.stock import Careless, Stock
from conformance.test_conformance import RECORDS


def main(words: list[str]) -> int:
    """Print one line per record and door whose name holds one of the words. Returns how many halfstep has wrong."""
    wrong = 0
    print("| record | kind | door | stock | halfstep | seen |\n|---|---|---|---|---|---|")
    for record in RECORDS:
        if words and not any(w in record.name for w in words):
            continue
        for door in record.doors:
            control = carry_out(record, Stock(door), quiet=True)
            ours = carry_out(record, Halfstep(door), quiet=True)
            careless = "" if record.wrong_in_stock else f"; careless: {carry_out(record, Careless(door), quiet=True).seen}"
            wrong += ours.status != "right"
            seen = f"stock: {control.seen}{careless}; halfstep: {ours.seen}".replace("|", "/").replace("\n", " ")
            print(f"| {record.name} | {record.kind} | {door} | {control.status} | {ours.status} | {seen} |", flush=True)
    print(f"\n{len(RECORDS)} records; halfstep has {wrong} wrong.")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
