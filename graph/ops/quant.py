"""Dynamic quantisation as a rounding point, and the transform that spreads outliers before it.

Values stay in the dtype computed in: what is stored packed is exactly what `quantise` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import product
from tilewright.graph.errors import ShapeError
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import F32, BlockFormat, TensorType, element_type

if TYPE_CHECKING:
    import torch

FP8_FLOOR = 1e-4  # smallest maximum of a group, so that a group of zeros has a scale
FP8_MAX, FP4_MAX = 448.0, 6.0
_SMALLEST_NORMAL = 2.0**-126
_NVFP4_FLOOR = 2.0**-9  # the smallest positive e4m3


def quantised_format(name: str) -> BlockFormat:
    """Return the activation format printed as `name`; raise ShapeError for another one."""
    found = element_type(name)
    if not isinstance(found, BlockFormat) or _rule(found) is None or found.block[0] != 1:
        raise ShapeError(f"dtype '{name}': no activation format: want groups of fp8 or fp4")
    return found


def _infer_quantise(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    floats(x)
    target = quantised_format(str(attrs["dtype"]))
    width = x.shape[-1] if x.rank else None
    fits = isinstance(width, int) and width > target.tail
    want(fits, f"last axis does not fit {target}: got {x}, want an int above {target.tail}")
    return TensorType(target, x.shape)


def quantise_dequantise(x: torch.Tensor, target: BlockFormat) -> torch.Tensor:
    """Round x [.., n] to what `target` can store, in fp32; return the dtype of x.

    Sources: the rules of the released V4 and V4.1 kernels. Gradients pass straight through, where
    training asks for them.
    """
    import torch

    with torch.no_grad():
        coded = x[..., : x.shape[-1] - target.tail].float()
        width, group = coded.shape[-1], target.block[1]
        padded = torch.nn.functional.pad(coded, (0, -width % group))
        groups = padded.reshape(*coded.shape[:-1], padded.shape[-1] // group, group)
        rule = _rule(target)
        assert rule is not None
        rounded = rule(groups).flatten(-2)[..., :width]
        tail = x[..., width:].to(torch.bfloat16).float()
        result = torch.cat((rounded, tail), -1).to(x.dtype)
    return result + (x - x.detach()) if x.requires_grad else result


def _rule(target: BlockFormat) -> Callable[[torch.Tensor], torch.Tensor] | None:
    return {
        ("fp8_e4m3", "ue8m0"): _fp8,
        ("fp4_e2m1", "ue8m0"): _mxfp4,
        ("fp4_e2m1", "fp8_e4m3"): _nvfp4,
    }.get((target.code.name, target.scale.name))


def power_of_two_at_least(x: torch.Tensor) -> torch.Tensor:
    """2 ** ceil(log2(x)) of positive fp32 numbers, from their bits: exact powers stay.

    Infinity and NaN give infinity, the scale that makes all of a group NaN.
    """
    import torch

    bits = x.contiguous().view(torch.int32).long()
    exponent = ((bits + 0x7FFFFF) >> 23).clamp_max(255)
    return (exponent << 23).int().view(torch.float32)


def _maximum(groups: torch.Tensor, floor: float) -> torch.Tensor:
    return groups.abs().amax(-1, keepdim=True).clamp_min(floor)


def _fp8(groups: torch.Tensor) -> torch.Tensor:
    scale = power_of_two_at_least(_maximum(groups, FP8_FLOOR) * (1 / FP8_MAX))
    return round_e4m3((groups / scale).clamp(-FP8_MAX, FP8_MAX)) * scale


def _mxfp4(groups: torch.Tensor) -> torch.Tensor:
    floor = FP4_MAX * _SMALLEST_NORMAL
    scale = power_of_two_at_least(_maximum(groups, floor) * (1 / FP4_MAX))
    return round_e2m1((groups / scale).clamp(-FP4_MAX, FP4_MAX)) * scale


def _nvfp4(groups: torch.Tensor) -> torch.Tensor:
    scale = _maximum(groups, FP4_MAX * _NVFP4_FLOOR) / FP4_MAX
    scale = round_e4m3(scale.clamp(_NVFP4_FLOOR, FP8_MAX))
    return round_e2m1((groups / scale).clamp(-FP4_MAX, FP4_MAX)) * scale


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 within +-448 to e4m3, ties to even."""
    import torch

    return x.to(torch.float8_e4m3fn).float()


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 within +-6 to e2m1 (0 .5 1 1.5 2 3 4 6), ties to the even code; the sign stays."""
    import torch

    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded: torch.Tensor = ((size / step).round() * step).copysign(x)
    return rounded


register(
    OpDef(
        name="quantise",
        kind=Kind.ROW,
        num_inputs=1,
        infer=_infer_quantise,
        reference=lambda inputs, attrs: quantise_dequantise(
            inputs[0], quantised_format(str(attrs["dtype"]))
        ),
        flops=lambda inputs, output, attrs: product(output.shape) * 4,
        attrs={"dtype": str},
        reduced_axes=((-1,),),
        doc="A rounding point like `cast`: codes with a scale per group of the last axis.",
    )
)


def _infer_hadamard(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    floats(x)
    width = x.shape[-1] if x.rank else 0
    power = isinstance(width, int) and width > 0 and width & (width - 1) == 0
    want(power, f"last axis is no power of two: got {x}, want 1, 2, 4, ...")
    return TensorType(F32, x.shape)


def _hadamard(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    """Butterflies of strides 1, 2, 4, ...: the order of sums is part of the meaning."""
    import torch

    (x,) = inputs
    width, stride = x.shape[-1], 1
    while stride < width:
        pairs = x.reshape(*x.shape[:-1], width // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        stride *= 2
    scaled: torch.Tensor = x * float(width) ** -0.5
    return scaled


register(
    OpDef(
        name="hadamard",
        kind=Kind.ROW,
        num_inputs=1,
        infer=_infer_hadamard,
        reference=_hadamard,
        flops=lambda inputs, output, attrs: product(output.shape)
        * (int(output.shape[-1]).bit_length()),
        reduced_axes=((-1,),),
        doc="Orthonormal Walsh-Hadamard transform of the last axis, natural order.",
    )
)
