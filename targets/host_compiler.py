"""Compilers of this machine, run as programs: their version is part of the key of caches."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tilewright.graph.errors import TargetError


def version_line(compiler: str) -> str:
    """Return the first line of a compiler's version; raise TargetError for a program without."""
    wanted = "want g++ or clang++; name another one in TILEWRIGHT_CXX"
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise TargetError(
            f"C++ compiler '{compiler}': cannot be run: got {error.strerror}, {wanted}"
        ) from None
    said = done.stdout.strip()
    if done.returncode or not said:
        got = f"exit code {done.returncode}" if done.returncode else "no text"
        raise TargetError(f"C++ compiler '{compiler}': tells no version: got {got}, {wanted}")
    return said.splitlines()[0]


def run_compiler(command: Sequence[str], kernel: str, who: str = "the C++ compiler") -> None:
    """Compile for a kernel; raise TargetError with the first error that the compiler tells."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [s for s in done.stderr.splitlines() if "error" in s.lower()] or [
            done.stderr.strip() or f"exit code {done.returncode}"
        ]
        raise TargetError(f"kernel '{kernel}': {who} failed: {lines[0][:500]}")
