"""A process that prints AscendC from kernels in TileLang's Ascend dialect, one request a line.

Run as `python -m tilewright.targets.ascend950.printing`: TileLang is heavy, so it stays out of the
process that asks.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.emit.ascendc_host import chip_call

NAME = "TW_KERNEL_NAME"  # stands for a kernel's name while it is printed
_SIGNATURE = re.compile(r'extern "C" __global__ __mix__\(1, 2\) void (\w+)\(([^)]*)\)')
HEADER = """#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/gemm.h>
#include "tw_ascend_math.h"
#include "tw_ascend_rows.h"
"""


@dataclass(frozen=True)
class Module:
    """A source in the dialect, taken apart: kernels as modules of their own, by name."""

    kernels: dict[str, str]
    prologue: str
    host: str
    arguments: dict[str, dict[str, str]]


def take_apart(text: str) -> Module:
    """Read a rendered module without running it."""
    tree = ast.parse(text)
    constants: dict[str, Any] = {}
    shared, kernels = [], {}
    for node in tree.body:
        segment = ast.get_source_segment(text, node) or ""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = ast.literal_eval(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("make_"):
            name = node.name.removeprefix("make_")
            kernels[name] = segment.replace(name, NAME) + f"\n\n\nKERNEL = make_{NAME}\n"
        elif isinstance(node, ast.Import | ast.FunctionDef):
            shared.append(segment)
    head = "\n".join(shared) + "\n\n\n"
    return Module(
        {name: head + kernel for name, kernel in kernels.items()},
        constants["ASCENDC"], constants["HOST"], constants["ARGUMENTS"],
    )  # fmt: skip


def put_together(module: Module, printed: dict[str, str]) -> str:
    """Return the whole AscendC: prologue, printed kernels, host side with their calls."""
    parts, host = [HEADER, module.prologue], module.host
    for name in module.kernels:
        text = re.sub(r"^#include.*\n", "", printed[name], flags=re.M).replace(NAME, name)
        found = _SIGNATURE.search(text)
        assert found is not None, "want a kernel of both kinds of core"
        order = [re.findall(r"\w+", p)[-1] for p in found.group(2).split(",")]
        given = module.arguments[name]
        call = f"{found.group(1)}({', '.join(given[p] for p in order)})"
        host = host.replace(f"@{name}@", call)
        for blocks in set(re.findall(f"@{name}:(\\d+)@", host)):
            host = host.replace(f"@{name}:{blocks}@", chip_call(call, int(blocks)))
        parts.append(text)
    return "\n".join([*parts, host])


def print_kernel(path: str) -> str:
    """Return what TileLang prints for the kernel of a module."""
    import tilelang
    from tvm.target import Target

    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = Target({"kind": "ascend"})
    with target:
        return str(tilelang.lower(module.KERNEL(), target=target).kernel_source)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TileLang prints is no answer
    for line in sys.stdin:
        try:
            answer = {"text": print_kernel(json.loads(line)["source"])}
        except Exception as error:  # noqa: BLE001 - a compiler's failure is an answer
            lines = [s for s in str(error).splitlines() if s.strip()] or [type(error).__name__]
            answer = {"error": lines[-1][:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
