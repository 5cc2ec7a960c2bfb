"""CUDA sources to cubins by nvcc, by way of PTX, which is scanned as Triton's is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.graph.errors import TargetError
from tilewright.targets.nvidia.build import kept_report, scan_ptx
from tilewright.targets.nvidia.overlap import FEW_BLOCKS, waiting

# Products and sums are never contracted: every fma is ours.
FLAGS = ("-O3", "-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true",
         f"-DTW_FEW_BLOCKS={FEW_BLOCKS}")  # fmt: skip
_USED = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


def find_nvcc() -> str | None:
    """Return CUDA's compiler: of the folder CUDA_HOME, else on the path; None if there is none."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def needed_nvcc() -> str:
    """Return CUDA's compiler; raises TargetError where there is none."""
    if (nvcc := find_nvcc()) is None:
        raise TargetError("nvcc not found; install CUDA's toolkit 12.4 or later")
    return nvcc


def nvcc_version(nvcc: str | None) -> str:
    """Return the release of the compiler for keys of caches, or that there is none."""
    if nvcc is None:
        return "no nvcc"
    return _run([nvcc, "--version"], "version").strip().splitlines()[-1]


def build_cuda(nvcc: str, source: Path, capability: int) -> dict[str, Any]:
    """Write the image and the host text of a source beside it; return what each kernel uses.

    Raises TargetError with the compiler's words, or for PTX whose bits are not ours.
    """
    cubin, report = build_image(nvcc, source, capability)
    lines = [f'#define TW_HOST "{cubin}"', f'#include "{source.name}"', kept_report(report)]
    source.with_suffix(".host.cpp").write_text("\n".join(lines) + "\n")
    return {"kernels": report}


def build_image(
    nvcc: str, source: Path, capability: int, includes: Sequence[Path] = ()
) -> tuple[Path, list[dict[str, Any]]]:
    """Write the image of a source's kernels beside it; return it, and what each of them uses."""
    ptx, cubin = source.with_suffix(".ptx"), source.with_suffix(".cubin")
    name, arch = source.stem, f"compute_{capability}a"
    flags = [*FLAGS, *(f"-I{folder}" for folder in includes), f"-gencode=arch={arch},code={arch}"]
    _run([nvcc, *flags, "-ptx", source, "-o", ptx], name)
    ptx.write_text(waiting(ptx.read_text()))
    if refused := scan_ptx(name, ptx.read_text()):
        raise TargetError(refused)
    ptxas = Path(nvcc).with_name("ptxas")
    said = _run([ptxas, f"-arch=sm_{capability}a", "-O3", "-v", ptx, "-o", cubin], name)
    return cubin, [{"source": name, **used} for used in usage(said)]


def usage(said: str) -> list[dict[str, Any]]:
    """Return registers at entry and spilled bytes a thread, as the assembler reports them."""
    return [
        {"kernel": name, "registers": int(registers), "spilled_bytes": int(stores) + int(loads)}
        for name, _, stores, loads, registers in _USED.findall(said)
    ]


def _run(arguments: Sequence[str | Path], what: str) -> str:
    done = subprocess.run(
        [str(a) for a in arguments], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        lines = [s for s in (done.stderr + done.stdout).splitlines() if "error" in s] or [
            done.stderr.strip() or f"exit code {done.returncode}"
        ]
        raise TargetError(f"kernel '{what}': nvcc failed: {lines[0][:500]}")
    return done.stdout + done.stderr
