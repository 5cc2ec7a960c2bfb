"""Writing an artifact aside and renaming it into place: it appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.graph.errors import TilewrightError

MANIFEST = "manifest.json"


def refuse_foreign(output: Path) -> None:
    """Raise unless `output` is absent, empty, or an artifact that may be replaced."""
    if output.exists() and not output.is_dir():
        raise TilewrightError(f"output '{output}': is a file: want a directory")
    if output.is_dir() and any(output.iterdir()) and not (output / MANIFEST).exists():
        raise TilewrightError(
            f"output '{output}': holds other files and no {MANIFEST}: want a new or empty directory"
        )


@contextmanager
def staging(output: Path) -> Iterator[Path]:
    """Give a folder beside `output` that takes its place when all went well, else is removed."""
    parent = output.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=parent))
    except OSError as error:
        raise TilewrightError(f"output '{output}': cannot be written: {error.strerror}") from None
    try:
        yield stage
        stage.chmod(0o755)
        _replace(stage, output.absolute())
    except OSError as error:
        full = error.errno == errno.ENOSPC
        why = "the disk is full" if full else f"cannot be written: {error.strerror}"
        raise TilewrightError(f"output '{output}': {why}; nothing was left behind") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _replace(stage: Path, output: Path) -> None:
    """Rename into place. A lock on the parent folder lets one of two compiles go after the
    other."""
    parent = os.open(output.parent, os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        if output.exists():
            refuse_foreign(output)
            old = Path(tempfile.mkdtemp(prefix=f".{output.name}-old-", dir=output.parent))
            os.rename(output, old / "artifact")
            os.rename(stage, output)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(stage, output)
    finally:
        os.close(parent)
