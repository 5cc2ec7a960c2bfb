"""Cost: what a kernel computes and moves, against counts by hand."""

from __future__ import annotations

import pytest

from support.tiny import quick_target, tiny_graph
from tilewright.codegen.body import extract
from tilewright.codegen.cost import BodyCost, body_cost, roofline_seconds
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.graph.dims import evaluate

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
