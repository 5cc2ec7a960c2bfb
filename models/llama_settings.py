"""Which settings of a Llama-like configuration are read, which change no result, and which are
refused. A setting that this list does not name is refused too: ignoring it could be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from tilewright.graph.errors import VerifyError
from tilewright.models.record import shown
from tilewright.models.settings import MAX_INT, below

READ = frozenset({
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_pairing", "rope_parameters", "rope_scaling",
    "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size",
})  # fmt: skip

# The only value of each that means what is built here; absent or null means that value.
FIXED: Mapping[str, Any] = {
    "activation": "swiglu", "add_cross_attention": False, "attention_multiplier": None,
    "attn_logit_softcapping": None, "clip_qkv": None, "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "is_causal": True, "is_encoder_decoder": False, "logit_scale": 1.0, "logits_scaling": 1.0,
    "mlp_bias": False, "no_rope_layers": None, "partial_rotary_factor": 1.0,
    "query_pre_attn_scalar": None, "residual_multiplier": 1.0, "rope_interleaved": False,
    "use_bidirectional_attention": False, "use_mrope": False, "use_qk_norm": False,
}  # fmt: skip

# What names the file, trains the model, or chooses tokens. How weights are stored is read from
# the tensors themselves, so `quantization_config` decides nothing.
IDLE = frozenset({
    "architectures", "attention_dropout", "attn_implementation", "attn_pdrop", "auto_map",
    "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "chunk_size_feed_forward", "custom_pipelines", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "dtype", "early_stopping", "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "eos_token_id", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "id2label",
    "initializer_range", "is_decoder", "is_llama_config", "label2id", "length_penalty",
    "max_length", "max_sequence_length", "min_length", "model_type",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
    "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "pruned_heads", "quantization_config", "remove_invalid_values",
    "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "typical_p", "unk_token_id",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
})  # fmt: skip

_SCALING: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "divisors": ("divisors",),
    "linear": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "attention_factor", "beta_fast", "beta_slow", "factor", "original_max_position_embeddings",
    ),
}  # fmt: skip
_SCALING_FIXED: Mapping[str, Any] = {"partial_rotary_factor": 1.0, "truncate": True}
_SCALING_IDLE = ("finetuned",)  # how the weights came about


def check_settings(config: Mapping[str, Any]) -> None:
    """Raise VerifyError for the first setting that would change a result and is not built."""
    check_fixed("config", config, FIXED)
    check_known(config, READ | FIXED.keys())


def check_known(config: Mapping[str, Any], known: Set[str]) -> None:
    """Raise VerifyError for the first setting that is neither in `known` nor in IDLE."""
    for key, value in config.items():
        idle = key in IDLE or key.startswith("_") or "dropout" in key
        if key not in known and not idle and value is not None:
            raise VerifyError(
                f"config {shown(key)}: unknown setting, which could change the result: "
                f"got {shown(value)}, want none; delete it from config.json if it has no effect"
            )


def check_scaling(scaling: Mapping[str, Any]) -> None:
    """Raise VerifyError for a part of `rope_scaling` that its type does not have here."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALING:
        raise VerifyError(f"rope scaling {shown(kind)}: unknown: have {', '.join(_SCALING)}")
    check_fixed("rope scaling", scaling, _SCALING_FIXED)
    for key, value in scaling.items():
        known = key in _SCALING[kind] or key in ("rope_theta", "rope_type", "type")
        known = known or key in _SCALING_IDLE or key in _SCALING_FIXED
        if not known and value is not None:
            wanted = ", ".join(_SCALING[kind]) or "none"
            raise VerifyError(
                f"rope scaling '{kind}': unknown setting {shown(key)}: got {shown(value)}, "
                f"want {wanted}"
            )


def check_fixed(where: str, found: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise VerifyError for a setting that has another value than the only one there is here; true
    is not 1. Absent and null mean that value."""
    for key, wanted in fixed.items():
        got = found.get(key)
        if got is not None and (got != wanted or isinstance(got, bool) != isinstance(wanted, bool)):
            want = "null" if wanted is None else repr(wanted)
            raise VerifyError(f"{where} '{key}': not supported: got {shown(got)}, want {want}")


def read_window(config: Mapping[str, Any], num_layers: int) -> int | None:
    """Return how many positions a token sees, itself among them, where some layer limits them.

    `use_sliding_window` false switches a window off, as Qwen's files do.
    """
    window = config.get("sliding_window")
    if config.get("use_sliding_window") is False:
        window = None
    if window is not None and (type(window) is not int or not 0 < window < MAX_INT):
        want = f"a positive int{below(window, MAX_INT)} or null"
        raise VerifyError(f"config 'sliding_window': got {shown(window)}, want {want}")
    kinds = config.get("layer_types")
    known = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    listed = kinds if isinstance(kinds, list) else []
    if kinds is not None and len(listed) != num_layers:
        raise VerifyError(
            f"config 'layer_types': got {shown(kinds)}, want a list of {num_layers} names"
        )
    for layer, kind in enumerate(listed):
        if kind not in known:
            raise VerifyError(
                f"config 'layer_types': not supported in layer {layer}: got {shown(kind)}, "
                f"want {' or '.join(known)}"
            )
    return window
