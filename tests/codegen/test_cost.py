"""Cost: what a kernel computes and moves, against counts by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from support.latent_cases import Problem, build
from support.tiny import quick_target, tiny_graph
from tilewright.codegen.body import extract
from tilewright.codegen.cost import BodyCost, body_cost, roofline_seconds
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.graph import Graph, GraphBuilder, Group, Role
from tilewright.graph.dims import evaluate
from tilewright.graph.types import BF16, BLOCK_FORMATS, F32, I32

STEP = {"tokens": 3, "requests": 2, "logit_rows": 2, "request_blocks": 5, "cache_blocks": 100}


def costs(stored: str) -> dict[str, BodyCost]:
    graph = lower(tiny_graph(stored), Flags()).graph
    return {g.name: body_cost(extract(graph, g).graph) for g in graph.groups}


def test_a_contraction_reads_its_weights_once() -> None:
    found = costs("q8_0")["layers.0.o_proj"]
    rows, hidden = 3, 64
    weight = hidden * hidden * (8 + 16 / 32) / 8
    activation = rows * hidden * 4
    residual, result = rows * hidden * 4, rows * hidden * 4
    moved = weight + activation + residual + result
    assert evaluate(found.num_bytes, STEP) == moved
    adds = rows * hidden
    assert evaluate(found.flops, STEP) == 2 * rows * hidden * hidden + adds


def test_attention_reads_the_blocks_of_its_requests() -> None:
    found = costs("f32")["layers.0.attend"]
    requests, blocks, kv_heads, block, width = 2, 5, 2, 8, 16
    cache = 2 * requests * blocks * kv_heads * block * width * 4
    q_and_result = 2 * 3 * 4 * width * 4
    small = (3 + 3 + requests * blocks) * 4
    assert evaluate(found.num_bytes, STEP) == cache + q_and_result + small


@pytest.mark.parametrize("threads", [1, 4])
def test_roofline(threads: int) -> None:
    target = quick_target()
    assert roofline_seconds(0, 25e9, target, threads) == pytest.approx(25e9 / target.peak_bandwidth)
    flops = target.peak_flops * threads
    assert roofline_seconds(flops, 0, target, threads) == pytest.approx(1.0)


def cost_of(graph: Graph, binding: Mapping[str, int]) -> tuple[int, int]:
    """All bytes, and those of weights, of a graph that is one kernel."""
    whole = Group("all", "row", tuple(n.name for n in graph.nodes))
    found = body_cost(extract(graph, whole).graph)
    return evaluate(found.num_bytes, binding), evaluate(found.weight_bytes, binding)


@pytest.mark.parametrize(("tokens", "met"), [(1, 2), (3, 6), (50, 7)])
def test_experts_count_no_more_often_than_slots_choose_them(tokens: int, met: int) -> None:
    b = GraphBuilder("experts")
    t = b.dim("tokens", Role.BATCH)
    x, ids = b.input("x", F32, t, 64), b.input("ids", I32, t, 2)
    w = b.weight("w", BLOCK_FORMATS["q8_0[g=32,axis=1,scale=f16]"], 7, 32, 64)
    b.output("y", b.op("expert_linear", x, w, ids))
    weights = met * 32 * 2 * 34
    moved = tokens * (64 * 4 + 2 * 4 + 2 * 32 * 4) + weights
    assert cost_of(b.build(), {"tokens": tokens}) == (moved, weights)


def test_a_table_counts_in_the_rows_looked_up() -> None:
    b = GraphBuilder("table")
    t = b.dim("tokens", Role.BATCH)
    ids = b.input("ids", I32, t)
    b.output("y", b.op("embedding", ids, b.weight("table", BF16, 1000, 16)))
    assert cost_of(b.build(), {"tokens": 5}) == (5 * (4 + 16 * 2 + 16 * 4), 5 * 16 * 2)


@pytest.mark.parametrize("op", ["attend_window", "attend_compressed", "attend_selected"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_latent_attention_reads_windows_and_entries(op: str, tokens: int) -> None:
    problem = Problem(op, epilogue=False)
    requests, window_pages, pages = 3, 4, 5
    binding = {
        "tokens": tokens, "requests": requests, "cache_blocks": pages, "pages": 99,
        "window_blocks": window_pages, "window_pages": 99,
    }  # fmt: skip
    row = problem.width * 4
    window = min(tokens * problem.window, requests * window_pages * problem.per_page) * row
    entries = requests * pages * problem.entries_per_page
    chosen = {
        "attend_window": 0, "attend_compressed": entries,
        "attend_selected": min(tokens * problem.selected, entries),
    }[op]  # fmt: skip
    small = tokens * 2 * 4 + requests * window_pages * 4 + problem.heads * 4
    if op != "attend_window":
        small += requests * pages * 4
    if op == "attend_selected":
        small += tokens * problem.selected * 4
    q_and_result = 2 * tokens * problem.heads * row
    moved, _ = cost_of(build(problem), binding)
    assert moved == window + chosen * row + q_and_result + small
