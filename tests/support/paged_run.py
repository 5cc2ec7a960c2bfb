"""Runs a graph on paged rows step by step in the reference interpreter, as an engine would.

Each request has a ring of window pages and a table of context pages, in random order; pages that a
ring gives back are poisoned before they are used again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tilewright.graph import Graph, reference
from tilewright.graph.dims import evaluate
from tilewright.graph.reference import Precision
from tilewright.graph.types import I32

Tensors = Mapping[str, torch.Tensor]


def graph_weights(graph: Graph, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Weights of a graph from checkpoint tensors by name."""
    found = {}
    for weight in graph.weights:
        names = weight.expr.tensors
        if weight.expr.kind == "tensor":
            found[weight.name] = tensors[names[0]]
        elif weight.expr.kind == "stack":
            found[weight.name] = torch.stack([tensors[name] for name in names])
        if weight.type.dtype == I32:
            found[weight.name] = found[weight.name].int()
    return found


@dataclass
class PagedRun:
    """Requests of one graph; `page` sizes are those the graph was built with."""

    graph: Graph
    weights: Tensors
    precision: Precision
    num_requests: int = 1
    max_positions: int = 512
    max_step: int = 512
    window: int = 128
    context_page: int = 256
    window_page: int = 64
    seed: int = 0
    keep_values: bool = False
    values: Tensors = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(init=False)
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        self.lengths = [0] * self.num_requests
        self.block_tables = self._tables(r, -(-self.max_positions // self.context_page))
        held = -(-(self.max_step + self.window) // self.window_page) + 1
        self.window_tables = self._tables(r, held)
        sizes = {"cache_blocks": self.block_tables.numel() + 1,
                 "window_blocks": self.window_tables.numel() + 1}
        self.states = {}
        for state in self.graph.states:
            shape = [evaluate(d, sizes) for d in state.type.shape]
            whole = state.type.dtype == I32
            dtype = torch.int32 if whole else self.precision.dtype
            self.states[state.name] = torch.full(shape, 0 if whole else torch.nan, dtype=dtype)

    def _tables(self, r: random.Random, pages: int) -> torch.Tensor:
        order = list(range(pages * self.num_requests + 1))
        r.shuffle(order)
        return torch.tensor(order[:-1], dtype=torch.int32).view(self.num_requests, pages)

    def step(
        self,
        batch: Mapping[int, Sequence[int]],
        *,
        padding: int = 0,
        extra: Tensors | None = None,
    ) -> dict[str, torch.Tensor]:
        """Feed tokens to requests; logits come for every token, in the order of the batch."""
        tokens, positions, rows = [], [], []
        for row, ids in batch.items():
            start = self.lengths[row]
            tokens += list(ids)
            positions += range(start, start + len(ids))
            rows += [row] * len(ids)
            self.lengths[row] += len(ids)
        count = len(tokens)
        inputs = {
            "token_ids": tokens + [0] * padding,
            "positions": positions + [-1] * padding,
            "request_rows": rows + [0] * padding,
            "logit_rows": list(range(count)),
        }
        tables = {"block_tables": self.block_tables, "window_tables": self.window_tables}
        given = {k: torch.tensor(v, dtype=torch.int32) for k, v in inputs.items()} | tables
        given = {k: v for k, v in {**given, **(extra or {})}.items()
                 if k in {i.name for i in self.graph.inputs}}
        result = reference.run(
            self.graph, given, states=self.states, weights=self.weights,
            precision=self.precision, keep_values=self.keep_values,
        )
        self.states, self.values = dict(result.states), result.values
        return dict(result.outputs)

    def rollback(self, row: int, length: int) -> None:
        """Forget the newest tokens: rows are overwritten when others come."""
        self.lengths[row] = length

    def feed_with(
        self, tokens: Sequence[int], measure: Callable[[Graph, Tensors], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of a whole text in one step, and what `measure` finds in the step's values."""
        self.keep_values = True
        logits = self.step({0: tokens})["logits"]
        return logits, measure(self.graph, self.values)

    def feed(self, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """Logits of one request given in chunks of these lengths."""
        found, at = [], 0
        for size in chunks:
            found.append(self.step({0: tokens[at : at + size]})["logits"])
            at += size
        assert at == len(tokens)
        return torch.cat(found)
