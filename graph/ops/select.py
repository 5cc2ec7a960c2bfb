"""Positions and values of the largest entries of a row; ties go to the lowest index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import product
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import F32, I32, TensorType

if TYPE_CHECKING:
    import torch


def _infer_argmax(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    _float_rows(x)
    return TensorType(I32, x.shape[:-1])


def _float_rows(x: TensorType) -> None:
    floats(x)
    want(x.rank >= 1, f"operand has no last axis: got {x}, want rank 1 or more")


def _argmax(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    (x,) = inputs
    largest = x.amax(-1, keepdim=True)
    return (x == largest).to(torch.int32).argmax(-1).to(torch.int32)


def _infer_top_k(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    k = attrs["k"]
    assert isinstance(k, int)
    _float_rows(x)
    width = x.shape[-1]
    fits = isinstance(width, int) and 0 < k <= width
    want(fits, f"k is out of range: got {k}, want 1 to the last axis of {x}, an int")
    return TensorType(F32, (*x.shape[:-1], k))


def _top_k(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    (x,) = inputs
    order = x.sort(dim=-1, descending=True, stable=True).indices
    return order[..., : attrs["k"]]


def _flops(inputs: Types, output: TensorType, attrs: Attrs) -> object:
    return product(inputs[0].shape)


register(
    OpDef(
        name="argmax",
        kind=Kind.SELECT,
        num_inputs=1,
        infer=_infer_argmax,
        reference=_argmax,
        flops=_flops,
        reduced_axes=((-1,),),
        doc="Index of the largest entry of each row; a row with NaN gives 0 as its index.",
    )
)
register(
    OpDef(
        name="top_k_indices",
        kind=Kind.SELECT,
        num_inputs=1,
        infer=lambda inputs, attrs: _infer_top_k(inputs, attrs).with_dtype(I32),
        reference=lambda inputs, attrs: _top_k(inputs, attrs).int(),
        flops=_flops,
        attrs={"k": int},
        reduced_axes=((-1,),),
        doc="Indices of the k largest entries of each row, largest first.",
    )
)
register(
    OpDef(
        name="top_k_values",
        kind=Kind.SELECT,
        num_inputs=1,
        infer=_infer_top_k,
        reference=lambda inputs, attrs: inputs[0].gather(-1, _top_k(inputs, attrs)),
        flops=_flops,
        attrs={"k": int},
        reduced_axes=((-1,),),
        doc="The k largest entries of each row, largest first.",
    )
)
