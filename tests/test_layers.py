"""Imports point one way, heavy packages stay out of the runtime, and names keep the house style."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED: dict[str, tuple[str, ...]] = {
    "graph": (),
    "templates": (),
    "runtime": (),
    "models": ("graph",),
    "codegen": ("graph", "templates", "runtime.artifact"),
    "targets": ("graph", "codegen"),
    "tools": ("graph", "templates", "runtime", "models", "codegen", "targets"),
}
COMPILE_TIME = ("sympy", "networkx", "triton", "tilelang")
FORBIDDEN_WORDS = frozenset(
    "manager helper helpers util utils handler wrapper processor info misc impl legacy".split()
)


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of everything imported, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def refusal(folder: str, name: str) -> str | None:
    """Say why a file of `folder` may not import `name`; None if it may."""
    if name.startswith("."):
        return "relative import"
    first, _, rest = name.partition(".")
    if first in ALLOWED:
        return f"write tilewright.{name}"
    if first == "tests" or (first == "tilewright" and rest.partition(".")[0] == "tests"):
        return "nobody imports tests"
    if first != "tilewright" or rest == "__version__":
        return None
    allowed = (folder, *ALLOWED[folder])
    if any(rest == a or rest.startswith(f"{a}.") for a in allowed):
        return None
    return f"allowed are {', '.join(allowed)}"


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {name}: {reason}"
        for path in sources(folder)
        for name in imports(ast.parse(path.read_text()))
        if (reason := refusal(folder, name))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("folder", "name", "allowed"),
    [
        ("graph", "tilewright.codegen.spec", False),
        ("codegen", "tilewright.targets.cpu", False),
        ("codegen", "tilewright.runtime.engine", False),
        ("codegen", "tilewright.runtime.artifact.Manifest", True),
        ("runtime", "tilewright.graph", False),
        ("runtime", "graph.ir", False),
        ("tools", "tilewright.runtime.engine", True),
        ("tools", ".cli", False),
        ("graph", "torch", True),
    ],
)
def test_planted_imports(folder: str, name: str, allowed: bool) -> None:
    assert (refusal(folder, name) is None) is allowed


def test_only_dims_imports_sympy_in_graph() -> None:
    users = [
        path.name
        for path in sources("graph")
        if any(i.partition(".")[0] == "sympy" for i in imports(ast.parse(path.read_text())))
    ]
    assert users == ["dims.py"]


def test_runtime_needs_no_compiler_packages() -> None:
    modules = [
        ".".join(("tilewright", *path.relative_to(ROOT).with_suffix("").parts))
        for path in sources("runtime")
        # imported when a chat is rendered, and need jinja2
        if path.stem not in ("chat_template", "template_growth")
    ]
    code = f"""
import importlib, sys
for name in {(*COMPILE_TIME, "jinja2")!r}:
    sys.modules[name] = None
import tilewright.runtime
for name in {modules!r}:
    importlib.import_module(name.removesuffix(".__init__"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/",
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""}, check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", ALLOWED)
def test_names_keep_the_house_style(folder: str) -> None:
    broken = []
    for path in sources(folder):
        names = [path.stem] + [
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        ]
        for name in names:
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
            if FORBIDDEN_WORDS.intersection(words):
                broken.append(f"{path.relative_to(ROOT)}: {name}")
    assert not broken, "\n".join(broken)
