"""Weights into the layouts kernels read, by the language of the kernels: panels or blocks for
matrices, plain rows for vectors and literals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.arguments import matrix_weights
from tilewright.codegen.emit.cpp_types import panel_format
from tilewright.codegen.pack_ascend import LAYOUT, pack_rows
from tilewright.codegen.pack_cpu import Unpacked, pack_panels
from tilewright.codegen.pack_gpu import pack_blocks
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


@dataclass(frozen=True)
class Packing:
    """How kernels of one language want some of their weights: `takes(body, weight)` says which."""

    layout: str
    takes: Callable[[Graph, str], bool]
    pack: Callable[[Weight, WeightSource], NDArray[np.uint8]]


def _panels(weight: Weight, source: WeightSource) -> NDArray[np.uint8]:
    found = source.unpacked(weight.name, weight.type.dtype)
    return pack_panels(
        panel_format(weight.type.dtype),
        values=found.values,
        codes=found.codes,
        d=found.d,
        m=found.m,
    )


def _blocks(weight: Weight, source: WeightSource) -> NDArray[np.uint8]:
    dtype = weight.type.dtype
    return pack_blocks(dtype.name, source.unpacked(weight.name, dtype))


def _rows(weight: Weight, source: WeightSource) -> NDArray[np.uint8]:
    return pack_rows(source.unpacked(weight.name, weight.type.dtype))


def _is_matrix(body: Graph, weight: str) -> bool:
    return weight in matrix_weights(body)


def _is_quantised(body: Graph, weight: str) -> bool:
    return isinstance(body.type_of(weight).dtype, BlockFormat)


PACKINGS: Mapping[str, Packing] = {
    "cpp": Packing("panels16", _is_matrix, _panels),
    "triton": Packing("blocks16", _is_quantised, _blocks),
    "tilelang_ascend": Packing(LAYOUT, _is_matrix, _rows),
    "ascendc": Packing(LAYOUT, _is_matrix, _rows),
}
_BY_LAYOUT = {p.layout: p for p in PACKINGS.values()}


def layouts(graph: Graph, plans: Sequence[GroupPlan]) -> Mapping[str, str]:
    """Map each weight to its layout; raise LowerError where two kernels want different ones."""
    found: dict[str, str] = {}
    for plan in plans:
        packing = PACKINGS[plan.choice.template.language]
        for weight in plan.body.graph.weights:
            name = plan.body.binding[weight.name]
            takes = packing.takes(plan.body.graph, weight.name)
            layout = packing.layout if takes else ROW_MAJOR
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
        packing = _BY_LAYOUT.get(layout[weight.name])
        data = packing.pack(weight, source) if packing else _plain(weight, source)
        yield PackedWeight(weight, layout[weight.name], data)


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
