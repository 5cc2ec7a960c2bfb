"""The V4.1 graph in the reference interpreter against `nemo-automodel`: fp32, no quantisation.

Needs transformers and the unpacked wheel of nemo-automodel 0.7.0 (development tools, not
dependencies): set TILEWRIGHT_NEMO to its folder; skipped without them.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from support.oracle_cases import Case, compared, randomise, report, v41_case
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


@dataclass(frozen=True)
class Pair:
    """A model of nemo-automodel, and the same settings and tensors for us."""

    model: Any
    config: deepseek_v41.V41Config
    tensors: dict[str, torch.Tensor]

    def run(self, *, rounded: bool, page: int, **more: Any) -> PagedRun:
        formats = Formats({}, F32, quantise_cache=rounded)
        limits = Limits(context_page=64, window_page=page)
        graph = deepseek_v41.build("tiny", self.config, formats, limits)
        precision = reference.HONOUR_CASTS if rounded else reference.IDEAL_F32
        weights = graph_weights(graph, self.tensors)
        return PagedRun(graph, weights, precision, context_page=64, window_page=page, **more)


def paired(case: Case, seed: int) -> Pair:
    words = tokenizer()
    ids, _ = token_map(words.backend_tokenizer)
    many = [10**9] * len(case.config["engram_layer_ids"])
    sizes = deepseek_v41.read_config({**case.config, "engram_num_embeddings": many}).engram
    rows = [sum(p) for p in bucket_primes(sizes).values()] if sizes else []
    settings = {**case.config, "engram_num_embeddings": rows}
    model = oracle(settings, words, seed)
    with torch.no_grad():
        state = model.state_dict_adapter.to_hf(dict(model.state_dict()))
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    tensors = {name: state[s.name] for name, s in sources(shapes).items()}
    tensors[TOKEN_MAP] = torch.tensor(ids)[:, None]
    return Pair(model, deepseek_v41.read_config({"text_config": settings}), tensors)


COMPRESSED_IDS = 172  # of the words above


@pytest.mark.parametrize("seed", range(CASES))
def test_equals_nemo(
    seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_automodel.components.models.deepseek_v41 import attention

    monkeypatch.setattr(attention, "quantize_cache", lambda x, **_: x)
    case = v41_case(seed, COMPRESSED_IDS)
    pair = paired(case, seed)
    with torch.no_grad():
        expected = pair.model(torch.tensor([case.tokens])).logits[0]
    page, gaps = random.Random(seed).choice((16, 64)), None
    for chunks in case.chunkings:
        run = pair.run(rounded=False, page=page, max_step=max(chunks), seed=seed)
        if gaps is None:
            got, gaps = run.feed_with(case.tokens, margins)
        else:
            got = run.feed(case.tokens, chunks)
        worst, skipped = compared(got, expected, gaps)
        report(capsys, f"v41 {seed} {pair.config.ratios}", chunks, worst, skipped)


@pytest.mark.parametrize("seed", range(min(CASES, 6)))
def test_rounded_caches_follow_nemo(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every entry is selected and every expert chosen, so that a last bit cannot flip a choice."""
    case = v41_case(seed + 100, COMPRESSED_IDS)
    easy = {"index_topk": 512, "candidate_source_layer_id": -1}
    easy["num_experts_per_tok"] = case.config["n_routed_experts"]
    case = replace(case, config=case.config | easy, tokens=case.tokens[:60])
    pair = paired(case, seed)
    with torch.no_grad():
        expected = pair.model(torch.tensor([case.tokens])).logits[0]
    got = pair.run(rounded=True, page=16).step({0: case.tokens})["logits"]
    alike = torch.nn.functional.cosine_similarity(got, expected, dim=-1)
    ideal = pair.run(rounded=False, page=16).step({0: case.tokens})["logits"]
    without = torch.nn.functional.cosine_similarity(ideal, expected, dim=-1)
    with capsys.disabled():
        print(f"\nv41 rounded {seed}, {len(case.tokens)} tokens: least cosine "
              f"{float(alike.min()):.6f}, mean {float(alike.mean()):.6f}, without rounding "
              f"{float(without.mean()):.6f}", end="")
    assert float(alike.mean()) > 0.9995 and float(alike.min()) > 0.99
