"""The cache under any traffic: pages are accounted for, and every row read is the reader's own.

The device keeps, in each row, a number that stands for all tokens up to it. What a token may read
is checked row by row; free memory is overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tilewright.runtime.artifact import StateRecord
from tilewright.runtime.batch import Batch
from tilewright.runtime.blocks import BlockPool
from tilewright.runtime.cache import Cache, CacheSettings, WindowPages
from tilewright.runtime.cache_layout import TAIL_TABLES, CacheLayout, PoolLayout, ring_pages
from tilewright.runtime.cache_memory import StateMemory
from tilewright.runtime.errors import RequestError
from tilewright.runtime.params import SamplingParams
from tilewright.runtime.request import FinishReason, Request
from tilewright.runtime.scheduler import Scheduler
from tilewright.runtime.snapshot import Snapshot, first_row
from tilewright.runtime.window import WindowTable

FREE = -1


def follow(history: int, token: int) -> int:
    """A number for a sequence: that of all but its last token, and that token."""
    return (history * 131 + token + 1) % ((1 << 61) - 1)


def next_token(history: int) -> int:
    return history % 1009


def window_state(
    name: str, page: int, window: int, group: int, tables: str = "window_tables"
) -> StateRecord:
    shape = ("window_blocks", page, 1)
    return StateRecord(name, "i64", shape, "i64", "window", 1, window, group, tables)


class Device:
    """States as plain numbers: one per position in blocks, one per position in two windows."""

    def __init__(self, layout: CacheLayout, pages: Mapping[str, int]) -> None:
        self.layout = layout
        self.states = {
            s.name: np.full((pages[s.scope], *(int(str(n)) for n in s.shape[1:])), FREE, np.int64)
            for pool in layout.pools
            for s in pool.states
        }
        self.logits: dict[tuple[str, int], int] = {}

    def state(self, name: str) -> Any:
        return self.states[name]

    def execute(self, batch: Batch) -> list[int]:
        found = [self._token(batch, i) for i in range(batch.num_tokens)]
        return [next_token(found[i]) for i in batch.logit_rows.tolist()]

    def _token(self, batch: Batch, i: int) -> int:
        row, position = int(batch.request_rows[i]), int(batch.positions[i])
        request = batch.requests[row]
        tokens = request.token_ids(0, position + 1)
        assert tokens[-1] == batch.token_ids[i]
        own = [0]
        for token in tokens:
            own.append(follow(own[-1], token))
        before = self._block(batch, row, position - 1) if position else 0
        made = follow(before, tokens[-1])
        self._write(batch, row, position, made)
        size = self.layout.blocks.page_positions
        for start in range(0, position + 1, size):
            stop = min(start + size, position + 1)
            block = self.states["all"][batch.block_tables[row, start // size], :, 0]
            assert block[: stop - start].tolist() == own[start + 1 : stop + 1], (request.id, start)
        for state in self._written(batch, row, position):
            begin = int(batch.tail_starts[row]) if state.tables == TAIL_TABLES else 0
            oldest = begin + first_row(state, position - begin)
            for where in range(oldest, position + 1):
                assert self._window(batch, row, state, where) == own[where + 1], (
                    request.id, state.name, where, position
                )  # fmt: skip
        return made

    def _block(self, batch: Batch, row: int, position: int) -> int:
        page, offset = divmod(position, self.layout.blocks.page_positions)
        return int(self.states["all"][batch.block_tables[row, page], offset, 0])

    def _window(self, batch: Batch, row: int, state: StateRecord, position: int) -> int:
        page, offset = self._page(batch, row, state, position)
        return int(self.states[state.name][page, offset, 0])

    def _written(self, batch: Batch, row: int, position: int) -> list[StateRecord]:
        """States that get a row for a position: those of the tail only from its start on."""
        assert self.layout.window is not None
        is_tail = position >= batch.tail_starts[row]
        return [s for s in self.layout.window.states if is_tail or s.tables != TAIL_TABLES]

    def _page(
        self, batch: Batch, row: int, state: StateRecord, position: int
    ) -> tuple[int, int]:
        assert self.layout.window is not None
        tables = getattr(batch, state.tables)
        position -= int(batch.tail_starts[row]) if state.tables == TAIL_TABLES else 0
        number, offset = divmod(position, self.layout.window.page_positions)
        return int(tables[row, number % tables.shape[1]]), offset

    def _write(self, batch: Batch, row: int, position: int, made: int) -> None:
        page, offset = divmod(position, self.layout.blocks.page_positions)
        self.states["all"][batch.block_tables[row, page], offset, 0] = made
        for state in self._written(batch, row, position):
            page, offset = self._page(batch, row, state, position)
            self.states[state.name][page, offset, 0] = made


class Rig:
    """Scheduler, cache and device of a few pages."""

    def __init__(
        self, *, blocks: int, pages: int, block: int = 4, page: int = 3, window: int = 5,
        group: int = 2, most: int = 6, requests: int = 4, replay: int | None = None, **kept: int,
    ) -> None:  # fmt: skip
        states = (window_state("keys", page, window, 1),
                  window_state("pending", page, 2 * group, group),
                  window_state("tail", page, window, 1, TAIL_TABLES))  # fmt: skip
        states = states[: 2 if replay is None else 3]
        every = StateRecord("all", "i64", ("cache_blocks", block, 1), "i64", "block", 1, 0, 1,
                            "block_tables")  # fmt: skip
        reach = max(window, 2 * group)
        layout = CacheLayout(PoolLayout("block", block, (every,)),
                             PoolLayout("window", page, states), reach,
                             ring_pages(reach, most, page))  # fmt: skip
        self.device = Device(layout, {"block": blocks, "window": pages})
        self.blocks, self.pages = BlockPool(blocks, block), BlockPool(pages, page)
        self.cache = Cache(
            self.blocks,
            WindowPages(pool=self.pages, reach=reach, width=layout.ring_width, replay=replay),
            memory=StateMemory(self.device.state, layout), settings=CacheSettings(**kept),
        )  # fmt: skip
        self.scheduler = Scheduler(self.cache, max_tokens_per_step=most, max_requests=requests)

    def execute(self, batch: Batch) -> list[int]:
        tokens = self.device.execute(batch)
        self.clear()
        return tokens

    def step(self, forced: Mapping[str, int] | None = None) -> None:
        batch = self.scheduler.schedule()
        assert batch is not None
        tokens = self.execute(batch)
        for i, row in enumerate(batch.logit_requests.tolist()):
            tokens[i] = (forced or {}).get(batch.requests[row].id, tokens[i])
        self.scheduler.commit(batch, tokens)
        self.clear()

    def clear(self) -> None:
        """Overwrite what nobody holds."""
        self.device.states["all"][self.blocks._free] = FREE
        for name, state in self.device.states.items():
            if name != "all":
                state[self.pages._free] = FREE

    def check(self) -> None:
        """Every page is free, or held by exactly those the pool counts."""
        held = np.zeros(self.blocks.num_blocks, int)
        tables = list(self.scheduler._running.values())
        for table in tables:
            held[table.blocks.blocks] += 1
        for snapshot in self.cache.snapshots:
            held[list(snapshot.blocks)] += 1
        assert held.tolist() == self.blocks._holders
        assert sorted(self.blocks._free) == np.flatnonzero(held == 0).tolist()
        pages = [p for t in tables for w in t.windows for p in w.pages]
        assert sorted([*pages, *self.pages._free]) == list(range(self.pages.num_blocks))


def make(
    request_id: str, num_prompt: int, max_tokens: int, resume: Snapshot | None = None,
    prompt: tuple[int, ...] | None = None,
) -> Request:  # fmt: skip
    salt = sum(request_id.encode()) * 31
    ids = prompt or tuple((salt + 7 * i) % 1009 for i in range(num_prompt))
    return Request(request_id, ids, SamplingParams(), salt, max_tokens, resume=resume)


class Traffic(RuleBasedStateMachine):
    """Random requests, rollbacks with other tokens, snapshots taken, resumed from and dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.snapshots: list[tuple[Snapshot, tuple[int, ...]]] = []
        self.prompts = 0

    @initialize(
        blocks=st.integers(4, 9), spare=st.integers(0, 8), block=st.integers(1, 5),
        page=st.integers(1, 5), window=st.integers(1, 7), group=st.integers(1, 4),
        most=st.integers(1, 9), requests=st.integers(1, 5), retained=st.integers(0, 4),
        snapshot_interval=st.integers(0, 6), snapshots_kept=st.integers(0, 3),
        replay=st.none() | st.integers(1, 9),
    )  # fmt: skip
    def start(self, *, blocks: int, spare: int, page: int, window: int, group: int,
              retained: int, replay: int | None, **sizes: int) -> None:  # fmt: skip
        kept = ring_pages(max(window, 2 * group) + retained, 1, page)
        kept *= 1 if replay is None else 2
        self.rig = Rig(blocks=blocks, pages=kept + spare, page=page, window=window, group=group,
                       retained=retained, replay=replay, **sizes)  # fmt: skip

    @property
    def scheduler(self) -> Scheduler:
        return self.rig.scheduler

    def _add(self, request: Request) -> None:
        room = self.rig.blocks.num_blocks * self.rig.blocks.block_size
        if request.max_positions > room:
            with pytest.raises(RequestError, match="can never fit in the cache"):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.requests.append(request)

    @rule(num_prompt=st.integers(1, 12), max_tokens=st.integers(0, 14))
    def add(self, num_prompt: int, max_tokens: int) -> None:
        self.prompts += 1
        self._add(make(f"r{self.prompts}", num_prompt, max_tokens))

    @rule(num_steps=st.integers(1, 6))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.scheduler.has_work:
                self.rig.step()
                self.rig.check()

    @precondition(lambda self: self.scheduler.num_running)
    @rule(draw=st.data())
    def set_back(self, draw: st.DataObject) -> None:
        request = draw.draw(st.sampled_from(list(self.scheduler._running)))
        prompt = len(request.prompt_ids)
        keep = draw.draw(st.integers(0, len(request.output_ids)))
        others = draw.draw(st.lists(st.integers(0, 1008), max_size=2))
        del request.output_ids[keep:]
        request.output_ids.extend(others[: max(request.max_tokens - 1 - keep, 0)])
        most = min(request.num_computed, prompt + keep, request.num_tokens - 1)
        position = draw.draw(st.integers(0, most))
        self.scheduler.rollback(request, position)
        assert request.num_computed <= position
        self.rig.clear()

    @precondition(lambda self: self.scheduler.num_running)
    @rule(draw=st.data())
    def snapshot(self, draw: st.DataObject) -> None:
        request = draw.draw(st.sampled_from(list(self.scheduler._running)))
        made = self.scheduler.snapshot(request)
        assert made.position == request.num_computed
        self.snapshots.append((made, tuple(request.token_ids(0, made.position))))

    @precondition(lambda self: self.snapshots)
    @rule(draw=st.data(), more=st.lists(st.integers(0, 1008), min_size=1, max_size=4),
          max_tokens=st.integers(0, 6))  # fmt: skip
    def resume(self, draw: st.DataObject, more: list[int], max_tokens: int) -> None:
        snapshot, known = draw.draw(st.sampled_from(self.snapshots))
        self.prompts += 1
        prompt = (*known, *more)
        self._add(make(f"s{self.prompts}", 0, max_tokens, snapshot, prompt))

    @precondition(lambda self: self.snapshots)
    @rule(draw=st.data())
    def drop(self, draw: st.DataObject) -> None:
        index = draw.draw(st.integers(0, len(self.snapshots) - 1))
        self.scheduler.drop(self.snapshots.pop(index)[0])
        self.rig.clear()

    @precondition(lambda self: any(not r.is_finished for r in self.requests))
    @rule(draw=st.data())
    def abort(self, draw: st.DataObject) -> None:
        live = [r for r in self.requests if not r.is_finished]
        self.scheduler.abort(draw.draw(st.sampled_from(live)).id)
        self.rig.clear()

    @invariant()
    def accounts_are_right(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.rig.step()
        assert all(r.is_finished for r in self.requests), "the requests do not finish"
        for snapshot, _ in self.snapshots:
            self.scheduler.drop(snapshot)
        assert self.rig.cache.snapshots == ()
        assert self.rig.blocks.num_free == self.rig.blocks.num_blocks
        assert self.rig.pages.num_free == self.rig.pages.num_blocks


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("block", "page", "retained"), [(256, 64, 16), (64, 16, 0), (32, 128, 40)])
def test_set_back_at_every_offset_of_256(block: int, page: int, retained: int) -> None:
    """Any number of other tokens at every offset; what is read afterwards is the request's own."""
    r = np.random.default_rng(block)
    rig = Rig(blocks=2048 // block, pages=40, block=block, page=page, window=128, group=4,
              most=64, retained=retained, snapshot_interval=64)  # fmt: skip
    request = make("a", 250, 900)
    rig.scheduler.add(request)
    while request.num_tokens < 256 + 256 + 2:
        rig.step()
        if request.num_computed < 250:
            continue
        known, strays = request.num_tokens, int(r.integers(1, 12))
        if r.random() < 0.02:
            strays = int(r.integers(40, 160))
        for token in r.integers(0, 1009, strays).tolist():
            rig.step({"a": token})
        del request.output_ids[known - 250 :]
        gone = request.num_computed - (known - 1)
        rig.scheduler.rollback(request, known - 1)
        assert gone > retained or request.num_computed == known - 1
        rig.clear()
        rig.check()
    history = 0
    for position, token in enumerate(request.token_ids(0, request.num_tokens)):
        assert position < 250 or token == next_token(history)
        history = follow(history, token)
    rig.scheduler.finish(request, FinishReason.STOP)
    assert rig.blocks.num_free == rig.blocks.num_blocks and not rig.cache.snapshots


