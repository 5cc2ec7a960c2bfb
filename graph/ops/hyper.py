"""Manifold-constrained hyper-connections: n residual streams mixed by small matrices per token.

A mix of a token is n * (2 + n) numbers: `pre` [n] collapses the streams, `post` [n] and the doubly
stochastic `comb` [n, n] (first index: old stream) update them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import product
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import F32, TensorType

if TYPE_CHECKING:
    import torch


def mix_width(streams: int) -> int:
    """Numbers of one token's mix."""
    return streams * (2 + streams)


def _infer_mix(inputs: Types, attrs: Attrs) -> TensorType:
    m, scale, base = inputs
    floats(m, scale, base)
    streams, iterations = attrs["streams"], attrs["iterations"]
    assert isinstance(streams, int) and isinstance(iterations, int)
    want(streams > 0, f"streams is not positive: got {streams}, want at least 1")
    want(iterations > 0, f"iterations is not positive: got {iterations}, want at least 1")
    width = mix_width(streams)
    fits = m.rank == 2 and m.shape[1] == width
    want(fits, f"logits do not fit {streams} streams: got {m}, want [tokens, {width}]")
    want(scale.shape == (3,), f"scale does not fit: got {scale}, want [3]")
    want(base.shape == (width,), f"base does not fit: got {base}, want [{width}]")
    return TensorType(F32, m.shape)


def _mix(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    m, scale, base = inputs
    n, eps = attrs["streams"], attrs["eps"]
    assert isinstance(n, int) and isinstance(eps, float)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
    comb = comb.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(int(str(attrs["iterations"])) - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return torch.cat((pre, post, comb.flatten(1)), -1)


register(
    OpDef(
        name="hyper_mix",
        kind=Kind.ROW,
        num_inputs=3,
        infer=_infer_mix,
        reference=_mix,
        flops=lambda inputs, output, attrs: product(output.shape)
        * (10 + 4 * int(str(attrs["iterations"]))),
        attrs={"streams": int, "iterations": int, "eps": float},
        reduced_axes=((-1,), (), ()),
        doc="pre = sigma(m s0 + b) + eps, post = 2 sigma(m s1 + b), comb = Sinkhorn of a softmax "
        "(columns first, then rows and columns in turn). Rows of m [tokens, n (2 + n)].",
    )
)


def _streams(x: TensorType) -> None:
    fits = x.rank == 3 and isinstance(x.shape[1], int)
    want(fits, f"streams do not fit: got {x}, want [tokens, streams, width]")


def _infer_collapse(inputs: Types, attrs: Attrs) -> TensorType:
    x, pre = inputs
    floats(x, pre)
    _streams(x)
    fits = pre.rank == 2 and pre.shape[0] == x.shape[0] and pre.shape[1] >= x.shape[1]
    want(fits, f"weights do not fit: got {pre}, want [tokens, {x.shape[1]} or more]")
    return TensorType(F32, (x.shape[0], x.shape[2]))


def _collapse(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    x, pre = inputs
    total = pre[:, 0, None] * x[:, 0]
    for i in range(1, x.shape[1]):
        total = total + pre[:, i, None] * x[:, i]
    return total


register(
    OpDef(
        name="hyper_collapse",
        kind=Kind.ROW,
        num_inputs=2,
        infer=_infer_collapse,
        reference=_collapse,
        flops=lambda inputs, output, attrs: product(inputs[0].shape) * 2,
        reduced_axes=((1,), ()),
        doc="sum_i pre_i x_i, streams in ascending order: [tokens, n, width] -> [tokens, width].",
    )
)


def _infer_update(inputs: Types, attrs: Attrs) -> TensorType:
    x, y, mix = inputs
    floats(x, y, mix)
    _streams(x)
    want(y.shape == (x.shape[0], x.shape[2]), f"sublayer output does not fit: got {y}, want {x}")
    wide = (x.shape[0], mix_width(int(x.shape[1])))
    want(mix.shape == wide, f"mix does not fit: got {mix}, want [tokens, {wide[1]}]")
    return TensorType(F32, x.shape)


def _update(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    x, y, mix = inputs
    n = x.shape[1]
    post, comb = mix[:, n : 2 * n], mix[:, 2 * n :].reshape(-1, n, n)
    streams = []
    for k in range(n):
        total = post[:, k, None] * y
        for j in range(n):
            total = total + comb[:, j, k, None] * x[:, j]
        streams.append(total)
    return torch.stack(streams, 1)


register(
    OpDef(
        name="hyper_update",
        kind=Kind.ROW,
        num_inputs=3,
        infer=_infer_update,
        reference=_update,
        flops=lambda inputs, output, attrs: product(output.shape)
        * (2 * int(inputs[0].shape[1]) + 2),
        reduced_axes=((1,), (), ()),
        doc="x'_k = post_k y + sum_j comb[j, k] x_j, in that order.",
    )
)


def _infer_repeat(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    streams = attrs["streams"]
    assert isinstance(streams, int)
    want(x.rank == 2, f"operand does not fit: got {x}, want [tokens, width]")
    want(streams > 0, f"streams is not positive: got {streams}, want at least 1")
    return x.with_shape(x.shape[0], streams, x.shape[1])


register(
    OpDef(
        name="repeat_streams",
        kind=Kind.ROW,
        num_inputs=1,
        infer=_infer_repeat,
        reference=lambda inputs, attrs: inputs[0]
        .unsqueeze(1)
        .repeat(1, int(str(attrs["streams"])), 1),
        flops=lambda inputs, output, attrs: 0,
        attrs={"streams": int},
        doc="[tokens, width] -> [tokens, streams, width], the same row in each stream.",
    )
)


def _infer_take(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    _streams(x)
    index = attrs["index"]
    assert isinstance(index, int)
    want(0 <= index < x.shape[1], f"index is out of range: got {index}, want below {x.shape[1]}")
    return x.with_shape(x.shape[0], x.shape[2])


register(
    OpDef(
        name="take_stream",
        kind=Kind.ROW,
        num_inputs=1,
        infer=_infer_take,
        reference=lambda inputs, attrs: inputs[0][:, int(str(attrs["index"]))],
        flops=lambda inputs, output, attrs: 0,
        attrs={"index": int},
        doc="[tokens, streams, width] -> [tokens, width]: one stream.",
    )
)
