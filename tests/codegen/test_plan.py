"""Plans: buckets, launches, and memory that every launch may name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from support.tiny import SETTINGS, quick_target, tiny_graph
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import buckets_of, first_candidate, plan_buckets, plan_groups
from tilewright.graph import Graph, GraphBuilder, Role, Value
from tilewright.graph.errors import LowerError
from tilewright.graph.types import F32
from tilewright.targets.registry import resolve

TARGET = quick_target()
Outputs = Callable[[GraphBuilder, Value], dict[str, Value]]


def fused(settings: CompileConfig = SETTINGS) -> Graph:
    return lower(tiny_graph(settings=settings), Flags()).graph


@pytest.mark.parametrize("tokens", [1, 2, 4, 24, 512])
def test_buckets_hold_every_step(tokens: int) -> None:
    """Each bucket fits the limits, the last one is the limits, and none stands twice.

    A request has at least one token in a step, so there are never more requests than tokens.
    """
    settings = replace(SETTINGS, max_tokens_per_step=tokens)
    graph = fused(settings)
    buckets = buckets_of(graph, resolve("cpu")[0], settings)
    assert len({b.name for b in buckets}) == len(buckets)
    for bucket in buckets:
        assert bucket.bounds.keys() == graph.dim.keys()
        assert all(1 <= n <= graph.dim[d].upper for d, n in bucket.bounds.items())
    limits = {d.name: d.upper for d in graph.dims}
    assert buckets[-1].bounds == limits | {"requests": min(tokens, limits["requests"])}


def test_launches_name_memory_that_is_written_before() -> None:
    """Buffers are placed, are written before they are read, and never share bytes while alive."""
    graph = fused()
    plans = plan_groups(graph, TARGET, SETTINGS, first_candidate(TARGET))
    records, tensors = plan_buckets(graph, plans, TARGET, SETTINGS)
    for record in records:
        places = {p.name: p for p in record.placements}
        assert places.keys() == {t.name for t in tensors}
        written: set[str] = set()
        for plan, launch in zip(plans, record.launches, strict=True):
            outputs = {plan.body.binding[v] for _, v in plan.body.graph.outputs}
            named = [a.name for a in launch.arguments if a.kind == "buffer"]
            assert set(named) <= written | outputs
            for a, b in itertools.combinations([places[n] for n in named], 2):
                assert a.offset + a.num_bytes <= b.offset or b.offset + b.num_bytes <= a.offset
            written |= outputs
        assert all(p.offset + p.num_bytes <= record.arena_bytes for p in record.placements)


def given_as_is(b: GraphBuilder, x: Value) -> dict[str, Value]:
    return {"y": b.op("exp", x), "same": b.op("expand_last", x)}


def twice(b: GraphBuilder, x: Value) -> dict[str, Value]:
    y = b.op("exp", x)
    return {"first": y, "second": b.op("split_heads", y, num_heads=2)}


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (given_as_is, "output 'same': nothing computes it: got x as it is given"),
        (twice, "output 'second': is the memory of another: got that of 'first', want one output "
                "for each value"),
    ],
)  # fmt: skip
def test_outputs_without_memory_of_their_own_are_refused(outputs: Outputs, message: str) -> None:
    b = GraphBuilder("outputs")
    x = b.input("x", F32, b.dim("rows", Role.BATCH, upper=8), 4)
    for name, value in outputs(b, x).items():
        b.output(name, value)
    with pytest.raises(LowerError) as caught:
        plan_groups(lower(b.build(), Flags()).graph, TARGET, SETTINGS, first_candidate(TARGET))
    assert str(caught.value) == message
