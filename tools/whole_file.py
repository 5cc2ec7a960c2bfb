"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write beside `path` and rename; raise OSError, and leave what was there before.

    A link stands for the file it leads to; a pipe or device is written to, never replaced.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            file.write(content)
        return
    place = Path(os.path.realpath(path))
    handle, name = _open_beside(place, path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise


def _open_beside(place: Path, path: Path) -> tuple[int, str]:
    """Open a new file beside `place`; an error is about the file that was asked for."""
    try:
        return tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}-")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
