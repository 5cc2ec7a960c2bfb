"""Storage formats of weights: their sizes, their values in float32, their codes and scales.

Formulas follow the block layouts of ggml (ggml-common.h, dequantize_row_* in ggml-quants.c); every
function works on whole tensors at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.graph.errors import VerifyError

Bytes = NDArray[np.uint8]
Half = NDArray[np.float16]
Single = NDArray[np.float32]


@dataclass(frozen=True)
class BlockFormat:
    """A format stores `block` consecutive values of a row in `block_bytes` bytes."""

    block: int
    block_bytes: int


BLOCK_FORMATS = {
    "f32": BlockFormat(1, 4),
    "f16": BlockFormat(1, 2),
    "bf16": BlockFormat(1, 2),
    "q8_0": BlockFormat(32, 34),
    "q4_0": BlockFormat(32, 18),
    "q4_1": BlockFormat(32, 20),
    "q6_k": BlockFormat(256, 210),
}


def _blocks(dtype: str, raw: Bytes, shape: tuple[int, ...], where: str) -> Bytes:
    """View raw bytes as [rows, blocks per row, bytes per block]."""
    form = BLOCK_FORMATS[dtype]
    cols = shape[-1] if shape else 1
    if cols % form.block:
        raise VerifyError(
            f"{where}: rows do not divide into blocks of {dtype}: got {cols} columns, "
            f"want a multiple of {form.block}"
        )
    want = math.prod(shape) // form.block * form.block_bytes
    if raw.size != want:
        raise VerifyError(
            f"{where}: bytes do not match the shape: got {raw.size}, "
            f"want {want} for {dtype} {list(shape)}"
        )
    return raw.reshape(math.prod(shape[:-1]), cols // form.block, form.block_bytes)


def _halves(column: Bytes) -> Half:
    """Read two bytes of every block as one float16: [rows, blocks]."""
    return np.ascontiguousarray(column).view("<f2")[..., 0]


def _nibbles(packed: Bytes) -> Bytes:
    """Split [rows, blocks, 16] bytes into codes: low nibbles are values 0-15, high ones 16-31."""
    rows, blocks, size = packed.shape
    packed = np.ascontiguousarray(packed)
    codes = np.empty((rows, blocks, 2, size), np.uint8)
    # One 16-byte item per copy: a strided inner loop over single bytes is several times slower.
    halves = codes.view(f"V{size}")[..., 0]
    halves[:, :, 0] = (packed & np.uint8(15)).view(f"V{size}")[..., 0]
    halves[:, :, 1] = (packed >> np.uint8(4)).view(f"V{size}")[..., 0]
    return codes.reshape(rows, blocks * 2 * size)


def unpack_q4_0(
    raw: Bytes, shape: tuple[int, ...], *, where: str = "tensor"
) -> tuple[Bytes, Half]:
    """Codes 0-15 [N, K] and scales [N, K/32] of Q4_0: value = d * (code - 8).

    Raises VerifyError if the bytes do not match the shape.
    """
    blocks = _blocks("q4_0", raw, shape, where)
    return _nibbles(blocks[..., 2:]), _halves(blocks[..., :2])


def unpack_q4_1(
    raw: Bytes, shape: tuple[int, ...], *, where: str = "tensor"
) -> tuple[Bytes, Half, Half]:
    """Codes 0-15 [N, K], scales and minima [N, K/32] of Q4_1: value = d * code + m.

    Raises VerifyError if the bytes do not match the shape.
    """
    blocks = _blocks("q4_1", raw, shape, where)
    return _nibbles(blocks[..., 4:]), _halves(blocks[..., :2]), _halves(blocks[..., 2:4])


def unpack_q8_0(
    raw: Bytes, shape: tuple[int, ...], *, where: str = "tensor"
) -> tuple[NDArray[np.int8], Half]:
    """Codes [N, K] and scales [N, K/32] of Q8_0: value = d * code.

    Raises VerifyError if the bytes do not match the shape.
    """
    blocks = _blocks("q8_0", raw, shape, where)
    rows, count, _ = blocks.shape
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return codes.reshape(rows, count * 32), _halves(blocks[..., :2])


def unpack_q6_k(
    raw: Bytes, shape: tuple[int, ...], *, where: str = "tensor"
) -> tuple[NDArray[np.int8], Single]:
    """Codes -32..31 [N, K] and scales [N, K/16] of Q6_K: value = scale * code.

    The scale is the block's float16 times an 8-bit integer: 19 bits, so float32 holds it exactly.
    Raises VerifyError if the bytes do not match the shape.
    """
    blocks = _blocks("q6_k", raw, shape, where)
    rows, count, _ = blocks.shape
    low = blocks[..., :128].reshape(rows, count, 2, 64)
    high = blocks[..., 128:192].reshape(rows, count, 2, 32)
    codes = np.empty((rows, count, 2, 4, 32), np.uint8)
    for quarter in range(4):
        half = low[..., 32 * (quarter % 2) :][..., :32]
        nibble = half & np.uint8(15) if quarter < 2 else half >> np.uint8(4)
        top = (high >> np.uint8(2 * quarter)) & np.uint8(3)
        codes[..., quarter, :] = nibble | (top << np.uint8(4))
    codes -= np.uint8(32)
    groups = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    with np.errstate(invalid="ignore"):
        scale = _halves(blocks[..., 208:]).astype(np.float32)[..., None] * groups
    return codes.view(np.int8).reshape(rows, count * 256), scale.reshape(rows, count * 16)


def _scale(codes: NDArray[np.generic], scale: NDArray[np.generic], group: int) -> Single:
    """Multiply codes [N, K] by one scale per group of columns."""
    values = codes.astype(np.float32).reshape(-1, group)
    # A broken file may hold infinite scales: the values say so, a warning would not help.
    with np.errstate(invalid="ignore", over="ignore"):
        values *= scale.astype(np.float32).reshape(-1, 1)
    return values


def _q4_0(raw: Bytes, shape: tuple[int, ...], where: str) -> Single:
    codes, d = unpack_q4_0(raw, shape, where=where)
    return _scale(codes.view(np.int8) - np.int8(8), d, 32)


def _q4_1(raw: Bytes, shape: tuple[int, ...], where: str) -> Single:
    codes, d, m = unpack_q4_1(raw, shape, where=where)
    values = _scale(codes, d, 32)
    with np.errstate(invalid="ignore", over="ignore"):
        values += m.astype(np.float32).reshape(-1, 1)
    return values


def _q8_0(raw: Bytes, shape: tuple[int, ...], where: str) -> Single:
    codes, d = unpack_q8_0(raw, shape, where=where)
    return _scale(codes, d, 32)


def _q6_k(raw: Bytes, shape: tuple[int, ...], where: str) -> Single:
    codes, scale = unpack_q6_k(raw, shape, where=where)
    return _scale(codes, scale, 16)


def _f32(raw: Bytes, shape: tuple[int, ...], where: str) -> Single:
    return np.ascontiguousarray(_blocks("f32", raw, shape, where)).view("<f4").astype(np.float32)


def _f16(raw: Bytes, shape: tuple[int, ...], where: str) -> Single:
    return np.ascontiguousarray(_blocks("f16", raw, shape, where)).view("<f2").astype(np.float32)


def _bf16(raw: Bytes, shape: tuple[int, ...], where: str) -> Single:
    bits = np.ascontiguousarray(_blocks("bf16", raw, shape, where)).view("<u2").astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


_FORMULAS: dict[str, Callable[[Bytes, tuple[int, ...], str], Single]] = {
    "f32": _f32,
    "f16": _f16,
    "bf16": _bf16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q6_k": _q6_k,
}


def dequantise(
    dtype: str, raw: Bytes, shape: tuple[int, ...], *, where: str = "tensor"
) -> Single:
    """Values of a stored tensor in float32, of `shape`, as ggml's formulas give them.

    Raises VerifyError for an unknown dtype or bytes that do not match the shape.
    """
    if dtype not in _FORMULAS:
        raise VerifyError(
            f"{where}: no formula for its dtype: got {dtype}, want one of {', '.join(_FORMULAS)}"
        )
    return _FORMULAS[dtype](raw, shape, where).reshape(shape)
