"""The draft layer, and window layers of the model, against formulas written out."""

from __future__ import annotations

import pytest
import torch

from support.deepseek_tiny import V4, drawn_tensors
from support.paged_run import PagedRun, graph_weights
from support.plain_deepseek import head_logits, norm, window_block
from tilewright.graph import reference
from tilewright.graph.types import F32
from tilewright.graph.verify import verify
from tilewright.models import deepseek_v4
from tilewright.models.deepseek_mtp import build_mtp
from tilewright.models.layers import Formats, Limits

PLAIN = Formats({}, F32, quantise_cache=False)
WINDOWS = {**V4, "num_hash_layers": 0, "num_hidden_layers": 2, "compress_ratios": [0, 0, 0]}
TOKENS = [(7 * i * i + 3) % 67 for i in range(40)]


def run_of(graph, weights, **more):  # type: ignore[no-untyped-def]
    return PagedRun(graph, graph_weights(graph, weights), reference.IDEAL_F32, window_page=16,
                    context_page=128, max_step=40, window=12, **more)


def test_window_layers_equal_the_formulas() -> None:
    config = deepseek_v4.read_config(WINDOWS)
    limits = Limits(context_page=128, window_page=16)
    graph = deepseek_v4.build("tiny", config, PLAIN, limits, expose_streams=True)
    verify(graph)
    weights = drawn_tensors(graph, 1, ids_below=5)
    result = run_of(graph, weights).step({0: TOKENS}, padding=2)
    r = weights["embed.weight"][TOKENS][:, None].repeat(1, 4, 1)
    for layer in range(2):
        r = window_block(weights, f"layers.{layer}", r, WINDOWS)
    torch.testing.assert_close(result["streams"][:40], r, atol=1e-4, rtol=1e-4)
    expected = head_logits(weights, "", r, "norm.weight", WINDOWS)
    torch.testing.assert_close(result["logits"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunks", [(40,), (1,) * 40, (3, 30, 7)])
def test_draft_layer_equals_the_formulas(chunks: tuple[int, ...]) -> None:
    config = deepseek_v4.read_config(V4)
    graph = build_mtp("draft", config, PLAIN, Limits(context_page=128, window_page=16))
    verify(graph)
    w = drawn_tensors(graph, 2, ids_below=5)
    before = torch.randn(40, 4, 32, generator=torch.Generator().manual_seed(0))
    run, got, after, at = run_of(graph, w), [], [], 0
    for size in chunks:
        part = slice(at, at + size)
        result = run.step({0: TOKENS[part]}, extra={"streams": before[part]})
        got.append(result["logits"])
        after.append(result["streams"])
        at += size
    token = norm(w["embed.weight"][TOKENS], w["mtp.0.enorm.weight"], 1e-6) @ w[
        "mtp.0.e_proj.weight"].T
    r = norm(before, w["mtp.0.hnorm.weight"], 1e-6) @ w["mtp.0.h_proj.weight"].T + token[:, None]
    r = window_block(w, "mtp.0", r, V4)
    torch.testing.assert_close(torch.cat(after), r, atol=1e-4, rtol=1e-4)
    expected = head_logits(w, "mtp.0.", r, "mtp.0.norm.weight", V4)
    torch.testing.assert_close(torch.cat(got), expected, atol=1e-4, rtol=1e-4)
