"""Steps over paged rows for kernels under test: requests with histories, ring tables, shuffled
pages, and parts of a step cut out of the same state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
I32 = NDArray[np.int32]
OF_TOKENS = ("q", "w", "positions", "request_rows", "candidates", "selected")


@dataclass(frozen=True, eq=False)
class Tables:
    """Where entries of every request stand: pages [requests, n], and how many pages there are."""

    pages: I32
    num_pages: int
    per_page: int

    def slots(self, row: int, entries: Array) -> Array:
        """Flat slots of entries of one request."""
        page = self.pages[row, entries // self.per_page % self.pages.shape[1]]
        return page * self.per_page + entries % self.per_page


def make_tables(
    rng: np.random.Generator, requests: int, held: int, per_page: int, spare: int = 2
) -> Tables:
    """Tables that hold `held` entries of each request, pages in random order."""
    each = -(-held // per_page) + 1
    order = rng.permutation(each * requests + spare).astype(np.int32)
    return Tables(order[: each * requests].reshape(requests, each), len(order), per_page)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of a step."""

    positions: I32
    rows: I32

    @property
    def count(self) -> int:
        return len(self.positions)


def make_tokens(spans: list[tuple[int, int]], padding: int = 0) -> Tokens:
    """Requests are (first position, tokens); padding tokens follow."""
    positions = [np.arange(a, a + n) for a, n in spans] + [np.full(padding, -1)]
    rows = [np.full(n, i) for i, (_, n) in enumerate(spans)] + [np.zeros(padding)]
    return Tokens(np.concatenate(positions).astype(np.int32), np.concatenate(rows).astype(np.int32))


def poisoned(memory: Array, slots: list[Array], byte: int = 0xFF) -> Array:
    """The state with every entry outside `slots` overwritten: NaN in every format."""
    flat = memory.reshape(-1, memory.shape[-1]).copy()
    kept = np.unique(np.concatenate([np.asarray(s).ravel() for s in slots]).astype(np.int64))
    absent = np.setdiff1d(np.arange(len(flat)), kept)
    flat.view(np.uint8).reshape(len(flat), -1)[absent] = byte
    return flat.reshape(memory.shape)


@dataclass(frozen=True, eq=False)
class Step:
    """Operands of one launch by name as kernels take them, their values, and bound dims."""

    arrays: dict[str, Array]
    values: dict[str, Array]
    dims: dict[str, int]

    def take(self, chosen: Array) -> Step:
        """The same states, some of the tokens."""
        names = [n for n in OF_TOKENS if n in self.arrays]
        cut = {n: np.ascontiguousarray(self.arrays[n][chosen]) for n in names}
        values = {n: self.values[n][chosen] for n in names}
        return Step({**self.arrays, **cut}, {**self.values, **values},
                    {**self.dims, "tokens": len(chosen)})  # fmt: skip
