"""The kernel cache: addressed by content, whole files only, safe for several builders at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tilewright.codegen.cache import MANY, KernelCache
from tilewright.codegen.source import KernelSource
from tilewright.graph.errors import TargetError


class Recorder:
    """A toolchain whose objects are their sources; it can be slow, and fail on a word."""

    def __init__(self, *, identity: str = "cc 1 -O3", seconds: float = 0.0) -> None:
        self.compiled: list[str] = []
        self.seconds = seconds
        self._identity = identity
        self.header = "int f();"

    def identity(self) -> str:
        return self._identity

    def compile(self, source: Path, output: Path) -> None:
        text = source.read_text()
        assert (source.parent / "tw_a.h").read_text() == self.header
        output.write_text(text[: len(text) // 2])
        time.sleep(self.seconds)
        if "fail" in text:
            raise TargetError(f"kernel '{source.stem}': the C++ compiler failed: fail")
        output.write_text(text)
        self.compiled.append(source.stem)

    def link(self, objects: Sequence[Path], output: Path) -> None:
        output.write_bytes(b"".join(o.read_bytes() for o in objects))

    def support_sources(self) -> Mapping[str, str]:
        return {"tw_a.h": self.header, "tw_host.cpp": "int host;"}


def sources(*texts: str) -> list[KernelSource]:
    return [KernelSource(f"row_{i}", "cpp", text) for i, text in enumerate(texts)]


def build(folder: Path, toolchain: Recorder, *texts: str) -> int:
    cache = KernelCache(folder, toolchain)
    built = cache.build(sources(*texts), jobs=2, progress=lambda *_: None)
    assert {p.read_text() for p in built.objects} == {*texts, "int host;"}
    return built.num_compiled


def test_objects_are_found_by_content(tmp_path: Path) -> None:
    toolchain = Recorder()
    assert build(tmp_path, toolchain, "a", "b") == 3
    assert build(tmp_path, toolchain, "b", "a") == 0
    assert build(tmp_path, toolchain, "a", "c") == 1
    assert build(tmp_path, Recorder(identity="cc 2 -O3"), "a", "b") == 3
    changed = Recorder()
    changed.header = "int g();"
    assert build(tmp_path, changed, "a", "b") == 3
    assert {p.suffix for p in (tmp_path / "objects").iterdir()} == {".o"}


def test_modules_count_for_the_sources_that_name_them(tmp_path: Path) -> None:
    """Directly, or through each other."""

    class Modules(Recorder):
        inner, outer = "x = 1", "from tw_inner import *"

        def support_sources(self) -> Mapping[str, str]:
            return {
                **super().support_sources(), "tw_inner.py": self.inner, "tw_outer.py": self.outer,
                "tw_inner.cuh": "int x;",
            }  # fmt: skip

    texts = ("a", "from tw_inner import *", "from tw_outer import *")
    assert build(tmp_path, Modules(), *texts) == 4
    assert build(tmp_path, Modules(), *texts) == 0
    other = Modules()
    other.outer += " "
    assert build(tmp_path, other, *texts) == 1
    inner = Modules()
    inner.inner = "x = 2"
    assert build(tmp_path, inner, *texts) == 2
    header = Modules()
    header.header = "int h();"
    assert build(tmp_path, header, *texts) == 4


def test_a_failure_leaves_no_object_and_no_folder(tmp_path: Path) -> None:
    toolchain = Recorder()
    with pytest.raises(TargetError, match="^kernel 'row_1': the C\\+\\+ compiler failed: fail$"):
        build(tmp_path, toolchain, "a", "fail", "b")
    left = list((tmp_path / "objects").iterdir())
    assert all(p.suffix == ".o" for p in left)
    assert "fail" not in {p.read_text() for p in left}
    assert build(tmp_path, toolchain, "a", "b") <= 3


def test_builders_at_once_see_whole_objects(tmp_path: Path) -> None:
    texts = [f"kernel {i} " * 50 for i in range(6)]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            build(tmp_path, Recorder(seconds=0.01), *texts)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(list((tmp_path / "objects").iterdir())) == 7
    assert build(tmp_path, Recorder(), *texts) == 0


class Preparing(Recorder):
    """Reads its headers once where many sources wait; what it compiles must not differ."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[Path] = []

    def prepare(self, folder: Path) -> None:
        assert (folder / "tw_a.h").read_text() == self.header
        self.prepared.append(folder)


def test_headers_are_prepared_once_for_many(tmp_path: Path) -> None:
    toolchain = Preparing()
    assert build(tmp_path, toolchain, "a", "b") == 3
    assert toolchain.prepared == []
    assert build(tmp_path, toolchain, *(f"kernel {i}" for i in range(MANY))) == MANY
    assert len(toolchain.prepared) == 1
    assert not toolchain.prepared[0].exists()
