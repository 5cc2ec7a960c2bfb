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
from tilewright.graph import Dim, Graph, GraphBuilder, Role, Value
from tilewright.graph.types import (
    BF16,
    BLOCK_FORMATS,
    F32,
    I32,
    BlockFormat,
    ElementType,
    element_type,
)

pytestmark = pytest.mark.cpu
ROWS = 23
CACHED = {  # format -> widths, the released ones first
    "fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=64xbf16]": (512, 80),
    "fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=8xbf16]": (72,),
    "fp8_e4m3[g=32,axis=1,scale=ue8m0]": (512, 40),
    "fp8_e4m3[g=128,axis=1,scale=ue8m0]": (256, 130),
    "fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]": (512, 20),
    "fp4_e2m1[g=32,axis=1,scale=ue8m0]": (128, 33),
}
RELEASED_BYTES = {584, 528, 288, 68}


@dataclass(frozen=True)
class Token:
    """Inputs that index the tokens of a step."""

    rows: Dim
    owners: Dim
    positions: Value
    requests: Value
    tables: Value


def _token(b: GraphBuilder) -> Token:
    rows = b.dim("tokens", Role.BATCH, upper=ROWS)
    positions, requests = b.input("positions", I32, rows), b.input("request_rows", I32, rows)
    owners = b.dim("requests", Role.BATCH, upper=4)
    tables = b.input("block_tables", I32, owners, b.dim("ring", Role.CONTEXT, upper=8))
    return Token(rows, owners, positions, requests, tables)


def _x(b: GraphBuilder, t: Token, name: str, *shape: int, dtype: ElementType = F32) -> Value:
    return b.input(name, dtype, t.rows, *shape)


def exact_graph() -> Graph:
    """Ops whose bits are defined: the fp32 reference must be met exactly."""
    b = GraphBuilder("exact")
    t = _token(b)
    pages = b.dim("cache_blocks", Role.BATCH, upper=64)
    for i, (name, widths) in enumerate(CACHED.items()):
        for width in widths:
            tag = f"{i}.{width}"
            x = _x(b, t, f"quantise.{tag}", width)
            b.output(f"quantise.{tag}", b.quantise(x, element_type(name)))
    heads = _x(b, t, "heads", 3, 64)
    b.output("heads", b.quantise(heads, element_type("fp4_e2m1[g=32,axis=1,scale=ue8m0]")))
    half = _x(b, t, "half", 48, dtype=BF16)
    b.output("half", b.quantise(half, element_type("fp8_e4m3[g=32,axis=1,scale=ue8m0]")))
    for width in (1, 2, 16, 128):
        b.output(f"hadamard.{width}", b.op("hadamard", _x(b, t, f"h.{width}", width)))
    b.output("hadamard.heads", b.op("hadamard", _x(b, t, "h.heads", 3, 32)))
    for streams, width in ((4, 33), (1, 5), (3, 64)):
        tag = f"{streams}.{width}"
        x, mix = _x(b, t, f"s.{tag}", streams, width), _x(b, t, f"m.{tag}", streams * (2 + streams))
        y = _x(b, t, f"y.{tag}", width, dtype=BF16)
        b.output(f"collapse.{tag}", b.op("hyper_collapse", x, mix))
        b.output(f"update.{tag}", b.op("hyper_update", x, y, mix))
        b.output(f"sum.{tag}", b.op("sum_slots", x))
        b.output(f"take.{tag}", b.op("take_stream", x, index=streams - 1))
    half = _x(b, t, "streams.half", 2, 8, dtype=BF16)
    b.output("collapse.half", b.cast(b.op("hyper_collapse", half, _x(b, t, "pre.half", 2)), BF16))
    b.output("repeat", b.op("repeat_streams", _x(b, t, "r", 7), streams=4))
    ids = _x(b, t, "ids", 3, dtype=I32)
    b.output("gather", b.op("gather_last", _x(b, t, "g", 5), ids))
    b.output("gather.ints", b.op("gather_last", _x(b, t, "gi", 6, dtype=I32), ids))
    wide = b.op("modulo", _x(b, t, "big", 3, dtype=I32), divisor=3)
    b.output("modulo", wide)
    b.output("modulo.part", b.op("slice_last", b.op("modulo", ids, divisor=2), start=1, stop=3))
    for ratio, entries in ((1, 8), (4, 2), (2, 3)):
        slots = b.op("page_slots", t.positions, t.requests, t.tables, ratio=ratio, entries=entries)
        b.output(f"slots.{ratio}", slots)
    history = b.state("history", I32, pages, 8, 1, scope="window", window=4)
    rows = b.op(
        "ngram_rows", history, t.positions, t.requests, t.tables,
        multipliers=(2**61 + 1, 3**38, 5, -7), primes=(101, 103, 1009, 1013, 97, 89), pad=2,
    )  # fmt: skip
    b.output("ngram", rows)
    table = b.weight("table", F32, 1013, 6)
    b.output("embedding", b.op("embedding", b.op("modulo", _x(b, t, "e", 2, dtype=I32), divisor=7),
                               table))  # fmt: skip
    b.output("weights", b.weight("left", F32, 5, 7) * b.weight("right", F32, 5, 7))
    ints = b.input("ints", I32, t.owners, 3)
    b.output("gather_rows", b.op("gather_rows", ints, t.requests))
    return b.build()


