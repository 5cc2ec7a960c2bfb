"""Weights whose scales are tensors of their own: fp8 by blocks or rows, packed fp4 by groups.

A weight and its scales become one entry with its values' shape and the text of its storage type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilewright.graph.errors import VerifyError
from tilewright.graph.types import BlockFormat, element_type
from tilewright.models.float_codes import power_of_two_bytes, scaled_values

if TYPE_CHECKING:
    from tilewright.models.record import TensorEntry

Bytes = NDArray[np.uint8]
FP8_BLOCKS = ((128, 128), (32, 32), (1, 128), (1, 64), (1, 32))
FP4_GROUP = 32
_FP4_STORED = ("i8", "u8", "f4")
_SCALE_STORED = ("f8_e8m0", "u8", "f32")
_CHUNK_BYTES = 64 << 20


def join_scales(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors with every quantised weight joined to its scales, and these left out.

    Only names, shapes and dtypes are read. Raises VerifyError naming the tensor where a scale is
    missing, of another dtype, or of a shape that no known block size gives.
    """
    joined: dict[str, TensorEntry] = {}
    taken: set[str] = set()
    for name, entry in tensors.items():
        if not _needs_scale(entry):
            continue
        scale = _scale_of(name, entry, tensors)
        joined[name] = _join(entry, scale)
        taken.add(scale.name)
    return {n: joined.get(n, entry) for n, entry in tensors.items() if n not in taken}


def _needs_scale(entry: TensorEntry) -> bool:
    if entry.dtype in ("f8_e4m3", "f4"):
        return True
    return entry.dtype in _FP4_STORED and len(entry.shape) == 2 and entry.name.endswith(".weight")


def scale_names(name: str) -> tuple[str, ...]:
    """Names under which the scales of a weight are looked for, in order."""
    stem = name.removesuffix(".weight")
    return (f"{stem}.scale", f"{name}_scale_inv", f"{name}_scale")


def _scale_of(
    name: str, entry: TensorEntry, tensors: Mapping[str, TensorEntry]
) -> TensorEntry:
    for candidate in scale_names(name):
        if candidate in tensors:
            scale = tensors[candidate]
            if scale.dtype not in _SCALE_STORED or len(scale.shape) != 2:
                raise VerifyError(
                    f"{scale.where}: is no scale of '{name}': got {scale.dtype} "
                    f"{list(scale.shape)}, want {' or '.join(_SCALE_STORED)} [rows, cols]"
                )
            return scale
    raise VerifyError(
        f"{entry.where}: its scale is missing: got {entry.dtype} without a tensor "
        f"'{scale_names(name)[0]}'"
    )


def _join(entry: TensorEntry, scale: TensorEntry) -> TensorEntry:
    if len(entry.shape) != 2:
        raise VerifyError(
            f"{entry.where}: quantised tensors are matrices: got {list(entry.shape)}, want [n, k]"
        )
    n, k = entry.shape
    fp4 = entry.dtype in _FP4_STORED
    if fp4 and entry.dtype != "f4":
        k *= 2
    if fp4 and k % FP4_GROUP:
        raise VerifyError(
            f"{entry.where}: rows do not divide into groups: got {k} columns of fp4, "
            f"want a multiple of {FP4_GROUP}"
        )
    blocks = ((1, FP4_GROUP),) if fp4 else FP8_BLOCKS
    for rows, cols in blocks:
        if scale.shape == (-(-n // rows), -(-k // cols)):
            format = _format("fp4_e2m1" if fp4 else "fp8_e4m3", rows, cols)
            return replace(entry, dtype=format, shape=(n, k), scale=scale)
    wants = [f"{[-(-n // r), -(-k // c)]} for blocks of {r}x{c}" for r, c in blocks]
    raise VerifyError(
        f"{scale.where}: shape does not fit '{entry.name}' [{n}, {k}]: got {list(scale.shape)}, "
        f"want {' or '.join(wants)}"
    )


def _format(name: str, rows: int, cols: int) -> str:
    block = f"g={cols},axis=1" if rows == 1 else f"block={rows}x{cols}"
    return f"{name}[{block},scale=ue8m0]"


def block_format(entry: TensorEntry) -> BlockFormat:
    """The storage type of a joined entry."""
    found = element_type(entry.dtype)
    assert isinstance(found, BlockFormat)
    return found


def read_scaled(entry: TensorEntry) -> tuple[Bytes, Bytes]:
    """Codes and ue8m0 scales of a joined entry, after a look at every value.

    fp8 codes are [n, k], fp4 ones [n, k / 2]. Raises VerifyError for a NaN.
    """
    scale = read_scale(entry)
    codes = _codes(entry)
    _check_codes(entry, codes)
    return codes, scale


def read_rows(entry: TensorEntry) -> Iterator[tuple[Bytes, Bytes]]:
    """`read_scaled` piece by piece, for tables with scales by row: [some rows, ..] each."""
    codes, scale = _codes(entry), read_scale(entry)
    step = max(1, _CHUNK_BYTES // codes.shape[1])
    for start in range(0, len(codes), step):
        piece = codes[start : start + step]
        _check_codes(entry, piece)
        yield piece, scale[start : start + step]


def read_scale(entry: TensorEntry) -> Bytes:
    """The ue8m0 bytes of a joined entry. Raises VerifyError for a NaN or another number."""
    scale = entry.scale
    assert scale is not None
    if scale.dtype == "f32":
        values = scale.raw().view("<f4").reshape(scale.shape)
        found = power_of_two_bytes(values)
        if found is None:
            raise VerifyError(f"{scale.where}: holds a scale that is no normal power of two")
        return found
    codes = scale.raw().reshape(scale.shape)
    if bool((codes == 255).any()):
        at = np.argwhere(codes == 255)[0].tolist()
        raise VerifyError(f"{scale.where}: holds NaN: got scale 255 at {at}, want 0 to 254")
    return codes


def dequantise_scaled(entry: TensorEntry) -> NDArray[np.float32]:
    """Values of a joined entry in float32, of its shape."""
    format = block_format(entry)
    codes, scale = read_scaled(entry)
    return scaled_values(format.name, codes, scale, format.block)


def _codes(entry: TensorEntry) -> Bytes:
    n, k = entry.shape
    return entry.raw().reshape(n, k // 2 if block_format(entry).code.bits == 4 else k)


def _check_codes(entry: TensorEntry, codes: Bytes) -> None:
    if block_format(entry).code.name == "fp8_e4m3":
        # Both NaN codes are 127 without their sign; none above it exists.
        if codes.size and int((codes & np.uint8(127)).max()) == 127:
            at = np.argwhere(codes & np.uint8(127) == 127)[0].tolist()
            raise VerifyError(f"{entry.where}: holds NaN: got fp8 code 127 at {at}, want a number")
