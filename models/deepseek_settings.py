"""Which settings of a DeepSeek configuration are read, which change no result, which are refused.

As for Llama, a setting that no list here names is refused: ignoring it could be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.graph.errors import VerifyError
from tilewright.models.llama_settings import check_fixed, check_known, check_scaling
from tilewright.models.record import shown
from tilewright.models.settings import section

_SHARED = frozenset({
    "attention_bias", "compress_rates", "compress_ratios", "compress_rope_theta", "expert_dtype",
    "gate_temperature", "hc_eps", "hc_mult", "hc_sinkhorn_iters", "head_dim", "hidden_act",
    "hidden_size", "index_head_dim", "index_n_heads", "index_topk", "layer_types",
    "max_position_embeddings", "moe_intermediate_size", "n_routed_experts", "n_shared_experts",
    "norm_topk_prob", "num_attention_heads", "num_experts_per_tok", "num_hidden_layers",
    "num_key_value_heads", "num_nextn_predict_layers", "o_groups", "o_lora_rank",
    "partial_rotary_factor", "q_lora_rank", "qk_rope_head_dim", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "routed_scaling_factor", "scoring_func", "sliding_window",
    "swiglu_limit", "tie_word_embeddings", "topk_method", "vocab_size",
})  # fmt: skip
V4 = _SHARED | {"mlp_layer_types", "num_hash_layers"}
V41 = _SHARED | {
    "candidate_block_size", "candidate_source_layer_id", "candidate_topk_blocks",
    "engram_compressed_pad_id", "engram_compressed_vocab_size", "engram_head_dim",
    "engram_layer_ids", "engram_max_ngram_size", "engram_n_heads", "engram_num_embeddings",
    "engram_pad_token_id", "engram_vocab_size", "index_source_layer_ids", "kv_source_layer_ids",
    "text_config",
}  # fmt: skip

# The only value of each that means what is built; absent or null means that value.
_FIXED: Mapping[str, Any] = {
    "first_k_dense_replace": 0, "mlp_bias": False, "moe_layer_freq": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
_V41_FIXED: Mapping[str, Any] = {"num_hash_layers": 0}

# Of the router's training, of expert parallelism, and of parts beside the text model: images, and
# draft layers that write several tokens (their settings all begin with dspark_). `rope_pairing` is
# what opening a folder adds, for families whose files differ in it.
_IDLE = frozenset({
    "aux_loss_alpha", "ep_size", "image_token_id", "output_router_logits", "router_aux_loss_coef",
    "rope_pairing", "router_jitter_noise", "seq_aux", "vision_config",
})  # fmt: skip
_DRAFTS = "dspark_"

# Which tensors are quantised is read from the tensors.
_STORAGE = frozenset({
    "activation_scheme", "expert_dtype", "fmt", "modules_to_not_convert", "quant_method",
    "scale_fmt", "weight_block_size",
})  # fmt: skip


def check_settings(config: Mapping[str, Any], read: frozenset[str]) -> None:
    """Raise VerifyError for the first setting that could change a result and is not built.

    `read` is V4 or V41: what the family's reader takes from `config`.
    """
    fixed = {key: value for key, value in {**_FIXED, **_V41_FIXED}.items() if key not in read}
    check_fixed("config", config, fixed)
    drafts = {key for key in config if key.startswith(_DRAFTS)}
    check_known(config, read | fixed.keys() | _IDLE | drafts)
    for key, value in section(config, "quantization_config").items():
        if key not in _STORAGE and value is not None:
            raise VerifyError(
                f"config 'quantization_config': unknown setting {shown(key)}: got {shown(value)}, "
                f"want one of {', '.join(sorted(_STORAGE))}"
            )
    _check_rotation(config)


def _check_rotation(config: Mapping[str, Any]) -> None:
    """Check what `rope_scaling`, or the sections that `transformers` writes, say of rotation."""
    nested = section(config, "rope_parameters")
    split = "compress" in nested and "main" in nested
    parts = [section(nested, name) for name in ("main", "compress")] if split else [nested]
    for part in (config, section(config, "rope_scaling"), *parts):
        _check_share(config, part.get("partial_rotary_factor"))
    for part in (section(config, "rope_scaling"), *parts):
        check_scaling({k: v for k, v in part.items() if k != "partial_rotary_factor"})


def _check_share(config: Mapping[str, Any], got: object) -> None:
    """`transformers` writes qk_rope_head_dim a second time, as a share of head_dim."""
    rope, width = config.get("qk_rope_head_dim"), config.get("head_dim")
    if got is None or type(rope) is not int or type(width) is not int or width < 1:
        return  # widths that are no widths are refused where they are read
    if not isinstance(got, (int, float)) or abs(got * width - rope) > 1e-3:
        raise VerifyError(
            f"config 'partial_rotary_factor': differs from qk_rope_head_dim of head_dim: "
            f"got {shown(got)}, want {rope / width:g}"
        )
