"""How element types and tensor arguments look in C++."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.graph.errors import LowerError
from tilewright.graph.types import BlockFormat, DType


@dataclass(frozen=True)
class Storage:
    """C++ element type, how to read one element as fp32 and how to write one."""

    ctype: str
    load: str
    store: str
    code: str  # DLPack type code
    bits: int


_STORAGE = {
    "f32": Storage("float", "{0}", "{0}", "kDLFloat", 32),
    "bf16": Storage("uint16_t", "tw_bf16_to_f32({0})", "tw_f32_to_bf16({0})", "kDLBfloat", 16),
    "f16": Storage("uint16_t", "tw_f16_to_f32({0})", "tw_f32_to_f16({0})", "kDLFloat", 16),
    "i32": Storage("int32_t", "((float){0})", "((int32_t){0})", "kDLInt", 32),
}
PACKED = Storage("uint8_t", "", "", "kDLUInt", 8)
PANEL_FORMATS = {
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
    "q4_1": "q4_1",
    "q8_0": "q8_0",
    "q8_g16": "q8s16",
}


def storage(dtype: DType | BlockFormat) -> Storage:
    """Return how elements of `dtype` lie in memory; raise LowerError for one without C++ form."""
    if isinstance(dtype, BlockFormat) or dtype.name not in _STORAGE:
        raise LowerError(
            f"element type '{dtype}': has no plain C++ form: have {', '.join(_STORAGE)}"
        )
    return _STORAGE[dtype.name]


def panel_format(dtype: DType | BlockFormat) -> str:
    """Return the packed format of a matrix; raise LowerError listing the known ones."""
    if dtype.name not in PANEL_FORMATS:
        known = ", ".join(PANEL_FORMATS)
        raise LowerError(f"weight format '{dtype}': no packed layout: have {known}")
    return PANEL_FORMATS[dtype.name]
