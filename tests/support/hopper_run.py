"""Run a generated CUDA source on the CPU: its functions over PTX become those of
hopper/tw_hopper.cuh, with a thread of this machine for each of a block's."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from support.kernel_case import Case
from tilewright.codegen.arguments import argument_names, int_names
from tilewright.codegen.emit.cuda import TEXTS
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.emit.triton_host import Pointer, pointers
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph.dims import to_json
from tilewright.runtime.artifact import evaluate
from tilewright.targets.registry import resolve

HERE = Path(__file__).parent / "hopper"
WORKSPACE = 64 << 20


def build_library(
    text: str, kernels: Mapping[str, int], parameters: str, folder: Path
) -> ctypes.CDLL:
    """Build a source's kernels, of so many threads a block, as `run_<name>(pointers, grid)`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, support in resolve("sm90")[1].support_sources().items():
        if name.endswith(".cuh") and not (HERE / name).exists():
            (folder / name).write_text(support)
    (folder / "kernel.cu").write_text(text)
    (folder / "main.cpp").write_text(_main(kernels, parameters))
    return build_threads(folder / "main.cpp", folder)


def build_threads(source: Path, folder: Path) -> ctypes.CDLL:
    """Build a source whose threads of a block are the machine's."""
    library = source.with_suffix(".so")
    command = ["g++", "-std=c++20", "-O1", "-pthread", "-w", "-ffp-contract=off", "-shared",
               "-fPIC", f"-I{HERE}", f"-I{folder}", str(source), "-o", str(library)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(library))


def _main(kernels: Mapping[str, int], parameters: str) -> str:
    lines = ['#include "tw_hopper.cuh"', '#include "kernel.cu"']
    passed = []
    for i, parameter in enumerate(parameters.split(", ")):
        kind = parameter.rpartition(" ")[0]
        text = f"({kind})p[{i}]" if "*" in kind else f"(int)(intptr_t)p[{i}]"
        passed.append(f"*(const tw_map*)p[{i}]" if kind.endswith("tw_map") else text)
    for kernel, threads in kernels.items():
        lines.append(
            f'extern "C" void run_{kernel}(void** p, const int* grid) {{ '
            f"run_grid(grid, {threads}, [=] {{ {kernel}({', '.join(passed)}); }}); }}"
        )
    return "\n".join(lines) + "\n"


def run_part(
    module: Any, launch: Mapping[str, Any], tensors: Sequence[torch.Tensor], ints: Sequence[int],
    grid: Sequence[int],
) -> None:
    """Run the kernel that a Triton source has in CUDA; what is built lies beside the source."""
    name = launch["kernel"]
    found = re.search(rf"\b{name}\((.*)\) {{$", module.CUDA, re.MULTILINE)
    assert found is not None, name
    folder = Path(module.__file__).parent / module.__name__
    if "PART" not in vars(module):
        threads = {name: launch["num_warps"] * 32}
        module.PART = build_library(module.CUDA, threads, found[1], folder)
    passed: list[int] = []
    for i, tensor in enumerate(tensors):
        described = i < len(launch.get("descriptors", ()))
        # A matrix that comes by tiles is followed by its extents and strides.
        passed += [tensor.data_ptr(), *([0] * 4 if described else [])]
    passed += ints
    array = (ctypes.c_void_p * len(passed))(*passed)
    getattr(module.PART, f"run_{name}")(array, (ctypes.c_int * 3)(*grid))


class HopperRun:
    """One compiled source; `run` takes operands by the names of the body."""

    def __init__(self, spec: KernelSpec, template: KernelTemplate, folder: Path) -> None:
        self._spec, self._variables = spec, TEXTS[template.path](spec)
        kernels = {i["kernel"]: i["threads"] for i in self._variables["images"]}
        self._library = build_library(
            emit(spec, template).text, kernels, self._variables["parameters"], folder
        )

    def run(
        self, arrays: Mapping[str, NDArray[np.generic]], dims: Mapping[str, int]
    ) -> torch.Tensor:
        """Return the output, poisoned before."""
        body = self._spec.body
        ((_, out),) = body.outputs
        shape = [evaluate(to_json(d), dims) for d in body.type_of(out).shape]
        is_int = body.type_of(out).dtype.name == "i32"
        poison = -77 if is_int else float("nan")
        result = torch.full(shape, poison, dtype=torch.int32 if is_int else torch.bfloat16)
        work = np.full(WORKSPACE, 0xFF, np.uint8)
        names = argument_names(body)
        given = {n: arrays[n].ctypes.data for n in names if n != out} | {out: result.data_ptr()}
        pointers = [given[n] for n in names]
        pointers += [work.ctypes.data + evaluate(p.offset, dims) for p in self._work()]
        ints = [dims[n] for n in int_names(body)]
        slab = self._variables.get("slab", shape[0])
        for first in range(0, shape[0], slab):
            passed = [*pointers, *ints, first]
            for kernel, grid in self._grids({**dims, "count": min(slab, shape[0] - first)}):
                array = (ctypes.c_void_p * len(passed))(*passed)
                getattr(self._library, f"run_{kernel}")(array, (ctypes.c_int * 3)(*grid))
        return result

    def run_case(self, case: Case) -> dict[str, torch.Tensor]:
        """Return the arguments after one run; outputs were poisoned, and so was the workspace."""
        arguments, dims = case.fresh(), case.dims
        work = np.full(WORKSPACE, 0xFF, np.uint8)
        passed = [
            arguments[p.tensor].data_ptr() + evaluate(p.offset, dims)
            for p in pointers(self._spec)
        ]
        passed += [work.ctypes.data + evaluate(p.offset, dims) for p in self._work()]
        passed += [dims[n] for n in int_names(self._spec.body)]
        for kernel, grid in self._grids(dims):
            array = (ctypes.c_void_p * len(passed))(*passed)
            getattr(self._library, f"run_{kernel}")(array, (ctypes.c_int * 3)(*grid))
        return arguments

    def _work(self) -> Sequence[Pointer]:
        given: Any = self._variables
        return given["work"] if "work" in given else given["launches"][0].pointers

    def _grids(self, dims: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, int, int]]]:
        given: Any = self._variables
        for launch in given.get("launches", ()):
            x, y, z = (evaluate(g, dims) for g in launch.grid)
            yield launch.kernel, (x, y, z)
        for kernel, grid in given.get("grids", {}).items():
            known = {"spans": evaluate(given["spans"], dims), "count": dims["count"]}
            x, y = (known[g] if g in known else int(g) for g in grid)
            yield kernel, (x, y, 1)
