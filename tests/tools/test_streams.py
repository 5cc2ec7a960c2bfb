"""Commands as processes whose standard streams are closed, full, left, or of another encoding."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.tools.streams import prepare_streams

from .conftest import command

STRICT = {"PYTHONIOENCODING": "utf-8:strict", "PYTHONUTF8": "0"}


def shell(line: str, *arguments: object, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run `tilewright` from a shell line, where "$@" stands for the command."""
    root = Path(__file__).parents[2] / "src"
    env = {**os.environ, "PYTHONPATH": str(root), **STRICT}
    return subprocess.run(["bash", "-c", line, "bash", *command(*arguments)], input=given, env=env,
                          capture_output=True, check=False)  # fmt: skip


def test_closed_streams_are_open_nowhere() -> None:
    for closed in (">&-", "<&-", "2>&-", "<&- >&- 2>&-"):
        done = shell(f'"$@" {closed}', "--help")
        is_shown = b"Compile language models" in done.stdout
        assert (done.returncode, done.stderr) == (0, b""), closed
        assert is_shown == (closed in ("<&-", "2>&-")), closed


def test_a_file_does_not_take_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tilewright.tools.streams import prepare_streams\nprepare_streams()\n"
        "file = open(sys.argv[1], 'w')\nprint('out')\nprint('err', file=sys.stderr)\n"
        "assert file.fileno() > 2 and sys.stdin.read() == ''"
    )
    line = 'exec 0<&- 1>&- 2>&-; exec "$@"'
    root = Path(__file__).parents[2] / "src"
    done = subprocess.run(["bash", "-c", line, "bash", sys.executable, "-c", code, tmp_path / "x"],
                          env={"PYTHONPATH": str(root)}, check=False)  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "x").read_text() == ""


def test_a_full_disk_under_stdout_is_one_sentence() -> None:
    done = shell('"$@" >/dev/full', "--help")
    assert done.returncode == 1
    assert done.stderr == b"error: reading or writing: No space left on device\n"


def test_no_character_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    given = io.BytesIO(b"a\xff\n")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given, encoding="utf-8", errors="strict"))
    prepare_streams()
    print("\u65e5 \udcff", flush=True)
    assert written.getvalue() == b"\\u65e5 \\udcff\n"
    assert sys.stdin.readline() == "a\udcff\n"


@pytest.mark.cpu
def test_bytes_that_are_no_text_are_refused_line_by_line(artifact: Path) -> None:
    done = shell('"$@"', "chat", artifact, "--max-tokens", 4, given=b"a\xff\nb\n")
    errors = done.stderr.decode().splitlines()
    assert done.returncode == 0, errors
    assert errors[0].startswith("error: prompt: is not valid Unicode: got a lone surrogate at ")
    assert "tokens/s, seed " in errors[1]
    lines = b'\xff\xfe\n{"prompt": "\xff"}\n{"tokens": [7]}\n'
    done = shell('"$@"', "generate", artifact, "--prompt-file", "-", "--json", "--max-tokens", 2,
                 given=lines)  # fmt: skip
    first, second, third = (json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 1 and "token_ids" in third
    assert all("not JSON" in line["error"] for line in (first, second))
