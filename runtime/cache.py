"""The cache of all requests: blocks for what lives as long as a request, window pages for its
newest positions, and snapshots. Every page is free or held; one with two holders is never written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.artifact import Manifest, StateRecord
from tilewright.runtime.blocks import BlockPool, BlockTable
from tilewright.runtime.cache_layout import (
    BLOCKS,
    PAGES_DIM,
    TAIL_TABLES,
    WINDOW,
    cache_layout,
    default_window_pages,
    ring_pages,
)
from tilewright.runtime.errors import RequestError
from tilewright.runtime.snapshot import CacheMemory, Snapshot, first_row
from tilewright.runtime.window import WindowTable


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """What is kept so that requests can be set back; no setting changes output.

    `retained`: positions by which a request can be set back without computing any again.
    `snapshot_interval`: positions between snapshots of a running request, 0 for none;
    `snapshots_kept`: how many of them, the newest, each request has. Only models with window
    states need either.
    """

    retained: int = 16
    snapshot_interval: int = 256
    snapshots_kept: int = 4

    def __post_init__(self) -> None:
        for name in ("retained", "snapshot_interval", "snapshots_kept"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= 1 << 24:
                raise RequestError(
                    f"cache setting '{name}': got {value!r}, want an int in 0..{1 << 24}"
                )


@dataclass(frozen=True, kw_only=True)
class WindowPages:
    """The pool of window pages. `reach`: positions a token may look back, itself included.

    `width`: pages in a row of the window tables. `replay`: how many of a prompt's last tokens have
    window rows in a table of their own, None if there is no such table.
    """

    pool: BlockPool
    reach: int
    width: int
    replay: int | None = None


@dataclass(eq=False, slots=True)
class Tables:
    """What one request holds: its blocks, its window pages, and snapshots, oldest first.

    `windows`: one table, or two where a tail has rows of its own. `restored`: the position of the
    snapshot that the window rows began with. A snapshot has the rows that are read from there on,
    so the request cannot be set back further by bookkeeping.
    """

    blocks: BlockTable
    windows: tuple[WindowTable, ...] = ()
    restored: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def tail_start(self) -> int:
        """The first position of the tail; 0 if there is none."""
        return self.windows[-1].offset if self.windows else 0

    def window_of(self, state: StateRecord) -> WindowTable:
        """The table that a state's rows are found by."""
        return self.windows[-1 if state.tables == TAIL_TABLES else 0]


def page_counts(
    manifest: Manifest, blocks: int, settings: CacheSettings | None = None
) -> dict[str, int]:
    """Return the dims that count pages, for an engine whose cache has `blocks` blocks."""
    counts = {PAGES_DIM[BLOCKS]: blocks}
    if any(s.scope == WINDOW for s in manifest.states):
        limits = {d.name: d.upper for d in manifest.dims}
        retained = (settings or CacheSettings()).retained
        pages = default_window_pages(
            cache_layout(manifest),
            tokens=limits["tokens"],
            requests=limits["requests"],
            retained=retained,
        )
        counts[PAGES_DIM[WINDOW]] = min(pages, limits[PAGES_DIM[WINDOW]])
    return counts


