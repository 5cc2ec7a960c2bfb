"""The V4.1 graph in the reference interpreter against `nemo-automodel`: fp32, no quantisation.

Needs transformers and the unpacked wheel of nemo-automodel 0.7.0 (development tools, not
dependencies): set TILEWRIGHT_NEMO to its folder; skipped without them.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import pytest
import torch

from support.oracle_cases import compared, randomise, report, v41_case
from support.paged_run import PagedRun, graph_weights
from support.selection_margins import margins
from tilewright.graph import reference
from tilewright.graph.types import F32
from tilewright.models import deepseek_v41
from tilewright.models.deepseek_names import sources
from tilewright.models.engram import TOKEN_MAP, bucket_primes, token_map
from tilewright.models.layers import Formats, Limits

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its compiled parts take minutes to build
FOLDER = os.environ.get("TILEWRIGHT_NEMO", "")
if not FOLDER:
    pytest.skip("TILEWRIGHT_NEMO does not name nemo-automodel's folder", allow_module_level=True)
sys.path.insert(0, FOLDER)
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("nemo_automodel", reason="nemo-automodel is not in TILEWRIGHT_NEMO")

CASES = int(os.environ.get("TILEWRIGHT_ORACLE_CASES", "3"))


def tokenizer() -> Any:
    """256 words, of which pairs are equal but for case."""
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    words = [f"{'T' if i % 3 == 0 else 't'}ok{i // 2}" for i in range(3, 256)]
    vocab: dict[str, int] = {}
    for i, word in enumerate(["<bos>", "<eos>", "<pad>", *words]):
        vocab[word if word not in vocab else f"{word}_{i}"] = i
    inner = Tokenizer(kinds.WordLevel(vocab, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


@pytest.fixture(autouse=True)
def without_cache_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_automodel.components.models.deepseek_v41 import attention

    monkeypatch.setattr(attention, "quantize_cache", lambda x, **_: x)


def oracle(config: dict[str, Any], words: Any, seed: int) -> Any:
    """A random model of nemo-automodel."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM

    settings = DeepseekV41Config(
        text_config=config, vision_config={"num_hidden_layers": 0}, image_token_id=240
    )
    backend = BackendConfig(
        attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch"
    )
    model = DeepseekV41ForCausalLM(settings, backend=backend, tokenizer=words).eval()
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    named = {k: v for k, v in named.items() if v.is_floating_point() and "rotary" not in k}
    randomise(named, seed, config["n_routed_experts"], config["num_experts_per_tok"])
    return model


@pytest.mark.parametrize("seed", range(CASES))
def test_equals_nemo(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = tokenizer()
    ids, count = token_map(words.backend_tokenizer)
    case = v41_case(seed, count)
    many = [10**9] * len(case.config["engram_layer_ids"])
    sizes = deepseek_v41.read_config({**case.config, "engram_num_embeddings": many}).engram
    rows = [sum(p) for p in bucket_primes(sizes).values()] if sizes else []
    settings = {**case.config, "engram_num_embeddings": rows}
    model = oracle(settings, words, seed)
    with torch.no_grad():
        expected = model(torch.tensor([case.tokens])).logits[0]
        state = model.state_dict_adapter.to_hf(dict(model.state_dict()))
    state = {name: state[s.name] for name, s in
             sources({k: tuple(v.shape) for k, v in state.items()}).items()}
    state[TOKEN_MAP] = torch.tensor(ids)[:, None]
    page = random.Random(seed).choice((16, 64))
    formats = Formats({}, F32, quantise_cache=False)
    config = deepseek_v41.read_config({"text_config": settings})
    graph = deepseek_v41.build("tiny", config, formats, Limits(context_page=64, window_page=page))
    weights = graph_weights(graph, state)
    gaps = None
    for chunks in case.chunkings:
        run = PagedRun(graph, weights, reference.IDEAL_F32, context_page=64, window_page=page,
                       max_step=max(chunks), seed=seed)
        if gaps is None:
            got, gaps = run.feed_with(case.tokens, margins)
        else:
            got = run.feed(case.tokens, chunks)
        worst, skipped = compared(got, expected, gaps)
        report(capsys, f"v41 {seed} {settings['compress_ratios'][:-3]}", chunks, worst, skipped)
