"""How far a kernel's results are from the reference: floats, codes of block formats, integers.

An error is measured against the largest entry of its row: entries of a row are sums of terms that
may cancel, and rounding is relative to the terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from tilewright.graph.types import BlockFormat

TOLERANCE_F32 = 1e-4
TOLERANCE_BF16 = 2.0**-7  # one value may round to its other neighbour: a step of 2^-8 to 2^-7
FLOOR = 1e-3  # of a tensor's largest entry: rows smaller than this are measured against it
TIPPED_SHARE = 0.01  # of a tensor's quantised entries, or one group: a scale tips all of its codes


@dataclass(frozen=True)
class Difference:
    """The worst error of a kernel over its launches.

    `absolute`; `relative` to the largest entry of the row; `units`: absolute in steps of bf16 at
    that entry, None where the kernel rounds nothing to bf16. `tipped`: quantised entries that are
    one code step off; `ties`: rows of selections that differ where scores tie. Both are allowed and
    not part of the errors.
    """

    kernel: str
    group: str
    num_launches: int
    absolute: float
    relative: float
    units: float | None
    tolerance: float
    tipped: int = 0
    ties: int = 0

    @property
    def is_within(self) -> bool:
        return self.relative <= self.tolerance


NONE = Difference("", "", 1, 0.0, 0.0, None, 0.0)


def worse(a: Difference, b: Difference) -> Difference:
    """Return the worst of both; group and tolerance are those of the larger relative error."""
    known = [u for u in (a.units, b.units) if u is not None]
    units = max(known, default=None)
    larger = a if (not a.is_within, a.relative) >= (not b.is_within, b.relative) else b
    return replace(
        larger, num_launches=a.num_launches + b.num_launches, units=units,
        absolute=max(a.absolute, b.absolute), tipped=a.tipped + b.tipped, ties=a.ties + b.ties,
    )  # fmt: skip


def exact(is_equal: bool) -> Difference:
    """Return the difference of what must be equal: nothing, or infinite."""
    wrong = 0.0 if is_equal else math.inf
    return replace(NONE, absolute=wrong, relative=wrong)


def difference(got: torch.Tensor, want: torch.Tensor, *, rounds: bool) -> Difference:
    """Compare one result; integers must be equal, and what is not finite must be the same."""
    if not want.is_floating_point():
        return exact(torch.equal(got.long(), want.long()))
    tolerance = TOLERANCE_BF16 if rounds else TOLERANCE_F32
    empty = replace(NONE, units=0.0 if rounds else None, tolerance=tolerance)
    if want.numel() == 0:
        return empty
    error = _errors(got, want)
    size = torch.where(want.isfinite(), want.abs(), 0.0)
    scale = size.amax(-1, keepdim=True) if want.dim() else size
    scale = scale.clamp(min=max(float(size.max()) * FLOOR, 1e-30)).expand_as(error)
    units = float((error / torch.exp2(scale.log2().floor() - 7)).max()) if rounds else None
    return replace(empty, absolute=float(error.max()), relative=float((error / scale).max()),
                   units=units)  # fmt: skip


def _errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    same = (got == want) | (got.isnan() & want.isnan())
    return torch.where(same, 0.0, (got - want).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def coded_difference(got: torch.Tensor, want: torch.Tensor, format: BlockFormat) -> Difference:
    """Compare decoded values [.., width] of a block format.

    A last-bit difference before the rounding can tip a code to its neighbour, and the scale of a
    group to the next. So entries may be one code step off: TIPPED_SHARE of them, or as many as a
    group has. All others are compared as bf16, and so is the tail. More than that is an infinite
    difference.
    """
    coded = want.shape[-1] - format.tail
    tail = difference(got[..., coded:], want[..., coded:], rounds=True)
    got, want = got[..., :coded], want[..., :coded]
    error, step = _errors(got, want), code_steps(torch.maximum(got.abs(), want.abs()), format)
    tipped = (error > 0) & (error <= step)
    count = int(tipped.sum())
    if count > max(TIPPED_SHARE * tipped.numel(), format.block[1]):
        return worse(replace(exact(False), tipped=count), replace(tail, num_launches=0))
    codes = difference(torch.where(tipped, want, got), want, rounds=True)
    return worse(replace(codes, tipped=count), replace(tail, num_launches=0))


# By code and scale: the least largest code of a group, and the least scale. The largest entry of a
# group is rounded up to the first at least, so that it says how large the scale can be.
_LEAST = {
    ("fp8_e4m3", "ue8m0"): (224.0, 2.0**-22),
    ("fp4_e2m1", "ue8m0"): (3.0, 2.0**-126),
    ("fp4_e2m1", "fp8_e4m3"): (4.0, 2.0**-9),
}
_NORMAL = {"fp8_e4m3": (2.0**-6, 3), "fp4_e2m1": (1.0, 1)}  # the smallest; bits of fraction


def code_steps(size: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """Return the distance of the codes below magnitudes [.., coded], with the largest scale that
    their groups may have."""
    top, least = _LEAST[format.code.name, format.scale.name]
    normal, bits = _NORMAL[format.code.name]
    width, group = size.shape[-1], format.block[1]
    padded = torch.nn.functional.pad(size.nan_to_num(), (0, -width % group))
    largest = padded.reshape(*size.shape[:-1], -(-width // group), group).amax(-1)
    scale = largest.clamp(min=1e-300) / top
    if format.scale.name == "ue8m0":
        scale = torch.exp2(scale.log2().floor())
    scale = scale.clamp(min=least).repeat_interleave(group, -1)[..., :width]
    place = (padded[..., :width] / scale).clamp(min=normal).log2().floor()
    steps: torch.Tensor = torch.exp2(place - bits) * scale
    return steps
