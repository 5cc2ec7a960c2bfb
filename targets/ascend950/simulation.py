"""Building AscendC against the functional model: any g++ or clang++, no CANN.

Kernels are compiled with the callbacks that ThreadSanitizer puts at every load and store, which the
model defines itself; the model's own object is compiled without them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tilewright.graph.errors import TargetError

MODEL = Path(__file__).resolve().parent / "model"
# The shipped templates of TileLang use std::bit_cast, so kernels are C++20; the model is C++17.
MODEL_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w")
KERNEL_FLAGS = (
    "-std=gnu++20",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-w",
    "-fsanitize=thread",
    "--param",
    "tsan-instrument-func-entry-exit=0",
)


def template_folder() -> Path:
    """Return the folder of TileLang's shipped headers; TargetError if TileLang is not installed."""
    found = importlib.util.find_spec("tilelang")
    if found is None or not found.submodule_search_locations:
        raise TargetError(
            "target 'ascend950': TileLang is not installed: want tilelang 0.1.15 or later"
        )
    return Path(found.submodule_search_locations[0]) / "src"


def model_text() -> str:
    """Return all headers and sources of the model, for cache keys."""
    files = sorted(p for p in MODEL.rglob("*") if p.suffix in (".h", ".cpp"))
    return "\n".join(f"// {p.relative_to(MODEL)}\n{p.read_text()}" for p in files)
