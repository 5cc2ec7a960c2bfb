"""Plausible steps and indices for kernels that read paged rows: latent attention and selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.graph import Graph, Node
from tilewright.graph.dims import evaluate
from tilewright.graph.ops import Kind, op_def

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class PagedRead:
    """Operands of a node by number: a state, its tables, and the positions of one entry."""

    state: int
    tables: int
    ratio: int


def paged_reads(node: Node) -> tuple[PagedRead, ...]:
    """Return the paged states that a node of attention or selection walks, or nothing."""
    ratio = int(str(node.attr.get("ratio", 1)))
    match op_def(node.op).kind, len(node.inputs):
        case Kind.SELECT, count if count > 1:
            return (PagedRead(2, 5, ratio),)
        case Kind.ATTEND, count if node.op != "attend":
            return (PagedRead(1, 4, 1), PagedRead(6, 7, ratio))[: 1 if count == 6 else 2]
        case _:
            return ()


def paged_extents(body: Graph, node: Node, context: int, requests: int) -> list[tuple[Any, int]]:
    """Return extents and what they should be: `context` positions for each request."""
    found: list[tuple[Any, int]] = []
    most = {d.name: d.upper for d in body.dims}
    for read in paged_reads(node):
        state, tables = (body.type_of(node.inputs[i]) for i in (read.state, read.tables))
        wanted = -(-context // (read.ratio * evaluate(state.shape[1], {})))
        pages = max(1, min(wanted, evaluate(tables.shape[1], most)))
        found += [(tables.shape[0], requests), (tables.shape[1], pages)]
        found.append((state.shape[0], requests * pages))
    return found


def paged_index(
    node: Node, place: int, count: int, context: int, requests: int, rng: np.random.Generator
) -> I32 | None:
    """Return flat indices for an int operand of such a node; None for any other node."""
    reads = paged_reads(node)
    if not reads:
        return None
    numbers, positions = np.arange(count, dtype=np.int32), reads[0].tables - 2
    if place == positions:
        last = np.full(count, context - 1, np.int32)
        return last if requests > 1 else numbers + np.int32(context - count)
    if place == positions + 1:
        return numbers % np.int32(requests)
    if place in [read.tables for read in reads]:
        return rng.permutation(numbers)
    size = int(str(node.attr.get("block_size", 1))) * reads[-1].ratio
    return rng.integers(0, max(1, context // size), count, np.int32)
