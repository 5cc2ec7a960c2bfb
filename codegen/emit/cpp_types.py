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
# By printed type. Tables of fp8 whose scales belong to single rows lie as rows, for gathering.
PANEL_FORMATS = {
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
    "q4_1[g=32,axis=1,scale=f16]": "q4_1",
    "q8_0[g=32,axis=1,scale=f16]": "q8_0",
    "q8_g16[g=16,axis=1,scale=f32]": "q8s16",
    "fp8_e4m3[block=128x128,scale=ue8m0]": "fp8",
    "fp8_e4m3[block=32x32,scale=ue8m0]": "fp8",
    "fp4_e2m1[g=32,axis=1,scale=ue8m0]": "fp4",
    "fp8_e4m3[g=128,axis=1,scale=ue8m0]": "fp8_rows128",
    "fp8_e4m3[g=64,axis=1,scale=ue8m0]": "fp8_rows64",
    "fp8_e4m3[g=32,axis=1,scale=ue8m0]": "fp8_rows32",
}


def storage(dtype: DType | BlockFormat) -> Storage:
    """Return how elements of `dtype` lie in memory; raise LowerError for one without C++ form.

    Values of activation formats lie as bf16, which holds them exactly."""
    if isinstance(dtype, BlockFormat) and dtype.block[0] == 1 and dtype.code.is_float:
        return _STORAGE["bf16"]
    if isinstance(dtype, BlockFormat) or dtype.name not in _STORAGE:
        raise LowerError(
            f"element type '{dtype}': has no plain C++ form: have {', '.join(_STORAGE)}"
        )
    return _STORAGE[dtype.name]


def panel_format(dtype: DType | BlockFormat) -> str:
    """Return the packed format of a matrix; raise LowerError listing the known ones."""
    if str(dtype) not in PANEL_FORMATS:
        known = ", ".join(PANEL_FORMATS)
        raise LowerError(f"weight format '{dtype}': no packed layout: have {known}")
    return PANEL_FORMATS[str(dtype)]
