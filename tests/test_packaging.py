"""What git tracks in the seven folders is what imports and what the wheel ships."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("graph", "codegen", "templates", "runtime", "targets", "models", "tools")


def test_links_match_folders() -> None:
    package = ROOT / "src/tilewright"
    links = {path.name: path.resolve() for path in package.iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in FOLDERS}


def test_links_are_relative() -> None:
    for name in FOLDERS:
        assert str((ROOT / "src/tilewright" / name).readlink()) == f"../../{name}"


def test_wheel_ships_every_tracked_file(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip(f"not a git checkout: {tracked.stderr.strip()}")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    with zipfile.ZipFile(built) as archive:
        shipped = set(archive.namelist())
    present = [p for p in tracked.stdout.split("\0") if p and (ROOT / p).exists()]
    assert present
    missing = [p for p in present if f"tilewright/{p}" not in shipped]
    assert not missing, f"not in the wheel: {missing}"
    assert "tilewright/py.typed" in shipped
