"""Row kernels of a model's graph, and how close their results must be to the reference's."""

from __future__ import annotations

import numpy as np

from support.rows import Arrays, unpack_rows
from tilewright.codegen.body import Body, extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.graph import Graph
from tilewright.graph.types import BlockFormat


def row_bodies(graph: Graph) -> list[Body]:
    """Distinct bodies of the row kernels of a model."""
    fused = lower(graph, Flags()).graph
    found = {}
    for group in fused.groups:
        body = extract(fused, group)
        if group.kind == "row":
            found.setdefault(body.graph.digest + repr(body.buffers), body)
    return list(found.values())


def state_values(states: Arrays, name: str, dtype: object, want: np.ndarray) -> np.ndarray:
    """Return the values of a state as it lies in memory after a run."""
    packed = states[name]
    if isinstance(dtype, BlockFormat):
        flat = packed.reshape(-1, packed.shape[-1])
        return unpack_rows(flat, dtype, want.shape[-1]).reshape(want.shape)
    if str(dtype) == "bf16":
        return (packed.astype(np.uint32) << 16).view(np.float32)
    return packed


def assert_close(got: np.ndarray, want: np.ndarray, name: str) -> None:
    """Ints equal; floats close, and equal but for values that fell to the other side."""
    if np.issubdtype(got.dtype, np.integer):
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    assert np.isfinite(want).all() and np.isfinite(got).all(), name
    limit = np.abs(want).max(-1, keepdims=True) + 1e-6
    differ = np.abs(got - want) / limit
    assert differ.max() <= 0.3, (name, differ.max())
    assert (differ > 1e-5).mean() <= 0.02, (name, (differ > 1e-5).mean())
