"""Settings of Llama-like configurations: read, without effect, or refused; none is skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.tiny import CONFIG, tiny_graph
from tilewright.codegen.config import CompileConfig
from tilewright.graph import reference
from tilewright.graph.errors import VerifyError
from tilewright.models import llama, mistral, qwen2, qwen3
from tilewright.models.layers import Rope, rotary_frequencies
from tilewright.models.llama_settings import FIXED, IDLE, READ
from tilewright.tools.prepare import prepare

# The keys that published files of the four families have, with the values they have there.
PUBLISHED: dict[str, Any] = {
    "_name_or_path": "", "activation": "swiglu", "architectures": ["LlamaForCausalLM"],
    "attention_dropout": 0.0, "auto_map": None, "hidden_dropout_prob": 0.1,
    "bos_token_id": 1, "chunk_size_feed_forward": 0, "dtype": "bfloat16", "eos_token_id": [2, 3],
    "hidden_act": "silu", "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02,
    "is_encoder_decoder": False, "is_llama_config": True, "label2id": {"LABEL_0": 0},
    "layer_types": ["full_attention", "full_attention"], "max_window_layers": 28,
    "max_sequence_length": 2048, "mlp_bias": False, "model_type": "llama",
    "output_attentions": False, "output_hidden_states": False, "pad_token_id": None,
    "pretraining_tp": 1,
    "problem_type": None, "quantization_config": None, "return_dict": True,
    "rope_interleaved": False, "rope_scaling": None,
    "sliding_window": None, "torch_dtype": "bfloat16", "transformers.js_config": {"dtype": "q4"},
    "transformers_version": "4.47.1", "use_cache": True, "use_mrope": False,
    "use_sliding_window": False,
}  # fmt: skip
READERS = (llama.read_config, mistral.read_config, qwen2.read_config, qwen3.read_config)


def refusal(changes: dict[str, Any], read: Callable[[Any], Any] = llama.read_config) -> str:
    with pytest.raises(VerifyError) as caught:
        read({**CONFIG, **changes})
    return str(caught.value)


@pytest.mark.parametrize("read", READERS)
def test_published_settings_are_accepted(read: Callable[[Any], Any]) -> None:
    assert read({**CONFIG, **PUBLISHED}).window is None


def test_published_scalings_are_accepted() -> None:
    """YaRN's own files say that the weights were trained for it."""
    scaling = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}
    read = llama.read_config({**CONFIG, "rope_scaling": {**scaling, "finetuned": True}})
    assert rotary_frequencies(read.rope) == rotary_frequencies(
        llama.read_config({**CONFIG, "rope_scaling": scaling}).rope
    )


def test_a_key_is_in_one_list() -> None:
    assert not READ & IDLE and not READ & FIXED.keys() and not IDLE & FIXED.keys()


@pytest.mark.parametrize("key", FIXED)
@pytest.mark.parametrize("read", READERS)
def test_a_setting_that_is_not_built_is_refused(read: Callable[[Any], Any], key: str) -> None:
    wanted = FIXED[key]
    read({**CONFIG, key: wanted})
    got: Any = not wanted if isinstance(wanted, bool) else 0.5
    want = "null" if wanted is None else repr(wanted)
    assert refusal({key: got}, read) == f"config '{key}': not supported: got {got}, want {want}"


