"""C++ sources to one library: any of g++ and clang++, one object per kernel."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tilewright.codegen.emit.cpp import TEMPLATE_ROOT
from tilewright.codegen.expr import prelude
from tilewright.codegen.target import FORBIDDEN_FLAGS, Target
from tilewright.graph.errors import TargetError
from tilewright.targets.host_compiler import run_compiler, version_line

HOST_SOURCES = ("tw_host.cpp", "tw_arguments.cpp")
ALL_HEADERS, MATH = "tw_all.h", "tw_math.h"


class CppToolchain:
    """Compiles with the flags of one variant. `cxx` names the compiler, else the first found."""

    def __init__(self, target: Target, *, cxx: str | None = None) -> None:
        self.target = target
        self._named = cxx

    @cached_property
    def compiler(self) -> str:
        cross = f"{self.target.machine}-linux-gnu-g++"
        native = _is_native(self.target.machine)
        wanted = [self._named] if self._named else ["g++", "clang++", "c++"] if native else [cross]
        for name in wanted:
            found = shutil.which(name)
            if found:
                return found
        raise TargetError(
            f"target '{self.target.variant}': no C++ compiler found: looked for "
            f"{', '.join(wanted)}; install g++ or name one in TILEWRIGHT_CXX"
        )

    def identity(self) -> str:
        """Version line of the compiler and the flags."""
        return f"{self._version} {' '.join(self.target.flags)}"

    @cached_property
    def _version(self) -> str:
        return version_line(self.compiler)

    def compile(self, source: Path, output: Path) -> None:
        """Compile one source; its headers lie beside it."""
        every = source.parent / ALL_HEADERS
        prepared = ["-include", str(every)] if every.exists() else []
        flags = [*self._flags(source.parent), *prepared]
        self._run([*flags, "-c", str(source), "-o", str(output)], source.stem)
        if not output.exists():
            raise TargetError(
                f"kernel '{source.stem}': the C++ compiler '{self.compiler}' wrote no object: "
                "name another one in TILEWRIGHT_CXX"
            )

    def prepare(self, folder: Path) -> None:
        """Precompile all headers in `folder`; same flags and text, so the same code."""
        # What other headers call from templates comes first.
        first = ("tw_arguments.h", "tw_host.h", MATH)
        found = {path.name for path in folder.glob("tw_*.h")}
        names = [*first, *sorted(found - {*first})]
        text, work = "".join(f'#include "{name}"\n' for name in names), folder / "prepared"
        work.mkdir()
        (work / ALL_HEADERS).write_text(text)
        output = work / f"{ALL_HEADERS}.gch"
        header = ["-x", "c++-header", str(work / ALL_HEADERS), "-o", str(output)]
        self._run([*self._flags(folder), *header], "headers")
        if not output.exists():
            return  # a compiler without precompiled headers: kernels compile all the same
        for path in (output, work / ALL_HEADERS):  # the text last: it says that both are there
            path.rename(folder / path.name)

    def _flags(self, folder: Path) -> list[str]:
        import tvm_ffi.libinfo

        includes = (
            folder,
            tvm_ffi.libinfo.find_include_path(),
            tvm_ffi.libinfo.find_dlpack_include_path(),
        )
        return [*self.target.flags, *(f"-I{path}" for path in includes)]

    def link(self, objects: Sequence[Path], output: Path) -> None:
        """Link a shared library; the names of TVM-FFI are found in the process that loads it."""
        self._run(["-shared", "-o", str(output), *map(str, objects), "-lpthread"], output.stem)

    def support_sources(self) -> Mapping[str, str]:
        """Headers every kernel may include, and the host sources, by file name."""
        folder = TEMPLATE_ROOT / "cpp"
        files = sorted([*folder.glob("tw_*.h"), *(folder / name for name in HOST_SOURCES)])
        math = f"#pragma once\n{prelude('cpp')}"
        return {**{path.name: path.read_text() for path in files}, MATH: math}

    def _run(self, arguments: Sequence[str], what: str) -> None:
        for flag in arguments:
            if flag in FORBIDDEN_FLAGS:
                raise TargetError(f"kernel '{what}': flag {flag} lets the compiler reorder sums")
        run_compiler([self.compiler, *arguments], what)


def _is_native(machine: str) -> bool:
    import platform

    return platform.machine() == machine
