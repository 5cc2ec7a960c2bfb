"""Random weights and cache rows of real formats, made on the GPU where no checkpoint is.

Codes are valid in their format (no NaN), scales keep values of ordinary size.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.pack import WOVEN
from tilewright.codegen.pack_tiles import matrix_bytes, scales_at
from tilewright.codegen.pack_woven import CODE_BYTES, SCALE_STEP
from tilewright.graph.types import BlockFormat, DType, ElementType, element_type
from tilewright.runtime.artifact import ROW_MAJOR, StateRecord, WeightRecord
from tilewright.runtime.devices.memory import TYPES

_CODES_RMS = {"fp8_e4m3": 7, "fp4_e2m1": 1}  # log2 of what random codes are about
_ONE_THIRD_E4M3 = 0x2B


def fill_weight(record: WeightRecord, memory: torch.Tensor, seed: int) -> None:
    """Fill the bytes of one weight. Matrices get values of about 1 / sqrt(columns)."""
    torch.manual_seed(seed)
    format_ = element_type(record.format)
    spread = _log2_root(record.shape[-1]) if len(record.shape) > 1 else 0
    if record.layout in ("blocks16", WOVEN) and isinstance(format_, BlockFormat):
        _fill_tiles(record, format_, memory, spread)
    elif isinstance(format_, BlockFormat):
        fill_rows(format_, record.shape[-1], memory, 0)
    elif record.layout == ROW_MAJOR:
        _fill_plain(record, format_, memory, spread)
    else:
        raise ValueError(f"weight '{record.name}': no random bytes for layout '{record.layout}'")


def _log2_root(columns: int) -> int:
    """Whole binary places of 1 / sqrt(columns), rounded down."""
    return -(-(columns - 1).bit_length() // 2)


def random_bytes(memory: torch.Tensor) -> None:
    """Fill memory of a multiple of 8 bytes, and the rest with zeros."""
    whole = memory[: memory.numel() // 8 * 8].view(torch.int64)
    whole.random_(-(1 << 63), None)
    memory[whole.numel() * 8 :] = 0


def _fill_tiles(
    record: WeightRecord, format_: BlockFormat, memory: torch.Tensor, spread: int
) -> None:
    name, (n, k) = format_.name, record.shape[-2:]
    random_bytes(memory)
    matrices = memory.view(-1, matrix_bytes(name, n, k))
    at = scales_at(name, n, k)
    if name == "fp8_e4m3":
        matrices[:, :at].bitwise_and_(0xFE)  # even codes: none is a NaN
    scale = 127 - spread - _CODES_RMS[name]
    if record.layout == WOVEN:
        tiles = memory.view(-1, CODE_BYTES * matrices.shape[1] // at)
        tiles[:, CODE_BYTES:] = scale + SCALE_STEP
    else:
        matrices[:, at:] = scale


def fill_rows(format_: BlockFormat, width: int, memory: torch.Tensor, spread: int) -> None:
    """Fill packed rows of `width` values: codes, a tail of bf16, scales."""
    random_bytes(memory)
    rows = memory.view(-1, format_.row_bytes(width))
    codes = (width - format_.tail) * int(format_.code.bits) // 8
    if format_.name == "fp8_e4m3":
        rows[:, :codes].bitwise_and_(0xFE)
    if format_.tail:
        tail = torch.randn(rows.shape[0], format_.tail, device=memory.device).bfloat16()
        rows[:, codes : codes + 2 * format_.tail] = tail.view(torch.uint8)
    power = 127 - spread - _CODES_RMS[format_.name]
    scale = power if format_.scale.name == "ue8m0" else _ONE_THIRD_E4M3
    rows[:, codes + 2 * format_.tail :] = scale


def _fill_plain(
    record: WeightRecord, format_: ElementType, memory: torch.Tensor, spread: int
) -> None:
    values = memory.view(TYPES[record.format].tensor_type)
    if record.format == "i32":
        values.copy_(torch.arange(values.numel(), device=memory.device) % 99_000)
    elif len(record.shape) > 1:
        values.normal_(0.0, 2.0**-spread if "embed" not in record.name else 1.0)
    else:
        values.normal_(1.0 if "norm" in record.name else 0.0, 0.1)


def fill_state(record: StateRecord, memory: torch.Tensor, seed: int) -> None:
    """Fill all rows of a state."""
    torch.manual_seed(seed)
    format_ = element_type(record.format)
    if isinstance(format_, BlockFormat):
        fill_rows(format_, _width(format_, record), memory, 0)
    elif isinstance(format_, DType) and format_.name == "i32":
        memory.view(torch.int32).random_(0, 99_000)
    else:
        memory.view(TYPES[record.dtype].tensor_type).normal_()


def _width(format_: BlockFormat, record: StateRecord) -> int:
    """Values of a row whose bytes are the last extent."""
    want: Any = record.shape[-1]
    for width in range(format_.block[1], 1 << 14, format_.block[1]):
        if format_.row_bytes(width + format_.tail) == want:
            return width + format_.tail
    raise ValueError(f"state '{record.name}': no width has rows of {want} bytes: {format_}")
