"""Options, golden files and skips that all tests share.

A test that needs what this machine lacks is skipped with a reason, never passed.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch

TESTS = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")

hypothesis.settings.register_profile("local", deadline=None, max_examples=40)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")
    parser.addoption(
        "--artifacts", type=Path, help="what tools/dev/device_check.py built, for tests/device"
    )
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes")
    parser.addoption(
        "--cpu-variant", help="what target cpu means in these tests, such as x86-64-v4"
    )


def pytest_configure(config: pytest.Config) -> None:
    variant = config.getoption("--cpu-variant")
    if variant is not None:
        cpu = importlib.import_module("tilewright.targets.cpu.target")
        if variant not in cpu.VARIANTS:
            known = ", ".join(cpu.VARIANTS)
            raise pytest.UsageError(f"--cpu-variant '{variant}': unknown: have {known}")
        vars(cpu)["host_variant"] = lambda: variant


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "slow": None if config.getoption("--slow") else "takes minutes: run with --slow",
        "cpu": None if find_compiler() else f"no C++ compiler: none of {', '.join(COMPILERS)}",
        "device": None if torch.cuda.is_available() else "no accelerator on this machine",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def find_compiler() -> str | None:
    """Return the C++ compiler that CXX names, else the first known one on the path."""
    chosen = os.environ.get("CXX")
    if chosen:
        return shutil.which(chosen)
    return next(filter(None, map(shutil.which, COMPILERS)), None)


@pytest.fixture(scope="session")
def kernel_cache(pytestconfig: pytest.Config) -> Path:
    """Folder of compiled kernels that all tests share, kept between runs: entries go by content."""
    assert pytestconfig.cache is not None
    folder = Path(pytestconfig.cache.mkdir("kernels"))
    headers = sorted(folder.glob("headers-*"), key=lambda p: p.stat().st_mtime)
    for stale in headers[:-3]:  # precompiled headers of earlier sources are large
        shutil.rmtree(stale, ignore_errors=True)
    return folder


Golden = Callable[[str], None]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare text with tests/golden/<area>/<test>.txt, where area is the test's folder."""
    area = request.path.parent.relative_to(TESTS)
    stem = re.sub(r"[^\w.-]+", "-", request.node.name.removeprefix("test_")).strip("-")
    path = TESTS / "golden" / area / f"{stem}.txt"

    def compare(text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"golden file {path.relative_to(TESTS)} is missing: run --update-golden")
        assert text == path.read_text(), f"differs from {path.relative_to(TESTS)}"

    return compare
