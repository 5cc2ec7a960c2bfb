"""Files that commands write are whole, or as they were."""

from __future__ import annotations

import io
import os
import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tilewright.tools.commands.logits import npy
from tilewright.tools.whole_file import write_whole

from .conftest import Call


def test_no_pipe_and_no_link_is_replaced(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("far.npy")
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    write_whole(pipe, npy(values))
    content, _ = reader.communicate(timeout=30)
    assert np.array_equal(np.load(io.BytesIO(content)), values) and pipe.is_fifo()
    for _ in range(2):
        write_whole(link, npy(values))
        assert link.is_symlink() and np.array_equal(np.load(tmp_path / "far.npy"), values)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("before", [None, b"before"])
def test_a_file_that_does_not_fit_leaves_what_was_there(
    tmp_path: Path, before: bytes | None
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a disk with little room
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, bytes(1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.read_bytes() for each in tmp_path.iterdir()] == ([before] if before else [])


@pytest.mark.cpu
def test_logits_and_pages_that_do_not_fit_are_told_and_gone(
    call: Call, artifact: Path, tmp_path: Path
) -> None:
    tokens = ",".join(["5"] * 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for place, arguments in (
            (tmp_path / "out.npy", ("logits", artifact, "--tokens", tokens, "-o")),
            (tmp_path / "page.html", ("inspect", artifact, "--html")),
        ):
            done = call(*arguments, place)
            assert (done.code, done.err) == (1, f"error: '{place}': File too large\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
