"""Values of weights as kernels of a target read them: panels, blocks, tiles or rows, and stacks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.arguments import matrix_weights
from tilewright.codegen.emit.cpp_types import panel_format
from tilewright.codegen.emit.triton_contract import contractions
from tilewright.codegen.pack_ascend import unpack_coded, unpack_rows
from tilewright.codegen.pack_cpu import FORMATS, Unpacked, unpack_panels
from tilewright.codegen.pack_gpu import lies_as_rows, unpack_blocks
from tilewright.codegen.pack_tiles import TILE_BITS, unpack_tiles
from tilewright.codegen.pack_woven import unweave
from tilewright.graph import Graph
from tilewright.graph.dims import evaluate
from tilewright.graph.types import BlockFormat, ElementType, TensorType
from tilewright.models.float_codes import scaled_values
from tilewright.targets.nvidia.hopper_contract import accepts_hopper
from tilewright.tools.packed_rows import bf16_values, row_values

Array = NDArray[Any]
_SCALE_GROUP = 32  # what unpacked float codes have a scale for
PACKED_FOR = ("cpu", "gpu", "hopper", "ascend")


def packing_of(target: str) -> str:
    """Return whose kernels read the weights of an artifact for a target of this name."""
    return {"cpu": "cpu", "ascend950": "ascend", "sm90": "hopper"}.get(target, "gpu")


def weight_values(
    body: Graph, name: str, packed: Array, *, packing: str
) -> NDArray[np.float64] | None:
    """Return the values [.., n, k] of a packed weight, None for one that lies row by row.

    Raises LowerError for a format without layout, or if the size is not that of the shape.
    """
    if name not in body.weight:
        return None
    type_ = body.type_of(name)
    if packing == "hopper":
        taken = contractions(body) and not accepts_hopper(body)
        packing = "woven" if taken else "gpu"
    quantised, tiles = isinstance(type_.dtype, BlockFormat), packing in ("gpu", "woven")
    if not (quantised if tiles else name in matrix_weights(body)):
        return None
    *stack, n, k = (evaluate(d, {}) for d in type_.shape)
    if _is_table(type_, packing):
        assert isinstance(type_.dtype, BlockFormat)
        rows = packed.reshape(*stack, n, type_.dtype.row_bytes(k))
        return row_values(type_.dtype, rows, k).astype(np.float64)
    unpack = {
        "cpu": _unpack_cpu, "gpu": _unpack_gpu, "woven": _unpack_woven, "ascend": _unpack_ascend,
    }[packing]  # fmt: skip
    parts = packed.reshape(math.prod(stack), -1)
    values = [matrix_values(type_.dtype, unpack(type_.dtype, part, n, k)) for part in parts]
    return np.stack(values).reshape(*stack, n, k)


def _is_table(type_: TensorType, packing: str) -> bool:
    """Say whether a weight lies as rows of codes, then scales."""
    if packing in ("gpu", "woven"):
        return isinstance(type_.dtype, BlockFormat) and lies_as_rows(type_.dtype)
    return panel_format(type_.dtype) not in FORMATS


def _unpack_cpu(dtype: ElementType, packed: Array, n: int, k: int) -> Unpacked:
    return unpack_panels(panel_format(dtype), packed, n, k)


def _unpack_gpu(dtype: ElementType, packed: Array, n: int, k: int) -> Unpacked:
    if isinstance(dtype, BlockFormat) and dtype.name in TILE_BITS:
        return unpack_tiles(dtype.name, packed, n, k, dtype.block)
    return unpack_blocks(dtype.name, packed, n, k)


def _unpack_woven(dtype: ElementType, packed: Array, n: int, k: int) -> Unpacked:
    return _unpack_gpu(dtype, unweave(packed, n, k), n, k)


def _unpack_ascend(dtype: ElementType, packed: Array, n: int, k: int) -> Unpacked:
    if isinstance(dtype, BlockFormat) and dtype.code.is_float:
        return unpack_coded(packed, dtype, n, k)
    if dtype.name == "f32":
        return Unpacked(values=packed.view(np.float32).reshape(n, k))
    return unpack_rows(packed, n, k)


def matrix_values(dtype: ElementType, found: Unpacked) -> NDArray[np.float64]:
    """Return the values of a weight [n, k]: exact, block scales applied."""
    if found.values is not None:
        plain = found.values
        return (bf16_values(plain) if plain.dtype == np.uint16 else plain).astype(np.float64)
    assert found.codes is not None and found.d is not None
    if isinstance(dtype, BlockFormat) and dtype.code.is_float:
        scaled = scaled_values(dtype.name, found.codes, found.d, (1, _SCALE_GROUP))
        return scaled.astype(np.float64)
    group = found.codes.shape[1] // found.d.shape[1]
    result = found.codes * np.repeat(found.d.astype(np.float64), group, axis=1)
    return result if found.m is None else result + np.repeat(found.m.astype(np.float64), group, 1)
