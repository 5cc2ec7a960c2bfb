"""What a GPU session asks of a GPU. Tests give one that is made of host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from tilewright.runtime.devices.launch_table import Place
from tilewright.runtime.lanes import Turn

Replay = Callable[[], None]


class FreeMemory(NamedTuple):
    """Bytes of a GPU: those nobody has taken, and all."""

    free: int
    total: int


class Chip(Protocol):
    """One GPU with a stream of its own; work issued inside `active` runs in order on it."""

    place: Place
    device: torch.device

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 host memory that copies to the GPU need not wait for."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed uint8 memory of the GPU, 256-byte aligned."""

    def active(self) -> AbstractContextManager[None]:
        """Issue this thread's work, torch's and the kernels', to the stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy from staging memory."""

    def wait_for_copies(self) -> None:
        """Wait until staging memory may be written again."""

    def capture(self, launch: Callable[[], None]) -> Replay:
        """Record what `launch` launches, without running it; return what runs it."""

    def issue(self, launches: Sequence[Callable[[], None]], turns: Sequence[Turn]) -> None:
        """Issue launches to a stream for each lane while a graph is recorded: each launch after
        those of its turn."""

    def timed(self, launches: Sequence[Callable[[], None]]) -> Sequence[float]:
        """Run launches one after the other; return the seconds of each."""
