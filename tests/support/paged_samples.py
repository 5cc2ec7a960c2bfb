"""Samples of the ops on paged rows, experts, hyper-connections and quantised values.

Steps mix requests of several lengths, ring tables whose pages stand in random order, and padding
tokens (position -1); extents are odd where an op allows it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

import torch

from tilewright.graph import TensorType
from tilewright.graph.dims import Dim, symbol
from tilewright.graph.ir import Attr
from tilewright.graph.types import F32, I32

ROWS = symbol("rows")
EXTENTS = (1, 2, 3, 5)
FORMATS = (
    "fp8_e4m3[g=128,axis=1,scale=ue8m0]",
    "fp8_e4m3[g=32,axis=1,scale=ue8m0]",
    "fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=8xbf16]",
    "fp4_e2m1[g=32,axis=1,scale=ue8m0]",
    "fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]",
)
Drawn: TypeAlias = tuple[
    tuple[TensorType, ...], dict[str, Attr], dict[str, int], dict[int, torch.Tensor]
]


@dataclass(frozen=True)
class PagedStep:
    """Tokens of one step: positions and rows [tokens], ring tables [requests, pages]."""

    positions: torch.Tensor
    rows: torch.Tensor
    tables: torch.Tensor
    num_pages: int

    @property
    def tokens(self) -> int:
        return len(self.positions)

    def types(self) -> tuple[TensorType, TensorType, TensorType]:
        """Types of positions, request_rows and tables."""
        return _i32(ROWS), _i32(ROWS), _i32(*self.tables.shape)

    def given(self, first: int) -> dict[int, torch.Tensor]:
        """The three operands from number `first` on."""
        return {first: self.positions, first + 1: self.rows, first + 2: self.tables}


def paged_step(r: random.Random, page_positions: int, window: int, *, ring: bool) -> PagedStep:
    """Draw a step of 1..3 requests; tables hold `window` older positions and the step's own."""
    spans = []
    for _ in range(r.randint(1, 3)):
        start = r.randint(0, 3 * window) if r.random() < 0.7 else 0
        spans.append((start, start + r.randint(1, 2 * window)))
    longest = max(b - a for a, b in spans) + window
    held = longest if ring else max(b for _, b in spans)
    pages = -(-held // page_positions) + 1
    order = list(range(pages * len(spans) + 1))
    r.shuffle(order)
    tokens = [(p, row) for row, (a, b) in enumerate(spans) for p in range(a, b)]
    tokens += [(-1, 0)] * r.randint(0, 2)
    r.shuffle(tokens)
    positions, rows = (torch.tensor(c, dtype=torch.int32) for c in zip(*tokens, strict=True))
    tables = torch.tensor(order[: pages * len(spans)], dtype=torch.int32).view(len(spans), -1)
    return PagedStep(positions, rows, tables, len(order))


def _f32(*shape: Dim) -> TensorType:
    return TensorType(F32, shape)


def _i32(*shape: Dim) -> TensorType:
    return TensorType(I32, shape)


def _whole(r: random.Random, shape: tuple[int, ...], stop: int, start: int = 0) -> torch.Tensor:
    count = 1
    for extent in shape:
        count *= extent
    drawn = [r.randrange(start, stop) for _ in range(count)]
    return torch.tensor(drawn, dtype=torch.int32).reshape(shape)


def _quantise(r: random.Random) -> Drawn:
    rows, width = r.choice(EXTENTS), r.choice((9, 31, 64, 100, 200))
    return (_f32(ROWS, width),), {"dtype": r.choice(FORMATS)}, {"rows": rows}, {}


def _hadamard(r: random.Random) -> Drawn:
    return (_f32(ROWS, 3, r.choice((1, 2, 8, 32))),), {}, {"rows": r.choice(EXTENTS)}, {}


def _modulo(r: random.Random) -> Drawn:
    rows = r.choice(EXTENTS)
    ids = _whole(r, (rows, 3), 50, -50)
    return (_i32(ROWS, 3),), {"divisor": r.choice((1, 2, 7))}, {"rows": rows}, {0: ids}


def _streams(r: random.Random, op: str) -> Drawn:
    rows, streams, width = r.choice(EXTENTS), r.choice((1, 2, 4)), r.choice(EXTENTS)
    x, mix = _f32(ROWS, streams, width), streams * (2 + streams)
    attrs: dict[str, Attr] = {}
    match op:
        case "hyper_mix":
            attrs = {"streams": streams, "iterations": r.choice((1, 2, 20)), "eps": 1e-6}
            types = (_f32(ROWS, mix), _f32(3), _f32(mix))
        case "hyper_collapse":
            types = (x, _f32(ROWS, r.choice((streams, mix))))
        case "hyper_update":
            types = (x, _f32(ROWS, width), _f32(ROWS, mix))
        case "repeat_streams":
            types, attrs = (_f32(ROWS, width),), {"streams": streams}
        case "take_stream":
            types, attrs = (x,), {"index": r.randrange(streams)}
        case _:
            types = (x,)
    return types, attrs, {"rows": rows}, {}


def _experts(r: random.Random, op: str) -> Drawn:
    rows, slots, count = r.choice(EXTENTS), r.choice((1, 2, 3)), r.choice((1, 4, 7))
    n, k = r.choice(EXTENTS), r.choice(EXTENTS)
    ids = _whole(r, (rows, slots), count)
    match op:
        case "grouped_linear":
            return (_f32(ROWS, slots, k), _f32(slots * n, k)), {}, {"rows": rows}, {}
        case "gather_last":
            return (_f32(ROWS, count), _i32(ROWS, slots)), {}, {"rows": rows}, {1: ids}
    x = r.choice((_f32(ROWS, k), _f32(ROWS, slots, k)))
    return (x, _f32(count, n, k), _i32(ROWS, slots)), {}, {"rows": rows}, {2: ids}


def _append_rows(r: random.Random) -> Drawn:
    rows, entries, pages, width = r.choice(EXTENTS), r.choice((2, 3)), 5, r.choice(EXTENTS)
    slots = [s if r.random() < 0.7 else -1 for s in r.sample(range(pages * entries), rows)]
    types = (_f32(pages, entries, width), _f32(ROWS, width), _i32(ROWS))
    return types, {}, {"rows": rows}, {2: torch.tensor(slots, dtype=torch.int32)}


def _page_slots(r: random.Random) -> Drawn:
    ratio, entries = r.choice((1, 2, 4)), r.choice((1, 3, 4))
    step = paged_step(r, ratio * entries, 2 * ratio, ring=True)
    attrs: dict[str, Attr] = {"ratio": ratio, "entries": entries}
    return step.types(), attrs, {"rows": step.tokens}, step.given(0)


def _pool(r: random.Random) -> Drawn:
    ratio, overlap, size = r.choice((1, 2, 4)), r.random() < 0.5, r.choice((3, 4, 8))
    step = paged_step(r, size, 2 * ratio, ring=True)
    state = _f32(step.num_pages, size, 2 * r.choice(EXTENTS))
    attrs: dict[str, Attr] = {"ratio": ratio, "overlap": overlap}
    return (state, state, *step.types()), attrs, {"rows": step.tokens}, step.given(2)


def _ngram(r: random.Random) -> Drawn:
    size, grams = r.choice((2, 3)), r.choice((1, 3))
    step = paged_step(r, size, grams + 1, ring=True)
    history = _whole(r, (step.num_pages, size, 1), 99092)
    attrs: dict[str, Attr] = {
        "multipliers": tuple(2 * r.randrange(1 << 45) + 1 for _ in range(grams + 1)),
        "primes": tuple(r.choice((5, 7, 101, 16000057)) for _ in range(2 * grams)),
        "pad": 2,
    }
    types = (_i32(step.num_pages, size, 1), *step.types())
    return types, attrs, {"rows": step.tokens}, {0: history, **step.given(1)}


def _attend(r: random.Random, op: str) -> Drawn:
    window, size, heads, width = r.choice((1, 3, 5)), r.choice((2, 3)), r.choice((1, 2)), 3
    ring = op == "attend_window" or r.random() < 0.5
    step = paged_step(r, size, window, ring=ring)
    types = [_f32(ROWS, heads, width), _f32(step.num_pages, size, width), *step.types()]
    types.append(_f32(heads))
    attrs: dict[str, Attr] = {"scale": 0.4, "window": window}
    given = step.given(2)
    if op != "attend_window":
        ratio, entries = r.choice((1, 2)), r.choice((1, 3))
        visible = (int(step.positions.max()) + 1) // ratio
        tables = _tables(r, step, -(-visible // entries) + 1)
        types += [_f32(int(tables.max()) + 1, entries, width), _i32(*tables.shape)]
        given[7] = tables
        if op == "attend_selected":
            selected = [_selection(r, (int(p) + 1) // ratio, 3) for p in step.positions]
            given[8] = torch.tensor(selected, dtype=torch.int32)
            types.append(_i32(ROWS, 3))
        else:
            attrs["ratio"] = ratio
    return tuple(types), attrs, {"rows": step.tokens}, given


def _tables(r: random.Random, step: PagedStep, pages: int) -> torch.Tensor:
    """Tables of another pool for the same requests."""
    order = list(range(pages * len(step.tables)))
    r.shuffle(order)
    return torch.tensor(order, dtype=torch.int32).view(-1, pages)


def _selection(r: random.Random, visible: int, k: int) -> list[int]:
    chosen = sorted(r.sample(range(visible), min(visible, r.randint(0, k))))
    return [*chosen, *[-1] * (k - len(chosen))]


def _select(r: random.Random, op: str) -> Drawn:
    ratio, entries, heads, width = r.choice((1, 2, 4)), r.choice((1, 3)), r.choice((1, 3)), 2
    step = paged_step(r, ratio * entries, 5, ring=False)
    state = _f32(step.num_pages, entries, width)
    types = [_f32(ROWS, heads, width), _f32(ROWS, heads), state, *step.types()]
    attrs: dict[str, Attr] = {"k": r.choice((1, 2, 9)), "ratio": ratio}
    given = step.given(3)
    if op != "select_entries":
        attrs["block_size"] = r.choice((1, 2, 3))
    if op == "select_with_blocks":
        attrs["blocks"] = r.choice((1, 3))
    if op == "select_within":
        types.append(_i32(ROWS, 3))
        given[6] = _whole(r, (step.tokens, 3), 4, -1)
    return tuple(types), attrs, {"rows": step.tokens}, given


def paged_sample(op: str, r: random.Random) -> Drawn | None:
    """Return types, attributes, extents and given operands of `op`; None for an op not here."""
    plain = {"quantise": _quantise, "hadamard": _hadamard, "modulo": _modulo, "pool_window": _pool,
             "append_rows": _append_rows, "page_slots": _page_slots, "ngram_rows": _ngram}
    families = {"hyper_mix": _streams, "hyper_collapse": _streams, "hyper_update": _streams,
                "repeat_streams": _streams, "take_stream": _streams, "sum_slots": _streams,
                "expert_linear": _experts, "grouped_linear": _experts, "gather_last": _experts,
                "attend_window": _attend, "attend_compressed": _attend,
                "attend_selected": _attend, "select_entries": _select,
                "select_with_blocks": _select, "select_within": _select}
    if op in plain:
        return plain[op](r)
    return families[op](r, op) if op in families else None
