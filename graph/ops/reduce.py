"""Reductions over the last axis, kept as an extent of 1, and the norms built from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.graph.dims import format_dim, product
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import F32, TensorType

if TYPE_CHECKING:
    import torch


def _infer_reduce(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    _float_rows(x)
    return TensorType(F32, (*x.shape[:-1], 1))


def _float_rows(x: TensorType) -> None:
    floats(x)
    want(x.rank >= 1, f"operand has no axis to reduce: got {x}, want rank 1 or more")


def _reduce(name: str, reference: Callable[[torch.Tensor], torch.Tensor]) -> OpDef:
    return register(
        OpDef(
            name=name,
            kind=Kind.REDUCE,
            num_inputs=1,
            infer=_infer_reduce,
            reference=lambda inputs, attrs: reference(inputs[0]),
            flops=lambda inputs, output, attrs: product(inputs[0].shape),
            reduced_axes=((-1,),),
        )
    )


_reduce("reduce_sum", lambda x: x.sum(-1, keepdim=True))
_reduce("reduce_max", lambda x: x.amax(-1, keepdim=True))


def _infer_rms_norm(inputs: Types, attrs: Attrs) -> TensorType:
    x, w = inputs
    _float_rows(x)
    floats(w)
    fits = x.shape[-1:] == w.shape
    want(fits, f"weight does not fit the last axis: got {w}, want [{format_dim(x.shape[-1])}]")
    return TensorType(F32, x.shape)


def _rms_norm_reference(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    x, w = inputs
    eps = attrs["eps"]
    assert isinstance(eps, float)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


def _expand_rms_norm(b: Any, inputs: Sequence[Any], attrs: Attrs) -> Any:
    x, w = inputs
    length = x.type.shape[-1]
    mean = b.op("scale", b.op("reduce_sum", b.op("square", x)), factor=1.0 / length)
    inverse = b.op("rsqrt", b.op("shift", mean, amount=attrs["eps"]))
    return b.op("mul", b.op("mul", x, inverse), w)


register(
    OpDef(
        name="rms_norm",
        kind=Kind.COMPOSITE,
        num_inputs=2,
        infer=_infer_rms_norm,
        reference=_rms_norm_reference,
        flops=lambda inputs, output, attrs: product(output.shape) * 4,
        attrs={"eps": float},
        expand=_expand_rms_norm,
        reduced_axes=((-1,), ()),
        doc="x / sqrt(mean(x^2) + eps) * w over the last axis (Zhang and Sennrich 2019).",
    )
)


def _infer_softmax(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    _float_rows(x)
    return TensorType(F32, x.shape)


def _expand_softmax(b: Any, inputs: Sequence[Any], attrs: Attrs) -> Any:
    (x,) = inputs
    weights = b.op("exp", b.op("sub", x, b.op("reduce_max", x)))
    return b.op("div", weights, b.op("reduce_sum", weights))


register(
    OpDef(
        name="softmax",
        kind=Kind.COMPOSITE,
        num_inputs=1,
        infer=_infer_softmax,
        reference=lambda inputs, attrs: inputs[0].softmax(-1),
        flops=lambda inputs, output, attrs: product(output.shape) * 11,
        expand=_expand_softmax,
        reduced_axes=((-1,),),
    )
)
