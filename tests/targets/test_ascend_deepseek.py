"""Kernels of the DeepSeek families on the functional model, against the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.ascend_check import StepCheck
from support.ascend_rows import compile_paged, fill_states, rows_of, run_step
from support.deepseek import v4_graph, v41_graph
from support.deepseek_rows import assert_close, row_bodies, state_values
from support.rows import paged_step, run_compiled, run_expected
from support.zoo import joined
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.text import parse_graph
from tilewright.graph.types import BF16
from tilewright.runtime.artifact_files import load_artifact, read_manifest
from tilewright.runtime.devices.ascend950_model import Ascend950Model
from tilewright.runtime.executor import Executor

pytestmark = pytest.mark.cpu
ROWS = 24
LONG = 40000  # two operands and a result of bf16: 240,000 bytes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["v4", "v41"])
def test_row_kernels_equal_the_reference(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    model = {"v4": v4_graph, "v41": v41_graph}[family]()
    check_rows(joined(row_bodies(model), model), tmp_path, kernel_cache)


def test_some_row_kernels(tmp_path: Path, kernel_cache: Path) -> None:
    """Packed rows of all formats, pooling, the mix of streams: one kernel of each kind."""
    model = v41_graph()
    chosen = {}
    for body in row_bodies(model):
        ops = frozenset(n.op for n in body.graph.nodes)
        for wanted in ({"page_slots", "quantise"}, {"pool_window"}, {"hyper_mix", "quantise"}):
            if wanted <= ops:
                chosen.setdefault(frozenset(wanted), body)
    assert len(chosen) == 3
    check_rows(joined(list(chosen.values()), model), tmp_path, kernel_cache)


def test_operands_too_long_for_the_buffer_are_read_where_they_lie(
    tmp_path: Path, kernel_cache: Path
) -> None:
    b = GraphBuilder("long")
    tokens = b.dim("tokens", Role.BATCH, upper=ROWS)
    x, y = (b.input(n, BF16, tokens, LONG) for n in ("x", "y"))
    total = b.op("reduce_sum", b.op("square", x))
    b.output("z", b.op("cast", b.op("mul", b.op("add", x, y), total), dtype="bf16"))
    text = check_rows(b.build(), tmp_path, kernel_cache)
    assert "first_row + row" in text


def test_results_too_long_for_the_buffer_take_several_launches(
    tmp_path: Path, kernel_cache: Path
) -> None:
    """The second reads what the first left."""
    b = GraphBuilder("results")
    tokens = b.dim("tokens", Role.BATCH, upper=ROWS)
    x, y = (b.input(n, BF16, tokens, LONG) for n in ("x", "y"))
    total = b.cast(b.op("add", x, y), BF16)
    b.output("total", total)
    b.output("product", b.cast(b.op("mul", x, y), BF16))
    b.output("more", b.cast(b.op("mul", total, y), BF16))
    text = check_rows(b.build(), tmp_path, kernel_cache)
    assert text.count("__global__ __vector__") == 2


def check_rows(graph: Graph, tmp_path: Path, kernel_cache: Path) -> str:
    """Compare in both orders; return the sources."""
    weights = compile_paged(graph, tmp_path / "m", kernel_cache, ROWS)
    step = paged_step(graph, ROWS, seed=5)
    expected = run_expected(graph, step, weights)
    held = step.inputs["positions"].numpy() >= 0 if "positions" in step.inputs else slice(None)
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
    sources = (tmp_path / "m" / "sources").glob("row_*.asc")
    return "\n".join(p.read_text() for p in sources)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["v4", "v41"])
def test_every_launch_of_a_model(family: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Launch by launch on what each was given, in both orders; then the tokens of one request give
    the same bits alone."""
    graph = {"v4": v4_graph, "v41": v41_graph}[family]()
    path = tmp_path / "m"
    weights = compile_paged(graph, path, kernel_cache, ROWS)
    step = paged_step(graph, ROWS, seed=6)
    drawn = np.random.default_rng(1).integers(0, 61, ROWS).astype(np.int32)
    step.inputs["token_ids"] = torch.from_numpy(drawn)
    fused = parse_graph((path / "sources" / "fused.txt").read_text())
    artifact = load_artifact(path)
    model = Ascend950Model(path / read_manifest(path).library)
    bits = []
    for adversarial in (False, True):
        model.configure(adversarial=adversarial)
        check = StepCheck(fused, weights.tensors())
        with Executor(artifact, artifact.device, poison=True) as executor:
            fill_states(executor, graph, step)
            bits.append(run_step(executor, graph, step, check)["logits"])
        far = [f for f in check.found if f.part > 0.01 or f.worst > 0.3]
        assert len(check.found) > 100 and not far, far
    assert np.array_equal(*bits)
    model.configure()
    for request in range(3):
        few, chosen = rows_of(step, graph, request)
        with Executor(artifact, artifact.device, poison=True) as executor:
            fill_states(executor, graph, step)
            assert np.array_equal(run_step(executor, graph, few)["logits"], bits[0][chosen])
