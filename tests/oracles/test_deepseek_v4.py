"""The V4 graph in the reference interpreter against `transformers`: fp32, no quantisation.

Needs transformers 5.24 (a development tool, not a dependency): skipped without it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from support.oracle_cases import compared, randomise, report, v4_case
from support.paged_run import PagedRun, graph_weights
from support.selection_margins import margins
from tilewright.graph import reference
from tilewright.graph.types import F32
from tilewright.models import deepseek_v4
from tilewright.models.checkpoint import account, open_checkpoint
from tilewright.models.deepseek_checkpoint import adopt, unread
from tilewright.models.deepseek_names import sources
from tilewright.models.layers import Formats, Limits

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "DeepseekV4Config"):
    pytest.skip("this transformers has no DeepseekV4", allow_module_level=True)

CASES = int(os.environ.get("TILEWRIGHT_ORACLE_CASES", "3"))


def oracle(config: dict[str, Any], seed: int) -> Any:
    """A random model of `transformers`."""
    settings = transformers.DeepseekV4Config(**config)
    settings._attn_implementation = settings._experts_implementation = "eager"
    model = transformers.DeepseekV4ForCausalLM(settings).eval().float()
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    named = {k: v for k, v in named.items() if "rotary" not in k}
    randomise(named, seed, config["n_routed_experts"], config["num_experts_per_tok"])
    return model


def canonical(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint under the released names."""
    found = {}
    for name, source in sources({k: tuple(v.shape) for k, v in state.items()}).items():
        flat = state[source.name]
        if source.rows is not None:
            flat = flat.flatten(0, -2)[source.start : source.start + source.rows]
        found[name] = flat.reshape(source.shape)
    return found


@pytest.mark.parametrize("seed", range(CASES))
def test_equals_transformers(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    case = v4_case(seed)
    model = oracle(case.config, seed)
    with torch.no_grad():
        expected = model(torch.tensor([case.tokens]), use_cache=False).logits[0]
    page = random.Random(seed).choice((16, 64))
    formats = Formats({}, F32, quantise_cache=False)
    config = deepseek_v4.read_config(case.config)
    graph = deepseek_v4.build("tiny", config, formats, Limits(context_page=128, window_page=page))
    weights = graph_weights(graph, canonical(model.state_dict()))
    gaps = None
    for chunks in case.chunkings:
        run = PagedRun(graph, weights, reference.IDEAL_F32, context_page=128, window_page=page,
                       max_step=max(chunks), seed=seed)
        if gaps is None:
            got, gaps = run.feed_with(case.tokens, margins)
        else:
            got = run.feed(case.tokens, chunks)
        worst, skipped = compared(got, expected, gaps)
        report(capsys, f"v4 {seed} {case.config['compress_ratios']}", chunks, worst, skipped)


def test_what_transformers_saves_gives_its_logits(tmp_path: Path) -> None:
    case = v4_case(3)
    model = oracle(case.config, 3)
    tokens = case.tokens[:60]
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    model.save_pretrained(tmp_path)
    checkpoint = adopt(open_checkpoint(tmp_path))
    config = deepseek_v4.read_config(checkpoint.config)
    formats = Formats({}, F32, quantise_cache=False)
    graph = deepseek_v4.build("tiny", config, formats, Limits(context_page=128))
    shapes = {n: w.type.shape[-2:] for w in graph.weights for n in w.expr.tensors}
    account(shapes, checkpoint, ignored=unread(config))
    tensors = {
        name: torch.from_numpy(entry.raw().view("<i8").reshape(entry.shape).copy())
        if entry.dtype == "i64" else torch.from_numpy(entry.dequantise())
        for name, entry in checkpoint.tensors.items()
    }  # fmt: skip
    run = PagedRun(graph, graph_weights(graph, tensors), reference.IDEAL_F32, context_page=128,
                   max_step=60)
    torch.testing.assert_close(run.step({0: tokens})["logits"], expected, atol=1e-3, rtol=0)
