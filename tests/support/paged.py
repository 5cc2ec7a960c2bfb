"""A small model with states of both scopes, and a stand-in for the executor that interprets it.

The interpreter runs one token at a time, so that bits depend on nothing but the token's own past;
memory that nobody holds is NaN, so that a stale read shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.tiny import quick_target
from support.toolchain import QuickToolchain
from support.weights import RandomWeights
from tilewright.codegen.compile import CompileJob, compile_graph
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import first_candidate, state_record
from tilewright.graph import Graph, GraphBuilder, Role, Value, reference
from tilewright.graph.types import F32, I32
from tilewright.runtime.artifact import ModelRecord, StateRecord
from tilewright.runtime.batch import Batch
from tilewright.runtime.blocks import BlockPool
from tilewright.runtime.cache import Cache, CacheSettings, Tables, WindowPages
from tilewright.runtime.cache_layout import CacheLayout, PoolLayout, ring_pages
from tilewright.runtime.cache_memory import StateMemory
from tilewright.runtime.devices.gpu import GpuSession
from tilewright.runtime.executor import Executor
from tilewright.runtime.scheduler import Scheduler
from tilewright.runtime.step_inputs import StepInputs

VOCAB, WIDTH, HEADS = 29, 8, 2
WINDOW, CSA, HCA, GRAM = 12, 4, 32, 3
BLOCK, PAGE, MOST = 32, 8, 16  # positions of a block and of a window page, tokens of a step


def paged_graph() -> Graph:
    """Window attention, two compressors (one overlapping) and n-grams, on 8 channels."""
    b = GraphBuilder("paged")
    tokens = b.dim("tokens", Role.BATCH, upper=MOST)
    requests = b.dim("requests", Role.BATCH, upper=8)
    rows = b.dim("logit_rows", Role.BATCH, lower=0, upper=MOST)
    blocks = b.dim("request_blocks", Role.CONTEXT, upper=64)
    ring = b.dim("request_window_blocks", Role.CONTEXT, upper=ring_pages(HCA, MOST, PAGE))
    b.dim("cache_blocks", Role.BATCH), b.dim("window_blocks", Role.BATCH)
    ids, positions, owner = (b.input(n, I32, tokens) for n in
                             ("token_ids", "positions", "request_rows"))  # fmt: skip
    tables = b.input("block_tables", I32, requests, blocks)
    windows = b.input("window_tables", I32, requests, ring)
    logit_rows = b.input("logit_rows", I32, rows)
    made = _Made(b, (positions, owner, windows), (positions, owner, tables))
    x = b.op("embedding", ids, b.weight("embed", F32, VOCAB, WIDTH))
    x = x + made.grams(ids)
    x = x + made.attend("hca", x, HCA, overlap=False)
    x = x + made.attend("csa", x, CSA, overlap=True)
    last = b.op("gather_rows", x, logit_rows)
    logits = b.linear(last, b.weight("head", F32, VOCAB, WIDTH), name="logits")
    b.output("logits", logits)
    b.output("argmax", b.op("argmax", logits, name="argmax"))
    return b.build()


@dataclass(frozen=True)
class _Made:
    """Declares states and what reads them. `window` and `block`: operands of the two pools."""

    b: GraphBuilder
    window: tuple[Value, ...]
    block: tuple[Value, ...]
    slots: dict[tuple[str, int], Value] = field(default_factory=dict)

    def _append(self, state: Value, rows: Value, ratio: int, entries: int, scope: str) -> Value:
        operands = self.window if scope == "window" else self.block
        if (scope, ratio) not in self.slots:
            made = self.b.op("page_slots", *operands, ratio=ratio, entries=entries)
            self.slots[scope, ratio] = made
        slots = self.slots[scope, ratio]
        return self.b.append(state, rows, slots, name=f"append_{scope}", op="append_rows")

    def _window(self, name: str, rows: Value, window: int) -> Value:
        shape = (self.b.dim("window_blocks", Role.BATCH), PAGE, rows.type.shape[-1])
        state = self.b.state(name, rows.type.dtype, *shape, scope="window", window=window)
        return self._append(state, rows, 1, PAGE, "window")

    def _entries(self, name: str, rows: Value, ratio: int) -> Value:
        shape = (self.b.dim("cache_blocks", Role.BATCH), BLOCK // ratio, rows.type.shape[-1])
        state = self.b.state(name, F32, *shape, positions_per_entry=ratio)
        return self._append(state, rows, ratio, BLOCK // ratio, "block")

    def _project(self, name: str, x: Value, width: int) -> Value:
        return self.b.linear(x, self.b.weight(name, F32, width, WIDTH))

    def grams(self, ids: Value) -> Value:
        """The embedding of the hashed bigram and trigram that a token ends."""
        history = self._window("history", self.b.op("expand_last", ids), GRAM)
        rows = self.b.op("ngram_rows", history, *self.window, multipliers=(3, 5, 7),
                         primes=(11, 13), pad=2)  # fmt: skip
        table = self.b.weight("grams", F32, 24, WIDTH // 2)
        return self.b.op("merge_heads", self.b.op("embedding", rows, table))

    def attend(self, name: str, x: Value, ratio: int, *, overlap: bool) -> Value:
        """Attention over the window and over all entries of a compressor of `ratio` positions."""
        b, halves = self.b, 2 if overlap else 1
        keys = self._window(f"{name}.kv", self._project(f"{name}.wkv", x, WIDTH), WINDOW)
        pending = [
            self._window(f"{name}.{part}", self._project(f"{name}.w{part}", x, halves * WIDTH),
                         halves * ratio)
            for part in ("values", "gates")
        ]  # fmt: skip
        pooled = b.op("pool_window", *pending, *self.window, ratio=ratio, overlap=overlap)
        entries = self._entries(f"{name}.entries", pooled, ratio)
        q = b.op("split_heads", self._project(f"{name}.wq", x, HEADS * WIDTH), num_heads=HEADS)
        sink = b.weight(f"{name}.sink", F32, HEADS)
        mixed = b.op("attend_compressed", q, keys, *self.window, sink, entries, self.block[-1],
                     scale=0.5, window=WINDOW, ratio=ratio)  # fmt: skip
        out = b.weight(f"{name}.wo", F32, WIDTH, HEADS * WIDTH)
        return b.linear(b.op("merge_heads", mixed), out)


def build_paged(output: Path, cache: Path) -> None:
    """Compile the model into `output`."""
    graph, chip = paged_graph(), quick_target()
    model = ModelRecord("paged", "paged", VOCAB, 60 * BLOCK, BLOCK, None, (), False, None, None)
    config = CompileConfig(dtype="float32", max_context=60 * BLOCK, max_tokens_per_step=MOST,
                           max_requests=8, block_size=BLOCK)  # fmt: skip
    job = CompileJob(graph, model, RandomWeights(graph), chip, QuickToolchain(chip, cache), config,
                     first_candidate(chip), Flags(cache=cache), jobs=2)  # fmt: skip
    compile_graph(job, output, lambda *_: None)


def layout_of(graph: Graph) -> CacheLayout:
    """Both pools of the small model."""
    records: list[StateRecord] = [state_record(graph, s) for s in graph.states]
    pools = {
        scope: PoolLayout(scope, size, tuple(r for r in records if r.scope == scope))
        for scope, size in (("block", BLOCK), ("window", PAGE))
    }
    reach = max(r.window for r in records)
    return CacheLayout(pools["block"], pools["window"], reach, ring_pages(reach, MOST, PAGE))


@dataclass
class Interpreter:
    """Runs batches on the reference; states are torch tensors that `StateMemory` copies in."""

    graph: Graph
    weights: Mapping[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    logits: dict[tuple[Any, int], bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, pages: Mapping[str, int], seed: int = 0) -> Interpreter:
        """With `pages` of each scope, all poisoned."""
        states = {}
        for s in graph.states:
            shape = (pages[s.scope], *(int(d) for d in s.type.shape[1:]))
            kind = torch.int32 if s.type.dtype == I32 else torch.float32
            states[s.name] = torch.full(shape, -7 if kind == torch.int32 else torch.nan, dtype=kind)
        return cls(graph, RandomWeights(graph, seed=seed).tensors(), states)

    def state(self, name: str) -> Any:
        """A state's live memory."""
        return self.states[name].numpy()

    def poison(self, scope: str, pages: list[int]) -> None:
        """Fill pages that nobody holds."""
        for s in self.graph.states:
            if s.scope == scope:
                self.states[s.name][pages] = -7 if s.type.dtype == I32 else torch.nan

    def execute(self, batch: Batch) -> list[int]:
        """Run the tokens one by one; return the likeliest token of each row of logits."""
        found: dict[int, tuple[bytes, int]] = {}
        for i in range(batch.num_tokens):
            row, outputs = batch.request_rows[i], self._token(batch, i)
            found[i] = outputs["logits"][0].numpy().tobytes(), int(outputs["argmax"][0])
            assert not torch.isnan(outputs["logits"]).any(), (batch.requests[row].id, i)
            self.logits[batch.requests[row].id, int(batch.positions[i])] = found[i][0]
        return [found[i][1] for i in batch.logit_rows.tolist()]

    def _token(self, batch: Batch, i: int) -> Mapping[str, torch.Tensor]:
        row, one = batch.request_rows[i], slice(i, i + 1)
        inputs = {
            "token_ids": batch.token_ids[one], "positions": batch.positions[one],
            "request_rows": np.zeros(1, np.int32), "logit_rows": np.zeros(1, np.int32),
            "block_tables": batch.block_tables[row : row + 1],
            "window_tables": batch.window_tables[row : row + 1],
        }  # fmt: skip
        given = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in inputs.items()}
        result = reference.run(self.graph, given, states=self.states, weights=self.weights,
                               precision=reference.HONOUR_CASTS)  # fmt: skip
        self.states = {name: t.contiguous() for name, t in result.states.items()}
        return result.outputs


