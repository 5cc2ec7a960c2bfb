"""Artifacts appear whole or not at all, and never in place of something else."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from support.tiny import Tiny, build, quick_target, tiny
from support.toolchain import QuickToolchain
from tilewright import runtime
from tilewright.codegen.compile import CompileJob, compile_graph
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import first_candidate
from tilewright.graph.errors import TilewrightError
from tilewright.graph.text import parse_graph
from tilewright.runtime.artifact_files import read_manifest
from tilewright.runtime.devices import cpu

pytestmark = pytest.mark.cpu
TARGET = quick_target()


def model(seed: int = 0) -> Tiny:
    return tiny("f32", seed=seed)


def digest(path: Path) -> str:
    return read_manifest(path).numerics_digest


def test_an_artifact_takes_the_place_of_another(tmp_path: Path, kernel_cache: Path) -> None:
    path = tmp_path / "m"
    first = build(model(0), path, kernel_cache, target=TARGET)
    second = build(model(1), path, kernel_cache, target=TARGET)
    assert digest(path) == second.numerics_digest != first.numerics_digest
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_process_sees_the_kernels_that_took_the_place(
    tmp_path: Path, kernel_cache: Path
) -> None:
    """The loader of shared libraries goes by path: a replaced one must not be mistaken for it."""
    path, tokens = tmp_path / "m", [1, 2, 3]
    found = []
    for eps in (1e-5, 0.5, 1e-5):
        build(tiny("f32", rms_norm_eps=eps), path, kernel_cache, target=TARGET)
        with runtime.load(path) as engine:
            found.append(engine.logits(tokens).tobytes())
    assert found[0] == found[2] != found[1]


def test_readable_files_and_counts(tmp_path: Path, kernel_cache: Path) -> None:
    path, tiny_model = tmp_path / "m", model()
    report = build(tiny_model, path, kernel_cache, target=TARGET)
    manifest = read_manifest(path)
    assert parse_graph((path / "sources" / "model.txt").read_text()).nodes[0].op == "embedding"
    fused = parse_graph((path / "sources" / "fused.txt").read_text())
    assert len(fused.groups) == report.num_launches == len(manifest.buckets[0].launches)
    assert report.num_kernels == len(manifest.kernels)
    assert report.weights_bytes == manifest.weights_bytes == (path / "weights.bin").stat().st_size
    assert {f"sources/{k.symbol}.cpp" for k in manifest.kernels} <= set(manifest.digests)


def test_other_folders_and_files_are_refused(tmp_path: Path, kernel_cache: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    file.write_text("years of work")
    for path, problem in (
        (folder, "holds other files and no manifest.json: want a new or empty directory"),
        (file, "is a file: want a directory"),
    ):
        with pytest.raises(TilewrightError) as caught:
            build(model(), path, kernel_cache, target=TARGET)
        assert str(caught.value) == f"output '{path}': {problem}"
    assert (folder / "thesis.txt").read_text() == file.read_text() == "years of work"


class FullDisk(QuickToolchain):
    """A toolchain whose linker finds no space."""

    def link(self, objects, output):  # type: ignore[no-untyped-def]
        output.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_nothing(tmp_path: Path, kernel_cache: Path) -> None:
    path, tiny_model = tmp_path / "m", model()
    report = build(tiny_model, path, kernel_cache, target=TARGET)
    job = CompileJob(
        tiny_model.graph, tiny_model.record(), tiny_model.weights, TARGET,
        FullDisk(TARGET, kernel_cache), tiny_model.settings, first_candidate(TARGET),
        Flags(cache=kernel_cache),
    )  # fmt: skip
    for output in (path, tmp_path / "new"):
        with pytest.raises(TilewrightError) as caught:
            compile_graph(job, output, lambda *_: None)
        problem = "the disk is full; nothing was left behind"
        assert str(caught.value) == f"output '{output}': {problem}"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert digest(path) == report.numerics_digest


def test_a_folder_that_cannot_be_made(tmp_path: Path, kernel_cache: Path) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "m"
    with pytest.raises(TilewrightError) as caught:
        build(model(), output, kernel_cache, target=TARGET)
    assert str(caught.value) == (
        f"output '{output}': '{output.parent}' is a file: want a directory"
    )


def test_two_compiles_into_one_folder(tmp_path: Path, kernel_cache: Path) -> None:
    """Both end well; what stands there afterwards is one of the two, whole."""
    path, digests = tmp_path / "m", []
    models = [model(0), model(1)]
    build(models[0], tmp_path / "warm", kernel_cache, target=TARGET)

    def work(each: Tiny) -> None:
        digests.append(build(each, path, kernel_cache, target=TARGET).numerics_digest)

    threads = [threading.Thread(target=work, args=(each,)) for each in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(digests)) == 2 and digest(path) in digests
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "warm"]
    with runtime.load(path) as engine:
        assert engine.logits([1, 2]).shape == (2, 67)


def test_dump_holds_every_stage(tmp_path: Path, kernel_cache: Path) -> None:
    tiny_model = model()
    job = CompileJob(
        tiny_model.graph, tiny_model.record(), tiny_model.weights, TARGET,
        QuickToolchain(TARGET, kernel_cache), tiny_model.settings, first_candidate(TARGET),
        Flags(cache=kernel_cache, dump=tmp_path / "dump"), jobs=2,
    )  # fmt: skip
    compile_graph(job, tmp_path / "m", lambda *_: None)
    stages = ["00_model.txt", "01_canonicalize.txt", "02_decompose.txt", "03_fuse.txt"]
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert names == [*stages, "kernels", "manifest.json", "plan.txt"]
    before = {s: (tmp_path / "dump" / s).read_bytes() for s in stages}
    compile_graph(replace(job), tmp_path / "m", lambda *_: None)
    assert before == {s: (tmp_path / "dump" / s).read_bytes() for s in stages}


def test_machine_of_the_tests() -> None:
    """The artifacts of these tests are for this machine."""
    assert set(TARGET.features) <= cpu.cpu_flags()
