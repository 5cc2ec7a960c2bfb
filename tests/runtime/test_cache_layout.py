"""What the cache takes: counted in what is really allocated, at the size of the real models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tilewright.codegen.plan import state_record, tensor_record
from tilewright.graph.types import BF16
from tilewright.models import deepseek_v4, deepseek_v41
from tilewright.models.known_config import FOLDER
from tilewright.models.layers import Formats, Limits
from tilewright.runtime.artifact import DimRecord, Manifest, ModelRecord, TargetRecord
from tilewright.runtime.blocks import BlockPool
from tilewright.runtime.cache import Cache, CacheSettings, Tables, WindowPages
from tilewright.runtime.cache_layout import CacheLayout, cache_layout, default_window_pages
from tilewright.runtime.devices.cpu import allocate
from tilewright.runtime.errors import ArtifactError, RequestError
from tilewright.runtime.plan_check import tensor_bytes
from tilewright.runtime.snapshot import first_row
from tilewright.tools.cache_facts import cache_facts

FAMILIES: dict[str, Any] = {"deepseek-v4-flash": deepseek_v4, "deepseek-v4.1-flash": deepseek_v41}
LAYERS_AND_REACH = {"deepseek-v4-flash": (43, 128), "deepseek-v4.1-flash": (40, 128)}


@cache
def manifest_of(name: str) -> Manifest:
    """The states, inputs and dims of a full-size model; nothing to run."""
    family = FAMILIES[name]
    config = family.read_config(json.loads((FOLDER / f"{name}.json").read_text()))
    limits = Limits(max_context=config.max_context)
    graph = family.build(name, config, Formats({}, BF16), limits)
    model = ModelRecord(name, "", 1, config.max_context, limits.context_page, None, (), False,
                        None, None)  # fmt: skip
    return Manifest(
        format=2, abi="", version="", target=TargetRecord("cpu", "", (), "", ()),
        mode="deterministic", dtype="bfloat16", model=model,
        dims=tuple(DimRecord(d.name, d.role.value, d.lower, d.upper) for d in graph.dims),
        inputs=tuple(tensor_record(i.name, i.type) for i in graph.inputs), outputs=(),
        states=tuple(state_record(graph, s) for s in graph.states), buffers=(), weights=(),
        weights_file="", weights_bytes=0, weights_digest="", kernels=(), library="", buckets=(),
        compile_config={}, numerics_digest="", invariance="proven", digests={},
    )  # fmt: skip


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Held:
    """One request in a cache whose states are allocated as the executor does."""

    def __init__(self, layout: CacheLayout, positions: int) -> None:
        blocks = -(-positions // layout.blocks.page_positions)
        assert layout.window is not None
        pages = default_window_pages(layout, tokens=512, requests=1, retained=16)
        dims = {layout.blocks.pages_dim: blocks, layout.window.pages_dim: pages}
        self.states = {
            s.name: allocate(tensor_bytes(s, dims)).reshape(dims[str(s.shape[0])], -1)
            for pool in layout.pools for s in pool.states
        }  # fmt: skip
        self.layout, self.pool = layout, BlockPool(pages, layout.window.page_positions)
        window = WindowPages(pool=self.pool, reach=layout.reach, width=layout.ring_width)
        self.blocks = BlockPool(blocks, layout.blocks.page_positions)
        self.cache = Cache(self.blocks, window, settings=CacheSettings(retained=16))
        self.tables: Tables = self.cache.open()
        self.computed = 0

    def compute(self, stop: int) -> None:
        """Take pages step by step, write them, and give back those that are old."""
        while self.computed < stop:
            step = min(512, stop - self.computed)
            start, self.computed = self.computed, self.computed + step
            assert self.cache.make_room(self.tables, start, stop=self.computed,
                                        window_stop=self.computed)  # fmt: skip
            pages = list(self.tables.windows[0].pages)
            for pool, ids in ((self.layout.blocks, self.tables.blocks.blocks.tolist()),
                              (self.layout.window, pages)):  # fmt: skip
                for state in pool.states if pool else ():
                    self.states[state.name][ids] = 1
            self.cache.settle(self.tables, start, self.computed)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks it holds, in the arrays themselves."""
        held = self.tables.blocks.num_blocks
        return sum(self.states[s.name][:held].nbytes for s in self.layout.blocks.states)

    @property
    def window_bytes(self) -> int:
        """Bytes of the window pages it holds."""
        assert self.layout.window is not None
        pages = list(self.tables.windows[0].pages)
        return sum(self.states[s.name][pages].nbytes for s in self.layout.window.states)


