"""Rows chosen by integer indices."""

from __future__ import annotations

from tilewright.graph.dims import Dim, product
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, register, want
from tilewright.graph.types import F32, I32, TensorType


def _infer_embedding(inputs: Types, attrs: Attrs) -> TensorType:
    ids, table = inputs
    want(ids.dtype == I32 and ids.rank >= 1, f"ids do not fit: got {ids}, want i32[n] or more axes")
    fits = table.dtype.is_float and table.rank == 2
    want(fits, f"table is no matrix: got {table}, want floats [n, width]")
    return TensorType(F32, (*ids.shape, table.shape[1]))


def _infer_gather_rows(inputs: Types, attrs: Attrs) -> TensorType:
    x, rows = inputs
    want(rows.dtype == I32 and rows.rank == 1, f"rows do not fit: got {rows}, want i32[n]")
    want(x.rank >= 1, f"operand has no rows: got {x}, want rank 1 or more")
    return x.with_shape(rows.shape[0], *x.shape[1:])


def _rows_read(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    """Bytes of the rows of the table that are looked up."""
    return inputs[1].with_shape(product(output.shape[:-1]), output.shape[-1]).num_bytes


register(
    OpDef(
        name="embedding",
        kind=Kind.GATHER,
        num_inputs=2,
        infer=_infer_embedding,
        reference=lambda inputs, attrs: inputs[1][inputs[0].long()],
        flops=lambda inputs, output, attrs: 0,
        far=(1,),
        touched={1: _rows_read},
        doc="Row ids[..] of a table [n, width], which may be block-quantised: [.., width].",
    )
)
register(
    OpDef(
        name="gather_rows",
        kind=Kind.GATHER,
        num_inputs=2,
        infer=_infer_gather_rows,
        reference=lambda inputs, attrs: inputs[0][inputs[1].long()],
        flops=lambda inputs, output, attrs: 0,
        far=(0,),
        touched={0: lambda inputs, output, attrs: output.num_bytes},
        doc="Row rows[i] of an activation; bits are copied as they are.",
    )
)
