"""The C++ toolchain of a target with its headers parsed once: quick for small kernels.

Same compiler, same flags, same text: only the time differs.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tvm_ffi.libinfo

from tilewright.codegen.target import Target
from tilewright.graph.errors import TargetError
from tilewright.targets.cpu.toolchain import CppToolchain

HEADERS = (
    "tw_host.h", "tw_vec.h", "tw_math.h", "tw_contract_formats.h", "tw_contract.h", "tw_attend.h",
    "tw_select.h", "tw_quant.h", "tw_hyper.h", "tw_pages.h", "tw_rows.h",
    "tw_latent.h", "tw_index.h",
)  # fmt: skip


class QuickToolchain:
    """Compiles as `CppToolchain` does, from a precompiled header kept in `folder`."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self.num_compiled = 0
        self._plain = CppToolchain(target)
        self._folder = folder

    def identity(self) -> str:
        return self._plain.identity()

    def support_sources(self) -> Mapping[str, str]:
        return self._plain.support_sources()

    def link(self, objects: Sequence[Path], output: Path) -> None:
        self._plain.link(objects, output)

    def compile(self, source: Path, output: Path) -> None:
        self.num_compiled += 1
        command = [*self._command, "-include", "all.h", "-x", "c++", "-", "-c", "-o", str(output)]
        self._run(command, self._headers, source.stem, source.read_text())

    @cached_property
    def _command(self) -> list[str]:
        includes = (
            tvm_ffi.libinfo.find_include_path(),
            tvm_ffi.libinfo.find_dlpack_include_path(),
        )
        return [self._plain.compiler, *self.target.flags, *(f"-I{path}" for path in includes)]

    @cached_property
    def _headers(self) -> Path:
        """The folder of the headers and their precompiled form, made once per content."""
        texts = self.support_sources()
        facts = repr((self.identity(), sorted(texts.items())))
        final = self._folder / f"headers-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
        if final.exists():
            return final
        self._folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="headers-", dir=self._folder))
        for name, text in texts.items():
            (work / name).write_text(text)
        (work / "all.h").write_text("".join(f'#include "{name}"\n' for name in HEADERS))
        self._run([*self._command, "-x", "c++-header", "all.h", "-o", "all.h.gch"], work, "headers")
        try:
            work.rename(final)
        except OSError:  # another process was first
            shutil.rmtree(work)
        return final

    @staticmethod
    def _run(command: Sequence[str], folder: Path, what: str, text: str = "") -> None:
        done = subprocess.run(
            command, cwd=folder, input=text, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise TargetError(f"kernel '{what}': the C++ compiler failed: {done.stderr[:2000]}")
