"""Both families against logits of independent implementations, stored as small files.

tests/oracles/make_golden.py writes them; weights are drawn by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.deepseek_tiny import V4, V41, drawn_tensors, golden_tokens
from support.paged_run import PagedRun, graph_weights
from tilewright.graph import reference
from tilewright.graph.types import F32
from tilewright.graph.verify import verify
from tilewright.models import deepseek_v4, deepseek_v41
from tilewright.models.engram import TOKEN_MAP
from tilewright.models.layers import Formats, Limits

DATA = Path(__file__).parents[1] / "data"
LIMITS = Limits(context_page=128, window_page=16)
FAMILIES: dict[str, tuple[Any, Any, int]] = {
    "v4": (deepseek_v4, V4, 5), "v41": (deepseek_v41, V41, 50)
}  # fmt: skip


@pytest.mark.parametrize("chunks", ["whole", "cut", "tokens at the end"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_stored_ones(family: str, chunks: str) -> None:
    module, config, ids_below = FAMILIES[family]
    stored = np.load(DATA / f"deepseek_golden_{family}.npz")
    tokens = stored["tokens"].tolist()
    assert tokens == golden_tokens(len(tokens))
    formats = Formats({}, F32, quantise_cache=False)
    graph = module.build("tiny", module.read_config(config), formats, LIMITS)
    tensors = drawn_tensors(graph, int(stored["seed"]), ids_below=ids_below)
    if family == "v41":  # what the loader finds out from the tokenizer
        config = {**config, "engram_compressed_pad_id": int(tensors[TOKEN_MAP][2, 0])}
        graph = module.build("tiny", module.read_config(config), formats, LIMITS)
    verify(graph)
    weights = graph_weights(graph, tensors)
    run = PagedRun(graph, weights, reference.IDEAL_F32, context_page=128, window_page=16,
                   max_step=len(tokens), window=128)
    rest = len(tokens) - 8
    sizes = {"whole": (len(tokens),), "cut": (3, 29, rest - 32, 8),
             "tokens at the end": (rest, *[1] * 8)}[chunks]
    got = run.feed(tokens, sizes)
    torch.testing.assert_close(got, torch.from_numpy(stored["logits"]), atol=1e-3, rtol=0)
