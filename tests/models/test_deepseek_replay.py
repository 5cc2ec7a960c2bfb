"""Bounded replay: a prompt's decoder layers run for its last rows alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.deepseek_tiny import V4, V41, drawn_tensors
from support.paged_run import PagedRun, graph_weights
from tilewright.codegen.config import CompileConfig
from tilewright.graph import Graph, reference
from tilewright.graph.errors import LowerError, VerifyError
from tilewright.graph.types import F32
from tilewright.graph.verify import verify
from tilewright.models import deepseek_v41
from tilewright.models.deepseek_v41 import first_of_tail
from tilewright.models.layers import Formats, Limits
from tilewright.models.registry import FAMILIES
from tilewright.tools.prepare import settled

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


@pytest.mark.parametrize(("window", "wanted"), [(12, 140), (140, 140), (141, 142), (300, 300)])
def test_the_default_is_140_and_never_less_than_the_window(window: int, wanted: int) -> None:
    read = deepseek_v41.read_config({**V41, "sliding_window": window})
    assert read.default_replay == wanted
    assert first_of_tail(replace(read, replay_tokens=wanted)) is not None


@pytest.mark.parametrize("mode", ["deterministic", "fast"])
def test_replay_is_asked_for_by_name_in_either_mode(mode: str) -> None:
    family = FAMILIES["DeepseekV41ForCausalLM"]
    plain, _ = settled(family, V41, CompileConfig(mode=mode), "auto", None)
    assert plain.replay_tokens is None and first_of_tail(plain) is None
    asked = CompileConfig(mode=mode, replay_tokens="default")
    read, config = settled(family, V41, asked, "auto", None)
    assert read.replay_tokens == config.replay_tokens == 140
    for bad, sentence in (
        (141, "setting 'replay_tokens': got 141, want an even int from 2 on, or 'default'"),
        ("140", "setting 'replay_tokens': got '140', want an even int from 2 on, or 'default'"),
        (True, "setting 'replay_tokens': got True, want an even int from 2 on, or 'default'"),
    ):
        with pytest.raises(LowerError) as caught:
            CompileConfig(mode=mode, replay_tokens=bad)
        assert str(caught.value) == sentence
    with pytest.raises(VerifyError) as refused:
        settled(FAMILIES["DeepseekV4ForCausalLM"], V4, asked, "auto", None)
    assert str(refused.value) == "setting 'replay_tokens': the family 'deepseek_v4' has none"
