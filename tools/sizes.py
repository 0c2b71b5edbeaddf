"""Refuse files that grow too long: `python tools/sizes.py` prints what is over and exits 1.

Files under 400 lines (kernels 600), functions under 80. Docstrings and comments count: long is long.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES, KERNEL_LINES, FUNCTION_LINES = 400, 600, 80
FOLDERS = ("src", "tests", "tools", "examples", "benchmarks")


def too_long(root: Path) -> Iterator[str]:
    """One line for every file or function over its limit."""
    for path in sorted(p for folder in FOLDERS for p in (root / folder).rglob("*.py")):
        text = path.read_text()
        lines = len(text.splitlines())
        limit = KERNEL_LINES if "kernels" in path.parts else FILE_LINES
        if lines > limit:
            yield f"{path.relative_to(root)}: {lines} lines, at most {limit}"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    yield f"{path.relative_to(root)}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def main() -> int:
    """Print what is over the limits; 0 when nothing is."""
    found = list(too_long(Path(__file__).parent.parent))
    print("\n".join(found) or "sizes: all files and functions are within their limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
