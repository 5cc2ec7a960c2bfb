"""Mixture of experts: products with the weights of chosen experts, and their sum.

Each token has k slots, each with an expert id. Bits depend on a token's own slots only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import Dim, product, smaller
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import F32, I32, TensorType

if TYPE_CHECKING:
    import torch


def _infer_expert_linear(inputs: Types, attrs: Attrs) -> TensorType:
    x, w, ids = inputs
    floats(x, w)
    want(w.rank == 3, f"weights do not fit: got {w}, want [experts, n, k]")
    want(ids.dtype == I32 and ids.rank == 2, f"ids do not fit: got {ids}, want i32[tokens, slots]")
    tokens, slots = ids.shape
    allowed = ((tokens, w.shape[2]), (tokens, slots, w.shape[2]))
    fits = x.shape in allowed
    want(fits, f"activation does not fit {w}: got {x}, want [tokens, k] or [tokens, slots, k]")
    return TensorType(F32, (tokens, slots, w.shape[1]))


def _expert_linear(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    x, w, ids = inputs
    rows = x if x.ndim == 3 else x[:, None].expand(-1, ids.shape[1], -1)
    result = rows.new_zeros(*ids.shape, w.shape[1])
    for expert in sorted(set(ids.flatten().tolist())):
        mine = (ids == expert).nonzero(as_tuple=True)
        result = result.index_put(mine, rows[mine] @ w[expert].to(x.dtype).T)
    return result


def _experts_read(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    """Bytes when each slot has an expert of its own: an upper bound, exact for one token."""
    w, ids = inputs[1], inputs[2]
    return w.with_shape(*w.shape[1:]).num_bytes * smaller(ids.num_elements, w.shape[0])


register(
    OpDef(
        name="expert_linear",
        kind=Kind.CONTRACT,
        num_inputs=3,
        infer=_infer_expert_linear,
        reference=_expert_linear,
        flops=lambda inputs, output, attrs: product(output.shape) * inputs[0].shape[-1] * 2,
        touched={1: _experts_read},
        reduced_axes=((-1,), (2,), ()),
        doc="y[t, s] = w[ids[t, s]] x[t] (or x[t, s]); weights [experts, n, k].",
    )
)


def _infer_grouped(inputs: Types, attrs: Attrs) -> TensorType:
    x, w = inputs
    floats(x, w)
    want(x.rank == 3 and w.rank == 2, f"operands do not fit: got {x}, {w}, want [t, g, k], [n, k]")
    groups, n = x.shape[1], w.shape[0]
    fits = isinstance(n, int) and n % groups == 0 and w.shape[1] == x.shape[2]
    want(fits, f"weight does not fit {x}: got {w}, want [{groups} * n, {x.shape[2]}]")
    return TensorType(F32, (x.shape[0], groups, n // groups))


def _grouped(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    x, w = inputs
    stacked = w.to(x.dtype).reshape(x.shape[1], -1, x.shape[2])
    return torch.einsum("tgk,gnk->tgn", x, stacked)


register(
    OpDef(
        name="grouped_linear",
        kind=Kind.CONTRACT,
        num_inputs=2,
        infer=_infer_grouped,
        reference=_grouped,
        flops=lambda inputs, output, attrs: product(output.shape) * inputs[0].shape[-1] * 2,
        reduced_axes=((-1,), (1,)),
        doc="y[t, g] = w[g] x[t, g]: block-diagonal product, weights [groups * n, k].",
    )
)


def _infer_sum_slots(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    floats(x)
    want(x.rank == 3, f"operand does not fit: got {x}, want [tokens, slots, width]")
    return TensorType(F32, (x.shape[0], x.shape[2]))


def _sum_slots(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    (x,) = inputs
    total = x[:, 0]
    for slot in range(1, x.shape[1]):
        total = total + x[:, slot]
    return total


register(
    OpDef(
        name="sum_slots",
        kind=Kind.ROW,
        num_inputs=1,
        infer=_infer_sum_slots,
        reference=_sum_slots,
        flops=lambda inputs, output, attrs: product(inputs[0].shape),
        reduced_axes=((1,),),
        doc="[tokens, slots, width] -> [tokens, width], slots added in ascending order.",
    )
)


def _infer_gather_last(inputs: Types, attrs: Attrs) -> TensorType:
    x, ids = inputs
    fits = x.rank == 2 and ids.rank == 2 and ids.dtype == I32 and ids.shape[0] == x.shape[0]
    want(fits, f"operands do not fit: got {x}, {ids}, want [tokens, n], i32[tokens, k]")
    return x.with_shape(*ids.shape)


register(
    OpDef(
        name="gather_last",
        kind=Kind.ROW,
        num_inputs=2,
        infer=_infer_gather_last,
        reference=lambda inputs, attrs: inputs[0].gather(1, inputs[1].long()),
        flops=lambda inputs, output, attrs: 0,
        doc="y[t, s] = x[t, ids[t, s]].",
    )
)
