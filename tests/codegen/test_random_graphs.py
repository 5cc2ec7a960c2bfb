"""Random graphs through the whole pipeline: compiled, run with poisoned memory, equal to the
reference bit for bit where nothing is summed or approximated, and closely elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.execute import random_inputs, run_artifact, run_reference
from support.graphs import MAX_ROWS, RandomGraph, random_graph
from support.tiny import SETTINGS, Tiny, build, quick_target
from support.weights import RandomWeights
from tilewright.graph import Graph
from tilewright.graph.text import print_graph

pytestmark = pytest.mark.cpu
ONE_BUCKET = (MAX_ROWS, MAX_ROWS)
# A sum of up to 64 terms in another order; rounding a close value to bf16 may go the other way.
CLOSENESS = {"close": 2e-5, "loose": 2e-2}


def check(drawn: RandomGraph, seed: int, output: Path, cache: Path) -> int:
    """Compile and compare at a few row counts, tails of one among them; return launches."""
    graph, weights = drawn.graph, RandomWeights(drawn.graph, seed=seed)
    limits = replace(SETTINGS, max_tokens_per_step=MAX_ROWS)
    model = Tiny(graph, weights, limits, {})
    report = build(model, output, cache, target=quick_target(ONE_BUCKET))
    steps = []
    for rows in (1, 2, random.Random(seed).randint(3, MAX_ROWS - 1), MAX_ROWS):
        dims = {"rows": rows, "picked": random.Random(seed + rows).randint(1, MAX_ROWS)}
        used = {d.name: dims[d.name] for d in graph.dims}
        steps.append((random_inputs(graph, dims, seed + rows), used))
    results = run_artifact(output, graph, steps)
    for (inputs, dims), result in zip(steps, results, strict=True):
        expected = run_reference(graph, inputs, weights, keep=True)
        largest = _largest_above(graph, {n: float(_finite_max(t.numpy())) for n, t in
                                         expected.values.items()})
        for public, value in graph.outputs:
            want = expected.outputs[public].numpy()
            where = f"output {public} ({value}) with {dims}"
            if drawn.exactness[public] == "exact":
                np.testing.assert_array_equal(result[public], want, err_msg=where)
                continue
            scale = (1 + largest[value]) ** 2
            limit = CLOSENESS[drawn.exactness[public]] * scale
            np.testing.assert_allclose(result[public], want, rtol=0, atol=limit, err_msg=where)
    return report.num_launches


def _finite_max(array: NDArray[Any]) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _largest_above(graph: Graph, largest: Mapping[str, float]) -> dict[str, float]:
    """The largest magnitude among a value and all it is computed from: errors scale with it."""
    found = dict(largest)
    for node in graph.nodes:
        found[node.name] = max([found[node.name], *(found[i] for i in node.inputs)])
    return found


@pytest.mark.parametrize(
    "examples", [pytest.param(3, id="few"), pytest.param(60, id="many", marks=pytest.mark.slow)]
)
def test_random_graphs_equal_the_reference(
    examples: int, tmp_path: Path, kernel_cache: Path
) -> None:
    @settings(
        max_examples=examples,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32 - 1))
    def run(seed: int) -> None:
        drawn = random_graph(seed)
        note(print_graph(drawn.graph))
        check(drawn, seed, tmp_path / "graph", kernel_cache)

    run()
