"""Run a generated CUDA source on the CPU: its functions over PTX become those of hopper/tw_hopper.cuh,
with a thread of this machine for each of a block's."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tilewright.codegen.arguments import argument_names, int_names
from tilewright.codegen.emit.cuda_latent import latent
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.runtime.artifact import evaluate
from tilewright.targets.registry import resolve

HERE = Path(__file__).parent / "hopper"


class HopperRun:
    """One compiled source; `run` takes operands by the names of the body."""

    def __init__(self, spec: KernelSpec, template: KernelTemplate, folder: Path) -> None:
        self._spec, self._variables = spec, latent(spec)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in resolve("sm90")[1].support_sources().items():
            if name.endswith(".cuh") and name != "tw_hopper.cuh":
                (folder / name).write_text(text)
        (folder / "kernel.cu").write_text(emit(spec, template).text)
        (folder / "main.cpp").write_text(self._main())
        library = folder / "kernel.so"
        command = ["g++", "-std=c++20", "-O1", "-pthread", "-w", "-ffp-contract=off", "-shared",
                   "-fPIC", f"-I{HERE}", f"-I{folder}", str(folder / "main.cpp"), "-o",
                   str(library)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:2000]
        self._library = ctypes.CDLL(str(library))

    def _main(self) -> str:
        lines = ['#include "tw_hopper.cuh"', '#include "kernel.cu"']
        passed = []
        for i, parameter in enumerate(self._variables["parameters"].split(", ")):
            kind = parameter.rpartition(" ")[0]
            passed.append(f"({kind})p[{i}]" if "*" in kind else f"(int)(intptr_t)p[{i}]")
        for image in self._variables["images"]:
            lines.append(
                f'extern "C" void run_{image["kernel"]}(void** p, const int* grid) {{ run_grid(grid, '
                f'{image["threads"]}, [=] {{ {image["kernel"]}({", ".join(passed)}); }}); }}'
            )
        return "\n".join(lines) + "\n"

    def run(
        self, arrays: Mapping[str, NDArray[np.generic]], dims: Mapping[str, int]
    ) -> torch.Tensor:
        """Return the bf16 output, poisoned before."""
        body = self._spec.body
        ((_, out),) = body.outputs
        shape = [evaluate(d, dims) for d in _json(body.type_of(out).shape)]
        result = torch.full(shape, float("nan"), dtype=torch.bfloat16)
        launches = self._variables["launches"]
        sizes = [evaluate(p.offset, dims) for p in launches[0].pointers]
        work = np.full(max([0, *sizes]) + (64 << 20 if sizes else 0), 0xFF, np.uint8)
        names = argument_names(body)
        given = {n: arrays[n].ctypes.data for n in names if n != out} | {out: result.data_ptr()}
        pointers = [given[n] for n in names] + [work.ctypes.data + s for s in sizes]
        passed = [*pointers, *(dims[n] for n in int_names(body))]
        for launch in launches:
            grid = (ctypes.c_int * 3)(*(evaluate(g, dims) for g in launch.grid))
            array = (ctypes.c_void_p * len(passed))(*passed)
            getattr(self._library, f"run_{launch.kernel}")(array, grid)
        return result


def _json(shape: tuple[object, ...]) -> list[object]:
    from tilewright.graph.dims import to_json

    return [to_json(d) for d in shape]  # type: ignore[arg-type]
