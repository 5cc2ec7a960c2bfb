"""Triton, TileLang and CUDA sources to one library: cubins by Triton in processes of their own and
by nvcc, the host side by g++.

A GPU is needed neither to build nor to load, and the library needs neither Triton nor CUDA's
toolkit where it runs: the driver only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tilewright.codegen.emit.cpp import TEMPLATE_ROOT
from tilewright.codegen.expr import prelude
from tilewright.codegen.flags import Flags
from tilewright.codegen.spec import Schedule
from tilewright.codegen.target import Target
from tilewright.codegen.work_folder import work_folder
from tilewright.graph.errors import TargetError
from tilewright.targets.host_compiler import run_compiler, version_line
from tilewright.targets.nvidia.build import read_report
from tilewright.targets.nvidia.build_cuda import FLAGS, build_cuda, find_nvcc, nvcc_version
from tilewright.targets.nvidia.overlap import BEGIN

PROGRAM = "\nTILELANG = r"  # in sources that have a kernel in TileLang
HOST_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-w")


class BuildProcess:
    """One process that compiles sources with kernels in Triton or TileLang, one at a time."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tilewright.targets.nvidia.build"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        self._stop = weakref.finalize(self, _end, self._process)

    def build(
        self, source: Path, capability: int, *, only_print: bool = False
    ) -> Mapping[str, Any]:
        """Compile one source, or print its TileLang program as CUDA; raise TargetError with the
        compiler's words."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            request = {"source": str(source), "capability": capability, "print": only_print}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise TargetError(f"kernel '{source.stem}': its compiler ended without a word")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TargetError(answer["error"])
        return answer


def _tilelang() -> str:
    try:
        return f"tilelang {version('tilelang')}"
    except PackageNotFoundError:
        return "no tilelang"


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()


class NvidiaToolchain:
    """Compiles for one chip. `cxx` names the C++ compiler of the host side, else the first found.

    `reports` holds registers, spilled bytes and shared memory of every kernel compiled here.
    """

    def __init__(
        self,
        target: Target,
        *,
        capability: int,
        cxx: str | None = None,
        folder: Path | None = None,
    ) -> None:
        """`folder` keeps what TileLang printed, by content; by default it lies in the kernel
        cache."""
        self.target, self.capability = target, capability
        self._folder = folder or Flags.from_environment().cache.expanduser() / "tilelang"
        self.reports: dict[str, list[Mapping[str, Any]]] = {}
        self._named = cxx
        self._idle: list[BuildProcess] = []
        self._lock = threading.Lock()

    @cached_property
    def compiler(self) -> str:
        wanted = [self._named] if self._named else ["g++", "clang++", "c++"]
        for name in wanted:
            found = shutil.which(name)
            if found:
                return found
        raise TargetError(
            f"target '{self.target.name}': no C++ compiler found: looked for "
            f"{', '.join(wanted)}; install g++ or name one in TILEWRIGHT_CXX"
        )

    def identity(self) -> str:
        """Versions of the compilers, their flags, and what is written into every kernel."""
        begin = hashlib.sha256(BEGIN.encode()).hexdigest()[:8]
        flags = (*self.target.flags, *HOST_FLAGS, *FLAGS, f"begin={begin}")
        return f"{self._version} {' '.join(flags)}"

    @cached_property
    def _version(self) -> str:
        try:
            triton = version("triton")
        except ModuleNotFoundError:
            raise TargetError(
                f"target '{self.target.name}': Triton is not installed: want triton 3.7 or later"
            ) from None
        host = version_line(self.compiler)
        return f"triton {triton}; {_tilelang()}; {nvcc_version(self._nvcc)}; {host}"

    def compile(self, source: Path, output: Path) -> None:
        """Compile one source to an object: its kernels first, then the host function."""
        if source.suffix in (".py", ".cu"):
            build = self._triton if source.suffix == ".py" else self._cuda
            self.reports[source.stem] = build(source)["kernels"]
            source = source.with_suffix(".host.cpp")
        import tvm_ffi.libinfo

        includes = [
            source.parent,
            Path(tvm_ffi.libinfo.find_include_path()),
            Path(tvm_ffi.libinfo.find_dlpack_include_path()),
        ]
        flags = [f"-I{path}" for path in includes]
        command = [self.compiler, *HOST_FLAGS, *flags, "-c", str(source), "-o", str(output)]
        run_compiler(command, source.stem)

    def _triton(self, source: Path, *, only_print: bool = False) -> Mapping[str, Any]:
        """Compile in an idle process, or in a new one."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or BuildProcess()
        report = process.build(source, self.capability, only_print=only_print)
        with self._lock:
            self._idle.append(process)
        if "printed" in report:
            self._keep(source.read_text(), report["printed"])
        return report

    def printed(self, file_name: str, text: str) -> Mapping[str, str]:
        """Return the CUDA that TileLang prints for the program of a source, if it has one."""
        if PROGRAM not in text:
            return {}
        kept = self._print_of(text)
        if not kept.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with work_folder(self._folder, "print-") as work:
                for name, support in self.support_sources().items():
                    (work / name).write_text(support)
                (work / file_name).write_text(text)
                self._triton(work / file_name, only_print=True)
        return {f"{file_name.removesuffix('.py')}.cu": kept.read_text()}

    def _print_of(self, text: str) -> Path:
        facts = repr((text, _tilelang(), self.capability))
        return self._folder / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.cu"

    def _keep(self, text: str, printed: str) -> None:
        kept = self._print_of(text)
        kept.parent.mkdir(parents=True, exist_ok=True)
        aside = kept.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        aside.write_text(printed)
        aside.rename(kept)

    def _cuda(self, source: Path) -> Mapping[str, Any]:
        return build_cuda(self.nvcc, source, self.capability)

    def lacks(self, schedule: Schedule) -> bool:
        """Whether a schedule's program cannot be built here: what TileLang prints wants nvcc."""
        return bool(schedule.values.get("tilelang")) and self._nvcc is None

    @cached_property
    def _nvcc(self) -> str | None:
        return find_nvcc()

    @property
    def nvcc(self) -> str:
        """CUDA's compiler; raises TargetError where there is none."""
        if self._nvcc is None:
            raise TargetError(
                f"target '{self.target.name}': nvcc not found; install CUDA's toolkit 12.4 or "
                "later, or name its folder in CUDA_HOME"
            )
        return self._nvcc

    def link(self, objects: Sequence[Path], output: Path) -> None:
        """Link a shared library; the names of TVM-FFI are found in the process that loads it."""
        arguments = ["-shared", "-o", str(output), *map(str, objects), "-ldl", "-lpthread"]
        run_compiler([self.compiler, *arguments], output.stem)

    def spilled_bytes(self, compiled: Path) -> int:
        """Return the most bytes that a thread of a kernel in an object keeps outside registers."""
        parts = read_report(compiled.read_bytes())
        return max((int(part.get("spilled_bytes", 0)) for part in parts), default=0)

    def support_sources(self) -> Mapping[str, str]:
        """Modules that every kernel may import, and the host sources, by file name."""
        texts = {p.name: p.read_text() for p in sorted((TEMPLATE_ROOT / "cuda").glob("tw_*"))}
        for name in ("tw_arguments.h", "tw_arguments.cpp"):
            texts[name] = (TEMPLATE_ROOT / "cpp" / name).read_text()
        for path in sorted((TEMPLATE_ROOT / "triton").glob("tw_*.triton")):
            texts[f"{path.stem}.py"] = path.read_text()
        math = {"tw_math.py": "triton", "tw_math.cuh": "cuda", "tw_tile_math.py": "tilelang"}
        return {**texts, **{name: prelude(language) for name, language in math.items()}}
