"""List the Python files and functions that are longer than we aim for: 400 and 40 lines.

Run from the repository: `python tools/dev/sizes.py`. Exits with 1 if it lists anything.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("graph", "codegen", "templates", "runtime", "targets", "models", "tools", "tests")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40


@dataclass(frozen=True)
class Size:
    """A file or a function, and its length in lines."""

    where: str
    num_lines: int
    limit: int


def sizes_of(path: Path) -> Iterator[Size]:
    """Yield the size of a file and of every function in it."""
    text, name = path.read_text(), path.relative_to(ROOT)
    yield Size(str(name), len(text.splitlines()), MAX_FILE_LINES)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            yield Size(f"{name}:{node.lineno} {node.name}", length, MAX_FUNCTION_LINES)


def main() -> int:
    """Print what is over its limit, longest first, and a summary; return the exit code."""
    paths = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
    found = [size for path in paths for size in sizes_of(path)]
    over = sorted((s for s in found if s.num_lines > s.limit), key=lambda s: -s.num_lines)
    for size in over:
        print(f"{size.num_lines:5} lines, want at most {size.limit:3}  {size.where}")
    functions = sorted(s.num_lines for s in found if s.limit == MAX_FUNCTION_LINES)
    print(
        f"{len(paths)} files, {len(functions)} functions, median function "
        f"{functions[len(functions) // 2]} lines; {len(over)} over the limit"
    )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
