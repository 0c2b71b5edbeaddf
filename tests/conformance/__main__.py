"""`python -m conformance [words] [--write PATH] [--without LIBRARY]` in the folder `tests`: every record against every library."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from conformance.registry import RECORDS
from conformance.table import COLUMNS, measure, missing, page, summary


def main(argv: list[str]) -> int:
    """Print one line per record; write the page where asked. Returns how many records halfstep has wrong without saying so beforehand."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description="Hold libraries against the records.")
    parser.add_argument("words", nargs="*", help="only records whose name holds one of these")
    parser.add_argument("--write", type=Path, metavar="PATH", help="write the whole table as a page of Markdown")
    parser.add_argument("--without", action="append", default=[], choices=[c.key for c in COLUMNS if c.key != "halfstep"], help="leave a library out")
    parser.add_argument("--seen", action="store_true", help="print what was seen in every library")
    options = parser.parse_args(argv)
    columns = [c for c in COLUMNS if c.key not in options.without]
    if absent := missing(columns):
        parser.exit(2, absent + "\n")
    if options.write and options.words:
        parser.exit(2, "--write is for the whole table: leave the words away\n")
    torch.set_num_threads(1)
    started, rows = time.monotonic(), []
    for record in RECORDS:
        if options.words and not any(word in record.name for word in options.words):
            continue
        rows.append(measure(record, columns))
        print(f"{record.kind} {record.name}: " + ", ".join(f"{c.title} {rows[-1].outcomes[c.key].status}" for c in columns), flush=True)
        for column in columns if options.seen else ():
            print(f"    {column.title}: {rows[-1].outcomes[column.key].seen}")
    print(summary(rows, columns, started))
    if options.write:
        options.write.write_text(page(rows, columns, time.monotonic() - started), encoding="utf-8")
    return sum(row.outcomes["halfstep"].status != "right" and not row.record.pending for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
