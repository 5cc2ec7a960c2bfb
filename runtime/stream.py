"""Requests under way, as their submitter holds them: all samples, or a stream of events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.runtime.outputs import StreamEvent
from tilewright.runtime.sample import Sample

if TYPE_CHECKING:
    from tilewright.runtime.engine import Engine


@dataclass(frozen=True)
class Submitted:
    """A request accepted by the engine, with its samples under way."""

    id: str
    prompt_ids: tuple[int, ...]
    seed: int
    samples: tuple[Sample, ...]


class EventStream(Iterator[StreamEvent]):
    """The events of one request, in order; iterating drives the engine."""

    def __init__(self, engine: Engine, submitted: Submitted) -> None:
        self.submitted = submitted
        self._engine = engine
        self._waiting = list(submitted.samples)
        self._ready: deque[StreamEvent] = deque()

    def __next__(self) -> StreamEvent:
        while not self._ready:
            if not self._waiting:
                raise StopIteration
            self._ready.extend(self._engine.events(self._waiting))
        return self._ready.popleft()

    def close(self) -> None:
        """Abort what is not finished; nothing more is given."""
        self._engine.cancel(self._waiting)
        self._waiting.clear()
        self._ready.clear()

    def __del__(self) -> None:
        # May run in the middle of a step, which holds the lock: leave a note instead.
        if self._waiting:
            self._engine.drop(self._waiting)
