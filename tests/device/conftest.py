"""Artifacts for the tests that need a GPU: built elsewhere, named by --artifacts."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Path:
    """SmolLM2 compiled for this machine's GPU."""
    folder = pytestconfig.getoption("--artifacts")
    if folder is None:
        pytest.skip("no artifacts: build them with tools/dev/device_check.py, then --artifacts DIR")
    path: Path = folder / "smollm2"
    return path
