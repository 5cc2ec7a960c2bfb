"""What the cache takes: what grows with every token, and what a sequence has anyway."""

from __future__ import annotations

from typing import Any

from tilewright.runtime.artifact import Manifest, StateRecord
from tilewright.runtime.cache import CacheSettings
from tilewright.runtime.cache_layout import CacheLayout, PoolLayout, cache_layout, ring_pages
from tilewright.runtime.plan_check import tensor_bytes
from tilewright.runtime.snapshot import first_row


def cache_facts(manifest: Manifest) -> dict[str, Any]:
    """Return bytes a token, a block, a full context and, with window states, a sequence."""
    layout, model = cache_layout(manifest), manifest.model
    blocks = -(-model.max_context // layout.blocks.page_positions)
    return {
        "cache_bytes_per_token": int(layout.bytes_per_token),
        "cache_block_size": layout.blocks.page_positions,
        "max_context": model.max_context,
        "cache_bytes_per_full_context": layout.blocks.page_bytes * blocks,
        "states": _state_facts(layout),
        "window": _window_facts(layout, layout.window) if layout.window else None,
    }


def _state_facts(layout: CacheLayout) -> list[dict[str, Any]]:
    """States alike in all but their layer: how many, and what a position takes in all of them."""
    groups: dict[tuple[Any, ...], list[StateRecord]] = {}
    for pool in layout.pools:
        for s in pool.states:
            key = (pool.scope, s.format, s.shape, s.positions_per_entry, s.window, s.group)
            groups.setdefault(key, []).append(s)
    return [
        {
            "scope": states[0].scope,
            "format": states[0].format,
            "shape": list(states[0].shape),
            "positions_per_entry": states[0].positions_per_entry,
            "window": states[0].window,
            "states": [s.name for s in states],
            "bytes_per_position": _position_bytes(states[0]) * len(states),
        }
        for states in groups.values()
    ]


def _position_bytes(state: StateRecord) -> float:
    """Bytes of a page over the positions it stands for."""
    pages = str(state.shape[0])
    entries = state.shape[-2]
    assert isinstance(entries, int), state
    return tensor_bytes(state, {pages: 1}) / (entries * state.positions_per_entry)


def _window_facts(layout: CacheLayout, pool: PoolLayout) -> dict[str, Any]:
    """The fixed part of a sequence: pages it holds between steps, and rows a snapshot copies."""
    retained = CacheSettings().retained
    pages = layout.windows * ring_pages(layout.reach + retained, 1, pool.page_positions)
    edge = layout.reach * pool.page_positions * 256  # a position at which every group is complete
    rows = {s.name: edge - first_row(s, edge) for s in pool.states}
    return {
        "page_positions": pool.page_positions,
        "page_bytes": pool.page_bytes,
        "positions": layout.reach,
        "ring_width": layout.ring_width,
        "pages_per_sequence": pages,
        "bytes_per_sequence": pages * pool.page_bytes,
        "snapshot_bytes": int(sum(rows[s.name] * _position_bytes(s) for s in pool.states)),
    }