class Compiled:
    """Runs batches on an artifact of the same model."""

    def __init__(self, executor: Executor, pages: Mapping[str, int]) -> None:
        executor.allocate_states({"cache_blocks": pages["block"], "window_blocks": pages["window"]})
        self._executor, self._manifest = executor, executor.artifact.manifest
        self._inputs = StepInputs(self._manifest)
        self.logits: dict[tuple[Any, int], bytes] = {}
        for scope, count in pages.items():
            self.poison(scope, list(range(count)))

    def state(self, name: str) -> Any:
        """A state's live memory; that of a GPU made of host memory too."""
        session = self._executor._session
        if isinstance(session, GpuSession):
            return session._view(("state", name), 0, session._state_dims).numpy()
        return self._executor.state(name)

    def poison(self, scope: str, pages: list[int]) -> None:
        """Fill pages that nobody holds."""
        for s in self._manifest.states:
            if s.scope == scope:
                self.state(s.name)[pages] = -7 if s.dtype == "i32" else np.nan

    def execute(self, batch: Batch) -> list[int]:
        """Run the step; return the likeliest token of each row of logits."""
        outputs = self._executor.run(*self._inputs.of(batch))
        assert not np.isnan(outputs["logits"]).any(), [r.id for r in batch.requests]
        for i, (row, owner) in enumerate(zip(batch.logit_rows, batch.logit_requests, strict=True)):
            key = batch.requests[owner].id, int(batch.positions[row])
            self.logits[key] = outputs["logits"][i].tobytes()
        return [int(token) for token in outputs["argmax"]]


