"""Write the tables that come from code into the documents: `python tools/tables.py` writes, `--check` only compares.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from halfstep.policy import preset_table
from halfstep.policy.memory import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for a start as a script

from tools import names  # noqa: E402

OPTIMIZERS = ("AdamW", ("Adam", {"amsgrad": True}), "Adamax", "Lion", "Muon", ("SGD", {"momentum": 0.9}), "SGD", "RMSprop", "Adagrad", "Adafactor")
PRECISIONS = (
    "bf16-mixed",
    "bf16-lean,states=fp32",
    "bf16-lean",
    "bf16-lean,weights=split24",
    "bf16-lean,weights=stochastic",
    "bf16-true",
    "fp16-true",
)


def memory_table() -> str:
    """Bytes per weight of every kind of precision with the usual optimizers."""
    return table(OPTIMIZERS, PRECISIONS)


TABLES: dict[str, Callable[[], str]] = {"presets": preset_table, "memory": memory_table} | names.TABLES


def filled(text: str) -> str:
    """A document with its tables made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.S)


def main(arguments: list[str]) -> int:
    """Write or check; 1 when a table is not what the code says."""
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if filled(text) != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(filled(text))
    if stale and "--check" in arguments:
        print(f"{', '.join(stale)}: a table differs from the code; run python tools/tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
