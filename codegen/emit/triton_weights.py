"""Packed weights as kernels see them: a pointer to each of a weight's sections."""

from __future__ import annotations

from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.pack_gpu import block_layout, lies_as_rows, matrix_bytes, sections
from tilewright.codegen.pack_tiles import TILE_BITS, scales_at
from tilewright.graph.types import BlockFormat, TensorType

_BYTES = {"u8": 1, "fp8e4nv": 1, "i32": 4, "fp16": 2, "fp32": 4}
_SCALES = {"<f2": "fp16", "<f4": "fp32"}


def packed_sections(name: str, type_: TensorType) -> list[tuple[str, str, int]]:
    """Return (pointer, Triton's element type, offset in bytes) of a packed weight [.., n, k]."""
    n, k = (constant(d) for d in type_.shape[-2:])
    format = type_.dtype.name
    if isinstance(type_.dtype, BlockFormat) and lies_as_rows(type_.dtype):
        return [(name, "u8", 0)]
    if format in TILE_BITS:
        codes = "fp8e4nv" if TILE_BITS[format] == 8 else "u8"
        return [(name, codes, 0), (f"{name}_d", "i32", scales_at(format, n, k))]
    layout, places = block_layout(format), sections(format, n, k)
    scale = _SCALES[layout.scale]
    found = [(name, "u8", 0), (f"{name}_d", scale, places.scales)]
    return [*found, (f"{name}_m", scale, places.minima)] if layout.has_min else found


def matrix_strides(name: str, type_: TensorType) -> list[tuple[str, int]]:
    """Return (pointer, elements from one matrix of a stack to the next) of a packed weight."""
    n, k = (constant(d) for d in type_.shape[-2:])
    size = matrix_bytes(type_.dtype.name, n, k)
    return [(p, size // _BYTES[dtype]) for p, dtype, _ in packed_sections(name, type_)]
