"""Content-addressed cache of compiled kernels: one object per source, flags and compiler."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tilewright.codegen.source import KernelSource
from tilewright.codegen.target import PreparesHeaders, Toolchain
from tilewright.codegen.work_folder import work_folder
from tilewright.graph.errors import TargetError

Progress = Callable[[str, int, int], None]
# Support files that only those sources read that name them, directly or through each other.
_NAMED = (".py", ".cuh")
MANY = 6  # sources from which on headers are prepared: that takes as long as two or three of them


@dataclass(frozen=True)
class Built:
    """Objects of all kernels, and how many had to be compiled."""

    objects: tuple[Path, ...]
    num_compiled: int


class KernelCache:
    """Objects under `folder`, each written aside and renamed into place, so readers see whole
    files."""

    def __init__(self, folder: Path, toolchain: Toolchain) -> None:
        self._folder = folder.expanduser() / "objects"
        self._toolchain = toolchain
        self._support = toolchain.support_sources()
        self.support_digest = _digest("", *(f"{n}\n{t}" for n, t in sorted(self._support.items())))
        named = [n for n in self._support if n.endswith(_NAMED)]
        self._named: dict[str, list[str]] = {_stem(n): [] for n in named}  # by what sources say
        for name in named:
            self._named[_stem(name)].append(f"{name}\n{self._support[name]}")
        self._others = [f"{n}\n{t}" for n, t in sorted(self._support.items()) if n not in named]

    def build(self, sources: Sequence[KernelSource], *, jobs: int, progress: Progress) -> Built:
        """Compile what is not cached, `jobs` at a time, together with the target's host sources.

        Raises TargetError where a kernel does not compile, or the cache cannot be written.
        """
        try:
            return self._build(sources, jobs, progress)
        except OSError as error:
            raise TargetError(
                f"kernel cache '{self._folder}': cannot be written: {error.strerror or error}; "
                "make room there, or name another folder in TILEWRIGHT_CACHE"
            ) from None

    def object_of(self, source: KernelSource) -> Path:
        """Return where the object of a source lies once it is built."""
        return self._folder / f"{self._key(source.text)}.o"

    def _build(self, sources: Sequence[KernelSource], jobs: int, progress: Progress) -> Built:
        self._folder.mkdir(parents=True, exist_ok=True)
        texts = {s.file_name: s.text for s in sources}
        texts |= {n: t for n, t in self._support.items() if n.endswith(".cpp")}
        objects = {name: self._folder / f"{self._key(text)}.o" for name, text in texts.items()}
        missing = [name for name, path in objects.items() if not _is_whole(path)]
        if missing:
            self._compile(texts, objects, missing, jobs, progress)
        return Built(tuple(objects[name] for name in sorted(objects)), len(missing))

    def _compile(
        self,
        texts: Mapping[str, str],
        objects: Mapping[str, Path],
        missing: Sequence[str],
        jobs: int,
        progress: Progress,
    ) -> None:
        with work_folder(self._folder, "build-") as work:
            for name, text in self._support.items():
                (work / name).write_text(text)
            progress("compile", 0, len(missing))
            if len(missing) >= MANY and isinstance(self._toolchain, PreparesHeaders):
                self._toolchain.prepare(work)
            with ThreadPoolExecutor(max(1, jobs)) as pool:
                waiting = [
                    pool.submit(self._compile_one, work, name, texts[name], objects[name])
                    for name in missing
                ]
                try:
                    for done, future in enumerate(as_completed(waiting), start=1):
                        future.result()
                        progress("compile", done, len(missing))
                except BaseException:
                    for future in waiting:
                        future.cancel()
                    raise

    def _compile_one(self, work: Path, name: str, text: str, target: Path) -> None:
        source = work / name
        source.write_text(text)
        output = source.with_suffix(".o")
        self._toolchain.compile(source, output)
        os.replace(output, target)

    def _key(self, text: str) -> str:
        """Name an object by all that it is made of."""
        return _digest(self._toolchain.identity(), *self._others, *self._read_by(text), text)

    def _read_by(self, text: str) -> list[str]:
        """Texts of the support files that a source may read, by the words in it."""
        found: dict[str, list[str]] = {}
        todo = [text]
        while todo:
            for name in _words(todo.pop()) & self._named.keys() - found.keys():
                found[name] = self._named[name]
                todo += found[name]
        return [each for name in sorted(found) for each in found[name]]


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\btw_\w+", text))


def _is_whole(path: Path) -> bool:
    """Whether an object is there. An empty one is what a machine that lost power leaves."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _digest(*parts: str) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(f"{len(part)}:".encode() + part.encode())
    return hashed.hexdigest()
