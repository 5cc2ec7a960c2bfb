"""Steps of latent attention for kernels under test, on any target: problems, operands and what the
reference gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from support.paged_rows import format_of, random_rows
from support.paged_steps import Step, Tables, Tokens, make_tables, make_tokens, poisoned
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.build import Value
from tilewright.graph.dims import Dim
from tilewright.graph.ops import op_def
from tilewright.graph.types import BF16, F32, I32

Array = NDArray[Any]
SPANS = [(0, 3), (37, 6), (9, 1), (60, 2), (18, 1)]


@dataclass(frozen=True)
class Problem:
    """What decides the bits. `op` is attend_window, attend_compressed or attend_selected."""

    op: str = "attend_selected"
    heads: int = 20
    width: int = 72
    window: int = 12
    per_page: int = 8  # window entries of a page
    ratio: int = 4
    entries_per_page: int = 2
    selected: int = 11
    window_format: str = "f32"
    entry_format: str = "f32"
    chunk: int = 5
    epilogue: bool = True
    scaled: bool = True  # with an epilogue: queries and values are scaled too

    @property
    def attrs(self) -> dict[str, Any]:
        found: dict[str, Any] = {"scale": 0.35, "window": self.window}
        return {**found, "ratio": self.ratio} if self.op == "attend_compressed" else found


PROBLEMS = {
    "window": Problem("attend_window", heads=7, width=40, window=13, chunk=32),
    "compressed": Problem("attend_compressed", entry_format="v4_short", window_format="v4_short"),
    "selected": Problem(window_format="fp8", entry_format="nvfp4", width=64, heads=16),
    "v4": Problem(
        window_format="v4", entry_format="v4", width=512, heads=32, chunk=128, window=16,
        selected=140,
    ),
}  # fmt: skip


def operands_of(b: GraphBuilder, p: Problem, q: Value, tokens: Dim, requests: Dim) -> list[Value]:
    """Declare what a problem's attention reads beside its queries; return all its operands."""
    window_blocks = b.dim("window_blocks", Role.CONTEXT, upper=512)
    window_pages = b.dim("window_pages", Role.BATCH, upper=1 << 20)
    window = b.state("window", format_of(p.window_format), window_pages, p.per_page, p.width)
    operands = [
        q, window, b.input("positions", I32, tokens), b.input("request_rows", I32, tokens),
        b.input("window_tables", I32, requests, window_blocks), b.weight("sink", F32, p.heads),
    ]  # fmt: skip
    if p.op != "attend_window":
        blocks = b.dim("cache_blocks", Role.CONTEXT, upper=512)
        pages = b.dim("pages", Role.BATCH, upper=1 << 20)
        kind = format_of(p.entry_format)
        operands.append(b.state("entries", kind, pages, p.entries_per_page, p.width))
        operands.append(b.input("block_tables", I32, requests, blocks))
    if p.op == "attend_selected":
        operands.append(b.input("selected", I32, tokens, p.selected))
    return operands


def build(p: Problem) -> Graph:
    b = GraphBuilder("latent")
    tokens = b.dim("tokens", Role.BATCH, upper=4096)
    requests = b.dim("requests", Role.BATCH, upper=512)
    q = b.input("q", BF16 if p.epilogue else F32, tokens, p.heads, p.width)
    if p.epilogue and p.scaled:
        q = b.cast(b.cast(q, F32) * 0.5, BF16)
    operands = operands_of(b, p, q, tokens, requests)
    out = b.op(p.op, *operands, **p.attrs)
    scaled = out * 2.0 if p.epilogue and p.scaled else out
    b.output("out", b.cast(scaled, BF16) if p.epilogue else out)
    return b.build()


