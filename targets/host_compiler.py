"""What a C++ compiler of this machine says of itself: its version is part of the key of caches."""

from __future__ import annotations

import subprocess

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
