"""Layout ops: they move elements and compute nothing (a sign flip aside), so they never round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import Dim, product
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, register, want
from tilewright.graph.types import TensorType

if TYPE_CHECKING:
    import torch

PAIRINGS = ("half", "interleaved")


def _infer_split_heads(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    heads = attrs["num_heads"]
    assert isinstance(heads, int)
    want(heads > 0, f"num_heads is not positive: got {heads}, want at least 1")
    width = _last(x)
    fits = isinstance(width, int) and width % heads == 0
    want(fits, f"heads do not divide the last axis: got {x}, want a multiple of {heads}")
    return x.with_shape(*x.shape[:-1], heads, width // heads)


def _last(x: TensorType) -> Dim:
    want(x.rank >= 1, f"operand has no last axis: got {x}, want rank 1 or more")
    return x.shape[-1]


def _infer_merge_heads(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    want(x.rank >= 2, f"operand has no heads: got {x}, want rank 2 or more")
    return x.with_shape(*x.shape[:-2], product(x.shape[-2:]))


def _split_heads(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    (x,) = inputs
    heads = attrs["num_heads"]
    assert isinstance(heads, int)
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


register(
    OpDef(
        name="split_heads",
        kind=Kind.LAYOUT,
        num_inputs=1,
        infer=_infer_split_heads,
        reference=_split_heads,
        flops=lambda inputs, output, attrs: 0,
        attrs={"num_heads": int},
        doc="[.., heads * width] -> [.., heads, width]; a view, no element moves.",
    )
)

register(
    OpDef(
        name="merge_heads",
        kind=Kind.LAYOUT,
        num_inputs=1,
        infer=_infer_merge_heads,
        reference=lambda inputs, attrs: inputs[0].flatten(-2),
        flops=lambda inputs, output, attrs: 0,
        doc="[.., heads, width] -> [.., heads * width]; a view, no element moves.",
    )
)

register(
    OpDef(
        name="expand_last",
        kind=Kind.LAYOUT,
        num_inputs=1,
        infer=lambda inputs, attrs: inputs[0].with_shape(*inputs[0].shape, 1),
        reference=lambda inputs, attrs: inputs[0].unsqueeze(-1),
        flops=lambda inputs, output, attrs: 0,
        doc="[..] -> [.., 1]; a view, no element moves.",
    )
)
# Views keep the row-major order of elements, so they need no kernel: the buffer is the same.
VIEWS = ("split_heads", "merge_heads", "expand_last")


def _infer_slice(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    start, stop = attrs["start"], attrs["stop"]
    assert isinstance(start, int) and isinstance(stop, int)
    width = _last(x)
    want(isinstance(width, int), f"last axis is symbolic: got {x}, want an int")
    in_range = 0 <= start < stop <= width
    want(in_range, f"slice is out of range: got {start}:{stop}, want within 0:{width}")
    return x.with_shape(*x.shape[:-1], stop - start)


register(
    OpDef(
        name="slice_last",
        kind=Kind.LAYOUT,
        num_inputs=1,
        infer=_infer_slice,
        reference=lambda inputs, attrs: inputs[0][..., attrs["start"] : attrs["stop"]],
        flops=lambda inputs, output, attrs: 0,
        attrs={"start": int, "stop": int},
    )
)


def _infer_rotate_pairs(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    pairing = attrs["pairing"]
    want(pairing in PAIRINGS, f"unknown pairing: got {pairing}, want {' or '.join(PAIRINGS)}")
    width = _last(x)
    even = isinstance(width, int) and width % 2 == 0
    want(even, f"last axis is not even: got {x}, want an even int")
    return x


def _rotate_pairs(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    (x,) = inputs
    if attrs["pairing"] == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)


register(
    OpDef(
        name="rotate_pairs",
        kind=Kind.LAYOUT,
        num_inputs=1,
        infer=_infer_rotate_pairs,
        reference=_rotate_pairs,
        flops=lambda inputs, output, attrs: 0,
        attrs={"pairing": str},
        doc="(a, b) -> (-b, a) for each pair of the last axis: half pairs i with i + width / 2, "
        "interleaved pairs 2i with 2i + 1 (rotary embedding, Su et al. 2021).",
    )
)
