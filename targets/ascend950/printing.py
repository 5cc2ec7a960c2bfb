"""A process that prints AscendC from modules in TileLang's Ascend dialect, one request a line.

Run as `python -m tilewright.targets.ascend950.printing`: TileLang is heavy, so it stays out of the
process that asks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from typing import Any

_SIGNATURE = re.compile(r'extern "C" __global__ (__\w+__)[^{]*? void (\w+)\(([^)]*)\)')
_MIX = re.compile(r"__mix__\(1, 2\)")


def print_kernels(path: str) -> dict[str, Any]:
    """Return the whole AscendC of a module: prologue, printed kernels, host side."""
    spec = importlib.util.spec_from_file_location("contract", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parts, host = [_HEADER, module.ASCENDC], module.HOST
    for make in module.KERNELS:
        function = make()
        text = _lowered(function)
        found = _SIGNATURE.search(text)
        assert found is not None and _MIX.search(found.group(0)), "want both kinds of core"
        order = [re.findall(r"\w+", p)[-1] for p in found.group(3).split(",")]
        name = function.attrs["global_symbol"]
        given = module.ARGUMENTS[str(name)]
        call = f"{found.group(2)}({', '.join(given[p] for p in order)})"
        host = host.replace(f"@{name}@", call)
        parts.append(re.sub(r"^#include.*\n", "", text, flags=re.M))
    return {"text": "\n".join([*parts, host])}


_HEADER = """#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/gemm.h>
#include "tw_ascend_math.h"
"""


def _lowered(function: Any) -> str:
    import tilelang
    from tvm.target import Target

    target = Target({"kind": "ascend"})
    with target:
        return str(tilelang.lower(function, target=target).kernel_source)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TileLang prints is no answer
    for line in sys.stdin:
        try:
            answer = print_kernels(json.loads(line)["source"])
        except Exception as error:  # noqa: BLE001 - a compiler's failure is an answer
            lines = [s for s in str(error).splitlines() if s.strip()] or [type(error).__name__]
            answer = {"error": lines[-1][:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
