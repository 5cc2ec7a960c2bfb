"""Launches of a step on several streams: a launch that does not touch what another writes need not
wait for it. What each does stays the same, and so do the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilewright.runtime.artifact import BucketRecord
from tilewright.runtime.plan_check import bucket_limits, tensor_bytes
from tilewright.runtime.plan_memory import PlanMemory, Region

LANES = 4


class Touch(NamedTuple):
    """Bytes `start` to `stop` of a region, read or written by a launch."""

    region: Region
    start: int
    stop: int
    is_write: bool

    def meets(self, other: Touch) -> bool:
        """Whether the two must keep their order."""
        return (
            (self.is_write or other.is_write)
            and self.region == other.region
            and self.start < other.stop
            and other.start < self.stop
        )

    def hides(self, other: Touch) -> bool:
        """Whether who must wait for `other` waits for this anyway, which waited for it."""
        return (
            self.is_write
            and self.region == other.region
            and self.start <= other.start
            and other.stop <= self.stop
        )


@dataclass(frozen=True)
class Turn:
    """The lane of a launch, and earlier launches of other lanes that it waits for."""

    lane: int
    after: tuple[int, ...]


def turns_of(plan: PlanMemory, bucket: BucketRecord) -> list[Turn]:
    """Return the turn of every launch of a bucket, for steps of any size that it takes."""
    return take_turns(_touches(plan, bucket))


def _touches(plan: PlanMemory, bucket: BucketRecord) -> list[list[Touch]]:
    """What each launch reads and writes, but for weights, inputs and scratch.

    A buffer is written by the first launch that names it; a state or output by any.
    """
    dims = bucket_limits(plan.manifest, bucket)
    written: set[str] = set()
    found: list[list[Touch]] = []
    for launch in bucket.launches:
        mine = []
        for argument in launch.arguments:
            if argument.kind not in ("buffer", "state", "output"):
                continue
            region, start, record = plan.locate(argument, bucket)
            is_write = argument.kind != "buffer" or argument.name not in written
            size = 1 if argument.kind == "state" else max(tensor_bytes(record, dims), 1)
            mine.append(Touch(region, start, start + size, is_write))
        written |= {a.name for a in launch.arguments if a.kind == "buffer"}
        found.append(mine)
    return found


def take_turns(touched: Sequence[Sequence[Touch]]) -> list[Turn]:
    """Give each launch the lane that ends with the last launch it waits for; where none does, the
    lane that ended first."""
    turns: list[Turn] = []
    last = [-1] * LANES  # launch that a lane ends with
    seen = [[-1] * LANES for _ in range(LANES)]  # by lane, the last of each other it waited for
    history: list[tuple[int, Touch]] = []
    for index, mine in enumerate(touched):
        needs = {j for j, theirs in history if any(a.meets(theirs) for a in mine)}
        final = max(needs, default=-1)
        lane = last.index(final) if final in last else last.index(min(last))
        after = []
        for other in range(LANES):
            wanted = max((j for j in needs if turns[j].lane == other), default=-1)
            if other != lane and wanted > seen[lane][other]:
                after.append(wanted)
                seen[lane][other] = wanted
        turns.append(Turn(lane, tuple(after)))
        last[lane] = index
        history = [(j, t) for j, t in history if not any(a.hides(t) for a in mine)]
        history += [(index, touch) for touch in mine]
    return turns
