"""Steps of paged attention with fewer kv heads than heads, for kernels of the Ascend target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from support.paged_steps import make_tables, make_tokens
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.ops import op_def
from tilewright.graph.types import BF16, I32

Array = NDArray[Any]


@dataclass(frozen=True)
class Problem:
    heads: int = 9
    kv_heads: int = 3
    width: int = 64
    block_size: int = 16


@dataclass(frozen=True, eq=False)
class Step:
    """Operands by name as kernels take them, and what the reference gives in fp64."""

    arrays: dict[str, Array]
    dims: dict[str, int]
    want: torch.Tensor

    def take(self, chosen: Array) -> Step:
        names = ("q", "positions", "request_rows")
        cut = {n: np.ascontiguousarray(self.arrays[n][chosen]) for n in names}
        dims = {**self.dims, "tokens": len(chosen)}
        return Step({**self.arrays, **cut}, dims, self.want[chosen])


def build(p: Problem) -> Graph:
    b = GraphBuilder("gqa")
    tokens, requests = (b.dim(n, Role.BATCH, upper=512) for n in ("tokens", "requests"))
    blocks = b.dim("request_blocks", Role.CONTEXT, upper=512)
    pages = b.dim("pages", Role.BATCH, upper=1 << 20)
    states = [b.state(n, BF16, pages, p.kv_heads, p.block_size, p.width) for n in ("k", "v")]
    ints = [b.input(n, I32, tokens) for n in ("positions", "request_rows")]
    tables = b.input("tables", I32, requests, blocks)
    q = b.input("q", BF16, tokens, p.heads, p.width)
    out = b.op("attend", q, *states, *ints, tables, scale=p.width**-0.5)
    b.output("out", b.cast(out, BF16))
    return b.build()


def make_step(p: Problem, spans: list[tuple[int, int]], seed: int) -> Step:
    """A step whose caches hold NaN wherever no token of it looks."""
    rng, tokens = np.random.default_rng(seed), make_tokens(spans)
    end = max(a + n for a, n in spans)
    tables = make_tables(rng, len(spans), end, p.block_size)
    shape = (tables.num_pages, p.kv_heads, p.block_size, p.width)
    cached = [torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    for row, (first, count) in enumerate(spans):
        slots = torch.from_numpy(tables.slots(row, np.arange(first + count))).long()
        for cache in cached:
            drawn = torch.from_numpy(rng.standard_normal((len(slots), p.kv_heads, p.width)))
            cache[slots // p.block_size, :, slots % p.block_size] = drawn.bfloat16()
    q = torch.from_numpy(rng.standard_normal((tokens.count, p.heads, p.width)) * 2).bfloat16()
    ints = (tokens.positions, tokens.rows, tables.pages)
    wide = [torch.nan_to_num(t.double()) for t in (q, *cached)]
    given = [*wide, *(torch.from_numpy(i) for i in ints)]
    want = op_def("attend").reference(given, {"scale": p.width**-0.5})
    bits = [t.view(torch.uint16).numpy() for t in (q, *cached)]
    names = ("q", "k", "v", "positions", "request_rows", "tables")
    dims = {"tokens": tokens.count, "requests": len(spans), "pages": tables.num_pages,
            "request_blocks": tables.pages.shape[1]}  # fmt: skip
    return Step(dict(zip(names, (*bits, *ints), strict=True)), dims, want)
