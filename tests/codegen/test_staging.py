"""Artifacts are written aside: what may be replaced, links, and what killed processes left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewright.codegen.staging import refuse_foreign, staging
from tilewright.codegen.tune import TuningRecord, TuningRecords
from tilewright.codegen.work_folder import work_folder
from tilewright.graph.errors import LowerError, TilewrightError


def write(stage: Path, text: str = "new") -> None:
    """Write what an artifact is, as far as replacing goes."""
    (stage / "kernels").mkdir()
    (stage / "kernels" / "a.so").write_text(text)
    (stage / "weights.bin").write_text(text)
    manifest = {"abi": "tvm-ffi/1", "weights_file": "weights.bin", "digests": {"kernels/a.so": ""}}
    (stage / "manifest.json").write_text(json.dumps(manifest))


def make(output: Path, text: str = "new") -> None:
    with staging(output) as stage:
        write(stage, text)


def refusal(output: Path) -> str:
    with pytest.raises(TilewrightError) as caught:
        refuse_foreign(output)
    with pytest.raises(TilewrightError) as late:
        make(output)
    assert str(late.value) == str(caught.value)
    return str(caught.value)


def test_an_artifact_is_replaced_whole(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")
    make(tmp_path / "out", "new")
    assert (tmp_path / "out" / "weights.bin").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_in_a_file_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file" / "out", tmp_path / "file" / "deep" / "out"):
        sentence = f"output '{output}': '{tmp_path}/file' is a file: want a directory"
        assert refusal(output) == sentence
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_written_to_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    # The answer that anybody but root gets.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")
    output = tmp_path / "closed" / "out"
    assert refusal(output) == f"output '{output}': '{tmp_path}/closed' cannot be written to"


def test_a_place_that_takes_no_folders_is_refused_first() -> None:
    output = Path("/proc/tilewright-out")
    assert refusal(output) == (
        f"output '{output}': no directory can be made in '/proc': No such file or directory; "
        "want another place"
    )


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "null", "x", '{"abi": "tvm-ffi/1"}', '{"name": "my web app", "icons": []}',
     '{"abi": "other/1", "weights_file": "w", "digests": {}}',
     '{"abi": "tvm-ffi/1", "weights_file": [], "digests": {}}'],
)  # fmt: skip
def test_a_manifest_of_another_kind_is_no_artifact(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.html").write_text("mine")
    (tmp_path / "manifest.json").write_text(text)
    assert refusal(tmp_path) == (
        f"output '{tmp_path}': its manifest.json is not that of an artifact: "
        "want a new or empty directory"
    )
    assert (tmp_path / "index.html").read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "kernels/mine.cpp", "inner/out/x", "link"])
def test_files_of_others_in_an_artifact_are_kept(tmp_path: Path, name: str) -> None:
    output = tmp_path / "out"
    make(output, "old")
    (output / name).parent.mkdir(parents=True, exist_ok=True)
    if name == "link":
        (output / name).symlink_to(tmp_path)
    else:
        (output / name).write_text("mine")
    assert refusal(output) == (
        f"output '{output}': holds '{name}', which is no part of the artifact there: "
        "move it, or give a new directory"
    )
    assert (output / "weights.bin").read_text() == "old" and (output / name).exists()


def test_a_link_stands_for_its_folder(tmp_path: Path) -> None:
    for name in ("real", "missing"):
        link = tmp_path / f"to-{name}"
        link.symlink_to(Path("far") / name)
    (tmp_path / "far" / "real").mkdir(parents=True)
    for name in ("real", "missing"):
        for text in ("old", "new"):
            make(tmp_path / f"to-{name}", text)
            assert (tmp_path / f"to-{name}").is_symlink()
            assert (tmp_path / "far" / name / "weights.bin").read_text() == text
    assert sorted(os.listdir(tmp_path / "far")) == ["missing", "real"]


def test_what_cannot_be_renamed_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(Path(".")) == (
        "output '.': is the current directory, which cannot be replaced: want a directory in it"
    )
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    assert refusal(tmp_path / "disk") == (
        f"output '{tmp_path / 'disk'}': is a mount point, which cannot be replaced: "
        "want a directory in it"
    )


def test_a_rename_that_fails_brings_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "out", "old")
    rename = os.rename

    def busy(source: Path, target: Path) -> None:
        if "-stage-" in str(source):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rename(source, target)

    monkeypatch.setattr("os.rename", busy)
    with pytest.raises(TilewrightError) as caught:
        make(tmp_path / "out")
    assert str(caught.value) == (
        f"output '{tmp_path / 'out'}': cannot be written: Device or resource busy; "
        "nothing was left behind"
    )
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "weights.bin").read_text() == "old"


def killed(code: str, *arguments: object) -> None:
    """Run Python code that kills its own process."""
    root = Path(__file__).parents[2] / "src"
    lead = "import os, signal, sys\nfrom pathlib import Path\n"
    done = subprocess.run([sys.executable, "-c", lead + code, *map(str, arguments)], check=False,
                          env={"PYTHONPATH": str(root)})  # fmt: skip
    assert done.returncode == -signal.SIGKILL


def test_the_next_compile_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    code = (
        "from tilewright.codegen.staging import staging\n"
        "with staging(Path(sys.argv[1])) as stage:\n"
        "    (stage / 'weights.bin').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed(code, tmp_path / "out")
    (tmp_path / ".out-stage-mine").mkdir()  # not one of ours by its name
    assert len(os.listdir(tmp_path)) == 2
    make(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [".out-stage-mine", "out"]


def test_work_under_way_is_left_alone(tmp_path: Path) -> None:
    with work_folder(tmp_path, "build-") as first, work_folder(tmp_path, "build-") as second:
        assert first.is_dir() and second.is_dir() and first != second
    assert os.listdir(tmp_path) == []


def test_what_was_moved_away_by_a_killed_compile_is_put_back(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")
    (tmp_path / ".out-old-abcdefgh").mkdir()
    (tmp_path / "out").rename(tmp_path / ".out-old-abcdefgh" / "artifact")
    with pytest.raises(KeyError), staging(tmp_path / "out"):
        raise KeyError
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "weights.bin").read_text() == "old"
    shutil.copytree(tmp_path / "out", tmp_path / ".out-old-abcdefgh" / "artifact")
    make(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "weights.bin").read_text() == "new"


def record(key: str) -> TuningRecord:
    return TuningRecord(key, "k", "tokens_1", {}, {}, 1.0, 2.0, 3, "m")


def test_two_tuners_keep_both_their_records(tmp_path: Path) -> None:
    first, second = (TuningRecords(tmp_path / "tuned.json") for _ in range(2))
    first.add(record("a"))
    second.add(record("b"))
    assert {r.key for r in TuningRecords(tmp_path / "tuned.json").all()} == {"a", "b"}


def test_records_that_cannot_be_written_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("json.dump", full)
    with pytest.raises(LowerError) as caught:
        TuningRecords(tmp_path / "tuned.json").add(record("a"))
    assert str(caught.value) == (
        f"tuning records '{tmp_path / 'tuned.json'}': cannot be written: No space left on device; "
        "make room there, or name another folder in TILEWRIGHT_CACHE"
    )
    assert os.listdir(tmp_path) == []
