"""The C++ toolchain of a target with its headers parsed once: quick for small kernels.

Same compiler, same flags, same text: only the time differs.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tilewright.codegen.target import Target
from tilewright.targets.cpu.toolchain import CppToolchain


class QuickToolchain:
    """Compiles as `CppToolchain` does, in a folder that keeps its prepared headers."""

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
        with tempfile.TemporaryDirectory() as folder:
            for header in self._headers.iterdir():
                (Path(folder) / header.name).symlink_to(header)
            copy = Path(folder) / source.name
            copy.unlink(missing_ok=True)
            copy.write_text(source.read_text())
            self._plain.compile(copy, output)

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
        self._plain.prepare(work)
        try:
            work.rename(final)
        except OSError:  # another process was first
            shutil.rmtree(work)
        return final
