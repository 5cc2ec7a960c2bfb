"""Steps of the selection of entries for kernels under test, on any target: problems, operands and
what the reference gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from support.paged_rows import format_of, random_rows
from support.paged_steps import Step, make_tables, make_tokens, poisoned
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.ops import op_def
from tilewright.graph.types import F32, I32, element_type

Array = NDArray[Any]
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
MXFP4 = "fp4_e2m1[g=32,axis=1,scale=ue8m0]"
SPANS = [(0, 3), (137, 6), (9, 1), (2060, 2), (300, 1)]


@dataclass(frozen=True)
class Problem:
    """What is selected. `op` is select_entries, select_with_blocks or select_within."""

    op: str = "select_entries"
    heads: int = 20
    width: int = 32
    ratio: int = 1
    per_page: int = 16
    k: int = 5
    blocks: int = 3  # selected, or given as candidates
    block_size: int = 4
    key_format: str = "f32"
    query: str = "f32"

    @property
    def attrs(self) -> dict[str, Any]:
        found: dict[str, Any] = {"k": self.k, "ratio": self.ratio}
        if self.op == "select_with_blocks":
            return {**found, "blocks": self.blocks, "block_size": self.block_size}
        return {**found, "block_size": self.block_size} if self.op == "select_within" else found


PROBLEMS = {
    "entries": Problem(k=40, ratio=2, heads=7, width=40),
    "blocks": Problem("select_with_blocks", key_format="mxfp4", query=MXFP4, k=9, blocks=4),
    "within": Problem("select_within", key_format="mxfp4", query=MXFP4, blocks=6, k=12),
    "large": Problem("select_with_blocks", heads=16, width=32, k=700, blocks=40, block_size=7),
}


def build(p: Problem) -> Graph:
    b = GraphBuilder("index")
    tokens = b.dim("tokens", Role.BATCH, upper=4096)
    requests = b.dim("requests", Role.BATCH, upper=512)
    blocks = b.dim("cache_blocks", Role.CONTEXT, upper=1 << 17)
    pages = b.dim("pages", Role.BATCH, upper=1 << 20)
    operands = [
        b.input("q", element_type(p.query), tokens, p.heads, p.width),
        b.input("w", F32, tokens, p.heads),
        b.state("keys", format_of(p.key_format), pages, p.per_page, p.width),
        b.input("positions", I32, tokens), b.input("request_rows", I32, tokens),
        b.input("tables", I32, requests, blocks),
    ]  # fmt: skip
    if p.op == "select_within":
        operands.append(b.input("candidates", I32, tokens, p.blocks))
    b.output("out", b.op(p.op, *operands, **p.attrs))
    return b.build()


def make_step(
    p: Problem, spans: list[tuple[int, int]], seed: int, *, whole: bool = True, padding: int = 1
) -> Step:
    """Queries, weights and keys are small whole numbers unless told otherwise; entries that no
    token sees are NaN."""
    rng = np.random.default_rng(seed)
    tokens = make_tokens(spans, padding)
    end = max(a + n for a, n in spans)
    tables = make_tables(rng, len(spans), end // p.ratio + 1, p.per_page)
    rows = random_rows(rng, p.key_format, tables.num_pages, p.per_page, p.width, whole=whole)
    shape = (tokens.count, p.heads, p.width)
    q = rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)
    if not whole and p.query != "f32":  # codes times a power of two per group
        groups = (*shape[:2], p.width // 32, 32)
        q = (rng.choice(CODES, groups) * 2.0 ** rng.integers(-9, 9, (*groups[:3], 1))).reshape(
            shape
        )
    w = rng.integers(-2, 3, shape[:2]) if whole else rng.standard_normal(shape[:2])
    q, w = q.astype(np.float32), w.astype(np.float32)
    visible = [np.arange((position + 1) // p.ratio) for position in tokens.positions]
    slots = [tables.slots(int(r), v) for r, v in zip(tokens.rows, visible, strict=True)]
    arrays: dict[str, Array] = {
        "q": q if p.query == "f32" else (q.view(np.uint32) >> 16).astype(np.uint16), "w": w,
        "keys": poisoned(rows.memory, slots), "positions": tokens.positions,
        "request_rows": tokens.rows, "tables": tables.pages,
    }  # fmt: skip
    values = {**arrays, "q": q, "keys": rows.values}
    if p.op == "select_within":
        candidates = np.full((tokens.count, p.blocks), -1, np.int32)
        for t, seen in enumerate(visible):
            known = -(-len(seen) // p.block_size)
            count = int(rng.integers(0, min(known, p.blocks) + 1))
            candidates[t, :count] = np.sort(rng.permutation(known)[:count])
            if t % 3 == 0:
                rng.shuffle(candidates[t])
        arrays["candidates"] = values["candidates"] = candidates
    dims = {
        "tokens": tokens.count, "requests": len(spans), "pages": tables.num_pages,
        "cache_blocks": tables.pages.shape[1],
    }  # fmt: skip
    return Step(arrays, values, dims)


def expected(p: Problem, step: Step) -> Array:
    order = ["q", "w", "keys", "positions", "request_rows", "tables"]
    order += ["candidates"] if p.op == "select_within" else []
    operands = [torch.from_numpy(step.values[n]) for n in order]
    operands = [o.double() if o.is_floating_point() else o for o in operands]
    found: Array = op_def(p.op).reference(operands, p.attrs).numpy()
    return found
