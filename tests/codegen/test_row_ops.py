"""Every op of row kernels, compiled and compared with its reference: bit for bit where nothing is
approximated, closely elsewhere, with poisoned outputs and odd shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from support.row_graphs import CACHED, ROWS, append_graph, close_graph, exact_graph
from support.rows import (
    Step,
    compile_rows,
    pack_rows,
    paged_step,
    run_compiled,
    run_expected,
    unpack_rows,
)
from support.weights import RandomWeights
from tilewright.graph import Graph
from tilewright.graph.types import BF16, BLOCK_FORMATS, BlockFormat

pytestmark = pytest.mark.cpu
RELEASED_BYTES = {584, 528, 288, 68}


GRAPHS: dict[str, Callable[[], Graph]] = {
    "exact": exact_graph, "append": append_graph, "close": close_graph
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    graph: Graph
    path: Path
    weights: RandomWeights


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> Callable[[str], Compiled]:
    made: dict[str, Compiled] = {}

    def get(name: str) -> Compiled:
        if name not in made:
            graph, path = GRAPHS[name](), tmp_path_factory.mktemp(name) / "m"
            made[name] = Compiled(graph, path, compile_rows(graph, path, kernel_cache, ROWS))
        return made[name]

    return get


Get = Callable[[str], Compiled]


def _same_bits(got: np.ndarray, want: np.ndarray, where: str) -> None:
    """Equal, NaN for NaN, with the sign of zeros."""
    np.testing.assert_array_equal(got, want, err_msg=where)
    if got.dtype == np.float32:
        held = ~np.isnan(want)
        assert (np.signbit(got) == np.signbit(want))[held].all(), where


@pytest.mark.parametrize("rows", [1, 5, ROWS])
def test_exact_ops_give_the_bits_of_their_reference(compiled: Get, rows: int) -> None:
    c = compiled("exact")
    step = paged_step(c.graph, rows, seed=rows)
    for name, tensor in step.inputs.items():
        if name.startswith(("big", "e")) and tensor.dtype == torch.int32:
            tensor[...] = torch.randint(-(2**31), 2**31 - 1, tensor.shape)
    if rows == ROWS:
        _plant(step)
    outputs, _ = run_compiled(c.path, c.graph, step)
    expected = run_expected(c.graph, step, c.weights).outputs
    assert set(outputs) == set(expected)
    for name, want in expected.items():
        _same_bits(outputs[name], want.numpy(), name)


def _plant(step: Step) -> None:
    """NaN and infinities, whole rows of them and single ones; rows of zeros."""
    for tensor in step.inputs.values():
        if tensor.is_floating_point():
            flat = tensor.flatten(1)
            flat[0], flat[1], flat[2] = torch.nan, torch.inf, 0.0
            flat[3, 0], flat[4, -1], flat[5, 0] = torch.nan, -torch.inf, 2.0**127


def test_rows_alone_give_the_bits_of_rows_together(compiled: Get) -> None:
    for graph in ("exact", "close"):
        c = compiled(graph)
        step = paged_step(c.graph, ROWS, seed=77)
        together, _ = run_compiled(c.path, c.graph, step)
        by_token = {i.name for i in c.graph.inputs if str(i.type.shape[0]) == "tokens"}
        for row in (0, 7, ROWS - 1):
            alone = {n: t[row : row + 1] if n in by_token else t for n, t in step.inputs.items()}
            single = Step(alone, {**step.dims, "tokens": 1}, step.states)
            outputs, _ = run_compiled(c.path, c.graph, single, threads=1)
            outputs.pop("weights", None)
            for name, got in outputs.items():
                _same_bits(got[0], together[name][row], f"{name} row {row}")


def test_appends_pack_every_format_as_the_rules_say(compiled: Get) -> None:
    c = compiled("append")
    step = paged_step(c.graph, ROWS, seed=3)
    _, states = run_compiled(c.path, c.graph, step)
    expected = run_expected(c.graph, step, c.weights).states
    sizes = set()
    for state in c.graph.states:
        want, got = expected[state.name], states[state.name]
        changed = want.flatten(0, 1) != step.states[state.name].flatten(0, 1)
        assert changed.any() and not changed.any(1).all(), state.name
        kind = state.type.dtype
        if not isinstance(kind, BlockFormat):
            held = want.bfloat16().view(torch.uint16) if kind == BF16 else want
            np.testing.assert_array_equal(got, held.numpy(), err_msg=state.name)
            continue
        width = want.shape[-1]
        sizes.add(got.shape[-1])
        assert got.shape[-1] == kind.row_bytes(width)
        _same_bits(unpack_rows(got.reshape(-1, got.shape[-1]), kind, width),
                   want.flatten(0, 1).numpy(), state.name)  # fmt: skip
        _check_bytes(c.graph, step, state.name, got.reshape(-1, got.shape[-1]), kind)
    assert sizes >= RELEASED_BYTES


def _check_bytes(
    graph: Graph, step: Step, state: str, got: np.ndarray, kind: BlockFormat
) -> None:
    """Stored rows are the numpy packing of what was quantised; all others are untouched."""
    want = pack_rows(step.states[state].flatten(0, 1).numpy(), kind)
    append = next(n for n in graph.nodes if n.inputs[0] == state and n.op == "append_rows")
    slots = run_slots(graph, step, append.inputs[2])
    kept = slots >= 0
    want[slots[kept]] = pack_rows(step.inputs[f"x.{state}"].numpy()[kept], kind)
    np.testing.assert_array_equal(got, want, err_msg=state)


def run_slots(graph: Graph, step: Step, value: str) -> np.ndarray:
    node = graph.node[value]
    from tilewright.graph.ops import op_def

    operands = [step.inputs[name] for name in node.inputs]
    return np.asarray(op_def(node.op).reference(operands, node.attr))


@pytest.mark.parametrize("rows", [1, ROWS])
def test_close_ops(compiled: Get, rows: int) -> None:
    c = compiled("close")
    step = paged_step(c.graph, rows, seed=rows + 50)
    step.inputs["softplus"][...] = torch.linspace(-87, 100, 33 * rows).reshape(rows, 33)
    outputs, _ = run_compiled(c.path, c.graph, step)
    expected = run_expected(c.graph, step, c.weights, wide=True).outputs
    for name, want in expected.items():
        np.testing.assert_allclose(
            outputs[name], want.numpy(), rtol=2e-6, err_msg=name,
            atol=0 if name == "softplus" else 2e-6,
        )


def test_formats_of_the_table_are_all_tried() -> None:
    activations = {
        n for n, f in BLOCK_FORMATS.items()
        if f.block[0] == 1 and f.code.is_float and f.tail in (0, 8, 64)
    }  # fmt: skip
    assert activations - set(CACHED) <= {"fp8_e4m3[g=64,axis=1,scale=ue8m0]"}
