"""Folders that a process works in and removes: one left by a killed process goes with the next."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DRAWN = r"[a-z0-9_]{8}"  # what mkdtemp adds to a prefix


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock; the system gives it back however the process ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Give a new folder in `parent`, removed at the end; before, remove those nobody works in."""
    with locked(parent):  # so that no other process finds the folder before it is locked
        for left in leftovers(parent, prefix):
            _remove_unlocked(left)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def leftovers(parent: Path, prefix: str) -> list[Path]:
    """Return the folders of a prefix in `parent`, whoever made them."""
    name = re.compile(re.escape(prefix) + _DRAWN)
    return sorted(p for p in parent.iterdir() if name.fullmatch(p.name) and not p.is_symlink())


def _remove_unlocked(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # its owner was quicker, or it is no folder
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(handle)
