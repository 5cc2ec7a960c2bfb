"""Elementwise ops, one definition each: the scalar expression lowers it, torch is its meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilewright.graph import scalar as s
from tilewright.graph.dims import product
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import DTYPES, F32, DType, TensorType, broadcast, dtype

if TYPE_CHECKING:
    import torch

Scalar = s.Scalar


def infer_broadcast(inputs: Types, attrs: Attrs) -> TensorType:
    """Floating operands of broadcastable shapes give fp32."""
    shape = inputs[0].shape
    floats(*inputs)
    for operand in inputs:
        shape = broadcast(shape, operand.shape)
    return TensorType(F32, shape)


def elementwise(
    name: str,
    num_inputs: int,
    scalar: Callable[..., Scalar],
    reference: Callable[..., torch.Tensor],
    *,
    flops: int = 1,
    attrs: dict[str, type] | None = None,
) -> OpDef:
    """Register an elementwise op; `scalar` and `reference` take operands, then attributes."""

    def call_scalar(values: Attrs, *operands: Scalar) -> Scalar:
        return scalar(*operands, **values)

    def call_reference(inputs: Sequence[torch.Tensor], values: Attrs) -> torch.Tensor:
        return reference(*inputs, **values)

    return register(
        OpDef(
            name=name,
            kind=Kind.ELEMENTWISE,
            num_inputs=num_inputs,
            infer=infer_broadcast,
            reference=call_reference,
            flops=lambda inputs, output, attrs: product(output.shape) * flops,
            attrs=attrs or {},
            scalar=call_scalar,
        )
    )


elementwise("add", 2, s.add, lambda a, b: a + b)
elementwise("sub", 2, s.sub, lambda a, b: a - b)
elementwise("mul", 2, s.mul, lambda a, b: a * b)
elementwise("div", 2, s.div, lambda a, b: a / b)
elementwise("maximum", 2, lambda a, b: s.call("max", a, b), lambda a, b: a.maximum(b))
elementwise("minimum", 2, lambda a, b: s.call("min", a, b), lambda a, b: a.minimum(b))
elementwise("neg", 1, lambda x: s.call("neg", x), lambda x: -x)
elementwise("abs", 1, lambda x: s.call("abs", x), lambda x: x.abs())
elementwise("square", 1, lambda x: s.mul(x, x), lambda x: x * x)
elementwise("sqrt", 1, lambda x: s.call("sqrt", x), lambda x: x.sqrt())
elementwise("rsqrt", 1, lambda x: s.div(1.0, s.call("sqrt", x)), lambda x: x.rsqrt(), flops=2)
elementwise("exp", 1, lambda x: s.call("exp", x), lambda x: x.exp(), flops=8)
elementwise("log", 1, lambda x: s.call("log", x), lambda x: x.log(), flops=8)
elementwise("tanh", 1, lambda x: s.call("tanh", x), lambda x: x.tanh(), flops=10)
elementwise("erf", 1, lambda x: s.call("erf", x), lambda x: x.erf(), flops=12)
elementwise("sin", 1, lambda x: s.call("sin", x), lambda x: x.sin(), flops=12)
elementwise("cos", 1, lambda x: s.call("cos", x), lambda x: x.cos(), flops=12)
# log(1 + exp(x)), written so that neither end overflows.
elementwise(
    "softplus", 1,
    lambda x: s.add(
        s.call("max", x, 0.0),
        s.call("log1p", s.call("exp", s.call("neg", s.call("abs", x)))),
    ),
    lambda x: x.clamp_min(0) + (-x.abs()).exp().log1p(),
    flops=20,
)
elementwise("sigmoid", 1, lambda x: s.call("sigmoid", x), lambda x: x.sigmoid(), flops=10)
elementwise(
    "silu", 1, lambda x: s.mul(x, s.call("sigmoid", x)), lambda x: x * x.sigmoid(), flops=11
)
# x * Phi(x), the exact form (Hendrycks and Gimpel 2016).
elementwise(
    "gelu", 1,
    lambda x: s.mul(s.mul(x, 0.5), s.add(s.call("erf", s.mul(x, 0.5**0.5)), 1.0)),
    lambda x: x * 0.5 * (1 + (x * 0.5**0.5).erf()),
    flops=16,
)
elementwise(
    "scale", 1, lambda x, factor: s.mul(x, factor), lambda x, factor: x * factor,
    attrs={"factor": float},
)
elementwise(
    "shift", 1, lambda x, amount: s.add(x, amount), lambda x, amount: x + amount,
    attrs={"amount": float},
)
elementwise(
    "at_most", 1, lambda x, limit: s.call("min", x, limit), lambda x, limit: x.clamp_max(limit),
    attrs={"limit": float},
)
elementwise(
    "at_least", 1, lambda x, limit: s.call("max", x, limit), lambda x, limit: x.clamp_min(limit),
    attrs={"limit": float},
)
elementwise(
    "sign", 1,
    lambda x: s.call("select_lt", 0.0, x, 1.0, s.call("select_lt", x, 0.0, -1.0, 0.0)),
    lambda x: x.sign(),
    flops=2,
)


def _infer_cast(inputs: Types, attrs: Attrs) -> TensorType:
    target = dtype(str(attrs["dtype"]))
    plain = isinstance(inputs[0].dtype, DType)
    want(plain, f"block formats have no cast: got {inputs[0]}, want floats or ints")
    known = ", ".join(_ROUNDING)
    want(target.name in _ROUNDING, f"dtype is no rounding target: got {target}, want {known}")
    return TensorType(target, inputs[0].shape)


_ROUNDING = {"f32": "round_f32", "bf16": "round_bf16", "f16": "round_f16"}


def _cast_reference(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    """Round to the target type and return in the dtype computed in (fp32 or fp64)."""
    import torch

    (x,) = inputs
    target = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    return x.to(target[str(attrs["dtype"])]).to(x.dtype)


CAST = register(
    OpDef(
        name="cast",
        kind=Kind.ELEMENTWISE,
        num_inputs=1,
        infer=_infer_cast,
        reference=_cast_reference,
        flops=lambda inputs, output, attrs: 0,
        attrs={"dtype": str},
        scalar=lambda attrs, x: s.call(_ROUNDING[str(attrs["dtype"])], x),
        doc="The only rounding point of a graph: no pass may add, move or remove one.",
    )
)
assert set(_ROUNDING) <= set(DTYPES)
