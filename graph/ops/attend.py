"""Attention over a paged cache, and the stores that fill it.

A cache is `[blocks, kv_heads, block_size, width]`. Position p of a request stands in entry
p % block_size of block `block_tables[row, p // block_size]`; slot = block * block_size + entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import Dim, product
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import F32, I32, TensorType

if TYPE_CHECKING:
    import torch


_PAGED = "[blocks, heads, block_size, width]"


def _infer_append(inputs: Types, attrs: Attrs) -> TensorType:
    cache, x, slots = inputs
    want(cache.rank == 4, f"cache is not paged: got {cache}, want {_PAGED}")
    entries = TensorType(cache.dtype, (*x.shape[:1], cache.shape[1], cache.shape[3]))
    want(x == entries, f"entries do not fit the cache: got {x}, want {entries}")
    indices = TensorType(I32, x.shape[:1])
    want(slots == indices, f"slots do not fit: got {slots}, want {indices}")
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
        touched={0: lambda inputs, output, attrs: inputs[1].num_bytes},
        doc="The cache with row i of x stored in slot slots[i]; slots of a step are distinct.",
    )
)


def _infer_attend(inputs: Types, attrs: Attrs) -> TensorType:
    q, k, v, positions, rows, tables = inputs
    floats(q, k, v)
    want(q.rank == 3, f"queries do not fit: got {q}, want [tokens, heads, width]")
    want(k.rank == 4, f"cache is not paged: got {k}, want {_PAGED}")
    want(k == v, f"caches differ: got {v}, want {k}")
    want(k.shape[3] == q.shape[2], f"head widths differ: got {k.shape[3]}, want {q.shape[2]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads == 0
    want(grouped, f"heads are not grouped: got {heads}, want a multiple of {kv_heads} kv heads")
    per_token = TensorType(I32, q.shape[:1])
    for name, index in (("positions", positions), ("request_rows", rows)):
        want(index == per_token, f"{name} do not fit the queries: got {index}, want {per_token}")
    fits = tables.dtype == I32 and tables.rank == 2
    want(fits, f"block tables do not fit: got {tables}, want i32[requests, blocks]")
    return TensorType(F32, q.shape)


def _attend(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    q, k, v, positions, rows, tables = inputs
    scale = attrs["scale"]
    assert isinstance(scale, float)
    block_size, repeat = k.shape[2], q.shape[1] // k.shape[1]
    output = torch.zeros_like(q)
    for row in sorted(set(rows.tolist())):
        mine = (rows == row).nonzero()[:, 0]
        last = int(positions[mine].max())
        blocks = tables[row, : last // block_size + 1].long()
        # [kv_heads, entries, width], then one copy of a kv head for each query head it serves
        keys, values = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, : last + 1].to(q.dtype)
            for cache in (k, v)
        )
        keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
        scores = torch.einsum("thd,hsd->hts", q[mine], keys) * scale
        hidden = torch.arange(last + 1)[None, :] > positions[mine][:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output = output.index_put((mine,), _weighted_sum(weights, values, hidden))
    return output


def _weighted_sum(
    weights: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Sum [h, t, s] times [h, s, d] over s; a hidden entry adds nothing, be it NaN or infinite."""
    import torch

    if values.isfinite().all():
        return torch.einsum("hts,hsd->thd", weights, values)
    seen = values[:, None].masked_fill(hidden[None, :, :, None], 0.0)  # 0 * NaN would be NaN
    return torch.einsum("hts,htsd->thd", weights, seen)


def _pages_read(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    """Bytes when every request fills its block table: each cached entry is read once."""
    cache, tables = inputs[1], inputs[5]
    return cache.with_shape(tables.num_elements, *cache.shape[1:]).num_bytes


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
        touched={1: _pages_read, 2: _pages_read},
        reduced_axes=((), (0, 2), (0, 2), (), (), ()),
        doc="softmax(scale q k^T) v, causal by absolute position, grouped queries: query head h "
        "reads kv head h // (heads / kv_heads).",
    )
)
