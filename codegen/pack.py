"""Weights into the layouts kernels read, by the language of the kernels: panels or blocks for
matrices, plain rows for vectors and literals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.arguments import matrix_weights
from tilewright.codegen.emit.cpp_types import panel_format
from tilewright.codegen.pack_ascend import CODED as CODED_ROWS
from tilewright.codegen.pack_ascend import F32_ROWS, coded_bytes, pack_coded, pack_rows
from tilewright.codegen.pack_ascend import LAYOUT as BF16_ROWS
from tilewright.codegen.pack_cpu import FORMATS, Unpacked, pack_panels, packed_bytes
from tilewright.codegen.pack_gpu import pack_matrix, refuses_format
from tilewright.codegen.pack_gpu import packed_bytes as gpu_bytes
from tilewright.codegen.pack_woven import is_woven, weave
from tilewright.codegen.plan import GroupPlan
from tilewright.graph import Graph, Weight
from tilewright.graph.errors import LowerError
from tilewright.graph.types import BlockFormat, DType, ElementType, TensorType
from tilewright.runtime.artifact import ROW_MAJOR, WeightRecord

ALIGNMENT = 64
PACKING_VERSION = 1
WOVEN = "woven16"
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


@dataclass(frozen=True)
class Layout:
    """A way to lay a weight out: its size in bytes, and its bytes piece by piece."""

    size: Callable[[Weight], int]
    pack: Callable[[Weight, WeightSource], Iterator[NDArray[np.uint8]]]


@dataclass(frozen=True)
class Packing:
    """How kernels of one language want some of their weights: `takes(body, weight)` says which,
    `layout(type)` in what layout."""

    takes: Callable[[Graph, str], bool]
    layout: Callable[[TensorType], str]


def _panels_size(weight: Weight) -> int:
    shape = [int(d) for d in weight.type.shape]
    matrices = math.prod(shape[:-2])
    return matrices * packed_bytes(panel_format(weight.type.dtype), shape[-2], shape[-1])


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


def _rows_size(weight: Weight) -> int:
    dtype, shape = weight.type.dtype, [int(d) for d in weight.type.shape]
    assert isinstance(dtype, BlockFormat)
    return math.prod(shape[:-1]) * dtype.row_bytes(shape[-1])


def _rows(weight: Weight, source: WeightSource) -> Iterator[NDArray[np.uint8]]:
    """Codes of a row, then its scales."""
    (name,) = weight.expr.tensors
    for piece in source.pieces(name, weight.type.dtype):
        assert piece.codes is not None and piece.d is not None
        yield np.concatenate((piece.codes, piece.d), 1).reshape(-1)


def _blocks(weight: Weight, source: WeightSource) -> Iterator[NDArray[np.uint8]]:
    dtype = weight.type.dtype
    assert isinstance(dtype, BlockFormat)
    for name in weight.expr.tensors:
        yield pack_matrix(dtype, source.unpacked(name, dtype))


def _woven(weight: Weight, source: WeightSource) -> Iterator[NDArray[np.uint8]]:
    n, k = (int(d) for d in weight.type.shape[-2:])
    for piece in _blocks(weight, source):
        yield weave(piece, n, k)


def _blocks_size(weight: Weight) -> int:
    return gpu_bytes(weight.type)


def _stored_size(weight: Weight) -> int:
    return int(weight.type.num_bytes)


def _bf16_rows_size(weight: Weight) -> int:
    return 2 * math.prod(int(d) for d in weight.type.shape)


def _bf16_rows(weight: Weight, source: WeightSource) -> Iterator[NDArray[np.uint8]]:
    for name in weight.expr.tensors:
        yield pack_rows(source.unpacked(name, weight.type.dtype))


def _coded_rows_size(weight: Weight) -> int:
    *stack, n, k = (int(d) for d in weight.type.shape)
    return math.prod(stack) * coded_bytes(weight.type.dtype, n, k)


def _coded_rows(weight: Weight, source: WeightSource) -> Iterator[NDArray[np.uint8]]:
    for name in weight.expr.tensors:
        yield pack_coded(source.unpacked(name, weight.type.dtype), weight.type.dtype)


def _is_matrix(body: Graph, weight: str) -> bool:
    return weight in matrix_weights(body)


def _is_quantised(body: Graph, weight: str) -> bool:
    return isinstance(body.type_of(weight).dtype, BlockFormat)


def _cpu_layout(type_: TensorType) -> str:
    return "panels16" if panel_format(type_.dtype) in FORMATS else "scaled_rows"


def _gpu_layout(type_: TensorType) -> str:
    """Blocks for matrices; tables with scales by row lie as rows, for gathering."""
    return "scaled_rows" if refuses_format(type_) else "blocks16"


def _cuda_layout(type_: TensorType) -> str:
    """Codes of fp4 are woven, so that kernels decode them with few instructions."""
    return WOVEN if is_woven(type_.dtype.name) else _gpu_layout(type_)


def _ascend_layout(type_: TensorType) -> str:
    """Tables of rows with their own scales lie as rows, fp32 is kept, all else becomes bf16."""
    if isinstance(type_.dtype, BlockFormat) and type_.dtype.code.is_float:
        known = panel_format(type_.dtype)
        return CODED_ROWS if known in FORMATS else "scaled_rows"
    return F32_ROWS if type_.dtype.name == "f32" else BF16_ROWS


PACKINGS: Mapping[str, Packing] = {
    "cpp": Packing(_is_matrix, _cpu_layout),
    "triton": Packing(_is_quantised, _gpu_layout),
    "cuda": Packing(_is_quantised, _cuda_layout),
    "tilelang_ascend": Packing(_is_matrix, _ascend_layout),
    "ascendc": Packing(_is_matrix, _ascend_layout),
}


def layouts(graph: Graph, plans: Sequence[GroupPlan]) -> Mapping[str, str]:
    """Map each weight to its layout; raise LowerError where two kernels want different ones."""
    found: dict[str, str] = {}
    for plan in plans:
        packing = PACKINGS[plan.choice.template.language]
        for weight in plan.body.graph.weights:
            name = plan.body.binding[weight.name]
            takes = packing.takes(plan.body.graph, weight.name)
            layout = packing.layout(weight.type) if takes else ROW_MAJOR
            if found.setdefault(name, layout) != layout:
                raise LowerError(
                    f"weight '{name}': is read in two layouts: got {layout}, want {found[name]}"
                )
    return {w.name: found.get(w.name, ROW_MAJOR) for w in graph.weights}


def pack_weights(
    graph: Graph, plans: Sequence[GroupPlan], source: WeightSource
) -> Iterator[PackedWeight]:
    """Yield every weight packed, one at a time, in graph order.

    The matrices of a stack, and the rows of a table with scales by row, are read and packed piece
    by piece.
    """
    layout = layouts(graph, plans)
    for weight in graph.weights:
        yield pack_weight(weight, layout[weight.name], source)


def pack_weight(weight: Weight, layout: str, source: WeightSource) -> PackedWeight:
    """Return one weight in a layout of `PACKINGS`."""
    packed = _LAYOUTS[layout]
    pieces = partial(packed.pack, weight, source)
    return PackedWeight(weight, layout, packed.size(weight), pieces)


def _plain(weight: Weight, source: WeightSource) -> Iterator[NDArray[np.uint8]]:
    dtype = weight.type.dtype
    if not isinstance(dtype, DType) or dtype.name not in _PLAIN:
        raise LowerError(f"weight '{weight.name}': {dtype} has no plain layout")
    if weight.expr.kind == "literal":
        yield _plain_bytes(np.array(weight.expr.args, dtype=np.float32), dtype)
        return
    for name in weight.expr.tensors:
        values = source.unpacked(name, dtype).values
        if values is None:
            raise LowerError(f"weight '{weight.name}': has no plain values")
        yield _plain_bytes(values, dtype)


def _plain_bytes(values: NDArray[Any], dtype: DType) -> NDArray[np.uint8]:
    if dtype.name == "bf16" and values.dtype != np.uint16:
        values = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return np.ascontiguousarray(values, _PLAIN[dtype.name]).reshape(-1).view(np.uint8)


_LAYOUTS: Mapping[str, Layout] = {
    "panels16": Layout(_panels_size, _panels),
    "scaled_rows": Layout(_rows_size, _rows),
    "blocks16": Layout(_blocks_size, _blocks),
    WOVEN: Layout(_blocks_size, _woven),
    BF16_ROWS: Layout(_bf16_rows_size, _bf16_rows),
    F32_ROWS: Layout(_stored_size, _plain),
    CODED_ROWS: Layout(_coded_rows_size, _coded_rows),
    ROW_MAJOR: Layout(_stored_size, _plain),
}


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
