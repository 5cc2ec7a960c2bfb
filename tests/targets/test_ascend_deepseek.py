"""Kernels of the DeepSeek families on the functional model, against the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.ascend_rows import compile_paged
from support.deepseek import v4_graph, v41_graph
from support.deepseek_rows import assert_close, row_bodies, state_values
from support.rows import paged_step, run_compiled, run_expected
from support.zoo import joined
from tilewright.runtime.artifact_files import read_manifest
from tilewright.runtime.devices.ascend950_model import Ascend950Model

pytestmark = [pytest.mark.cpu, pytest.mark.slow]
ROWS = 24


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_row_kernels_equal_the_reference(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    model = {"v4": v4_graph, "v41": v41_graph}[family]()
    graph = joined(row_bodies(model), model)
    weights = compile_paged(graph, tmp_path / "m", kernel_cache, ROWS)
    step = paged_step(graph, ROWS, seed=5)
    expected = run_expected(graph, step, weights)
    held = step.inputs["positions"].numpy() >= 0
    model_of = Ascend950Model(tmp_path / "m" / read_manifest(tmp_path / "m").library)
    for adversarial in (False, True):
        model_of.configure(adversarial=adversarial)
        outputs, states = run_compiled(tmp_path / "m", graph, step)
        for name, want in expected.outputs.items():
            rows = held if len(want) == ROWS else slice(None)
            assert_close(outputs[name][rows], want.numpy()[rows], name)
        for state in graph.states:
            want_rows = expected.states[state.name].numpy()
            got = state_values(states, state.name, state.type.dtype, want_rows)
            assert_close(got, want_rows, state.name)
