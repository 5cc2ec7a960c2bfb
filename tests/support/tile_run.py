"""Run the kernel that a Triton source has in TileLang on the CPU: TileLang prints CUDA for SM90,
and what that calls becomes hopper/tile.cuh, a thread of this machine for each of a block's."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from support.hopper_run import build_threads
from tilewright.codegen.expr import prelude
from tilewright.runtime.artifact import evaluate
from tilewright.targets.registry import resolve

HERE = Path(__file__).parent / "hopper"


def run_program(
    module: Any, launch: Mapping[str, Any], arguments: Mapping[str, torch.Tensor],
    ints: Mapping[str, int], grid: Sequence[int],
) -> None:
    """Run one launch on tensors by name; what is printed and built lies beside the source."""
    source = Path(module.__file__)
    if "PRINTED" not in vars(module):
        (text,) = _toolchain().printed(source.name, source.read_text()).values()
        folder = source.parent / module.__name__
        module.PRINTED = _build(text, launch["num_warps"] * 32, launch["kernel"], folder)
    library, names = module.PRINTED
    maps = {
        name: (tensor, offset, rows, cols, box)
        for name, tensor, _, offset, rows, cols, box in launch["descriptors"]
    }
    named = {name: (tensor, offset) for name, tensor, _, offset in launch["named"]}
    kept: list[Any] = []
    passed: list[int] = []
    for name in names:
        if name in maps:
            tensor, offset, rows, cols, box = maps[name]
            at = arguments[tensor].data_ptr() + evaluate(offset, ints)
            kept.append((ctypes.c_int64 * 4)(at, evaluate(rows, ints), cols, box[0]))
            passed.append(ctypes.addressof(kept[-1]))
        elif name in named:
            tensor, offset = named[name]
            passed.append(arguments[tensor].data_ptr() + evaluate(offset, ints))
        else:
            passed.append(evaluate(launch["rows"], ints))
    array = (ctypes.c_void_p * len(passed))(*passed)
    library.run_kernel(array, (ctypes.c_int * 3)(*grid))


@cache
def _toolchain() -> Any:
    """One for all: its process has TileLang loaded."""
    return resolve("sm90")[1]


def _build(text: str, threads: int, kernel: str, folder: Path) -> tuple[ctypes.CDLL, list[str]]:
    """Return the kernel of a printed text as a library, and its parameters' names in order."""
    folder.mkdir(parents=True, exist_ok=True)
    code = "\n".join(s for s in text.splitlines() if not s.startswith("#"))
    # The declaration before the definition would differ from it once attributes are gone.
    code = re.sub(r"^extern \"C\" .*\);$", "", code, flags=re.MULTILINE)
    shared = r"extern __shared__ .* buf_dyn_shmem\[\];"
    code = re.sub(shared, "uchar* buf_dyn_shmem = memory;", code)
    found = re.search(rf"{kernel}\(([^)]*)\) {{", code)
    assert found is not None, code[:500]
    passed, names = [], []
    for i, parameter in enumerate(found[1].split(",")):
        kind, _, name = parameter.strip().rpartition(" ")
        names.append(name)
        kind = kind.replace("__grid_constant__ const ", "").replace("__restrict__", "").strip()
        at = f"p[{i}]"
        passed.append(f"*({kind}*){at}" if kind == "CUtensorMap" else
                      f"({kind}){at}" if "*" in kind else f"(int)(intptr_t){at}")  # fmt: skip
    call = f"{kernel}({', '.join(passed)});"
    main = (
        f'extern "C" void run_kernel(void** p, const int* grid) '
        f"{{ run_grid(grid, {threads}, [=] {{ {call} }}); }}\n"
    )
    (folder / "tw_math.cuh").write_text(prelude("cuda"))
    lines = ['#include "tile.cuh"', '#include "tw_math.cuh"', code, main]
    (folder / "printed.cpp").write_text("\n".join(lines))
    return build_threads(folder / "printed.cpp", folder), names
