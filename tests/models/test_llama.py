"""Llama and Qwen2 graphs against an independent implementation in plain torch."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from support.tiny import CONFIG, SETTINGS, step_inputs, tiny, zero_states
from tilewright.graph import Graph, reference
from tilewright.graph.errors import VerifyError
from tilewright.models import llama
from tilewright.models.registry import family_of

Tensors = dict[str, torch.Tensor]
TOKENS = [5, 1, 66, 0, 33, 7, 2, 2, 19, 40, 11]


def plain(w: Tensors, tokens: list[int], c: dict[str, Any]) -> torch.Tensor:
    """Logits [tokens, vocab] of a decoder, written out: no cache, one causal mask."""
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    width, n = c["head_dim"], len(tokens)
    x = w["model.embed_tokens.weight"][tokens]
    mask = torch.full((n, n), -math.inf).triu(1)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."

        def project(h: torch.Tensor, name: str, p: str = p) -> torch.Tensor:
            y = h @ w[f"{p}{name}.weight"].T
            return y + w[f"{p}{name}.bias"] if f"{p}{name}.bias" in w else y

        h = norm(x, w[p + "input_layernorm.weight"], c["rms_norm_eps"])
        q, k, v = (
            project(h, f"self_attn.{part}_proj").view(n, count, width).transpose(0, 1)
            for part, count in (("q", heads), ("k", kv), ("v", kv))
        )
        q, k = turned(q, c), turned(k, c)
        mixed = torch.empty(heads, n, width)
        for head in range(heads):
            served = head * kv // heads
            scores = q[head] @ k[served].T / math.sqrt(width) + mask
            mixed[head] = torch.softmax(scores, -1) @ v[served]
        x = x + project(mixed.transpose(0, 1).reshape(n, heads * width), "self_attn.o_proj")
        h = norm(x, w[p + "post_attention_layernorm.weight"], c["rms_norm_eps"])
        gate, up = project(h, "mlp.gate_proj"), project(h, "mlp.up_proj")
        x = x + project(torch.nn.functional.silu(gate) * up, "mlp.down_proj")
    head_weight = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"], c["rms_norm_eps"]) @ head_weight.T


def norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, w.shape, w, eps)


def turned(x: torch.Tensor, c: dict[str, Any]) -> torch.Tensor:
    """Rotate pairs as complex numbers: x is [heads, tokens, width]."""
    width = x.shape[-1]
    angles = torch.outer(
        torch.arange(x.shape[1]).double(),
        c["rope_theta"] ** (-torch.arange(0, width, 2).double() / width),
    )
    factor = torch.polar(torch.ones_like(angles), angles)
    if c.get("rope_pairing", "half") == "half":
        pairs = torch.complex(x[..., : width // 2].double(), x[..., width // 2 :].double())
        y = pairs * factor
        return torch.cat((y.real, y.imag), -1).float()
    y = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2)) * factor
    return torch.view_as_real(y).flatten(-2).float()


VARIANTS: dict[str, dict[str, Any]] = {
    "half": {},
    "interleaved": {"rope_pairing": "interleaved"},
    "untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 32},
    "biases": {"attention_bias": True},
    "qwen2": {"family": "Qwen2ForCausalLM"},
    "theta": {"rope_theta": 500.0, "rms_norm_eps": 0.1},
}


def logits(graph: Graph, weights: Tensors, tokens: list[int]) -> torch.Tensor:
    inputs, _ = step_inputs(tokens, block_size=SETTINGS.block_size)
    return reference.run(
        graph,
        {name: torch.from_numpy(array) for name, array in inputs.items()},
        states=zero_states(graph, 4),
        weights=weights,
        precision=reference.IDEAL_F32,
    ).outputs["logits"]


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_plain_implementation(name: str) -> None:
    model = tiny("f32", **VARIANTS[name])
    weights = model.weights.tensors()
    config = {**CONFIG, **VARIANTS[name]}
    expected = plain(weights, TOKENS, config)
    torch.testing.assert_close(logits(model.graph, weights, TOKENS), expected, atol=1e-4, rtol=0)


def names(**changes: Any) -> set[str]:
    return {w.name for w in tiny(**changes).graph.weights if w.expr.kind == "tensor"}


def test_tensors_of_each_variant() -> None:
    base = names()
    assert len(base) == 2 + 2 * 9
    assert names(tie_word_embeddings=False) - base == {"lm_head.weight"}
    parts = {f"model.layers.{i}.self_attn.{p}_proj.bias" for i in (0, 1) for p in "qkv"}
    assert names(family="Qwen2ForCausalLM") - base == parts
    outs = {f"model.layers.{i}.self_attn.o_proj.bias" for i in (0, 1)}
    assert names(attention_bias=True) - base == parts | outs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config 'hidden_size': is missing: want a positive int"),
        ({"hidden_size": 0}, "config 'hidden_size': got 0, want a positive int"),
        ({"vocab_size": True}, "config 'vocab_size': got True, want a positive int"),
        ({"num_hidden_layers": "2"}, "config 'num_hidden_layers': got '2', want a positive int"),
        ({"intermediate_size": 1 << 40},
         "config 'intermediate_size': got 1099511627776, want a positive int below 2147483648"),
        ({"hidden_size": 1 << 62}, "config 'hidden_size': got 4611686018427387904, want a positive "
         "int below 2147483648"),
        ({"rms_norm_eps": None}, "config 'rms_norm_eps': got None, want a positive number"),
        ({"rms_norm_eps": 1e300},
         "config 'rms_norm_eps': got 1e+300, want a positive number below 1e+30"),
        ({"rope_theta": None}, "config 'rope_theta': got None, want a positive number"),
        ({"max_position_embeddings": None},
         "config 'max_position_embeddings': got None, want a positive int"),
        ({"sliding_window": 1 << 31}, "config 'sliding_window': got 2147483648, want a positive "
         "int below 2147483648 or null"),
        ({"num_key_value_heads": 3},
         "config 'num_key_value_heads': does not divide the heads: got 3, want a divisor of 4"),
        ({"head_dim": 15}, "config 'head_dim': is odd: got 15, want an even width"),
        ({"hidden_act": "gelu"},
         "config 'hidden_act': not supported: got 'gelu', want 'silu'"),
        ({"rms_norm_eps": 0}, "config 'rms_norm_eps': got 0, want a positive number"),
        ({"rms_norm_eps": float("nan")}, "config 'rms_norm_eps': got nan, want a positive number"),
        ({"rope_theta": -1.0}, "config 'rope_theta': got -1.0, want a positive number"),
    ],
)  # fmt: skip
def test_bad_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        llama.read_config({**CONFIG, **changes})
    assert str(caught.value) == message


def test_null_is_a_default_where_published_files_have_it() -> None:
    derived = {"head_dim": None, "num_key_value_heads": None}
    plain = {k: v for k, v in CONFIG.items() if k not in derived}
    said = {**derived, "attention_bias": None, "sliding_window": None, "rope_scaling": None}
    assert llama.read_config({**plain, **said}) == llama.read_config(plain)


@pytest.mark.parametrize("names", ["LlamaForCausalLM", {}, 3])
def test_architectures_are_a_list(names: object) -> None:
    with pytest.raises(VerifyError) as caught:
        family_of({"architectures": names})
    assert str(caught.value) == f"config 'architectures': got {names!r}, want a list of names"


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(VerifyError, match=r"^rope scaling 'spiral': unknown: have "):
        tiny("f32", rope_scaling={"rope_type": "spiral"})
    with pytest.raises(VerifyError) as caught:
        family_of({"architectures": ["OtherForCausalLM"]})
    assert re.fullmatch(
        r"model architecture \['OtherForCausalLM'\]: not supported: have [\w, ]+", str(caught.value)
    )