class Cache:
    """Hands out tables, makes room in them, takes and restores snapshots.

    `memory` is what snapshots and shared blocks copy from and to; without it there are none.
    """

    def __init__(
        self,
        blocks: BlockPool,
        window: WindowPages | None = None,
        *,
        memory: CacheMemory | None = None,
        settings: CacheSettings | None = None,
    ) -> None:
        self.blocks = blocks
        self.window = window
        self.settings = settings or CacheSettings()
        self._memory = memory
        self._snapshots: dict[Snapshot, None] = {}  # least recently used first
        self._pins: Counter[int] = Counter()  # by block, the snapshots that hold it
        self._kept = 0  # pages of one window table between steps, at most
        self._num_windows = 0
        if window is not None:
            reach = window.reach + self.settings.retained
            self._kept = ring_pages(reach, 1, window.pool.block_size)
            self._num_windows = 1 if window.replay is None else 2
            least = self._kept * self._num_windows
            if window.pool.num_blocks < least:
                raise RequestError(
                    f"cache 'window pages': too few for one request: got "
                    f"{window.pool.num_blocks}, want at least {least}"
                )

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """All that are kept, least recently used first."""
        return tuple(self._snapshots)

    # --- room -----------------------------------------------------------------------------------

    def open(self, num_prompt: int = 0, *, whole: bool = False) -> Tables:
        """Return empty tables for a prompt of `num_prompt` tokens.

        `whole`: all its tokens go through all layers, as if there were no tail.
        """
        pages, windows = self.window, list[WindowTable]()
        if pages is not None:
            windows.append(WindowTable(pages.pool, pages.width))
            if pages.replay is not None:
                start = 0 if whole else max(num_prompt - pages.replay, 0)
                windows.append(WindowTable(pages.pool, pages.width, start))
        return Tables(BlockTable(self.blocks), tuple(windows))

    def make_room(self, tables: Tables, start: int, *, stop: int, window_stop: int) -> bool:
        """Hold blocks up to `stop` and window pages up to `window_stop` for writing from `start`.

        Drops snapshots of which blocks are wanted. Returns False, with nothing held, if the pools
        are short all the same.
        """
        table = tables.blocks
        if self.window is not None:
            missing = sum(w.num_missing(window_stop) for w in tables.windows)
            if missing > self.window.pool.num_free:
                return False
        while self._blocks_missing(table, start, stop) > self.blocks.num_free:
            if not self._drop_for(table.blocks[start // self.blocks.block_size :].tolist()):
                return False
        shared = table.shared_from(start) if self._snapshots else []
        if shared:
            assert self._memory is not None, "a shared block and no memory"
            self._memory.copy_blocks([table.unshare(index) for index in shared])
        table.grow(stop)
        for window in tables.windows:
            window.grow(window_stop)
        return True

    def _blocks_missing(self, table: BlockTable, start: int, stop: int) -> int:
        return table.num_missing(stop) + (len(table.shared_from(start)) if self._snapshots else 0)

    def window_room(self, tables: Tables) -> int | None:
        """Positions up to which window pages could be held now; None if there is no limit."""
        if self.window is None:
            return None
        free = self.window.pool.num_free // len(tables.windows)
        return min(w.room(free) for w in tables.windows)

    def can_begin(self, num_positions: int) -> bool:
        """Whether a new request of `num_positions` positions could decode in the window pages."""
        if self.window is None:
            return True
        pool = self.window.pool
        pages = min(pool.blocks_for(num_positions), self._kept)
        return pages * self._num_windows <= pool.num_free

    def settle(self, tables: Tables, start: int, stop: int) -> None:
        """Take what became due while positions `start` to `stop` were computed; give back pages
        that nobody reads again."""
        if self.window is None:
            return
        for position in self._due(start, stop):
            self._keep(tables, self.snapshot(tables, position))
        for window in tables.windows:
            window.release_before(stop - self.settings.retained - self.window.reach + 1)

    def _due(self, start: int, stop: int) -> Iterator[int]:
        interval, kept = self.settings.snapshot_interval, self.settings.snapshots_kept
        if interval and kept and self._memory is not None:
            due = range(start // interval * interval + interval, stop + 1, interval)
            yield from due[-kept:]

    def _keep(self, tables: Tables, snapshot: Snapshot) -> None:
        tables.snapshots.append(snapshot)
        while len(tables.snapshots) > self.settings.snapshots_kept:
            self.drop(tables.snapshots.pop(0))

    def release(self, tables: Tables) -> None:
        """Give back all that a request holds, its snapshots too."""
        self._drop_from(tables, 0)
        tables.blocks.release()
        self._restart_window(tables)

    def _restart_window(self, tables: Tables) -> None:
        tables.restored = 0
        for window in tables.windows:
            window.restart(0)

    # --- snapshots ------------------------------------------------------------------------------

    def snapshot(self, tables: Tables, position: int) -> Snapshot:
        """Keep the first `position` positions of a request; the caller may drop it.

        The window pages must still hold the rows that are read from there on.
        """
        assert self._memory is not None, "a snapshot and no memory"
        rows = {}
        for state in self._memory.window_states:
            slots = _kept_slots(tables, state, position)
            rows[state.name] = self._memory.read_rows(state.name, slots)
        blocks = tables.blocks.blocks[: self.blocks.blocks_for(position)].tolist()
        self.blocks.share(blocks)
        self._pins.update(blocks)
        made = Snapshot(position, tuple(blocks), rows, tables.tail_start)
        self._snapshots[made] = None
        return made

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot; one that is dropped already stays so."""
        if snapshot.is_dropped:
            return
        del self._snapshots[snapshot]
        self.blocks.free(snapshot.blocks)
        self._pins.subtract(snapshot.blocks)
        snapshot.is_dropped = True
        snapshot.rows = {}

    def _drop_for(self, wanted: list[int]) -> bool:
        """Drop the least recently used snapshot that gives blocks back, or shares one of those
        `wanted` for writing; False if there is none."""
        for snapshot in self._snapshots:
            sole = (self.blocks.num_holders(b) == self._pins[b] for b in snapshot.blocks)
            if any(sole) or not set(wanted).isdisjoint(snapshot.blocks):
                self.drop(snapshot)
                return True
        return False

    def _drop_from(self, tables: Tables, position: int) -> None:
        """Drop a request's own snapshots at `position` or later."""
        for snapshot in tables.snapshots:
            if snapshot.position >= position:
                self.drop(snapshot)
        tables.snapshots = [s for s in tables.snapshots if not s.is_dropped]

    def resume(self, tables: Tables, snapshot: Snapshot) -> bool:
        """Begin empty tables with a snapshot; False, with nothing done, if it was dropped, has
        another tail, or there are no window pages for it."""
        other = snapshot.tail_start != tables.tail_start
        if other and snapshot.position > min(snapshot.tail_start, tables.tail_start):
            return False
        if snapshot.is_dropped or not self._restore_window(tables, snapshot):
            return False
        tables.blocks.adopt(snapshot.blocks)
        return True

    def rollback(self, tables: Tables, position: int) -> int:
        """Forget positions from `position` on; returns the position to compute on from.

        That is `position` where the window still holds what a token there reads, else that of the
        nearest snapshot, or 0.
        """
        self._drop_from(tables, position + 1)
        if self.window is None:
            tables.blocks.truncate(position)
            return position
        oldest = position - self.window.reach + 1
        is_held = all(w.start <= max(oldest, w.offset) for w in tables.windows)
        if is_held and tables.restored <= position:
            for window in tables.windows:
                window.truncate(position)
        else:
            near = tables.snapshots[-1] if tables.snapshots else None
            self._restart_window(tables)
            is_restored = near is not None and self._restore_window(tables, near)
            position = near.position if near is not None and is_restored else 0
        tables.blocks.truncate(position)
        return position

    def _restore_window(self, tables: Tables, snapshot: Snapshot) -> bool:
        """Put a snapshot's rows into fresh window pages; False if the pool has too few."""
        self._snapshots[snapshot] = self._snapshots.pop(snapshot)  # used just now
        if self.window is None:
            return True
        assert self._memory is not None, "a snapshot and no memory"
        position, windows = snapshot.position, tables.windows
        for window in windows:
            window.restart(position - self.window.reach + 1)
        if sum(w.num_missing(position) for w in windows) > self.window.pool.num_free:
            self._restart_window(tables)
            return False
        tables.restored = position
        for window in windows:
            window.grow(position)
        for state in self._memory.window_states:
            slots = _kept_slots(tables, state, position)
            self._memory.write_rows(state.name, slots, snapshot.rows[state.name])
        return True


def _kept_slots(tables: Tables, state: StateRecord, position: int) -> NDArray[np.int64]:
    """Slots of the window rows that a snapshot at `position` has of a state."""
    window = tables.window_of(state)
    stop = max(position, window.offset)
    return window.slots(window.offset + first_row(state, stop - window.offset), stop)
