"""Trainable weights: fp32 masters rounded to their stored format at each use, gradients straight
through; and the same values as the bytes of a released checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tilewright.graph.ops.quant import (
    FP4_MAX,
    FP8_FLOOR,
    FP8_MAX,
    power_of_two_at_least,
    round_e2m1,
    round_e4m3,
)
from tilewright.graph.types import BlockFormat, element_type

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rounded(weight: torch.Tensor, stored: str) -> torch.Tensor:
    """Return the values that `stored` keeps of a master weight; the gradient passes straight."""
    with torch.no_grad():
        value = _rounded(weight.detach(), stored)
    return value + (weight - weight.detach())


def _rounded(weight: torch.Tensor, stored: str) -> torch.Tensor:
    if stored == "f32":
        return weight
    if stored == "bf16":
        return weight.bfloat16().float()
    codes, scale, shape = _scaled(weight, stored)
    return _unblocked(codes * scale, shape, stored)


def _format(stored: str) -> BlockFormat:
    found = element_type(stored)
    assert isinstance(found, BlockFormat)
    return found


def _scaled(weight: torch.Tensor, stored: str) -> tuple[torch.Tensor, torch.Tensor, torch.Size]:
    """Return codes as numbers and power-of-two scales of blocks [rows, cols, elements]."""
    blocks = _blocked(weight.float(), stored)
    largest = blocks.abs().amax(-1, keepdim=True)
    if _format(stored).code.name == "fp8_e4m3":
        scale = power_of_two_at_least(largest.clamp_min(FP8_FLOOR) * (1 / FP8_MAX))
        return round_e4m3((blocks / scale).clamp(-FP8_MAX, FP8_MAX)), scale, weight.shape
    scale = power_of_two_at_least(largest.clamp_min(FP4_MAX * 2.0**-126) * (1 / FP4_MAX))
    return round_e2m1((blocks / scale).clamp(-FP4_MAX, FP4_MAX)), scale, weight.shape


def _blocked(weight: torch.Tensor, stored: str) -> torch.Tensor:
    rows, cols = _format(stored).block
    n, k = weight.shape
    split = weight.reshape(n // rows, rows, k // cols, cols).transpose(1, 2)
    return split.reshape(n // rows, k // cols, rows * cols)


def _unblocked(blocks: torch.Tensor, shape: torch.Size, stored: str) -> torch.Tensor:
    rows, cols = _format(stored).block
    split = blocks.reshape(shape[0] // rows, shape[1] // cols, rows, cols)
    return split.transpose(1, 2).reshape(shape)


def released_tensors(
    masters: Mapping[str, torch.Tensor], stored: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors under their released names as released checkpoints keep them: bytes of codes,
    scales beside them as `.scale`."""
    for name, master in masters.items():
        weight, kind = master.detach().cpu(), stored[name]
        if kind == "f32":
            yield name, weight.float()
        elif kind == "bf16":
            yield name, weight.bfloat16()
        else:
            codes, scale, shape = _scaled(weight, kind)
            yield name, _code_bytes(_unblocked(codes, shape, kind), kind)
            exponent = (scale[..., 0].contiguous().view(torch.int32) >> 23) & 0xFF
            yield name.replace(".weight", ".scale"), exponent.to(torch.uint8).view(
                torch.float8_e8m0fnu
            )


def _code_bytes(codes: torch.Tensor, stored: str) -> torch.Tensor:
    if _format(stored).code.name == "fp8_e4m3":
        return codes.to(torch.float8_e4m3fn)
    size = torch.bucketize(codes.abs(), torch.tensor(E2M1))
    nibble = (size + 8 * torch.signbit(codes)).to(torch.uint8)
    return (nibble[:, 0::2] | (nibble[:, 1::2] << 4)).view(torch.int8)
