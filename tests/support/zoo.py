"""All kernels of tiny models side by side in one graph, each with inputs of its own, so that what a
kernel is given can be chosen freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.tiny import Tiny
from tilewright.codegen.body import Body, extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import Bucket, Candidate, Chooser
from tilewright.codegen.select import Choice
from tilewright.codegen.target import Target
from tilewright.codegen.tune import candidates
from tilewright.graph import Graph, Input, Weight, WeightExpr
from tilewright.graph.dims import evaluate
from tilewright.graph.types import I32

Arrays = dict[str, NDArray[Any]]
BLOCK_SIZE, BLOCKS_EACH = 8, 12
EXTREMES = np.array([-0.0, 0.0, 1e-40, -1e-42, 1e8, 1.0, -1e8, 2.0**-20, 2.0**20], np.float32)


def bodies(models: Iterable[Tiny], keep: Callable[[int, Body], bool]) -> list[Body]:
    """Distinct bodies of the models; `keep` sees the index of a body among those of its kind."""
    found: dict[str, Body] = {}
    for model in models:
        graph = lower(model.graph, Flags()).graph
        count: dict[str, int] = {}
        for group in graph.groups:
            body = extract(graph, group)
            key = body.graph.digest + repr(body.buffers)
            if key in found:
                continue
            index = count.setdefault(group.kind, 0)
            count[group.kind] += 1
            if keep(index, body):
                found[key] = body
    return list(found.values())


def joined(parts: Iterable[Body], shared: Graph) -> Graph:
    """One graph of all bodies. Integer inputs are those of the model; all else is renamed."""
    result = replace(
        shared, name="zoo", states=(), weights=(), nodes=(), outputs=(), state_outputs=(), groups=()
    )
    ints = {i.name for i in shared.inputs if i.type.dtype == I32}
    inputs = {i.name: i for i in shared.inputs if i.name in ints}
    for index, part in enumerate(parts):
        result = _with_body(result, f"b{index}.", part, ints, inputs, shared)
    read = {i for n in result.nodes for i in n.inputs}
    inputs = {name: i for name, i in inputs.items() if name in read}
    return replace(result, inputs=tuple(inputs.values()))


def _with_body(
    graph: Graph, tag: str, part: Body, ints: set[str], inputs: dict[str, Input], shared: Graph
) -> Graph:
    body = part.graph
    name = {v: part.binding[v] if part.binding.get(v) in ints else tag + v for v in body.types}
    for given in body.inputs:
        inputs.setdefault(name[given.name], Input(name[given.name], given.type))
    final = {s: name[s] for s in body.state} | {s: name[v] for s, v in body.state_outputs}
    return replace(
        graph,
        states=graph.states
        + tuple(
            replace(shared.state.get(part.binding[s.name], s), name=name[s.name], type=s.type)
            for s in body.states
        ),
        weights=graph.weights
        + tuple(
            Weight(name[w.name], w.type, WeightExpr("tensor", (name[w.name],)))
            for w in body.weights
        ),
        nodes=graph.nodes
        + tuple(
            replace(n, name=name[n.name], inputs=tuple(name[i] for i in n.inputs))
            for n in body.nodes
        ),
        outputs=graph.outputs + tuple((name[v], name[v]) for _, v in body.outputs),
        state_outputs=graph.state_outputs + tuple((name[s], v) for s, v in final.items()),
    )


def nth_candidate(target: Target, settings: Any, n: int) -> Chooser:
    """Choose the n-th of what the tuner may measure, counted round for each kernel and bucket."""

    def choose(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        found = candidates(body, choice, bucket, target, settings)
        return found[n % len(found)]

    return choose


@dataclass(frozen=True)
class Rows:
    """Rows of requests of one token each: inputs per row, and the caches they read and write."""

    graph: Graph
    floats: Arrays  # [rows, ..] by input
    positions: NDArray[np.int32]
    caches: Arrays  # by state, as it lies in memory

    @property
    def count(self) -> int:
        return len(self.positions)

    def step(self, chosen: list[int]) -> tuple[Arrays, dict[str, int]]:
        """Inputs and dims of a step that holds these rows, in this order."""
        n, rows = len(chosen), np.array(chosen, np.int32)
        positions = self.positions[rows]
        blocks = int(positions.max()) // BLOCK_SIZE + 1
        tables = rows[:, None] * BLOCKS_EACH + np.arange(blocks, dtype=np.int32)
        slots = rows * BLOCKS_EACH * BLOCK_SIZE + positions
        given: Arrays = {
            "token_ids": positions % 31, "positions": positions, "logit_rows": np.arange(n),
            "request_rows": np.arange(n), "slots": slots, "block_tables": tables,
        }  # fmt: skip
        given = {k: v.astype(np.int32) for k, v in given.items()}
        names = {i.name for i in self.graph.inputs}
        given |= {name: array[rows] for name, array in self.floats.items()}
        dims = {"tokens": n, "requests": n, "logit_rows": n, "request_blocks": blocks}
        return {k: v for k, v in given.items() if k in names}, dims


def hard_rows(graph: Graph, count: int, seed: int, *, nan_rows: Iterable[int] = ()) -> Rows:
    """Rows with exponents over 2^+-20, cancellation, -0 and subnormals; some hold only NaN."""
    r = np.random.default_rng(seed)
    floats = {
        i.name: _hard(r, [evaluate(d, _one(count)) for d in i.type.shape], str(i.type.dtype))
        for i in graph.inputs
        if i.type.dtype != I32
    }
    caches = {
        s.name: _hard(r, [count * BLOCKS_EACH, *map(int, s.type.shape[1:])], str(s.type.dtype))
        for s in graph.states
    }
    for row in nan_rows:
        for array in floats.values():
            array[row] = _nan(array)
        for array in caches.values():
            array[row * BLOCKS_EACH : (row + 1) * BLOCKS_EACH] = _nan(array)
    positions = r.integers(0, BLOCKS_EACH * BLOCK_SIZE, count).astype(np.int32)
    return Rows(graph, floats, positions, caches)


def _one(count: int) -> Mapping[str, int]:
    return {"tokens": count, "logit_rows": count, "requests": count}


def _hard(r: np.random.Generator, shape: list[int], dtype: str) -> NDArray[Any]:
    values = r.standard_normal(shape) * np.exp2(r.integers(-20, 21, shape))
    array = np.where(r.random(shape) < 0.2, r.choice(EXTREMES, shape), values).astype(np.float32)
    return (array.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else array


def _nan(array: NDArray[Any]) -> Any:
    return np.uint16(0x7FC0) if array.dtype == np.uint16 else np.float32(np.nan)