def test_set_back_further_than_a_restored_snapshot() -> None:
    """The window begins with the rows that the snapshot had; those before it are not there."""
    rig = Rig(blocks=12, pages=20, block=2, page=1, window=7, group=1, most=8, retained=0,
              snapshot_interval=3)  # fmt: skip
    request = make("a", 10, 9)
    rig.scheduler.add(request)
    while request.num_computed < 11:
        rig.step()
    rig.scheduler.rollback(request, 7)
    assert request.num_computed == 6
    rig.scheduler.rollback(request, 5)
    assert request.num_computed == 3
    rig.clear()
    while rig.scheduler.has_work:
        rig.step()


@given(
    page=st.integers(1, 6), width=st.integers(1, 5),
    moves=st.lists(st.tuples(st.sampled_from(["grow", "release", "cut"]), st.integers(0, 12)),
                   max_size=30),
)  # fmt: skip
def test_window_table_is_a_ring_of_its_newest_pages(
    page: int, width: int, moves: list[tuple[str, int]]
) -> None:
    pool = BlockPool(60, page)
    table, stop = WindowTable(pool, width), 0
    for move, count in moves:
        match move:
            case "grow":
                stop += count
                if table.num_missing(stop) <= pool.num_free:
                    table.grow(stop)
                stop = min(stop, table.room(0))
            case "release":
                table.release_before(min(table.start + count, stop))
            case _:
                stop = max(stop - count, table.start)
                table.truncate(stop)
        first = table.start // page
        shown = list(enumerate(table.pages, first))[-width:]
        assert [int(table.ring[n % width]) for n, _ in shown] == [p for _, p in shown]
        assert len(table.pages) + pool.num_free == 60
        assert table.room(0) >= stop
        positions = np.arange(table.start, stop)
        pages = np.array(table.pages, int)
        expected = pages[positions // page - first] * page + positions % page
        assert table.slots(table.start, stop).tolist() == expected.tolist()
    table.restart(7)
    assert (table.start, pool.num_free) == (7 // page * page, 60)
