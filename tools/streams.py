"""Standard streams as every command may count on them: open, and able to take any text."""

from __future__ import annotations

import errno
import io
import os
import sys
from io import TextIOWrapper
from typing import Any

STDOUT = "standard output"  # stands for a file's name in an error


def prepare_streams() -> None:
    """Open what the process was started without, and let no character be an error.

    A file opened later would take the number of a closed stream, and get what is meant for it. What
    is read from a closed stdin is empty, and what is said on a stderr that is closed, full or left
    is lost; whatever is written to a closed stdout is an error, for it is the answer.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), "r", encoding="utf-8")
    if sys.stdout is None:
        # The system refuses to write to what was opened for reading.
        sys.stdout = _text(_Output(os.open(os.devnull, os.O_RDONLY), "wb"), encoding="utf-8")
    elif isinstance(sys.stdout, TextIOWrapper):
        sys.stdout = _renewed(sys.stdout, _Output)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    elif isinstance(sys.stderr, TextIOWrapper):
        sys.stderr = _renewed(sys.stderr, _Notes)
    # Bytes that are no text come in as what every prompt refuses; on the way out names of files
    # and texts that the terminal's encoding lacks are escaped.
    for name, errors in (("stdin", "surrogateescape"), ("stdout", "backslashreplace")):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


class _Output(io.FileIO):
    """Standard output, which says in an error that it is about this."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            is_closed = error.errno == errno.EBADF
            why = "is closed: nobody could read the answer" if is_closed else error.strerror
            raise OSError(error.errno, why, STDOUT) from None


class _Notes(io.FileIO):
    """Standard error: what it does not take is lost, for no answer should fail with a note."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError:
            return len(memoryview(content).cast("B"))


def _renewed(stream: TextIOWrapper, kind: type[io.FileIO]) -> TextIOWrapper:
    """Return a stream anew, on the same file; one that is no file, as in tests, stays."""
    try:
        number = stream.fileno()
    except OSError:
        return stream
    stream.flush()
    return _text(kind(number, "wb", closefd=False), encoding=stream.encoding, errors=stream.errors,
                 line_buffering=stream.line_buffering,
                 write_through=stream.write_through)  # fmt: skip


def _text(raw: io.FileIO, **settings: Any) -> TextIOWrapper:
    return TextIOWrapper(io.BufferedWriter(raw), **settings)


def drop_stdout() -> None:
    """Let what stdout did not take be lost, so that nothing more is said of it at the end."""
    number = os.open(os.devnull, os.O_WRONLY)
    os.dup2(number, 1)
    os.close(number)
