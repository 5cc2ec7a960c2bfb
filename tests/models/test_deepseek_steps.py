"""Both families in the interpreter: neighbours, padding, rollback, and the modes that round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.deepseek_tiny import V4, V41, drawn_tensors
from support.paged_run import PagedRun, graph_weights
from tilewright.graph import reference
from tilewright.graph.types import BF16, F32
from tilewright.models.layers import Formats, Limits
from tilewright.models.registry import family_of

LIMITS = Limits(context_page=128, window_page=8)
BOTH = pytest.mark.parametrize("config", [V4, V41], ids=["v4", "v41"])


def run_of(config: Any, *, seed: int = 0, formats: Formats | None = None, **more: Any) -> PagedRun:
    family = family_of(config)
    formats = formats or Formats({}, F32, quantise_cache=False)
    graph = family.build("tiny", family.read_config(config), formats, LIMITS)
    weights = graph_weights(graph, drawn_tensors(graph, 9, ids_below=5))
    rounds = formats.activation == BF16 or formats.quantise_cache
    precision = reference.HONOUR_CASTS if rounds else reference.IDEAL_F32
    return PagedRun(graph, weights, precision, context_page=128, window_page=8, max_step=48,
                    max_positions=256, window=128, seed=seed, **more)


def text(salt: int, count: int) -> list[int]:
    return [(i * i * 7 + salt * 13 + i) % 67 for i in range(count)]


@BOTH
def test_neighbours_and_padding_change_nothing(config: Any) -> None:
    alone = run_of(config)
    expected = torch.cat([alone.step({0: text(1, 20)})["logits"],
                          alone.step({0: text(2, 9)})["logits"]])
    batch = run_of(config, seed=5, num_requests=3)
    first = batch.step({2: text(3, 30), 0: text(1, 20), 1: text(4, 1)}, padding=3)["logits"]
    second = batch.step({1: text(5, 8), 0: text(2, 9)}, padding=1)["logits"]
    got = torch.cat([first[30:50], second[8:17]])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@BOTH
@pytest.mark.parametrize("kept", [17, 20, 27])
def test_rollback_equals_never_having_seen_the_tokens(config: Any, kept: int) -> None:
    run, fresh = run_of(config), run_of(config)
    run.step({0: text(1, 28)})
    run.rollback(0, kept)
    got = run.step({0: text(8, 13)})["logits"]
    fresh.step({0: text(1, kept)})
    expected = fresh.step({0: text(8, 13)})["logits"]
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@BOTH
def test_rounding_modes_stay_near_the_ideal(config: Any) -> None:
    """With every entry selected and every expert chosen, rounding moves logits a little only."""
    easy = {**config, "index_topk": 64, "num_experts_per_tok": 5}
    easy |= {"candidate_topk_blocks": 64} if "candidate_topk_blocks" in config else {}
    tokens = text(6, 40)
    ideal = run_of(easy).step({0: tokens})["logits"]
    for formats in (Formats({}, BF16, quantise_cache=False), Formats({}, BF16), Formats({}, F32)):
        got = run_of(easy, formats=formats).step({0: tokens})["logits"]
        close = torch.nn.functional.cosine_similarity(got, ideal, dim=-1)
        assert float(close.mean()) > 0.98 and float(close.min()) > 0.9
        assert float((got - ideal).abs().max()) > 1e-3


@BOTH
def test_quantised_cache_decodes_as_it_prefills(config: Any) -> None:
    """Rows are rounded before they are stored, so chunks read the same values."""
    formats = Formats({}, BF16)
    whole = run_of(config, formats=formats).step({0: text(2, 40)})["logits"]
    parts = run_of(config, formats=formats)
    got = parts.feed(text(2, 40), (13, 1, 1, 20, 5))
    torch.testing.assert_close(got, whole, atol=2e-2, rtol=1e-2)
