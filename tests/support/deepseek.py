"""Small graphs of both DeepSeek families with bf16 activations and weights stored as released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.graph import Graph
from tilewright.graph.types import BF16, I32, ElementType, element_type
from tilewright.models import deepseek_v4, deepseek_v41
from tilewright.models.engram import EngramSizes, bucket_primes
from tilewright.models.layers import Formats, Limits

LIMITS = Limits(max_tokens=24, max_requests=4, max_logit_rows=24, max_context=2048,
                context_page=128, window_page=32)  # fmt: skip
MXFP4 = "fp4_e2m1[g=32,axis=1,scale=ue8m0]"
_FP8 = ("wq_a", "wq_b", "wkv.weight", "wo_a", "wo_b", "shared_experts")
_YARN = {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "original_max_position_embeddings": 64}  # fmt: skip
_SHARED: Mapping[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 32,
    "o_groups": 2, "o_lora_rank": 32, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0, "sliding_window": 16, "index_n_heads": 24, "index_head_dim": 32,
    "index_topk": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def v4_graph(ratios: Sequence[int] = (0, 4, 128), *, hashed: int = 1, **changes: Any) -> Graph:
    """V4 layers by ratio: 0 sees the window, 4 selects entries, 128 sees all of them."""
    config = deepseek_v4.read_config({
        **_SHARED, "num_hidden_layers": len(ratios), "compress_ratios": [*ratios, 0],
        "num_hash_layers": hashed, "num_nextn_predict_layers": 1, "rope_parameters": _YARN,
        **changes,
    })  # fmt: skip
    plain = deepseek_v4.build("v4", config, Formats({}), LIMITS)
    return deepseek_v4.build("v4", config, Formats(_stored(plain, 32), BF16), LIMITS)


def v41_graph(
    modes: str = "wfrxcrx", *, engram: Sequence[int] = (1,), **changes: Any
) -> Graph:
    """V4.1 layers by mode: w window, f full of ratio 2, c full of ratio 1 with candidates, x index
    source alone, r reuse."""
    kv = [i for i, mode in enumerate(modes) if mode in "fc"]
    ratios, ratio = [], 0
    for mode in modes:
        ratio = {"f": 2, "c": 1}.get(mode, ratio)
        ratios.append(ratio)
    sizes = EngramSizes(layers=tuple(engram), rows=(0,) * len(engram), grams=3, heads=2, width=32,
                        buckets=40, compressed=50, pad=2)  # fmt: skip
    config = deepseek_v41.read_config({
        **_SHARED, "rms_norm_eps": 1e-20, "num_hidden_layers": len(modes),
        "compress_ratios": [*ratios, 0, 0, 0], "kv_source_layer_ids": kv,
        "index_source_layer_ids": [i for i, mode in enumerate(modes) if mode in "fcx"],
        "candidate_source_layer_id": modes.find("c"), "candidate_topk_blocks": 3,
        "candidate_block_size": 4, "engram_layer_ids": list(engram),
        "engram_num_embeddings": [sum(p) for p in bucket_primes(sizes).values()],
        "engram_max_ngram_size": 3, "engram_vocab_size": 40, "engram_n_heads": 2,
        "engram_head_dim": 32, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 50,
        "num_nextn_predict_layers": 3, "rope_scaling": _YARN, **changes,
    })  # fmt: skip
    plain = deepseek_v41.build("v41", config, Formats({}), LIMITS)
    return deepseek_v41.build("v41", config, Formats(_stored(plain, 32), BF16), LIMITS)


def _stored(plain: Graph, block: int) -> dict[str, ElementType]:
    """Formats by tensor name, as the released checkpoints have them."""
    found: dict[str, ElementType] = {}
    for weight in plain.weights:
        for name in () if weight.type.dtype == I32 else weight.expr.tensors:
            if ".experts." in name:
                found[name] = element_type(MXFP4)
            elif "engram.embed" in name:
                found[name] = element_type("fp8_e4m3[g=32,axis=1,scale=ue8m0]")
            elif any(part in name for part in _FP8) and "compressor" not in name:
                found[name] = element_type(f"fp8_e4m3[block={block}x{block},scale=ue8m0]")
            elif weight.type.rank == 2 and "hc_" not in name and "ape" not in name:
                found[name] = BF16
    return found
