"""Steps made by hand, for tools that run the executor without a scheduler: every request has pages
of its own, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.artifact import Manifest
from tilewright.runtime.cache_layout import CacheLayout, cache_layout
from tilewright.runtime.step_inputs import bound_step

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Step:
    """Inputs and dims of one executor step."""

    inputs: Mapping[str, Ints]
    dims: Mapping[str, int]


def plain_step(
    manifest: Manifest,
    token_ids: Sequence[int],
    *,
    requests: int = 1,
    start: int,
    all_logits: bool = False,
    window_pages: int | None = None,
) -> Step:
    """Return a step of requests that each compute as many of `token_ids` from `start` on.

    Logits are those of every token, or of the last one of each request. `window_pages`: how many
    window pages each request has (default: a whole ring); they are used in turn, so that a later
    step of the same requests finds its rows if all that it reads fit.
    """
    layout, tokens = cache_layout(manifest), len(token_ids) // requests
    size = layout.blocks.page_positions
    blocks = -(-(start + tokens) // size)
    positions = np.tile(np.arange(start, start + tokens, dtype=np.int32), requests)
    rows = np.repeat(np.arange(requests, dtype=np.int32), tokens)
    tables = np.arange(requests * blocks, dtype=np.int32).reshape(requests, blocks)
    last = (np.arange(requests, dtype=np.int32) + 1) * tokens - 1
    arrays = {
        "token_ids": np.array(token_ids, np.int32),
        "positions": positions,
        "request_rows": rows,
        "slots": tables[rows, positions // size] * size + positions % size,
        "block_tables": tables,
        "window_tables": _rings(layout, requests, start + tokens, window_pages, 0),
        "tail_starts": np.zeros(requests, np.int32),
        "tail_window_tables": _rings(layout, requests, start + tokens, window_pages, 1),
        "logit_rows": np.arange(len(token_ids), dtype=np.int32) if all_logits else last,
    }
    return Step(*bound_step(manifest, arrays))


def _rings(
    layout: CacheLayout, requests: int, stop: int, pages: int | None, index: int
) -> Ints:
    """Ring of each request for positions before `stop`; the newest pages take its places.

    `index`: 1 for the tables of a tail, whose pages come after those of all others.
    """
    if layout.window is None:
        return np.zeros((requests, 0), np.int32)
    width = layout.ring_width
    pages = width if pages is None else pages
    last = -(-stop // layout.window.page_positions)
    numbers = np.arange(max(last - width, 0), last)
    rings = np.zeros((requests, width), np.int32)
    first = (np.arange(requests)[:, None] + index * requests) * pages
    rings[:, numbers % width] = numbers % pages + first
    return rings


def page_dims(manifest: Manifest, *, requests: int = 1, positions: int) -> dict[str, int]:
    """Return the dims with which states hold all pages of such steps up to `positions`."""
    layout = cache_layout(manifest)
    counts = {layout.blocks.pages_dim: requests * -(-positions // layout.blocks.page_positions)}
    if layout.window is not None:
        counts[layout.window.pages_dim] = layout.windows * requests * layout.ring_width
    return counts