def append_graph() -> Graph:
    """Stores in every format, of values quantised in the same kernel and of plain ones."""
    b = GraphBuilder("append")
    t = _token(b)
    pages = b.dim("cache_blocks", Role.BATCH, upper=64)
    for ratio, entries in ((1, 8), (4, 2)):
        slots = b.op("page_slots", t.positions, t.requests, t.tables, ratio=ratio, entries=entries)
        for name, widths in CACHED.items():
            for width in widths:
                tag = f"{element_type(name)}.{width}.{ratio}"
                state = b.state(tag, element_type(name), pages, entries, width)
                x = b.quantise(_x(b, t, f"x.{tag}", width), element_type(name))
                b.append(state, x, slots, op="append_rows")
        for dtype in (F32, BF16, I32):
            state = b.state(f"{dtype}.{ratio}", dtype, pages, entries, 5)
            b.append(state, _x(b, t, f"x.{dtype}.{ratio}", 5, dtype=dtype), slots, op="append_rows")
    return b.build()


def close_graph() -> Graph:
    """Ops that use elementary functions or divide sums."""
    b = GraphBuilder("close")
    t = _token(b)
    pages = b.dim("cache_blocks", Role.BATCH, upper=64)
    for streams, iterations in ((4, 20), (2, 1), (3, 2)):
        width = streams * (2 + streams)
        tag = f"{streams}"
        scale, base = b.weight(f"scale.{tag}", F32, 3), b.weight(f"base.{tag}", F32, width)
        mix = b.op(
            "hyper_mix", _x(b, t, f"mix.{tag}", width), scale, base,
            streams=streams, iterations=iterations, eps=1e-6,
        )  # fmt: skip
        b.output(f"mix.{tag}", mix)
    for ratio, overlap, width, dtype in (
        (4, True, 24, F32), (2, False, 130, F32), (1, False, 7, F32), (16, False, 64, F32),
        (8, True, 64, BF16),
    ):  # fmt: skip
        tag = f"{ratio}.{overlap}.{width}"
        wide = 2 * width if overlap else width
        values, gates = (
            b.state(f"{n}.{tag}", dtype, pages, 8, wide, scope="window", window=32) for n in "vg"
        )
        b.output(
            f"pool.{tag}",
            b.op("pool_window", values, gates, t.positions, t.requests, t.tables,
                 ratio=ratio, overlap=overlap),
        )  # fmt: skip
    b.output("softplus", b.op("softplus", _x(b, t, "softplus", 33)))
    return b.build()


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
