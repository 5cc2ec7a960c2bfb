"""Graphs that hold every op of row kernels, for compilers of all targets."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.graph import Dim, Graph, GraphBuilder, Role, Value
from tilewright.graph.types import BF16, F32, I32, ElementType, element_type

ROWS = 23
CACHED = {  # format -> widths, the released ones first
    "fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=64xbf16]": (512, 80),
    "fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=8xbf16]": (72,),
    "fp8_e4m3[g=32,axis=1,scale=ue8m0]": (512, 40),
    "fp8_e4m3[g=128,axis=1,scale=ue8m0]": (256, 130),
    "fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]": (512, 20),
    "fp4_e2m1[g=32,axis=1,scale=ue8m0]": (128, 33),
}


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
    coded = b.weight("coded", element_type("fp8_e4m3[g=32,axis=1,scale=ue8m0]"), 23, 64)
    near = b.op("modulo", _x(b, t, "e.coded", 3, dtype=I32), divisor=23)
    b.output("embedding.coded", b.op("embedding", near, coded))
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
