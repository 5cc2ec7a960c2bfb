"""Steps padded to the limits of their bucket, so that one captured graph serves them all.

A padded token has id 0 and request row 0; nothing is stored for it. Where slots are an input, its
slot is -1 and its position 0; where the graph finds slots by positions, its position is -1. A
padded row of logits is row 0. Kernels compute such rows, and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tilewright.runtime.artifact import BucketRecord, Manifest
from tilewright.runtime.devices.memory import Array

NOTHING = -1


def padded_dims(
    manifest: Manifest, bucket: BucketRecord, dims: Mapping[str, int], fixed: Collection[str]
) -> dict[str, int]:
    """Return the dims a padded step runs with; those in `fixed` (of the states) stay.

    Batch dims take the bucket's limit. Context dims go to the next power of two: bits do not
    depend on them, and a short context then does not pay for the longest.
    """
    found = {}
    for dim in manifest.dims:
        most = bucket.bounds.get(dim.name, dim.upper)
        if dim.name in fixed:
            found[dim.name] = dims[dim.name]
        elif dim.role == "batch":
            found[dim.name] = most
        else:
            found[dim.name] = min(next_power(dims[dim.name]), most)
    return found


def next_power(value: int) -> int:
    """Return the smallest power of two that is not below a value."""
    return 1 << max(value - 1, 0).bit_length()


def paddings(manifest: Manifest) -> dict[str, int]:
    """Return what a padded entry of each input holds."""
    names = [i.name for i in manifest.inputs]
    marks = "slots" if any(_is(n, "slots") for n in names) else "positions"
    return {name: NOTHING if _is(name, marks) else 0 for name in names}


def _is(input_name: str, mark: str) -> bool:
    """Say whether an input is of that name, or a variant of it such as that of a tail."""
    return input_name == mark or input_name.endswith(f"_{mark}")


def fill(target: Array, array: Array, padding: int) -> None:
    """Copy an array into the first entries of a larger one, and pad the rest."""
    if target.shape != array.shape:
        target[...] = padding
    part: Any = tuple(np.s_[:n] for n in array.shape)
    target[part] = array
