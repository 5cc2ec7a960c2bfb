"""Small DeepSeek models without files: configurations and weights drawn by name."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tilewright.graph import Graph

V4: Mapping[str, Any] = dict(
    vocab_size=67, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=1, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16,
    o_groups=2, o_lora_rank=16, n_routed_experts=5, n_shared_experts=1, num_experts_per_tok=2,
    scoring_func="sqrtsoftplus", routed_scaling_factor=1.5, swiglu_limit=10.0, num_hash_layers=1,
    sliding_window=12, compress_ratios=[0, 4, 128, 4, 0], index_n_heads=24, index_head_dim=16,
    index_topk=6, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6,
    max_position_embeddings=4096, rope_theta=10000.0, compress_rope_theta=160000.0,
    rope_scaling={"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                  "original_max_position_embeddings": 64},
    num_nextn_predict_layers=1, bos_token_id=0, eos_token_id=1, topk_method="noaux_tc",
    norm_topk_prob=True, architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4",
)
V41: Mapping[str, Any] = {
    **{k: v for k, v in V4.items() if k != "num_hash_layers"},
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41_text",
    "num_hidden_layers": 8, "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "rms_norm_eps": 1e-20, "kv_source_layer_ids": [1, 4], "index_source_layer_ids": [1, 3, 4, 6],
    "candidate_source_layer_id": 4, "candidate_topk_blocks": 3, "candidate_block_size": 4,
    "engram_layer_ids": [0, 3], "engram_num_embeddings": [184, 258], "engram_max_ngram_size": 3,
    "engram_vocab_size": 40, "engram_n_heads": 2, "engram_head_dim": 16, "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 50, "num_nextn_predict_layers": 3, "pad_token_id": 2,
}


def drawn(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The fp32 tensor of that name: none is all zeros or ones, where mistakes hide."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = random.standard_normal(shape)
    if "norm" in name or name.endswith(("_scale", "q_weight", "k_weight")):
        values = 1 + 0.2 * values
    elif name.endswith(("bias", "_base", "ape")):
        values = 0.4 * values
    elif len(shape) > 1:
        values = values * shape[-1] ** -0.5
    return torch.from_numpy(values.astype(np.float32))


def drawn_ids(name: str, shape: tuple[int, ...], count: int, seed: int) -> torch.Tensor:
    """Rows of different numbers below `count`."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    rows = [random.permutation(count)[: shape[1]] for _ in range(shape[0])]
    return torch.from_numpy(np.array(rows, np.int32))


def drawn_tensors(graph: Graph, seed: int, *, ids_below: int) -> dict[str, torch.Tensor]:
    """Checkpoint tensors that a graph's weights are made of."""
    found = {}
    for weight in graph.weights:
        shape = tuple(int(d) for d in weight.type.shape[-2:])
        for name in weight.expr.tensors:
            whole = str(weight.type.dtype) == "i32"
            found[name] = (
                drawn_ids(name, shape, ids_below, seed) if whole else drawn(name, shape, seed)
            )
    return found


def golden_tokens(count: int) -> list[int]:
    """The text of the golden vectors."""
    random = np.random.default_rng(11)
    return [int(t) for t in random.integers(3, 66, count)]
