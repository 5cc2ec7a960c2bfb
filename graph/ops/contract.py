"""Contractions: sums of products over a shared axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import format_dim, product
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import F32, TensorType

if TYPE_CHECKING:
    import torch


def _infer_linear(inputs: Types, attrs: Attrs) -> TensorType:
    x, w = inputs
    floats(x, w)
    want(x.rank >= 1 and w.rank == 2, f"ranks do not fit: got {x} and {w}, want [.., k] and [n, k]")
    k = x.shape[-1]
    want(k == w.shape[1], f"inner extents differ: got {w}, want [n, {format_dim(k)}]")
    return TensorType(F32, (*x.shape[:-1], w.shape[0]))


def _linear(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    x, w = inputs
    return x @ w.to(x.dtype).T


register(
    OpDef(
        name="linear",
        kind=Kind.CONTRACT,
        num_inputs=2,
        infer=_infer_linear,
        reference=_linear,
        flops=lambda inputs, output, attrs: product(output.shape) * inputs[0].shape[-1] * 2,
        reduced_axes=((-1,), (1,)),
        doc="[.., k] times a weight [n, k], as stored in checkpoints: y = x w^T.",
    )
)
