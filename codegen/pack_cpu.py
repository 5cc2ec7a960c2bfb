"""Pack weights [N, K] into the panels that the CPU contraction kernels read, and back.

A panel is 16 output columns for all of K; templates/cpp/tw_contract_formats.h states the layout.
The packed size is that of the unpacked format with N rounded up to 16: nothing is lost or added.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.pack_floats import pack_floats, unpack_floats
from tilewright.graph.errors import LowerError

PANEL = 16
Array = NDArray[Any]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class PanelFormat:
    """Sizes of one packed format: `group` values of k of 16 columns take `group_bytes`."""

    group: int
    group_bytes: int
    words: int = 0
    scale: str = ""
    has_min: bool = False
    float_codes: bool = False


@dataclass(frozen=True)
class Unpacked:
    """A weight [N, K] out of its panels: `values` of a plain format, else codes and scales.

    fp8 and fp4 have bytes as codes, [N, K] and [N, K / 2], and ue8m0 bytes as scales.
    """

    values: Array | None = None
    codes: Array | None = None
    d: Array | None = None
    m: Array | None = None


FORMATS: dict[str, PanelFormat] = {
    "f32": PanelFormat(1, 64),
    "f16": PanelFormat(1, 32),
    "bf16": PanelFormat(1, 32),
    "q4_1": PanelFormat(32, 320, words=4, scale="<f2", has_min=True),
    "q8_0": PanelFormat(32, 544, words=8, scale="<f2"),
    "q8s16": PanelFormat(16, 320, words=4, scale="<f4"),
    "fp8": PanelFormat(32, 528, words=8, scale="|u1", float_codes=True),
    "fp4": PanelFormat(32, 272, words=4, scale="|u1", float_codes=True),
}
_PLAIN = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}


def panel_format(name: str) -> PanelFormat:
    """Look up a packed format. Raises LowerError for an unknown name."""
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise LowerError(f"packed format '{name}': unknown: got {name}, want one of {known}")
    return FORMATS[name]


def packed_bytes(format: str, n: int, k: int) -> int:
    """Size of a packed [n, k] weight. Raises LowerError if k does not hold whole groups."""
    layout = panel_format(format)
    if k % layout.group:
        raise LowerError(
            f"packed format '{format}': row length does not hold whole groups: got {k}, "
            f"want a multiple of {layout.group}"
        )
    return -(-n // PANEL) * (k // layout.group) * layout.group_bytes


def pack_panels(
    format: str,
    *,
    values: Array | None = None,
    codes: Array | None = None,
    d: Array | None = None,
    m: Array | None = None,
    block: tuple[int, int] = (1, 32),
) -> Bytes:
    """Pack one weight [N, K] into panels: uint8 [packed_bytes].

    Plain formats take `values` (float32 or float16; for bf16 also its bits as uint16; narrowing
    rounds to nearest even). q4_1 takes codes 0..15 with `d` and `m` [N, K / 32]; q4_0 takes codes
    0..15 with `d`, and becomes q4_1 with m = -8 d; q8_0 takes int8 codes with `d` [N, K / 32];
    q8s16 takes int8 codes with float32 `d` [N, K / 16]. fp8 and fp4 take bytes of codes and of
    scales, one of these per `block` of rows and columns, as `pack_floats` says. Raises LowerError
    if arrays do not fit.
    """
    if format == "q4_0":
        d, m = _q4_0_scales(d)
        format = "q4_1"
    layout = panel_format(format)
    if not layout.words:
        return _pack_plain(format, _required(format, "values", values))
    matrix = _required(format, "codes", codes)
    if layout.float_codes:
        return pack_floats(format, matrix, _required(format, "d", d), block).reshape(-1)
    packed_bytes(format, *matrix.shape)
    groups = matrix.shape[1] // layout.group
    panels = -(-matrix.shape[0] // PANEL)
    out = np.zeros((panels, groups, layout.group_bytes), np.uint8)
    scales = [("d", d)] + ([("m", m)] if layout.has_min else [])
    start = 0
    for name, scale in scales:
        array = _required(format, name, scale)
        _check_shape(format, name, array, (matrix.shape[0], groups))
        lanes = _columns_last(array.astype(layout.scale, copy=False))
        stop = start + PANEL * lanes.dtype.itemsize
        out[:, :, start:stop] = lanes.view(np.uint8)
        start = stop
    padded = _pad_rows(matrix).reshape(panels, PANEL, groups, layout.group)
    fields = _nibble_fields(padded) if layout.has_min else _byte_fields(padded)
    _field_view(out, layout)[...] = fields
    return out.reshape(-1)


def unpack_panels(format: str, packed: Bytes, n: int, k: int) -> Unpacked:
    """Invert `pack_panels`: values [n, k] (bf16 as its bits), or codes [n, k] with scales.

    Raises LowerError if the number of bytes is not that of [n, k].
    """
    layout = panel_format(format)
    if packed.size != packed_bytes(format, n, k):
        raise LowerError(
            f"packed format '{format}': size differs from [{n}, {k}]: got {packed.size} bytes, "
            f"want {packed_bytes(format, n, k)}"
        )
    groups = k // layout.group
    if not layout.words:
        lanes = packed.view(_PLAIN[format]).reshape(-1, groups, PANEL)
        return Unpacked(values=_columns_first(lanes)[:n])
    if layout.float_codes:
        floats, exponents = unpack_floats(format, packed, n, k)
        return Unpacked(codes=floats, d=exponents)
    blocks = packed.reshape(-1, groups, layout.group_bytes)
    width = PANEL * np.dtype(layout.scale).itemsize
    scales = [
        _columns_first(np.ascontiguousarray(blocks[:, :, at : at + width]).view(layout.scale))[:n]
        for at in range(0, (1 + layout.has_min) * width, width)
    ]
    fields = _field_view(blocks, layout)
    if layout.has_min:
        fields = np.stack((fields & 15, fields >> 4), axis=4).reshape(*fields.shape[:3], 8, 4)
    codes = np.ascontiguousarray(fields).reshape(-1, k)[:n]
    if layout.has_min:
        return Unpacked(codes=codes, d=scales[0], m=scales[1])
    return Unpacked(codes=(codes ^ 128).view(np.int8), d=scales[0])


def _field_view(blocks: Bytes, layout: PanelFormat) -> Bytes:
    """View the words of all groups as bytes [panel, column, group, byte of word, word]."""
    start = layout.group_bytes - 64 * layout.words
    shape = (*blocks.shape[:2], layout.words, PANEL, 4)
    outer = blocks.strides[:2]
    view = np.lib.stride_tricks.as_strided(
        blocks[:, :, start:], shape, (*outer, 4 * PANEL, 4, 1)
    )
    return view.transpose(0, 3, 1, 4, 2)


def _nibble_fields(codes: Array) -> Bytes:
    """Join codes k = 4 j + w of even and odd j into bytes [panel, column, group, j / 2, w]."""
    quads = np.ascontiguousarray(codes, np.uint8).view("<u4")
    joined: Array = quads[..., 0::2] | (quads[..., 1::2] << 4)
    return joined.view(np.uint8).reshape(*codes.shape[:3], 4, 4)


def _byte_fields(codes: Array) -> Bytes:
    """Offset signed codes k = words * j + w by 128: bytes [panel, column, group, j, w]."""
    offset: Array = np.ascontiguousarray(codes, np.int8).view(np.uint8) ^ np.uint8(128)
    return offset.reshape(*codes.shape[:3], 4, -1)


def _pack_plain(format: str, values: Array) -> Bytes:
    packed_bytes(format, *values.shape)
    narrow = _bf16_bits(values) if format == "bf16" else values.astype(_PLAIN[format], copy=False)
    return _columns_last(narrow).view(np.uint8).reshape(-1)


def _bf16_bits(values: Array) -> NDArray[np.uint16]:
    """Round float32 to the bits of bf16, to nearest even; NaN stays NaN; bits pass through."""
    if values.dtype == np.uint16:
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | 0x40, rounded)


def _q4_0_scales(d: Array | None) -> tuple[Array, Array]:
    """Return (d, -8 d) in f16; a power of two is exact unless it overflows."""
    scale = _required("q4_0", "d", d).astype("<f2", copy=False)
    with np.errstate(over="ignore"):
        low = scale * np.float16(-8)
    if not np.array_equal(np.isfinite(low), np.isfinite(scale)):
        largest = float(np.abs(scale[np.isfinite(scale)]).max())
        raise LowerError(
            f"packed format 'q4_0': -8 d overflows f16: got |d| = {largest:g}, want at most 8188"
        )
    return scale, low


def _pad_rows(matrix: Array) -> Array:
    absent = -matrix.shape[0] % PANEL
    return np.pad(matrix, ((0, absent), (0, 0))) if absent else matrix


def _columns_last(matrix: Array) -> Array:
    """[N, G] -> contiguous [panel, G, 16], absent rows zero."""
    padded = _pad_rows(matrix)
    return np.ascontiguousarray(padded.reshape(-1, PANEL, matrix.shape[1]).transpose(0, 2, 1))


def _columns_first(lanes: Array) -> Array:
    """[panel, G, 16] -> contiguous [N, G]."""
    return np.ascontiguousarray(lanes.transpose(0, 2, 1)).reshape(-1, lanes.shape[1])


def _required(format: str, name: str, array: Array | None) -> Array:
    if array is None:
        raise LowerError(f"packed format '{format}': an array is missing: got none, want '{name}'")
    return array


def _check_shape(format: str, name: str, array: Array, want: tuple[int, int]) -> None:
    if array.shape != want:
        raise LowerError(
            f"packed format '{format}': shape of '{name}' does not fit the codes: "
            f"got {list(array.shape)}, want {list(want)}"
        )
