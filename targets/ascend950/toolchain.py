"""AscendC to an artifact. For the functional model: g++ and one library that runs here. For the
chip: `bisheng` where CANN is installed, else the sources alone, which the artifact then says.
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
from tilewright.codegen.target import Target
from tilewright.graph.errors import TargetError
from tilewright.targets.ascend950.printing import put_together, take_apart
from tilewright.targets.ascend950.simulation import (
    KERNEL_FLAGS,
    MODEL,
    MODEL_FLAGS,
    model_text,
    template_folder,
)
from tilewright.targets.ascend950.target import MODEL_SUFFIX
from tilewright.targets.host_compiler import run_compiler, version_line

_WHO = "the compiler"  # of C++ or of the chip
TILES_VERSION = 2  # of the choice of tiles, which may decide bits
SOURCES_ONLY = "sources only: no CANN was found when this artifact was made\n"
BISHENG_FLAGS = ("-O2", "-fPIC", "--npu-arch=dav-3510", "-ffp-contract=off", "-std=c++17")
_PLAIN_INLINE = "static inline __attribute__((always_inline, unused))"


def ascend950_toolchain(target: Target, cxx: str | None = None) -> AscendToolchain:
    return AscendToolchain(target, cxx=cxx)


class PrintProcess:
    """One process with TileLang, which prints one module at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tilewright.targets.ascend950.printing"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._stop = weakref.finalize(self, _end, self._process)

    def ask(self, source: Path) -> str:
        """Return the AscendC of a module; raise TargetError with TileLang's words."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"source": str(source)}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise TargetError(f"kernel '{source.stem}': TileLang ended without a word")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TargetError(f"kernel '{source.stem}': TileLang failed: {answer['error']}")
        return str(answer["text"])


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()


class AscendToolchain:
    """Builds for one part. `cxx` names the C++ compiler for the model, else the first found."""

    def __init__(
        self, target: Target, *, cxx: str | None = None, folder: Path | None = None
    ) -> None:
        """`folder` keeps what was printed, by content; by default it lies in the kernel cache."""
        self.target = target
        self.simulated = target.variant.endswith(MODEL_SUFFIX)
        self._named = cxx
        self._printer: PrintProcess | None = None
        self._lock = threading.Lock()
        self._folder = folder or Flags.from_environment().cache.expanduser() / "ascendc"

    @cached_property
    def compiler(self) -> str:
        wanted = [self._named] if self._named else ["g++", "clang++", "c++"]
        for name in wanted:
            if found := shutil.which(name):
                return found
        raise TargetError(
            f"target '{self.target.variant}': no C++ compiler found: looked for "
            f"{', '.join(wanted)}; install g++ or name one in TILEWRIGHT_CXX"
        )

    @cached_property
    def bisheng(self) -> str | None:
        """CANN's compiler, if it is installed."""
        home = os.environ.get("BISHENG_HOME")
        return shutil.which("bisheng", path=f"{home}/bin" if home else None)

    def identity(self) -> str:
        """Versions of what prints and compiles, and the flags."""
        try:
            printer = f"tilelang {version('tilelang')}"
        except PackageNotFoundError:
            raise TargetError(
                "target 'ascend950': TileLang is not installed: want tilelang 0.1.15 or later"
            ) from None
        tiles = f"tiles {TILES_VERSION}"
        if self.simulated:
            host = version_line(self.compiler)
            return f"{printer}; {tiles}; functional model; {host} {' '.join(KERNEL_FLAGS)}"
        found = "bisheng " + " ".join(BISHENG_FLAGS) if self.bisheng else "sources only"
        return f"{printer}; {tiles}; {found}"

    # --- printing -------------------------------------------------------------------------------

    def printed(self, file_name: str, text: str) -> Mapping[str, str]:
        """Return the AscendC of a source in the dialect; nothing for one that is AscendC."""
        if not file_name.endswith(".tl.py"):
            return {}
        return {file_name.removesuffix(".tl.py") + ".asc": self.ascendc(text)}

    def ascendc(self, text: str) -> str:
        """Print a module; kernels are printed once, and found by content afterwards."""
        with self._lock:  # CPython 3.11 counts the depth of syntax trees for all threads together
            module = take_apart(text)
        printed = {name: self._printed(kernel) for name, kernel in module.kernels.items()}
        return put_together(module, printed)

    def _printed(self, kernel: str) -> str:
        facts = repr((kernel, version("tilelang")))
        path = self._folder / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.asc"
        with self._lock:
            if not path.exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                source = path.with_suffix(f".{os.getpid()}.py")
                source.write_text(kernel)
                try:
                    self._printer = self._printer or PrintProcess()
                    text = self._printer.ask(source)
                finally:
                    source.unlink()
                work = path.with_suffix(f".{os.getpid()}.tmp")
                work.write_text(text)
                work.rename(path)
        return path.read_text()

    # --- building -------------------------------------------------------------------------------

    def compile(self, source: Path, output: Path) -> None:
        """Compile one source to an object; without CANN the object is the AscendC itself."""
        text = source.read_text()
        if source.name.endswith(".tl.py"):
            text = self.ascendc(text)
        if not self.simulated and self.bisheng is None:
            output.write_text(text)
            return
        if self.simulated and source.suffix == ".cpp":
            self._compile_host(source, output)
            return
        listing = source.with_name(source.name.partition(".")[0] + ".printed.cpp")
        listing.write_text(text)
        folders = [source.parent, template_folder()]
        if self.simulated:
            command = [self.compiler, *KERNEL_FLAGS, "-DTW_MODEL", *self._model_includes()]
        else:
            command = [str(self.bisheng), *BISHENG_FLAGS, "-x", "asc"]
        includes = [f"-I{path}" for path in folders]
        run_compiler(
            [*command, *includes, "-c", str(listing), "-o", str(output)], source.stem, _WHO
        )

    def _model_includes(self) -> list[str]:
        import tvm_ffi.libinfo

        found = tvm_ffi.libinfo
        folders = (MODEL, found.find_include_path(), found.find_dlpack_include_path())
        return [f"-I{path}" for path in folders]

    def _compile_host(self, source: Path, output: Path) -> None:
        """The host part and the model, without the instrumentation of kernels."""
        flags = [*MODEL_FLAGS, "-DTW_WITH_HOST", *self._model_includes(), f"-I{source.parent}"]
        run_compiler(
            [self.compiler, *flags, "-c", str(source), "-o", str(output)], source.stem, _WHO
        )

    def link(self, objects: Sequence[Path], output: Path) -> None:
        """Link the library; without CANN write a note in its place."""
        if self.simulated:
            command = [self.compiler, "-shared", "-o", str(output), *map(str, objects), "-lpthread"]
            run_compiler(command, output.stem, _WHO)
        elif self.bisheng:
            command = [self.bisheng, "-shared", "--npu-arch=dav-3510", "-o", str(output)]
            run_compiler([*command, *map(str, objects)], output.stem, _WHO)
        else:
            output.write_text(SOURCES_ONLY)

    def support_sources(self) -> Mapping[str, str]:
        """Headers of kernels; for the model also the host part and the model itself."""
        math = prelude("cpp").replace(_PLAIN_INLINE, "__simt_callee__ static inline")
        texts = {"tw_ascend_math.h": f"#pragma once\n{math}"}
        for name in ("tw_ascend_host.h", "tw_ascend_rows.h"):
            texts[name] = (TEMPLATE_ROOT / "ascendc" / name).read_text()
        if self.simulated:
            folder = TEMPLATE_ROOT / "cpp"
            for name in (
                "tw_arguments.h", "tw_arguments.cpp", "tw_host.h", "tw_pool.h", "tw_host.cpp",
            ):  # fmt: skip
                texts[name] = (folder / name).read_text()
            # The content decides whether it is compiled again, so it holds the model's digest.
            digest = hashlib.sha256(model_text().encode()).hexdigest()
            texts["tw_model.cpp"] = f'// {digest}\n#include "{MODEL / "tw_model.cpp"}"\n'
        return texts
