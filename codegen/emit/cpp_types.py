"""How element types and tensor arguments look in C++."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.graph import Graph
from tilewright.graph.dims import Dim, evaluate, symbols_of
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat, DType, TensorType


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
    if dtype.name not in PANEL_FORMATS:
        known = ", ".join(PANEL_FORMATS)
        raise LowerError(f"weight format '{dtype}': no packed layout: have {known}")
    return PANEL_FORMATS[dtype.name]


def packed_weights(body: Graph) -> frozenset[str]:
    """Return the weights a body reads as panels: matrices of contractions and embeddings."""
    found = set()
    for node in body.nodes:
        if op_def(node.op).kind is Kind.CONTRACT or node.op == "embedding":
            if node.inputs[1] in body.weight:
                found.add(node.inputs[1])
    return frozenset(found)


def constant(extent: Dim) -> int:
    """Return an extent that must be known when the kernel is generated."""
    if symbols_of([extent]):
        raise LowerError(f"extent '{extent}': is symbolic: want a constant inside a row")
    return evaluate(extent, {})


def inner_shape(type_: TensorType, rank: int, rows: Dim) -> tuple[int, ...]:
    """Return the shape of an operand within one row, for a result of `rank` axes."""
    shape = type_.shape
    if len(shape) == rank and rank > 0 and (shape[0] == rows or shape[0] == 1):
        shape = shape[1:]
    return tuple(constant(d) for d in shape)


def has_rows(type_: TensorType, rank: int, rows: Dim) -> bool:
    """Say whether an operand has one entry per row."""
    return len(type_.shape) == rank and rank > 0 and type_.shape[0] == rows
