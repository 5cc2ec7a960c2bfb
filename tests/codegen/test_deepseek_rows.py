"""Fusion of the DeepSeek families: launches a layer, the same for permuted and renamed graphs, and
all their row kernels compiled and compared with the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.deepseek import v4_graph, v41_graph
from support.deepseek_rows import assert_close, row_bodies, state_values
from support.graphs import shuffled
from support.rows import compile_rows, paged_step, run_compiled, run_expected
from support.zoo import joined
from tilewright.codegen.body import extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.graph import Graph

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


@pytest.mark.cpu
@pytest.mark.parametrize("family", ["v4", "v41"])
def test_row_kernels_equal_the_reference(family: str, tmp_path: Path, kernel_cache: Path) -> None:
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
        assert_close(outputs[name][rows], want.numpy()[rows], name)
    for state in graph.states:
        want = expected.states[state.name].numpy()
        assert_close(state_values(states, state.name, state.type.dtype, want), want, state.name)
