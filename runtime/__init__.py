"""Run compiled models: `load` an artifact, `generate`, `stream`, or get `logits`.

Names are imported when first used, so that whoever needs only the artifact format (the compiler)
does not load the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.runtime.api import generate, load
    from tilewright.runtime.engine import Engine
    from tilewright.runtime.errors import ArtifactError, LaunchError, RequestError
    from tilewright.runtime.outputs import RequestOutput, SampleOutput, StreamEvent, Usage
    from tilewright.runtime.params import SamplingParams
    from tilewright.runtime.stream import Submitted

__all__ = [
    "ArtifactError",
    "Engine",
    "LaunchError",
    "RequestError",
    "RequestOutput",
    "SampleOutput",
    "SamplingParams",
    "StreamEvent",
    "Submitted",
    "Usage",
    "generate",
    "load",
]

_HOMES = {
    "api": ("generate", "load"),
    "engine": ("Engine",),
    "errors": ("ArtifactError", "LaunchError", "RequestError"),
    "outputs": ("RequestOutput", "SampleOutput", "StreamEvent", "Usage"),
    "params": ("SamplingParams",),
    "stream": ("Submitted",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tilewright.runtime' has no attribute '{name}'")
    return getattr(import_module(f"tilewright.runtime.{_HOME_OF[name]}"), name)