@pytest.mark.parametrize(
    ("name", "per_token"), [("deepseek-v4-flash", 3514), ("deepseek-v4.1-flash", 890)]
)
def test_bytes_of_a_token_as_allocated(
    name: str, per_token: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A context of the real model's shape: what is counted is what the machine gave."""
    layout = cache_layout(manifest_of(name))
    held = Held(layout, 16384)
    held.compute(8192)
    counted, memory, fixed = held.num_bytes, resident(), held.window_bytes
    held.compute(16384)
    grown = held.num_bytes - counted
    assert grown // 8192 == per_token == int(layout.bytes_per_token)
    assert held.window_bytes == fixed, "the window grew with the context"
    touched = resident() - memory
    assert abs(touched - grown) < 0.02 * grown + (2 << 20)
    facts = cache_facts(manifest_of(name))
    assert facts["window"]["bytes_per_sequence"] >= fixed
    with capsys.disabled():
        print(f"\n{name}: {grown / 8192:.2f} B a token, {touched / 8192:.2f} by the system; "
              f"window pages of a sequence {fixed / 1e6:.1f} MB, "
              f"a snapshot {facts['window']['snapshot_bytes'] / 1e6:.2f} MB", end="")  # fmt: skip
    held.cache.release(held.tables)
    assert held.blocks.num_free == held.blocks.num_blocks
    assert held.pool.num_free == held.pool.num_blocks


def test_a_snapshot_at_a_block_edge_has_no_pending_rows() -> None:
    """Compressors wait for whole groups: at a multiple of 128 only overlapping ones keep rows."""
    states = {s.name: s for s in manifest_of("deepseek-v4-flash").states}
    kept = {name: 1024 - first_row(s, 1024) for name, s in states.items() if s.scope == "window"}
    assert kept["window.0"] == 127
    assert kept["pending.2.values"] == kept["pending.2.index.gates"] == 4
    assert kept["pending.3.values"] == 0
    later = {name: 1027 - first_row(states[name], 1027) for name in kept}
    assert (later["window.0"], later["pending.2.values"], later["pending.3.values"]) == (127, 7, 3)


def test_a_snapshot_of_the_real_models_is_as_small_as_published() -> None:
    sizes = {n: cache_facts(manifest_of(n))["window"]["snapshot_bytes"] for n in FAMILIES}
    assert sizes["deepseek-v4-flash"] == 43 * 127 * 584 + 21 * 4 * 2 * (1024 + 256) * 4
    assert sizes["deepseek-v4.1-flash"] == 40 * 127 * 528 + 3 * 4


Edit = Callable[[Manifest], Manifest]


def changed(name: str, **changes: Any) -> Edit:
    """Change one state."""
    return lambda m: replace(m, states=tuple(
        replace(s, **changes) if s.name == name else s for s in m.states
    ))  # fmt: skip


def narrow(m: Manifest) -> Manifest:
    dims = [replace(d, upper=10) if d.name == "request_window_blocks" else d for d in m.dims]
    return replace(m, dims=tuple(dims))


def without_tables(m: Manifest) -> Manifest:
    return replace(m, inputs=tuple(i for i in m.inputs if i.name != "window_tables"))


REFUSED: dict[str, Edit] = {
    "state 'window.3': not in pages: got shape ['pages', 64, 528], want window_blocks first":
        changed("window.3", shape=("pages", 64, 528)),
    "state 'window.3': page size differs: got 32 positions, want 64":
        changed("window.3", shape=("window_blocks", 32, 528)),
    "state 'entries.8': page size differs: got 128 positions, want 256":
        changed("entries.8", positions_per_entry=1),
    "state 'window.3': not in pages: got shape ['window_blocks', 'tokens', 528], "
    "want a positive count of entries second but last":
        changed("window.3", shape=("window_blocks", "tokens", 528)),
    "state 'window.3': positions_per_entry of scope window: got 2, want 1":
        changed("window.3", positions_per_entry=2),
    "model 'block_size': differs from the pages of state 'entries.2': got 128 positions, want 256":
        lambda m: replace(m, model=replace(m.model, block_size=128)),
    "input 'window_tables': too narrow: got 10 pages of 64 positions, want at least 11 "
    "for a window of 128 and steps of 512 tokens": narrow,
    "input 'window_tables': missing: states such as 'engram.history' are of scope window":
        without_tables,
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_layouts_that_do_not_fit(message: str) -> None:
    with pytest.raises(ArtifactError) as error:
        cache_layout(REFUSED[message](manifest_of("deepseek-v4.1-flash")))
    assert str(error.value) == message


def test_default_pages_serve_what_they_promise() -> None:
    """As many requests decode at once as were promised, while a full step is prefilled."""
    layout = cache_layout(manifest_of("deepseek-v4.1-flash"))
    pages = default_window_pages(layout, tokens=512, requests=3, retained=16)
    pool = BlockPool(pages, 64)
    cache = Cache(BlockPool(64, 256), WindowPages(pool=pool, reach=128, width=layout.ring_width),
                  settings=CacheSettings(retained=16))  # fmt: skip
    tables = [cache.open() for _ in range(3)]
    for stop in range(1, 1500):
        for table in tables[:2]:
            assert cache.make_room(table, stop - 1, stop=stop, window_stop=stop)
            cache.settle(table, stop - 1, stop)
        if stop % 512 == 0:
            assert cache.make_room(tables[2], stop - 512, stop=stop, window_stop=stop)
            cache.settle(tables[2], stop - 512, stop)


@pytest.mark.parametrize(("name", "value"), [("retained", -1), ("snapshot_interval", 1.5),
                                             ("snapshots_kept", True)])  # fmt: skip
def test_bad_settings(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        CacheSettings(**{name: value})
    assert str(error.value) == f"cache setting '{name}': got {value!r}, want an int in 0..16777216"


def test_too_few_window_pages() -> None:
    with pytest.raises(RequestError) as error:
        Cache(BlockPool(4, 8), WindowPages(pool=BlockPool(3, 8), reach=20, width=9))
    assert str(error.value) == (
        "cache 'window pages': too few for one request: got 3, want at least 6"
    )
