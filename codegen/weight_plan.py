"""Where weights would lie in the file, without reading one."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.pack import ALIGNMENT, WeightSource, pack_weights, weight_record
from tilewright.codegen.plan import GroupPlan
from tilewright.graph import Graph
from tilewright.runtime.artifact import WeightRecord


def planned_weights(
    graph: Graph, plans: Sequence[GroupPlan], source: WeightSource
) -> tuple[tuple[WeightRecord, ...], int]:
    """Return the record of every weight, and the bytes of the file. `source` is not asked."""
    records, end = [], 0
    for packed in pack_weights(graph, plans, source):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        records.append(weight_record(packed, offset))
        end = offset + packed.num_bytes
    return tuple(records), end