def make_step(p: Problem, spans: list[tuple[int, int]], seed: int, padding: int = 1) -> Step:
    """A step whose states hold NaN wherever no token of it may look."""
    rng = np.random.default_rng(seed)
    tokens = make_tokens(spans, padding)
    longest = max((n for _, n in spans), default=1)
    window = make_tables(rng, len(spans), p.window + longest, p.per_page)
    end = max(a + n for a, n in spans)
    context = make_tables(rng, len(spans), end // p.ratio + 1, p.entries_per_page)
    q = rng.standard_normal((tokens.count, p.heads, p.width)).astype(np.float32)
    q_bits = (q.view(np.uint32) >> 16).astype(np.uint16)
    q_values = (q_bits.astype(np.uint32) << 16).view(np.float32) if p.epilogue else q
    sink = rng.standard_normal(p.heads).astype(np.float32)
    arrays: dict[str, Array] = {
        "q": q_bits if p.epilogue else q, "positions": tokens.positions,
        "request_rows": tokens.rows, "window_tables": window.pages, "sink": sink,
    }  # fmt: skip
    values = {**arrays, "q": q_values}
    rows = random_rows(rng, p.window_format, window.num_pages, p.per_page, p.width)
    arrays["window"] = poisoned(rows.memory, window_slots(p, tokens, window))
    values["window"] = rows.values
    dims = {
        "tokens": tokens.count, "requests": len(spans), "window_blocks": window.pages.shape[1],
        "window_pages": window.num_pages,
    }  # fmt: skip
    if p.op != "attend_window":
        entries = random_rows(rng, p.entry_format, context.num_pages, p.entries_per_page, p.width)
        seen, selected = chosen_entries(p, tokens, rng)
        slots = [context.slots(int(tokens.rows[t]), e) for t, e in enumerate(seen)]
        arrays["entries"], values["entries"] = poisoned(entries.memory, slots), entries.values
        arrays["block_tables"] = values["block_tables"] = context.pages
        dims |= {"cache_blocks": context.pages.shape[1], "pages": context.num_pages}
        if p.op == "attend_selected":
            arrays["selected"] = values["selected"] = selected
    return Step(arrays, values, dims)


def window_slots(p: Problem, tokens: Tokens, tables: Tables) -> list[Array]:
    found = []
    for position, row in zip(tokens.positions, tokens.rows, strict=True):
        seen = np.arange(max(0, position + 1 - p.window), position + 1)
        found.append(tables.slots(int(row), seen))
    return found


def chosen_entries(
    p: Problem, tokens: Tokens, rng: np.random.Generator
) -> tuple[list[Array], NDArray[np.int32]]:
    """Entries every token may read, and a selection with holes in it."""
    selected = np.full((tokens.count, p.selected), -1, np.int32)
    seen = []
    for t, position in enumerate(tokens.positions):
        visible = np.arange(max(0, position + 1) // p.ratio)
        if p.op == "attend_compressed":
            seen.append(visible)
            continue
        count = int(rng.integers(0, min(len(visible), p.selected) + 1))
        picked = rng.permutation(visible)[:count].astype(np.int32)
        selected[t, np.sort(rng.permutation(p.selected)[:count])] = picked
        seen.append(picked)
    return seen, selected


def expected(p: Problem, step: Step) -> NDArray[np.float64]:
    """The reference in fp64, with the casts of the graph."""
    order = ["q", "window", "positions", "request_rows", "window_tables", "sink"]
    order += ["entries", "block_tables"] if p.op != "attend_window" else []
    order += ["selected"] if p.op == "attend_selected" else []
    operands = [torch.from_numpy(np.nan_to_num(step.values[n])) for n in order]
    operands = [o.double() if o.is_floating_point() else o for o in operands]
    if p.epilogue and p.scaled:
        operands[0] = (operands[0] * 0.5).bfloat16().double()
    out = op_def(p.op).reference(operands, p.attrs)
    found: NDArray[np.float64] = (out * 2.0 if p.epilogue and p.scaled else out).numpy()
    return found


def widened(p: Problem, found: dict[str, Array]) -> NDArray[np.float64]:
    (array,) = found.values()
    if p.epilogue:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)
