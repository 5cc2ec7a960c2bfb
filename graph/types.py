"""Tensor types: element types, block-quantised formats and shapes.

Every type prints as it is stored, for example `bf16[tokens, 576]` or
`q4_1[g=32,axis=1,scale=f16][576, 576]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

from tilewright.graph.dims import Dim, ceil_div, format_dim, normalise, product
from tilewright.graph.errors import ShapeError


@dataclass(frozen=True)
class DType:
    """An element type. `bits` is its size in memory; sub-byte types are packed."""

    name: str
    bits: int
    kind: str  # float | int | scale

    def __str__(self) -> str:
        return self.name

    @property
    def is_float(self) -> bool:
        return self.kind == "float"


_DTYPES = (
    DType("f64", 64, "float"),
    DType("f32", 32, "float"),
    DType("f16", 16, "float"),
    DType("bf16", 16, "float"),
    DType("fp8_e4m3", 8, "float"),
    DType("fp8_e5m2", 8, "float"),
    DType("fp4_e2m1", 4, "float"),
    DType("ue8m0", 8, "scale"),
    DType("i64", 64, "int"),
    DType("i32", 32, "int"),
    DType("i8", 8, "int"),
    DType("u8", 8, "int"),
    DType("u4", 4, "int"),
)
DTYPES: Mapping[str, DType] = {d.name: d for d in _DTYPES}


def dtype(name: str) -> DType:
    """Return the element type of that name; raise ShapeError listing the known ones."""
    if name not in DTYPES:
        raise ShapeError(f"dtype '{name}': unknown: have {', '.join(DTYPES)}")
    return DTYPES[name]


F32, F64, F16, BF16 = (dtype(n) for n in ("f32", "f64", "f16", "bf16"))
I32, I64, U8 = dtype("i32"), dtype("i64"), dtype("u8")


@dataclass(frozen=True)
class BlockFormat:
    """A block-quantised storage format: integer or float codes with a scale (and a min) per block.

    A block spans `block` elements, one entry per axis of the weight `[rows, cols]`: `(1, 32)` is a
    group of 32 along the columns. The value of an element is `code * scale + min`. Activations and
    cache entries use groups along their last axis; of those, the last `tail` columns may stay bf16.
    """

    name: str
    code: DType
    block: tuple[int, int]
    scale: DType
    minimum: DType | None = None
    tail: int = 0

    def __str__(self) -> str:
        rows, cols = self.block
        shape = f"g={cols},axis=1" if rows == 1 else f"block={rows}x{cols}"
        tail = f",tail={self.tail}xbf16" if self.tail else ""
        return f"{self.name}[{shape},scale={self.scale}{tail}]"

    @property
    def is_float(self) -> bool:
        return True

    @property
    def bits(self) -> float:
        """Bits of storage per element of whole blocks, scales included."""
        per_block = self.scale.bits + (self.minimum.bits if self.minimum else 0)
        return self.code.bits + per_block / (self.block[0] * self.block[1])

    def row_bytes(self, width: int) -> int:
        """Bytes of one packed row of `width` elements: codes, tail, scales.

        A last group may be cut short. Rows with a tail pad their scales to 8 bytes, as the released
        V4 cache does (448 codes, 128 bytes of bf16, 7 scales and a pad: 584).
        """
        coded = width - self.tail
        scales = -(-coded // self.block[1]) * self.scale.bits // 8
        padded = -(-scales // 8) * 8 if self.tail else scales
        return -(-coded * self.code.bits // 8) + self.tail * 2 + padded


_I8, _U4 = dtype("i8"), dtype("u4")
_BLOCK_FORMATS = (
    BlockFormat("q4_1", _U4, (1, 32), F16, F16),
    BlockFormat("q8_0", _I8, (1, 32), F16),
    BlockFormat("q8_g16", _I8, (1, 16), F32),
    BlockFormat("fp8_e4m3", dtype("fp8_e4m3"), (128, 128), dtype("ue8m0")),
    BlockFormat("fp8_e4m3", dtype("fp8_e4m3"), (32, 32), dtype("ue8m0")),
    BlockFormat("fp4_e2m1", dtype("fp4_e2m1"), (1, 32), dtype("ue8m0")),
    *(BlockFormat("fp8_e4m3", dtype("fp8_e4m3"), (1, g), dtype("ue8m0")) for g in (128, 64, 32)),
    BlockFormat("fp4_e2m1", dtype("fp4_e2m1"), (1, 16), dtype("fp8_e4m3")),
    *(
        BlockFormat("fp8_e4m3", dtype("fp8_e4m3"), (1, 64), dtype("ue8m0"), tail=tail)
        for tail in (8, 16, 32, 64)
    ),
)
BLOCK_FORMATS: Mapping[str, BlockFormat] = {str(f): f for f in _BLOCK_FORMATS}

ElementType: TypeAlias = DType | BlockFormat


def element_type(text: str) -> ElementType:
    """Return the dtype or block format printed as `text`; raise ShapeError listing all."""
    if text in DTYPES:
        return DTYPES[text]
    if text in BLOCK_FORMATS:
        return BLOCK_FORMATS[text]
    known = ", ".join([*DTYPES, *BLOCK_FORMATS])
    raise ShapeError(f"element type '{text}': unknown: have {known}")


@dataclass(frozen=True)
class TensorType:
    """Element type and shape of a tensor, row-major."""

    dtype: ElementType
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(normalise(d) for d in self.shape))

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return f"{self.dtype}{_dims(self.shape)}"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def num_elements(self) -> Dim:
        return product(self.shape)

    @property
    def num_bytes(self) -> Dim:
        """Bytes of storage without padding, scales of whole blocks included."""
        if isinstance(self.dtype, BlockFormat) and self.dtype.tail:
            return normalise(product(self.shape[:-1]) * self.dtype.row_bytes(int(self.shape[-1])))
        bits = Fraction(self.dtype.bits)  # exact: blocks hold powers of two
        return ceil_div(normalise(self.num_elements * bits.numerator), 8 * bits.denominator)

    def with_shape(self, *shape: Dim) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: ElementType) -> TensorType:
        return TensorType(dtype, self.shape)


def _dims(shape: tuple[Dim, ...]) -> str:
    return f"[{', '.join(format_dim(d) for d in shape)}]"


def broadcast(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the common shape under trailing-axis broadcasting, or raise ShapeError."""
    rank = max(len(a), len(b))
    left = (1,) * (rank - len(a)) + a
    right = (1,) * (rank - len(b)) + b
    result = []
    for x, y in zip(left, right, strict=True):
        if x != y and x != 1 and y != 1:
            raise ShapeError(
                f"shapes do not broadcast: got {_dims(b)}, want a shape that fits {_dims(a)}"
            )
        result.append(y if x == 1 else x)
    return tuple(result)
