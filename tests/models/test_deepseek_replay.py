"""Bounded replay: a prompt's decoder layers run for its last rows alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.deepseek_tiny import V41, drawn_tensors
from support.paged_run import PagedRun, graph_weights
from tilewright.graph import Graph, reference
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import F32
from tilewright.graph.verify import verify
from tilewright.models import deepseek_v41
from tilewright.models.layers import Formats, Limits

LIMITS = Limits(context_page=32, window_page=8)
PLAIN = Formats({}, F32, quantise_cache=False)
TOKENS = [(5 * i * i + 11) % 67 for i in range(50)]
CONFIG = deepseek_v41.read_config(V41)


def graph_of(**changes: Any) -> Graph:
    graph = deepseek_v41.build("tiny", replace(CONFIG, **changes), PLAIN, LIMITS)
    verify(graph)
    return graph


def run_of(graph: Graph) -> PagedRun:
    weights = graph_weights(graph, drawn_tensors(graph, 3, ids_below=50))
    return PagedRun(graph, weights, reference.IDEAL_F32, context_page=32, window_page=8,
                    max_step=50, window=12)


def logits(run: PagedRun, tokens: list[int], start: int) -> torch.Tensor:
    """Feed tokens; rows from position `start` of the text on go through the whole model."""
    first = run.lengths[0]
    rows = [i for i in range(len(tokens)) if first + i >= start]
    extra = {
        "tail_rows": rows,
        "tail_window_positions": [first + i - start for i in rows],
        "logit_rows": range(len(rows)),
    }
    given = {name: torch.tensor(list(v), dtype=torch.int32) for name, v in extra.items()}
    given["tail_window_tables"] = run.window_tables
    return run.step({0: tokens}, extra=given)["logits"]


@pytest.mark.parametrize("tail_layer", [None, 5, 7])
def test_a_tail_of_the_whole_text_changes_nothing(tail_layer: int | None) -> None:
    expected = run_of(graph_of()).step({0: TOKENS})["logits"]
    graph = graph_of(replay_tokens=12, tail_layer=tail_layer)
    assert torch.equal(logits(run_of(graph), TOKENS, 0), expected)


@pytest.mark.parametrize("start", [20, 38, 49])
def test_only_the_tail_is_run_and_its_windows_begin_there(start: int) -> None:
    """States start as NaN, so reading a window row before the tail would show."""
    graph, full = graph_of(replay_tokens=12), run_of(graph_of()).step({0: TOKENS})["logits"]
    got = logits(run_of(graph), TOKENS, start)
    assert got.shape == (50 - start, 67) and bool(got.isfinite().all())
    assert not torch.allclose(got[0], full[start], atol=1e-2)


@pytest.mark.parametrize("chunks", [(38, 12), (10, 20, 20), (49, 1), (7, 33, 3, 7)])
def test_steps_without_a_tail_then_with_one(chunks: tuple[int, ...]) -> None:
    graph = graph_of(replay_tokens=12)
    expected = logits(run_of(graph), TOKENS, 36)
    run, found, at = run_of(graph), [], 0
    for size in chunks:
        found.append(logits(run, TOKENS[at : at + size], 36))
        at += size
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replay_tokens": 10},
         "setting 'replay_tokens': got 10, want an even number of at least the window, 12"),
        ({"replay_tokens": 13},
         "setting 'replay_tokens': got 13, want an even number of at least the window, 12"),
        ({"replay_tokens": 12, "tail_layer": 3},
         "setting 'tail_layer': got 3, want a layer of 0:8 from the last KV source of [1, 4] on"),
    ],
)  # fmt: skip
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        graph_of(**changes)
    assert str(caught.value) == message
