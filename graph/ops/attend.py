"""Attention over a paged cache, and the stores that fill it.

A cache is `[blocks, kv_heads, block_size, width]`. Position p of a request stands in entry
p % block_size of block `block_tables[row, p // block_size]`; slot = block * block_size + entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import product
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, register, want
from tilewright.graph.types import F32, I32, TensorType

if TYPE_CHECKING:
    import torch


def _infer_append(inputs: Types, attrs: Attrs) -> TensorType:
    cache, x, slots = inputs
    want(cache.rank == 4, f"cache is not [blocks, heads, block_size, width]: got {cache}")
    want(x.rank == 3 and x.shape[1:] == (cache.shape[1], cache.shape[3]),
         f"entries do not fit the cache: got {x}, want [n, {cache.shape[1]}, {cache.shape[3]}]")
    want(x.dtype == cache.dtype, f"dtypes differ: got {x.dtype}, want {cache.dtype}")
    want(slots.dtype == I32 and slots.shape == x.shape[:1], f"slots do not fit: got {slots}")
    return cache


def _append(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    cache, x, slots = inputs
    block_size = cache.shape[2]
    result = cache.clone()
    rows = slots.long()
    result[rows // block_size, :, rows % block_size, :] = x.to(cache.dtype)
    return result


register(
    OpDef(
        name="append",
        kind=Kind.STORE,
        num_inputs=3,
        infer=_infer_append,
        reference=_append,
        flops=lambda inputs, output, attrs: 0,
        doc="The cache with row i of x stored in slot slots[i]; slots of a step are distinct.",
    )
)


def _infer_attend(inputs: Types, attrs: Attrs) -> TensorType:
    q, k, v, positions, rows, tables = inputs
    want(q.rank == 3, f"queries are not [tokens, heads, width]: got {q}")
    want(k.rank == 4 and k == v, f"caches differ or are not paged: got {k} and {v}")
    want(k.shape[3] == q.shape[2], f"head widths differ: {q.shape[2]} and {k.shape[3]}")
    grouped = isinstance(q.shape[1], int) and q.shape[1] % k.shape[1] == 0
    want(grouped, f"{q.shape[1]} heads are no multiple of {k.shape[1]} kv heads")
    for name, index in (("positions", positions), ("request_rows", rows)):
        want(index == TensorType(I32, q.shape[:1]), f"{name} do not fit the queries: got {index}")
    want(tables.dtype == I32 and tables.rank == 2, f"block tables are not i32[r, b]: got {tables}")
    return TensorType(F32, q.shape)


def _attend(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    q, k, v, positions, rows, tables = inputs
    block_size, repeat = k.shape[2], q.shape[1] // k.shape[1]
    output = torch.zeros_like(q)
    for row in rows.unique().tolist():
        mine = (rows == row).nonzero()[:, 0]
        last = int(positions[mine].max())
        blocks = tables[row, : last // block_size + 1].long()
        keys, values = (
            c[blocks].transpose(0, 1).flatten(1, 2)[:, : last + 1].to(q.dtype).repeat_interleave(
                repeat, 0
            )
            for c in (k, v)
        )
        scores = torch.einsum("thd,hsd->hts", q[mine], keys) * attrs["scale"]
        hidden = torch.arange(last + 1)[None, :] > positions[mine][:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        # A masked entry has weight 0, but 0 * NaN is NaN: rows not yet written must not count.
        visible = values.masked_fill(hidden.all(0)[None, :, None], 0.0)
        output = output.index_put((mine,), torch.einsum("hts,hsd->thd", weights, visible))
    return output


register(
    OpDef(
        name="attend",
        kind=Kind.ATTEND,
        num_inputs=6,
        infer=_infer_attend,
        reference=_attend,
        flops=lambda inputs, output, attrs: product(output.shape)
        * 4 * inputs[5].shape[1] * inputs[1].shape[2],
        attrs={"scale": float},
        reduced_axes=((), (0, 2), (0, 2), (), (), ()),
        doc="softmax(scale q k^T) v, causal by absolute position, grouped queries: query head h "
        "reads kv head h // (heads / kv_heads).",
    )
)
