"""Configurations of DeepSeek models: what is read, and one clear sentence for what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from support.deepseek_tiny import V4, V41
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import BF16, F32, element_type
from tilewright.graph.verify import verify
from tilewright.models import deepseek_v4, deepseek_v41
from tilewright.models.layers import Formats, Limits
from tilewright.models.registry import family_of

BAD_V4: dict[str, tuple[dict[str, Any], str]] = {
    "unknown mode": (
        {"compress_ratios": [0, 4, 7, 4]},
        "config 'compress_ratios': unknown mode of layer 2: got 7, want 0, 4 or 128",
    ),
    "negative": (
        {"compress_ratios": [0, -4, 0, 0]},
        "config 'compress_ratios': unknown mode of layer 1: got -4, want an int of at least 0",
    ),
    "no ratios": (
        {"compress_ratios": 4}, "config 'compress_ratios': got 4, want a list of ints",
    ),
    "too few": (
        {"compress_ratios": [0, 4]},
        "config 'compress_ratios': does not cover the layers: got 2 ratios, want at least 4",
    ),
    "unknown type": (
        {"compress_ratios": None, "layer_types": ["sliding_attention", "full_attention"],
         "compress_rates": {"compressed_sparse_attention": 4}},
        "config 'layer_types': unknown mode of layer 1: got 'full_attention', want one of "
        "compressed_sparse_attention, sliding_attention",
    ),
    "experts": (
        {"num_experts_per_tok": 6},
        "config 'num_experts_per_tok': more than the experts: got 6, want at most 5",
    ),
    "shared": (
        {"n_shared_experts": 2}, "config 'n_shared_experts': not supported: got 2, want 1"
    ),
    "hash": (
        {"num_hash_layers": 5}, "config 'num_hash_layers': got 5, want an int of at most 4"
    ),
    "hash order": (
        {"num_hash_layers": None, "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]},
        "config 'mlp_layer_types': hash layers do not come first: got ['moe', 'hash_moe', 'moe', "
        "'moe'], want hash_moe before moe",
    ),
    "groups": (
        {"o_groups": 3}, "config 'o_groups': does not divide the heads: got 3, want a divisor of 4"
    ),
    "rope": (
        {"qk_rope_head_dim": 18},
        "config 'qk_rope_head_dim': got 18, want an even width of at most 16",
    ),
    "scoring": (
        {"scoring_func": "softmax"},
        "config 'scoring_func': not supported: got 'softmax', want 'sqrtsoftplus'",
    ),
    "kv heads": (
        {"num_key_value_heads": 2},
        "config 'num_key_value_heads': not supported: got 2, want 1",
    ),
    "block": (
        {"quantization_config": {"weight_block_size": [128, 96]}},
        "config 'weight_block_size': got [128, 96], want [128, 128] or [32, 32] or [1, 128] or "
        "[1, 64] or [1, 32]",
    ),
    "unknown": (
        {"kv_lora_rank": 512},
        "config 'kv_lora_rank': unknown setting, which could change the result: got 512, want "
        "none; delete it from config.json if it has no effect",
    ),
    "of the other family": (
        {"kv_source_layer_ids": [1]},
        "config 'kv_source_layer_ids': unknown setting, which could change the result: got [1], "
        "want none; delete it from config.json if it has no effect",
    ),
    "dense layers": (
        {"first_k_dense_replace": 3},
        "config 'first_k_dense_replace': not supported: got 3, want 0",
    ),
    "share": (
        {"partial_rotary_factor": 0.5},
        "config 'partial_rotary_factor': differs from qk_rope_head_dim of head_dim: got 0.5, "
        "want 0.25",
    ),
    "scaling": (
        {"rope_scaling": {"type": "yarn", "factor": 16, "mscale": 0.7}},
        "rope scaling 'yarn': unknown setting 'mscale': got 0.7, want attention_factor, "
        "beta_fast, beta_slow, factor, original_max_position_embeddings",
    ),
    "storage": (
        {"quantization_config": {"quant_method": "fp8", "zero_point": True}},
        "config 'quantization_config': unknown setting 'zero_point': got True, want one of "
        "activation_scheme, expert_dtype, fmt, modules_to_not_convert, quant_method, scale_fmt, "
        "weight_block_size",
    ),
    "missing": ({"q_lora_rank": None}, "config 'q_lora_rank': is missing: want a positive int"),
    "null number": (
        {"routed_scaling_factor": None},
        "config 'routed_scaling_factor': got None, want a positive number",
    ),
    "null where the default is yes": (
        {"norm_topk_prob": None}, "config 'norm_topk_prob': got None, want true or false"
    ),
    "null shared experts": (
        {"n_shared_experts": None}, "config 'n_shared_experts': got None, want a positive int"
    ),
    "true is not 1": (
        {"num_key_value_heads": True},
        "config 'num_key_value_heads': not supported: got True, want 1",
    ),
    "0 is not false": (
        {"attention_bias": 0}, "config 'attention_bias': not supported: got 0, want False"
    ),
    "hash text": (
        {"num_hash_layers": ""}, "config 'num_hash_layers': got '', want an int of at most 4"
    ),
    "unknown kind": (
        {"mlp_layer_types": ["hash_moe", "dense", "moe", "moe"]},
        "config 'mlp_layer_types': got ['hash_moe', 'dense', 'moe', 'moe'], want hash_moe or moe "
        "for each of 4 layers",
    ),
    "kinds of fewer layers": (
        {"num_hash_layers": None, "mlp_layer_types": ["hash_moe"]},
        "config 'mlp_layer_types': got ['hash_moe'], want hash_moe or moe for each of 4 layers",
    ),
    "drafts": (
        {"num_nextn_predict_layers": "1"},
        "config 'num_nextn_predict_layers': got '1', want an int of at least 0",
    ),
    "negative drafts": (
        {"num_nextn_predict_layers": -1},
        "config 'num_nextn_predict_layers': got -1, want an int of at least 0",
    ),
}
BAD_V41: dict[str, tuple[dict[str, Any], str]] = {
    "no source": (
        {"kv_source_layer_ids": [4]},
        "config 'kv_source_layer_ids': no source at or before layer 1: got [4], want a source of "
        "ratio 2",
    ),
    "other ratio": (
        {"kv_source_layer_ids": [1], "candidate_source_layer_id": 1},
        "config 'kv_source_layer_ids': no source at or before layer 4: got [1], want a source of "
        "ratio 1",
    ),
    "not an index source": (
        {"index_source_layer_ids": [1, 3, 6]},
        "config 'index_source_layer_ids': lacks a KV source: got [1, 3, 6], want layer 4 among "
        "them",
    ),
    "window layer": (
        {"index_source_layer_ids": [0, 1, 4]},
        "config 'index_source_layer_ids': layer 0 sees its window alone: got ratio 0, want a "
        "ratio of at least 1",
    ),
    "order": (
        {"index_source_layer_ids": [4, 1]},
        "config 'index_source_layer_ids': got [4, 1], want ascending layer numbers below 8",
    ),
    "beyond": (
        {"engram_layer_ids": [8]},
        "config 'engram_layer_ids': got [8], want ascending layer numbers below 8",
    ),
    "candidates": (
        {"candidate_source_layer_id": 6},
        "config 'candidate_source_layer_id': got 6, want a KV source of [1, 4] or -1",
    ),
    "late source": (
        {"candidate_source_layer_id": 1},
        "config 'candidate_source_layer_id': KV sources come after it: got 1, want the last of "
        "[1, 4]",
    ),
    "rows": (
        {"engram_num_embeddings": [10]},
        "config 'engram_num_embeddings': got [10], want 2 positive ints",
    ),
    "few rows": (
        {"engram_num_embeddings": [183, 258]},
        "config 'engram_num_embeddings': too few rows for layer 0: got 183, want at least 184",
    ),
    "no list": (
        {"engram_layer_ids": False},
        "config 'engram_layer_ids': got False, want ascending layer numbers below 8",
    ),
    "no layer number": (
        {"candidate_source_layer_id": -1.0},
        "config 'candidate_source_layer_id': got -1.0, want a KV source of [1, 4] or -1",
    ),
}


@pytest.mark.parametrize("name", BAD_V4)
def test_bad_v4(name: str) -> None:
    changes, message = BAD_V4[name]
    with pytest.raises(VerifyError) as caught:
        deepseek_v4.read_config({**V4, **changes})
    assert str(caught.value) == message


@pytest.mark.parametrize("name", BAD_V41)
def test_bad_v41(name: str) -> None:
    changes, message = BAD_V41[name]
    with pytest.raises(VerifyError) as caught:
        deepseek_v41.read_config({"text_config": {**V41, **changes}})
    assert str(caught.value) == message


def test_what_transformers_writes_reads_the_same() -> None:
    rest = {k: v for k, v in V4.items() if k not in ("compress_ratios", "num_hash_layers")}
    names = {0: "sliding_attention", 4: "compressed_sparse_attention",
             128: "heavily_compressed_attention"}
    written = rest | {
        "layer_types": [names[r] for r in (0, 4, 128, 4)],
        "compress_rates": {names[4]: 4, names[128]: 128},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "rope_scaling": None,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            "compress": {"rope_theta": 160000.0, "rope_type": "yarn", "factor": 16,
                         "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0,
                         "original_max_position_embeddings": 64},
        },
    }
    graphs = [
        deepseek_v4.build("g", deepseek_v4.read_config(c), Formats({}, F32), Limits())
        for c in (V4, written)
    ]
    assert graphs[0].digest == graphs[1].digest


@pytest.mark.parametrize("config", [V4, V41], ids=["v4", "v41"])
@pytest.mark.parametrize("quantised", [False, True])
def test_graphs_hold_their_rules_and_quantise_where_asked(config: Any, quantised: bool) -> None:
    family = family_of(config)
    read = family.read_config(config)
    plain = family.build("g", read, Formats({}, BF16), Limits())
    names = {n for w in plain.weights for n in w.expr.tensors}
    fp8, fp4 = (element_type(n) for n in (
        "fp8_e4m3[block=128x128,scale=ue8m0]", "fp4_e2m1[g=32,axis=1,scale=ue8m0]"))
    stored = {n: fp4 if ".experts." in n else fp8 if ".wq_" in n else BF16 for n in names}
    formats = Formats(stored, BF16, quantise_cache=quantised, quantise_activations=quantised)
    graph = family.build("g", read, formats, Limits())
    verify(graph)
    used = {str(n.type.dtype) for n in graph.nodes if n.op == "quantise"}
    assert bool(used) == quantised
    states = {str(s.type.dtype) for s in graph.states if s.name.startswith("entries")}
    if not quantised:
        assert states == {"bf16"}
    elif config is V41:
        assert states == {"fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]"}
    else:
        assert states == {"fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=8xbf16]"}


def test_experts_stored_differently_are_refused() -> None:
    name = "layers.0.ffn.experts.3.w1.weight"
    with pytest.raises(VerifyError) as caught:
        deepseek_v4.build("g", deepseek_v4.read_config(V4), Formats({name: BF16}, F32), Limits())
    assert str(caught.value) == (
        f"tensor '{name}': experts are stored differently: got bf16, want f32 as "
        "'layers.0.ffn.experts.0.w1.weight'"
    )


def test_pages_hold_whole_entries() -> None:
    with pytest.raises(VerifyError) as caught:
        limits = Limits(context_page=64)
        deepseek_v4.build("g", deepseek_v4.read_config(V4), Formats({}, F32), limits)
    assert str(caught.value) == (
        "setting 'context_page': not a multiple of every ratio: got 64, want a multiple of 128"
    )
