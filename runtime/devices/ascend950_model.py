"""The functional model of an Ascend 950 as a device: artifacts compiled for it run on this CPU.

Kernels are checked while they run; a fault is an error of the step. Never run on an NPU.
"""

from __future__ import annotations

import ctypes
import json
import platform
from pathlib import Path
from typing import Any

from tilewright.runtime.artifact import TargetRecord
from tilewright.runtime.errors import ArtifactError

NAME, SUFFIX = "ascend950", "+model"


def accepts(target: TargetRecord) -> bool:
    """Say whether an artifact runs on the model; raise ArtifactError if it is for the chip, or for
    the model on another machine."""
    if target.name != NAME:
        return False
    if not target.variant.endswith(SUFFIX):
        raise ArtifactError(
            f"target '{NAME}' cannot run here: no device runs it yet; compile the model with "
            "--simulate to run it on the functional model"
        )
    machine = platform.machine()
    if target.features and machine not in target.features:
        raise ArtifactError(
            f"variant '{target.variant}' is for another architecture: got {machine}, want "
            f"{', '.join(target.features)}; compile the model again on this machine"
        )
    return True


class Ascend950Model:
    """Modes and facts of the model inside a loaded library."""

    def __init__(self, library: Path) -> None:
        """Open the library; raise ArtifactError if it holds no model."""
        try:
            self._library = ctypes.CDLL(str(library))
            self._set = self._library.tw_model_set
        except (OSError, AttributeError) as error:
            raise ArtifactError(f"library '{library.name}': holds no model: {error}") from None
        for name in ("tw_model_facts", "tw_model_trace"):
            function = getattr(self._library, name)
            function.argtypes = [ctypes.c_char_p, ctypes.c_int64]
            function.restype = ctypes.c_int64
        self.machine = platform.machine()

    def configure(
        self, *, adversarial: bool = False, trace: bool = False, buffers: bool = False
    ) -> None:
        """Choose the order of pipes (as late as flags allow, or as early), and whether to keep a
        timeline and a map of buffers; forget what earlier launches did."""
        self._set(int(adversarial), int(trace) + 2 * int(buffers))
        self._library.tw_model_reset()

    def facts(self) -> list[dict[str, Any]]:
        """Return for each kernel its launches, cycles, cycles by pipe, bytes by path, and the part
        of each memory that it used: [first, end, size]. Where buffers are kept, `map` says what
        stands in the memories of the first block at its end, by who wrote it: [memory, first, end,
        pipe, call, line]."""
        found: list[dict[str, Any]] = json.loads(self._text("tw_model_facts"))
        return found

    def trace(self) -> str:
        """Return the timeline as JSON that Perfetto loads; one unit of time is a cycle."""
        return self._text("tw_model_trace")

    def _text(self, name: str) -> str:
        function = getattr(self._library, name)
        size = function(None, 0)
        buffer = ctypes.create_string_buffer(size)
        function(buffer, size)
        return buffer.value.decode()
