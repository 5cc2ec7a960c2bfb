"""The small model's configuration under the released keys, and how its tensors are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB = 2048
SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜pad｜>")


def config(engram_rows: tuple[int, ...], compressed_vocab: int) -> dict[str, Any]:
    """Return config.json: every layer mode of V4.1 in ten layers.

    `engram_rows` are the table sizes that the primes give, `compressed_vocab` the number of ids
    after normalisation: both follow from the tokenizer.
    """
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "text_config": {
            **_SHAPE,
            "engram_num_embeddings": list(engram_rows),
            "engram_compressed_vocab_size": compressed_vocab,
        },
    }


_SHAPE: Mapping[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 96,
    "o_groups": 2,
    "o_lora_rank": 128,
    "moe_intermediate_size": 96,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 32,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 5],
    "index_source_layer_ids": [2, 5, 7],
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 12,
    "candidate_block_size": 8,
    "index_n_heads": 24,
    "index_head_dim": 32,
    "index_topk": 32,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 4096,
    "engram_layer_ids": [1, 6],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 800,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32],
        "activation_scheme": "dynamic",
        "expert_dtype": "fp4",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

FP8 = "fp8_e4m3[block=32x32,scale=ue8m0]"
FP4 = "fp4_e2m1[g=32,axis=1,scale=ue8m0]"
ENGRAM = "fp8_e4m3[g=32,axis=1,scale=ue8m0]"
_FP8_PARTS = (
    "attn.wq_a.", "attn.wq_b.", "attn.wkv.", "attn.wo_a.", "attn.wo_b.", "indexer.wq_b.",
    "shared_experts.", "engram.wkv.",
)  # fmt: skip
_F32_PARTS = ("hc_", "attn_sink", "gate.bias")


def storage(name: str) -> str:
    """Return the stored format of a tensor, by its released name (model_spec 4.4)."""
    if ".experts." in name:
        return FP4
    if "engram.embed." in name:
        return ENGRAM
    if any(part in name for part in _FP8_PARTS):
        return FP8
    return "f32" if any(part in name for part in _F32_PARTS) else "bf16"
