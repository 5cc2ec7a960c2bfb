"""Row kernels of paged models in Triton, in its interpreter on the CPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.deepseek import v4_graph, v41_graph
from support.row_graphs import append_graph, close_graph, exact_graph
from support.rows import Step, unpack_rows
from support.triton_rows import (
    RowCase,
    in_memory,
    prologue_bodies,
    row_bodies,
    row_case,
    run_interpreted,
)
from tilewright.codegen.emit.triton_quant import codes_of
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import op_def
from tilewright.graph.ops.quant import quantise_dequantise
from tilewright.graph.types import F32, I32, element_type

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, for NaN
ROWS = 6
GRAPHS: dict[str, Callable[[], Graph]] = {
    "exact": exact_graph, "append": append_graph, "close": close_graph,
    "v4": lambda: v4_graph(hc_sinkhorn_iters=3),
    "v41": lambda: v41_graph(hc_sinkhorn_iters=3),
}  # fmt: skip


@cache
def graph_of(name: str) -> Graph:
    return GRAPHS[name]()


def cases(name: str, rows: int, seed: int) -> list[RowCase]:
    """Every row kernel of a graph with a step of its own."""
    model = graph_of(name)
    return [row_case(body, model, rows, seed + i) for i, body in enumerate(row_bodies(model))]


def plant(step: Step) -> None:
    """NaN and infinities, whole rows of them and single ones; a row of zeros; large ints."""
    for tensor in step.inputs.values():
        if tensor.is_floating_point() and tensor.ndim > 1:
            flat = tensor.flatten(1)
            flat[0], flat[1], flat[2] = torch.nan, torch.inf, 0.0
            flat[3, 0], flat[4, -1], flat[5, 0] = torch.nan, -torch.inf, 2.0**127


def same_bits(got: torch.Tensor, want: torch.Tensor, where: str) -> None:
    """Equal, NaN for NaN, with the sign of zeros."""
    np.testing.assert_array_equal(got.float().numpy(), want.float().numpy(), err_msg=where)
    if got.is_floating_point():
        held = ~want.isnan()
        assert torch.equal(got.signbit()[held], want.signbit()[held]), where


@pytest.mark.parametrize("rows", [1, ROWS])
def test_exact_ops_give_the_bits_of_their_reference(rows: int, tmp_path: Path) -> None:
    for case in cases("exact", rows, seed=rows):
        for name, tensor in case.step.inputs.items():
            if name.startswith(("big", "e")) and tensor.dtype == torch.int32:
                tensor[...] = torch.randint(-(2**31), 2**31 - 1, tensor.shape)
        if rows == ROWS:
            plant(case.step)
        got, want = run_interpreted(case, tmp_path), case.expected().outputs
        for _, value in case.body.graph.outputs:
            expected = want[case.names[value]]
            same_bits(got[value].reshape(expected.shape), expected, value)


def test_appends_store_the_bytes_of_the_rules(tmp_path: Path) -> None:
    """Rows with a slot are packed as numpy packs them; all other bytes are as before."""
    touched = 0
    for case in cases("append", ROWS, seed=3):
        got = run_interpreted(case, tmp_path)
        for state in case.body.graph.states:
            public = case.names[state.name]
            want = in_memory(case.step.states[public], state.type).flatten(0, 1)
            (append,) = [n for n in case.graph.nodes if n.inputs[0] == public]
            rows, slots = _raw(case, append.inputs[1]), _value(case, append.inputs[2])
            kept = slots >= 0
            want[slots[kept].long()] = in_memory(rows[kept], state.type)
            have = got[state.name].flatten(0, 1)
            assert torch.equal(have.view(torch.uint8), want.view(torch.uint8)), public
            touched += int(kept.sum())
    assert touched > 50


def _raw(case: RowCase, value: str) -> torch.Tensor:
    """What was quantised, or the value itself."""
    node = case.graph.node.get(value)
    return _value(case, value if node is None or node.op != "quantise" else node.inputs[0])


def _value(case: RowCase, value: str) -> torch.Tensor:
    """An input, or what an op makes of inputs."""
    if value in case.step.inputs:
        return case.step.inputs[value]
    node = case.graph.node[value]
    operands = [case.step.inputs[i] for i in node.inputs]
    return op_def(node.op).reference(operands, node.attr)


def test_close_ops(tmp_path: Path) -> None:
    for case in cases("close", 4, seed=50):
        if "softplus" in case.step.inputs:
            line = torch.linspace(-87, 100, 33 * 4).reshape(4, 33)
            case.step.inputs["softplus"][...] = line
        got, want = run_interpreted(case, tmp_path), case.expected(wide=True).outputs
        for _, value in case.body.graph.outputs:
            expected = want[case.names[value]].numpy()
            np.testing.assert_allclose(
                got[value].reshape(expected.shape).numpy(), expected, rtol=3e-6, atol=2e-6,
                err_msg=value,
            )  # fmt: skip


def close(got: torch.Tensor, want: torch.Tensor, where: str) -> None:
    """Rounded values may fall to the other side here and there; all else is close."""
    if not want.is_floating_point():
        assert torch.equal(got.long(), want.long()), where
        return
    got, want = got.reshape(want.shape).float(), want.float()
    assert bool(got.isfinite().all()), where
    differ = (got - want).abs() / (want.abs().amax(-1, keepdim=True) + 1e-6)
    assert float(differ.max()) <= 0.3, where
    assert float((differ > 1e-5).float().mean()) <= 0.02, where


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_kernels_of_models_equal_the_reference(family: str, tmp_path: Path) -> None:
    for case in cases(family, 4, seed=9):
        got, want = run_interpreted(case, tmp_path), case.expected()
        positions = case.step.inputs.get("positions")
        for _, value in case.body.graph.outputs:
            expected = want.outputs[case.names[value]]
            by_token = positions is not None and len(expected) == 4
            held = positions >= 0 if by_token else slice(None)
            close(got[value].reshape(expected.shape)[held], expected[held], value)
        for state in case.body.graph.states:
            expected = in_memory(want.states[case.names[state.name]], state.type)
            if expected.is_floating_point():
                close(got[state.name], expected, state.name)
            else:
                differ = (got[state.name] != expected).float().mean()
                assert float(differ) <= 0.002, (state.name, differ)


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_activations_made_before_contractions(family: str, tmp_path: Path) -> None:
    """Streams collapsed, rows of n-gram tables, quantised: rows of a kernel before the product."""
    model = graph_of(family)
    for _, body in prologue_bodies(model):
        case = row_case(body, model, 3, seed=6)
        got, want = run_interpreted(case, tmp_path), case.expected().outputs
        ((_, value),) = body.graph.outputs
        close(got[value], want[case.names[value]], value)


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_padding_stores_nothing(family: str, tmp_path: Path) -> None:
    """Positions and slots of -1, request rows of 0: no state changes, page tables are not read."""
    for case in cases(family, 2, seed=4):
        if not case.body.graph.states:
            continue
        slots = {n.inputs[2] for n in case.graph.nodes if n.op == "append_rows"}
        for name, tensor in case.step.inputs.items():
            if name == "positions" or name in slots:
                tensor[...] = -1
            elif name.endswith("tables"):
                tensor[...] = 1 << 30
        got = run_interpreted(case, tmp_path)
        for state in case.body.graph.states:
            before = in_memory(case.step.states[case.names[state.name]], state.type)
            same = got[state.name].view(torch.uint8) == before.view(torch.uint8)
            assert bool(same.all()), state.name


def test_a_row_alone_gives_the_bits_of_rows_together(tmp_path: Path) -> None:
    for case in cases("v41", 3, seed=11):
        by_token = {i.name for i in case.graph.inputs if str(i.type.shape[0]) == "tokens"}
        together = run_interpreted(case, tmp_path)
        alone = {n: t[1:2] if n in by_token else t for n, t in case.step.inputs.items()}
        step = Step(alone, {**case.step.dims, "tokens": 1}, case.step.states)
        single = RowCase(case.body, case.graph, step, case.weights, case.names)
        got = run_interpreted(single, tmp_path)
        for _, value in case.body.graph.outputs:
            if str(case.body.graph.type_of(value).shape[0]) == "tokens":
                want = together[value][1:2].contiguous().view(torch.uint8)
                assert torch.equal(got[value].view(torch.uint8), want), value


def wide_graph(heads: int, width: int, group: str) -> Graph:
    """Lines that several programs share: a norm of each, pairs turned, groups quantised."""
    b = GraphBuilder("wide")
    rows = b.dim("tokens", Role.BATCH, upper=8)
    x, angle = b.input("x", F32, rows, heads, width), b.input("angle", F32, rows, 1, width)
    mean = b.op("scale", b.op("reduce_sum", b.op("square", x)), factor=1.0 / width)
    normed = x * b.op("rsqrt", b.op("shift", mean, amount=1e-6))
    turned = normed * angle + b.op("rotate_pairs", normed, pairing="interleaved")
    b.output("turned", turned)
    b.output("codes", b.quantise(turned, element_type(group)))
    return b.build()


@given(
    heads=st.integers(1, 20), width=st.sampled_from([2, 6, 64, 130, 1026]),
    seed=st.integers(0, 99),
    group=st.sampled_from(["fp8_e4m3[g=32,axis=1,scale=ue8m0]",
                           "fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]"]),
)  # fmt: skip
@settings(max_examples=4, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_lines_are_spread_over_programs(
    heads: int, width: int, seed: int, group: str, tmp_path: Path
) -> None:
    model = wide_graph(heads, width, group)
    for body in row_bodies(model):
        case = row_case(body, model, 2, seed)
        got, want = run_interpreted(case, tmp_path), case.expected().outputs
        for _, value in body.graph.outputs:
            close(got[value], want[case.names[value]], value)


@pytest.mark.parametrize("kind", ["fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]",
                                  "fp8_e4m3[g=32,axis=1,scale=ue8m0]"])  # fmt: skip
def test_values_quantised_elsewhere_are_stored_exactly(kind: str, tmp_path: Path) -> None:
    b = GraphBuilder("late")
    rows, width = b.dim("tokens", Role.BATCH, upper=8), 48
    format_ = element_type(kind)
    state = b.state("s", format_, b.dim("cache_blocks", Role.BATCH, upper=64), 4, width)
    b.append(state, b.input("x", format_, rows, width), b.input("slots", I32, rows),
             op="append_rows")  # fmt: skip
    model = b.build()
    (body,) = row_bodies(model)
    case = row_case(body, model, 6, seed=2)
    (name,) = [n for n in case.step.inputs if n.endswith("x0")]
    values = quantise_dequantise(case.step.inputs[name], format_)
    case.step.inputs[name][...] = values
    got = run_interpreted(case, tmp_path)["s0"].flatten(0, 1)
    slots = case.step.inputs["slots"] if "slots" in case.step.inputs else None
    assert slots is not None
    kept = slots >= 0
    have = unpack_rows(got[slots[kept].long()].numpy(), format_, width)
    np.testing.assert_array_equal(have, values[kept].numpy())


def test_formats_without_packed_rows_are_refused() -> None:
    target = element_type("q8_0[g=32,axis=1,scale=f16]")
    with pytest.raises(LowerError) as error:
        codes_of(target)
    assert str(error.value) == (
        "format 'q8_0[g=32,axis=1,scale=f16]': has no packed rows: have fp8_e4m3 with ue8m0, "
        "fp4_e2m1 with ue8m0, fp4_e2m1 with fp8_e4m3"
    )
