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

FULL = b"error: standard output: No space left on device\n"
STRICT = {"PYTHONIOENCODING": "utf-8:strict", "PYTHONUTF8": "0"}


def shell(line: str, *arguments: object, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run `tilewright` from a shell line, where "$@" stands for the command."""
    root = Path(__file__).parents[2] / "src"
    env = {**os.environ, "PYTHONPATH": str(root), **STRICT}
    return subprocess.run(["bash", "-c", line, "bash", *command(*arguments)], input=given, env=env,
                          capture_output=True, check=False)  # fmt: skip


def test_an_input_or_notes_that_are_closed_are_open_nowhere() -> None:
    for closed in ("<&-", "2>&-", "<&- 2>&-"):
        done = shell(f'"$@" {closed}', "--help")
        assert (done.returncode, done.stderr) == (0, b""), closed
        assert b"Compile language models" in done.stdout, closed


@pytest.mark.cpu
@pytest.mark.parametrize("place", ["2>/dev/full", "2> >(exit)", "2</dev/null", "2>&-"])
def test_notes_that_nobody_takes_cost_no_answer(artifact: Path, place: str) -> None:
    asked = ("generate", artifact, "--tokens", "1,2", "--max-tokens", 2, "--seed", 1)
    kept = shell('"$@"', *asked)
    assert b"seed 1" in kept.stderr
    lost = shell(f'"$@" {place}', *asked)
    assert (lost.returncode, lost.stdout) == (0, kept.stdout)
    talk = ("chat", artifact, "--max-tokens", 2, "--seed", 1)
    said = shell(f'"$@" {place}', *talk, given=b"a\n/reset\na\n")
    (first, second) = said.stdout.splitlines()
    assert said.returncode == 0 and first == second
    assert shell(f'"$@" {place}', "inspect", "none").returncode == 1


NOWHERE = b"error: standard output: is closed: nobody could read the answer\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_an_answer_that_nobody_could_read_is_an_error(closed: str) -> None:
    said = b"" if "2>&-" in closed else NOWHERE
    done = shell(f'"$@" {closed}', "--help")
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.cpu
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_closed_or_full_stdout_fails_after_its_sentence(
    artifact: Path, form: tuple[str, ...]
) -> None:
    asked = ("generate", artifact, "--tokens", "1,2", "--max-tokens", 2, *form)
    closed = shell('"$@" >&-', *asked)
    assert (closed.returncode, closed.stderr) == (1, NOWHERE)
    full = shell('"$@" >/dev/full', *asked)
    assert (full.returncode, full.stderr) == (1, FULL)


def test_a_failure_is_told_though_its_json_is_not() -> None:
    sentence = b"error: artifact 'none': there is no such directory\n"
    for place in (">&-", ">/dev/full"):
        done = shell(f'"$@" {place}', "inspect", "none", "--json")
        assert (done.returncode, done.stderr) == (1, sentence), place


def test_a_file_does_not_take_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tilewright.tools.streams import prepare_streams\nprepare_streams()\n"
        "file = open(sys.argv[1], 'w')\nprint('err', file=sys.stderr)\n"
        "assert file.fileno() > 2 and sys.stdin.read() == ''\n"
        "try: print('out', flush=True)\n"
        "except OSError: sys.stdout = None\n"
        "else: raise AssertionError"
    )
    line = 'exec 0<&- 1>&- 2>&-; exec "$@"'
    root = Path(__file__).parents[2] / "src"
    done = subprocess.run(["bash", "-c", line, "bash", sys.executable, "-c", code, tmp_path / "x"],
                          env={"PYTHONPATH": str(root)}, check=False)  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "x").read_text() == ""


def test_a_full_disk_under_stdout_is_one_sentence() -> None:
    done = shell('"$@" >/dev/full', "--help")
    assert done.returncode == 1
    assert done.stderr == FULL


@pytest.mark.cpu
def test_a_full_disk_under_a_file_is_one_sentence(artifact: Path) -> None:
    small = ("--prompt-tokens", 4, "--decode-tokens", 2, "--context", 2, "--batch", 1, "--repeat",
             1)  # fmt: skip
    for asked in (
        ("logits", artifact, "--tokens", "1,2", "-o", "/dev/full"),
        ("inspect", artifact, "--html", "/dev/full"),
        ("bench", artifact, "-o", "/dev/full", *small),
    ):  # fmt: skip
        done = shell('"$@"', *asked)
        said = done.stderr.decode().strip()
        assert (done.returncode, said) == (1, "error: '/dev/full': No space left on device")


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
    assert done.returncode == 1, errors
    assert errors[0] == (
        "error: chat: message 0: 'content': is not valid Unicode: got a lone surrogate at "
        "character 1, want text"
    )
    assert "tokens/s, seed " in errors[1]
    lines = b'\xff\xfe\n{"prompt": "\xff"}\n{"tokens": [7]}\n'
    done = shell('"$@"', "generate", artifact, "--prompt-file", "-", "--json", "--max-tokens", 2,
                 given=lines)  # fmt: skip
    first, second, third = (json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 1 and "token_ids" in third
    want = ", want text in UTF-8"
    assert [line["error"] for line in (first, second)] == [
        f"line 1: not UTF-8: got byte 0xff at byte 0 of the line{want}",
        f"line 2: not UTF-8: got byte 0xff at byte 12 of the line{want}",
    ]
