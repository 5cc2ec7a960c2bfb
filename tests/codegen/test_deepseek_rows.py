"""Fusion of the DeepSeek families: launches a layer, the same for permuted and renamed graphs, and
all their row kernels compiled and compared with the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.deepseek import v4_graph, v41_graph
from support.graphs import shuffled
from support.rows import Arrays, compile_rows, paged_step, run_compiled, run_expected, unpack_rows
from support.zoo import joined
from tilewright.codegen.body import Body, extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.graph import Graph
from tilewright.graph.types import BlockFormat

ROWS = 24


def launches(graph: Graph) -> Counter[str]:
    return Counter(g.kind for g in lower(graph, Flags()).graph.groups)


@pytest.mark.parametrize(
    ("ratio", "row", "contract", "select"),
    [(0, 8, 11, 0), (4, 9, 12, 1), (128, 9, 12, 0)],
)
def test_launches_of_a_v4_layer(ratio: int, row: int, contract: int, select: int) -> None:
    """Launches that one layer more of a kind costs."""
    base = (0, 4, 128, 4, 128)
    more = launches(v4_graph((*base, ratio, 0))) - launches(v4_graph((*base, 0)))
    found = {kind: n for kind, n in more.items()}
    assert found == {
        k: n for k, n in {"row": row, "contract": contract, "attend": 1, "select": select}.items()
        if n
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "row", "contract", "select"), [("r", 6, 11, 0), ("x", 6, 12, 1), ("w", 6, 11, 0)]
)
def test_launches_of_a_v41_layer(mode: str, row: int, contract: int, select: int) -> None:
    before, after = ("ww", "") if mode == "w" else ("wfrxcrx", "r")
    one = launches(v41_graph(before + mode + after, engram=()))
    more = one - launches(v41_graph(before + after, engram=()))
    want = {"row": row, "contract": contract, "attend": 1, "select": select}
    assert dict(more) == {k: n for k, n in want.items() if n}


@pytest.mark.parametrize("build", [v4_graph, v41_graph])
def test_permuted_and_renamed_graphs_fuse_alike(build: Callable[[], Graph]) -> None:
    graph = build()
    for seed in range(2):
        assert _digests(shuffled(graph, seed)) == _digests(graph)


def _digests(graph: Graph) -> list[tuple[str, str]]:
    fused = lower(graph, Flags()).graph
    return [(g.kind, extract(fused, g).graph.digest) for g in fused.groups]


def row_bodies(graph: Graph) -> list[Body]:
    """Distinct bodies of the row kernels of a model."""
    fused = lower(graph, Flags()).graph
    found = {}
    for group in fused.groups:
        body = extract(fused, group)
        if group.kind == "row":
            found.setdefault(body.graph.digest + repr(body.buffers), body)
    return list(found.values())


@pytest.mark.cpu
@pytest.mark.parametrize("family", ["v4", "v41"])
def test_row_kernels_equal_the_reference(
    family: str, tmp_path: Path, kernel_cache: Path
) -> None:
    """Rounded values may fall to the other side here and there; all else is close."""
    model = {"v4": v4_graph, "v41": v41_graph}[family]()
    graph = joined(row_bodies(model), model)
    weights = compile_rows(graph, tmp_path / "m", kernel_cache, ROWS)
    step = paged_step(graph, ROWS, seed=5)
    outputs, states = run_compiled(tmp_path / "m", graph, step)
    expected = run_expected(graph, step, weights)
    held = step.inputs["positions"].numpy() >= 0
    for name, want in expected.outputs.items():
        rows = held if len(want) == ROWS else slice(None)
        _close(outputs[name][rows], want.numpy()[rows], name)
    for state in graph.states:
        want = expected.states[state.name].numpy()
        _close(_values(states, state.name, state.type.dtype, want), want, state.name)


def _values(states: Arrays, name: str, dtype: object, want: np.ndarray) -> np.ndarray:
    packed = states[name]
    if isinstance(dtype, BlockFormat):
        flat = packed.reshape(-1, packed.shape[-1])
        return unpack_rows(flat, dtype, want.shape[-1]).reshape(want.shape)
    if str(dtype) == "bf16":
        return (packed.astype(np.uint32) << 16).view(np.float32)
    return packed


def _close(got: np.ndarray, want: np.ndarray, name: str) -> None:
    if np.issubdtype(got.dtype, np.integer):
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    assert np.isfinite(want).all() and np.isfinite(got).all(), name
    limit = np.abs(want).max(-1, keepdims=True) + 1e-6
    differ = np.abs(got - want) / limit
    assert differ.max() <= 0.3, (name, differ.max())
    assert (differ > 1e-5).mean() <= 0.02, (name, (differ > 1e-5).mean())
