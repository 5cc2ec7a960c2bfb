"""Weights into the layouts kernels read: panels for matrices, plain rows for vectors and
literals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.emit.cpp_types import packed_weights, panel_format
from tilewright.codegen.pack_cpu import FORMATS, Unpacked, pack_panels, packed_bytes
from tilewright.codegen.plan import GroupPlan
from tilewright.graph import Graph, Weight
from tilewright.graph.errors import LowerError
from tilewright.graph.types import BlockFormat, DType, ElementType, TensorType
from tilewright.runtime.artifact import ROW_MAJOR, WeightRecord

ALIGNMENT = 64
PACKING_VERSION = 1
_PLAIN = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32}


class WeightSource(Protocol):
    """Where a model's tensors come from."""

    def unpacked(self, name: str, dtype: ElementType) -> Unpacked:
        """Return a tensor as `dtype` stores it: plain values, or codes and scales of a format."""
        ...

    def pieces(self, name: str, dtype: ElementType) -> Iterator[Unpacked]:
        """Yield codes and scales of a table of rows, some rows at a time."""
        ...


@dataclass(frozen=True)
class PackedWeight:
    """A weight as it will lie in the file: pieces in order, made when they are asked for."""

    weight: Weight
    layout: str
    num_bytes: int
    pieces: Callable[[], Iterator[NDArray[np.uint8]]]

    @property
    def data(self) -> NDArray[np.uint8]:
        """All bytes at once."""
        return np.concatenate(list(self.pieces()))


def layouts(graph: Graph, plans: Sequence[GroupPlan]) -> Mapping[str, str]:
    """Map each weight to its layout; raise LowerError where two kernels want different ones."""
    found: dict[str, str] = {}
    for plan in plans:
        packed = packed_weights(plan.body.graph)
        for weight in plan.body.graph.weights:
            name = plan.body.binding[weight.name]
            layout = _packed_layout(weight.type) if weight.name in packed else ROW_MAJOR
            if found.setdefault(name, layout) != layout:
                raise LowerError(
                    f"weight '{name}': is read in two layouts: got {layout}, want {found[name]}"
                )
    return {w.name: found.get(w.name, ROW_MAJOR) for w in graph.weights}


def _packed_layout(type_: TensorType) -> str:
    return "panels16" if panel_format(type_.dtype) in FORMATS else "scaled_rows"


def pack_weights(
    graph: Graph, plans: Sequence[GroupPlan], source: WeightSource
) -> Iterator[PackedWeight]:
    """Yield every weight packed, one at a time, in graph order.

    The matrices of a stack, and the rows of a table with scales by row, are read and packed piece
    by piece.
    """
    layout = layouts(graph, plans)
    for weight in graph.weights:
        name = layout[weight.name]
        make = {"panels16": _panels, "scaled_rows": _rows, ROW_MAJOR: _plain}[name]
        yield PackedWeight(weight, name, _size(weight, name), partial(make, weight, source))


def _size(weight: Weight, layout: str) -> int:
    dtype, shape = weight.type.dtype, [int(d) for d in weight.type.shape]
    if layout == "panels16":
        return math.prod(shape[:-2]) * packed_bytes(panel_format(dtype), *shape[-2:])
    if layout == "scaled_rows":
        assert isinstance(dtype, BlockFormat)
        return math.prod(shape[:-1]) * dtype.row_bytes(shape[-1])
    return int(weight.type.num_bytes)


def _panels(weight: Weight, source: WeightSource) -> Iterator[NDArray[np.uint8]]:
    dtype = weight.type.dtype
    for name in weight.expr.tensors:
        found = source.unpacked(name, dtype)
        yield pack_panels(
            panel_format(dtype),
            values=found.values,
            codes=found.codes,
            d=found.d,
            m=found.m,
            block=dtype.block if isinstance(dtype, BlockFormat) else (1, 1),
        )


def _rows(weight: Weight, source: WeightSource) -> Iterator[NDArray[np.uint8]]:
    """Codes of a row, then its scales."""
    (name,) = weight.expr.tensors
    for piece in source.pieces(name, weight.type.dtype):
        assert piece.codes is not None and piece.d is not None
        yield np.concatenate((piece.codes, piece.d), 1).reshape(-1)


def _plain(weight: Weight, source: WeightSource) -> Iterator[NDArray[np.uint8]]:
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
    yield np.ascontiguousarray(values, _PLAIN[dtype.name]).reshape(-1).view(np.uint8)


def weight_record(packed: PackedWeight, offset: int) -> WeightRecord:
    """Return the record of a weight placed at `offset` bytes."""
    return WeightRecord(
        name=packed.weight.name,
        format=str(packed.weight.type.dtype),
        shape=tuple(int(d) for d in packed.weight.type.shape),
        layout=packed.layout,
        offset=offset,
        num_bytes=packed.num_bytes,
    )
