"""Settings that may not change output: what is shown, and where things are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewright.graph.errors import LowerError

_NAMES = ("TILEWRIGHT_DEBUG", "TILEWRIGHT_DUMP", "TILEWRIGHT_CACHE", "TILEWRIGHT_CXX")


@dataclass(frozen=True)
class Flags:
    """`debug`: 0-5, each level includes the lower ones. `dump`: folder for every stage as text.
    `cache`: folder of compiled kernels and tuning records. `cxx`: the C++ compiler."""

    debug: int = 0
    dump: Path | None = None
    cache: Path = Path("~/.cache/tilewright")
    cxx: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Flags:
        """Read TILEWRIGHT_* variables; raise LowerError for an unknown name or a bad value.

        Names that belong to the runtime are left to it.
        """
        for name in environment:
            runtime = name.startswith("TILEWRIGHT_RUNTIME_")
            if name.startswith("TILEWRIGHT_") and name not in _NAMES and not runtime:
                raise LowerError(f"flag '{name}': unknown: have {', '.join(_NAMES)}")
        level = environment.get("TILEWRIGHT_DEBUG", "0")
        if level not in tuple("012345"):
            raise LowerError(f"flag 'TILEWRIGHT_DEBUG': got {level!r}, want 0 to 5")
        dump = environment.get("TILEWRIGHT_DUMP")
        return cls(
            debug=int(level),
            dump=Path(dump) if dump else None,
            cache=Path(environment.get("TILEWRIGHT_CACHE", "~/.cache/tilewright")).expanduser(),
            cxx=environment.get("TILEWRIGHT_CXX") or None,
        )
