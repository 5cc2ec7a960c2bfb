"""Writing an artifact aside and renaming it into place: it appears whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright.codegen.work_folder import leftovers, locked, work_folder
from tilewright.graph.errors import TilewrightError

MANIFEST = "manifest.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def refuse_foreign(output: Path) -> None:
    """Raise unless `output` is absent, empty, or an artifact that may be replaced: all of it goes.

    A link stands for the folder it leads to.
    """
    place = Path(os.path.realpath(output))
    _refuse_unwritable(output, place)
    if not place.exists():
        return
    if not place.is_dir():
        raise TilewrightError(f"output '{output}': is a file: want a directory")
    for kind, is_one in (
        ("a mount point", os.path.ismount(place)),
        ("the current directory", place == Path(os.path.realpath(os.curdir))),
    ):
        if is_one:
            raise TilewrightError(
                f"output '{output}': is {kind}, which cannot be replaced: want a directory in it"
            )
    if any(place.iterdir()):
        _refuse_others(output, place)


def _refuse_unwritable(output: Path, place: Path) -> None:
    """Raise unless a folder can be made beside `place`, before time is spent on what is in it."""
    above = next((each for each in place.parents if os.path.lexists(each)), place)
    if not above.is_dir():
        raise TilewrightError(f"output '{output}': '{above}' is a file: want a directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise TilewrightError(f"output '{output}': '{above}' cannot be written to")
    try:
        # Also where permissions allow it: /proc takes no directories, a disk may be full.
        os.rmdir(tempfile.mkdtemp(prefix=f".{place.name}-tried-", dir=above))
    except OSError as error:
        raise TilewrightError(
            f"output '{output}': no directory can be made in '{above}': {error.strerror}; "
            "want another place"
        ) from None


def _refuse_others(output: Path, place: Path) -> None:
    """Raise unless all files of a folder are those of the artifact in it."""
    if not (place / MANIFEST).exists():
        raise TilewrightError(
            f"output '{output}': holds other files and no {MANIFEST}: want a new or empty directory"
        )
    own = _own_files(place / MANIFEST)
    if own is None:
        raise TilewrightError(
            f"output '{output}': its {MANIFEST} is not that of an artifact: "
            "want a new or empty directory"
        )
    for path in place.rglob("*"):
        name = path.relative_to(place).as_posix()
        if name not in own and (path.is_symlink() or not path.is_dir()):
            raise TilewrightError(
                f"output '{output}': holds '{name}', which is no part of the artifact there: "
                "move it, or give a new directory"
            )


def _own_files(path: Path) -> set[str] | None:
    """Return the files that a manifest of any format lists, None for a file of another kind."""
    try:
        tree: Any = json.loads(path.read_bytes())
        own = {MANIFEST, tree["weights_file"], *dict(tree["digests"])}
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    return own if str(tree.get("abi", "")).startswith("tvm-ffi/") else None


@contextmanager
def staging(output: Path) -> Iterator[Path]:
    """Give a folder beside `output` that takes its place when all went well, else is removed.

    What a killed process left beside it is removed; what it had moved away is put back.
    """
    place = Path(os.path.realpath(output))
    _refuse_unwritable(output, place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _put_back(place)
        with work_folder(place.parent, f".{place.name}-stage-") as stage:
            yield stage
            stage.chmod(0o755)
            _replace(stage, place, output)
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        why = "the disk is full" if error.errno in _FULL else why
        raise TilewrightError(f"output '{output}': {why}; nothing was left behind") from None


def _replace(stage: Path, place: Path, output: Path) -> None:
    """Rename into place. A lock on the parent folder lets one of two compiles go after the
    other."""
    with locked(place.parent):
        if not place.exists():
            os.rename(stage, place)
            return
        refuse_foreign(output)
        old = Path(tempfile.mkdtemp(prefix=f".{place.name}-old-", dir=place.parent))
        try:
            os.rename(place, old / "artifact")
            try:
                os.rename(stage, place)
            except OSError:
                os.rename(old / "artifact", place)
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


def _put_back(place: Path) -> None:
    """Finish what a process did not that was killed while it replaced an artifact."""
    with locked(place.parent):
        for old in leftovers(place.parent, f".{place.name}-old-"):
            if not place.exists() and (old / "artifact").is_dir():
                os.rename(old / "artifact", place)
            shutil.rmtree(old, ignore_errors=True)