@dataclass
class Served:
    """A scheduler over both pools, and what computes below it."""

    scheduler: Scheduler
    cache: Cache
    device: Interpreter | Compiled

    @classmethod
    def of(
        cls, *, blocks: int = 96, pages: int = 40, most: int = MOST,
        executor: Executor | None = None, **settings: int,
    ) -> Served:  # fmt: skip
        """`settings` are those of the cache. Without an executor the model is interpreted."""
        graph, counts = paged_graph(), {"block": blocks, "window": pages}
        layout = layout_of(graph)
        device: Interpreter | Compiled
        device = Compiled(executor, counts) if executor else Interpreter.of(graph, counts)
        memory = (executor.cache_memory(layout) if executor
                  else StateMemory(device.state, layout))  # fmt: skip
        pool = WindowPages(pool=BlockPool(pages, PAGE), reach=layout.reach, width=layout.ring_width)
        cache = Cache(BlockPool(blocks, BLOCK), pool, memory=memory,
                      settings=CacheSettings(**settings))  # fmt: skip
        return cls(Scheduler(cache, max_tokens_per_step=most, max_requests=8), cache, device)

    def step(self, forced: Mapping[Any, int] | None = None) -> None:
        """One step; `forced` names the next token of requests by id."""
        batch = self.scheduler.schedule()
        assert batch is not None
        tokens = self.device.execute(batch)
        for i, row in enumerate(batch.logit_requests.tolist()):
            tokens[i] = (forced or {}).get(batch.requests[row].id, tokens[i])
        self.scheduler.commit(batch, tokens)
        self.poison()

    def poison(self) -> None:
        """Fill everything free with what no result may come from."""
        assert self.cache.window is not None
        self.device.poison("block", self.cache.blocks._free)
        self.device.poison("window", self.cache.window.pool._free)

    def check_accounts(self) -> None:
        """Every page is free, or held by as many as the pool believes."""
        holders = np.zeros(self.cache.blocks.num_blocks, int)
        tables: list[Tables] = list(self.scheduler._running.values())
        lists = [t.blocks.blocks.tolist() for t in tables]
        for ids in [*lists, *(list(s.blocks) for s in self.cache.snapshots)]:
            holders[ids] += 1
        assert holders.tolist() == self.cache.blocks._holders
        assert sorted(self.cache.blocks._free) == np.flatnonzero(holders == 0).tolist()
        assert self.cache.window is not None
        pool = self.cache.window.pool
        pages = [p for t in tables for w in t.windows for p in w.pages]
        assert sorted([*pages, *pool._free]) == list(range(pool.num_blocks))
