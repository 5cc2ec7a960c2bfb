"""Weights into the layouts kernels read: panels for matrices, plain rows for vectors and
literals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.emit.cpp_types import packed_weights, panel_format
from tilewright.codegen.pack_cpu import Unpacked, pack_panels
from tilewright.codegen.plan import GroupPlan
from tilewright.graph import Graph, Weight
from tilewright.graph.errors import LowerError
from tilewright.graph.types import BlockFormat, DType, ElementType
from tilewright.runtime.artifact import ROW_MAJOR, WeightRecord

ALIGNMENT = 64
PACKING_VERSION = 1
_PLAIN = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


class WeightSource(Protocol):
    """Where a model's tensors come from."""

    def unpacked(self, name: str, dtype: ElementType) -> Unpacked:
        """Return a tensor as `dtype` stores it: plain values, or codes and scales of a format."""
        ...


@dataclass(frozen=True)
class PackedWeight:
    """A weight as it will lie in the file."""

    weight: Weight
    layout: str
    data: NDArray[np.uint8]


def layouts(graph: Graph, plans: Sequence[GroupPlan]) -> Mapping[str, str]:
    """Map each weight to its layout; raise LowerError where two kernels want different ones."""
    found: dict[str, str] = {}
    for plan in plans:
        packed = packed_weights(plan.body.graph)
        for weight in plan.body.graph.weights:
            name = plan.body.binding[weight.name]
            layout = "panels16" if weight.name in packed else ROW_MAJOR
            if found.setdefault(name, layout) != layout:
                raise LowerError(
                    f"weight '{name}': is read in two layouts: got {layout}, want {found[name]}"
                )
    return {w.name: found.get(w.name, ROW_MAJOR) for w in graph.weights}


def pack_weights(
    graph: Graph, plans: Sequence[GroupPlan], source: WeightSource
) -> Iterator[PackedWeight]:
    """Yield every weight packed, one at a time, in graph order."""
    layout = layouts(graph, plans)
    for weight in graph.weights:
        data = (
            _panels(weight, source) if layout[weight.name] == "panels16" else _plain(weight, source)
        )
        yield PackedWeight(weight, layout[weight.name], data)


def _panels(weight: Weight, source: WeightSource) -> NDArray[np.uint8]:
    dtype = weight.type.dtype
    found = source.unpacked(weight.name, dtype)
    return pack_panels(
        panel_format(dtype),
        values=found.values,
        codes=found.codes,
        d=found.d,
        m=found.m,
        block=dtype.block if isinstance(dtype, BlockFormat) else (1, 1),
    )


def _plain(weight: Weight, source: WeightSource) -> NDArray[np.uint8]:
    dtype = weight.type.dtype
    if not isinstance(dtype, DType) or dtype.name not in _PLAIN:
        raise LowerError(f"weight '{weight.name}': {dtype} has no plain layout")
    if weight.expr.kind == "literal":
        values: Any = np.array(weight.expr.args, dtype=np.float32)
    else:
        values = source.unpacked(weight.name, dtype).values
    if values is None:
        raise LowerError(f"weight '{weight.name}': has no plain values")
    if dtype.name == "bf16" and values.dtype != np.uint16:
        values = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return np.ascontiguousarray(values, _PLAIN[dtype.name]).reshape(-1).view(np.uint8)


def weight_record(packed: PackedWeight, offset: int) -> WeightRecord:
    """Return the record of a weight placed at `offset` bytes."""
    return WeightRecord(
        name=packed.weight.name,
        format=str(packed.weight.type.dtype),
        shape=tuple(int(d) for d in packed.weight.type.shape),
        layout=packed.layout,
        offset=offset,
        num_bytes=packed.data.nbytes,
    )
