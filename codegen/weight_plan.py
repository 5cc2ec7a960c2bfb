"""Where weights would lie in the file, from their types alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.codegen.emit.cpp_types import panel_format
from tilewright.codegen.pack import ALIGNMENT, layouts
from tilewright.codegen.pack_cpu import packed_bytes
from tilewright.codegen.plan import GroupPlan
from tilewright.graph import Graph
from tilewright.graph.types import BlockFormat, TensorType
from tilewright.runtime.artifact import WeightRecord


def planned_weights(
    graph: Graph, plans: Sequence[GroupPlan]
) -> tuple[tuple[WeightRecord, ...], int]:
    """Return the record of every weight, and the bytes of the file."""
    layout = layouts(graph, plans)
    records, end = [], 0
    for weight in graph.weights:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        size = _size(weight.type, layout[weight.name])
        shape = tuple(int(d) for d in weight.type.shape)
        name, format = weight.name, str(weight.type.dtype)
        records.append(WeightRecord(name, format, shape, layout[name], offset, size))
        end = offset + size
    return tuple(records), end


def _size(type_: TensorType, layout: str) -> int:
    shape = [int(d) for d in type_.shape]
    if layout == "panels16":
        stack = math.prod(shape[:-2])
        return stack * packed_bytes(panel_format(type_.dtype), *shape[-2:])
    if isinstance(type_.dtype, BlockFormat) and type_.dtype.block[0] == 1:
        return math.prod(shape[:-1]) * type_.dtype.row_bytes(shape[-1])
    return int(type_.num_bytes)