@pytest.mark.parametrize("read", READERS)
def test_an_unknown_setting_is_refused(read: Callable[[Any], Any]) -> None:
    assert refusal({"scale_emb": 12}, read) == (
        "config 'scale_emb': unknown setting, which could change the result: got 12, want none; "
        "delete it from config.json if it has no effect"
    )
    read({**CONFIG, "scale_emb": None})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"attention_bias": "no"},
             "config 'attention_bias': got 'no', want true or false"),
    "tied": ({"tie_word_embeddings": 1},
             "config 'tie_word_embeddings': got 1, want true or false"),
    "true is not one": ({"logit_scale": True},
                        "config 'logit_scale': not supported: got True, want 1.0"),
    "window": ({"sliding_window": 0},
               "config 'sliding_window': got 0, want a positive int or null"),
    "layers": ({"layer_types": ["full_attention", "linear_attention"]},
               "config 'layer_types': not supported in layer 1: got 'linear_attention', "
               "want full_attention"),
    "sliding without a window": (
        {"layer_types": ["sliding_attention", "full_attention"]},
        "config 'layer_types': not supported in layer 0: got 'sliding_attention', "
        "want full_attention"),
    "few layers": ({"layer_types": ["full_attention"]},
                   "config 'layer_types': got ['full_attention'], want a list of 2 names"),
    "partial": ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
                "rope scaling 'partial_rotary_factor': not supported: got 0.5, want 1.0"),
    "sections": ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}},
                 "rope scaling 'default': unknown setting 'mrope_section': got [1, 2], want none"),
    "per layer": ({"rope_parameters": {"full_attention": {}}},
                  "rope scaling 'default': unknown setting 'full_attention': got {}, want none"),
    "mscale": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0,
                                 "original_max_position_embeddings": 64}},
               "rope scaling 'yarn': unknown setting 'mscale': got 1.0, want attention_factor, "
               "beta_fast, beta_slow, factor, original_max_position_embeddings"),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
                "rope scaling 'dynamic': unknown: have default, divisors, linear, llama3, yarn"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_settings(name: str) -> None:
    changes, message = BAD[name]
    assert refusal(changes) == message


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "config 'rope_scaling.factor': got None, want a positive number"),
        ({"rope_type": "yarn", "factor": 2.0},
         "config 'rope_scaling.original_max_position_embeddings': got None, "
         "want a positive number"),
        ({"rope_type": "divisors", "divisors": [1.0]},
         "config 'rope_scaling.divisors': want 8 positive numbers"),
        ({"rope_type": "divisors", "divisors": [1.0] * 7 + [0.0]},
         "config 'rope_scaling.divisors': want 8 positive numbers"),
    ],
)  # fmt: skip
def test_a_missing_part_of_a_scaling(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        rotary_frequencies(Rope(10000.0, 16, scaling=scaling))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("MistralForCausalLM", {}),
        ("MistralForCausalLM", {"sliding_window": 4096}),
        ("LlamaForCausalLM", {"sliding_window": 4096}),
        ("Qwen2ForCausalLM", {"sliding_window": 4096, "use_sliding_window": True}),
        ("Qwen3ForCausalLM", {"sliding_window": 4096, "use_sliding_window": True,
                              "layer_types": ["full_attention", "sliding_attention"]}),
    ],
)  # fmt: skip
def test_a_context_beyond_the_window_is_refused(family: str, changes: dict[str, Any]) -> None:
    changes = {**changes, "max_position_embeddings": 32768}
    fits = CompileConfig(max_context=4096)
    assert tiny_graph("f32", family=family, settings=fits, **changes).outputs
    with pytest.raises(VerifyError) as caught:
        tiny_graph("f32", family=family, settings=CompileConfig(max_context=4097), **changes)
    assert str(caught.value) == (
        "config 'sliding_window': shorter than the context, and windows are not built: "
        "got 4096, want at least 4097; compile with --max-context 4096"
    )


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("said", [{}, {"use_sliding_window": False}])
def test_a_window_that_is_off_is_none(family: str, said: dict[str, Any]) -> None:
    settings = CompileConfig(max_context=8192)
    assert tiny_graph("f32", family=family, settings=settings, sliding_window=4, **said).outputs


def test_a_gguf_file_with_llama3_divisors_has_the_angles_of_its_formula(
    build_gguf: Callable[..., Path],
) -> None:
    """llama.cpp's converter stores llama3 scaling as the divisor of each frequency."""
    theta, width = 500000.0, 32
    published = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}  # fmt: skip
    wanted, factor = rotary_frequencies(Rope(theta, width, scaling=published))
    base = [theta ** (-2.0 * i / width) for i in range(width // 2)]
    divisors = np.array([b / f for b, f in zip(base, wanted, strict=True)], np.float32)
    assert factor == 1.0 and divisors[0] == 1.0 and divisors[-1] == 8.0
    path = build_gguf(
        tensors={"rope_freqs.weight": divisors}, metadata={"llama.rope.freq_base": theta}
    )
    graph = prepare(str(path), CompileConfig(max_context=64)).graph
    table = next(w for w in graph.weights if w.name == "rotary_frequencies")
    found = reference.literal(table.expr, torch.float64)
    spread = torch.tensor([f for f in wanted for _ in range(2)], dtype=torch.float64)
    torch.testing.assert_close(found, spread, rtol=3e-7, atol=0)
    assert float(found[-1]) < base[-1] / 7
