"""What GGUF metadata means in Hugging Face terms: settings, tensor names, tokens that end a text.

A key of the model's architecture that has no meaning here is refused, never skipped.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tilewright.graph.errors import VerifyError
from tilewright.models.gguf_file import GgufFile, Value
from tilewright.models.record import Generation, TensorEntry, shown
from tilewright.models.settings import MAX_INT, below

# Architecture -> class of the model and how rotary pairs its columns. llama.cpp's converter
# permutes the rows of llama's q and k so that pairs are neighbours; it leaves the others alone.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "interleaved"),
    "qwen2": ("Qwen2ForCausalLM", "half"),
    "qwen3": ("Qwen3ForCausalLM", "half"),
}

ROPE_FACTORS = "rope_freqs.weight"

_FIXED_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")

# Keys below "<architecture>." that `read_config` understands.
_KNOWN_KEYS = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
)


@dataclass(frozen=True)
class Metadata:
    """Typed reading of metadata; each method raises VerifyError for a missing or wrong value."""

    values: Mapping[str, Value]
    path: Path

    def _wrong(self, key: str, want: str) -> VerifyError:
        got = shown(self.values[key]) if key in self.values else "nothing"
        return VerifyError(f"metadata '{key}' ({self.path}): got {got}, want {want}")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self.values.get(key, default)
        if type(value) is not int or not 0 < value < MAX_INT:
            raise self._wrong(key, f"a whole number above 0{below(value, MAX_INT)}")
        return value

    def token(self, key: str) -> int | None:
        """A token id, or None if the file names none."""
        value = self.values.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < MAX_INT):
            raise self._wrong(key, f"a token id{below(value, MAX_INT)}")
        return value if isinstance(value, int) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero, as the shortest decimal of its float32."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3e38:
            raise self._wrong(key, "a number above 0")
        return float(str(np.float32(value)))

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self.values.get(key)
        found = [each for each in value if isinstance(each, str)] if type(value) is tuple else []
        if type(value) is not tuple or len(found) != len(value):
            raise self._wrong(key, "a list of strings")
        return tuple(found)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self.values.get(key)
        listed = value if isinstance(value, tuple) else ("",)
        found = [each for each in listed if isinstance(each, int | float) and abs(each) < 1e300]
        if len(found) != len(listed):
            raise self._wrong(key, "a list of finite numbers")
        return tuple(found)


def translate_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without translation stays as it is."""
    if name in _FIXED_NAMES:
        return _FIXED_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def read_tensors(file: GgufFile) -> dict[str, TensorEntry]:
    """The tensors under Hugging Face names. The rotary factors are a setting, so not among them.

    Raises VerifyError if two tensors get one name.
    """
    found: dict[str, TensorEntry] = {}
    for stored, entry in file.tensors.items():
        name = translate_name(stored)
        if name in found:
            raise VerifyError(
                f"tensor {shown(stored)} ({file.path}): another tensor is called {name} too"
            )
        if stored != ROPE_FACTORS:
            found[name] = replace(entry, name=name)
    return found


def _rope_scaling(meta: Metadata, prefix: str, file: GgufFile) -> dict[str, object] | None:
    """Rotary scaling in Hugging Face terms.

    A file with `rope_freqs.weight` (Llama 3) stores the divisor of every frequency, [head_dim/2];
    it is given as {"rope_type": "divisors", "divisors": [...]}.
    """
    kind = meta.text(f"{prefix}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise VerifyError(
            f"metadata '{prefix}.rope.scaling.type' ({file.path}): unknown scaling: "
            f"got {shown(kind)}, want one of none, linear, yarn"
        )
    entry = file.tensors.get(ROPE_FACTORS)
    if entry is not None:
        head_dim = _head_dim(meta, prefix)
        if kind != "none" or entry.shape != (head_dim // 2,) or entry.dtype != "f32":
            raise VerifyError(
                f"tensor '{ROPE_FACTORS}' ({file.path}): got {entry.dtype} {list(entry.shape)} "
                f"with scaling {kind}, want f32 [{head_dim // 2}] with scaling none"
            )
        divisors = entry.dequantise().tolist()
        return {"rope_type": "divisors", "divisors": divisors}
    if kind == "none":
        return None
    scaling: dict[str, object] = {
        "rope_type": kind,
        "factor": meta.number(f"{prefix}.rope.scaling.factor"),
    }
    if kind == "yarn":
        key = f"{prefix}.rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = meta.count(key)
        if f"{prefix}.rope.scaling.attn_factor" in meta.values:
            # llama.cpp multiplies it with yarn's own factor instead of replacing that.
            own = 0.1 * math.log(meta.number(f"{prefix}.rope.scaling.factor")) + 1.0
            scaling["attention_factor"] = own * meta.number(f"{prefix}.rope.scaling.attn_factor")
    return scaling


def _check_keys(meta: Metadata, prefix: str) -> None:
    """Refuse settings of the architecture whose meaning is not known here."""
    for key in meta.values:
        if key.startswith(f"{prefix}.") and key.removeprefix(f"{prefix}.") not in _KNOWN_KEYS:
            raise VerifyError(
                f"metadata {shown(key)} ({meta.path}): unknown setting of {prefix}: "
                f"got {shown(meta.values[key])}, want one of {', '.join(_KNOWN_KEYS)}"
            )
    if meta.values.get("split.count", 0) not in (0, 1):
        raise VerifyError(
            f"file '{meta.path}': is one part of a split GGUF; join the parts into one file first"
        )
    if meta.values.get("general.quantization_version", 2) != 2:
        raise VerifyError(
            f"metadata 'general.quantization_version' ({meta.path}): "
            f"got {shown(meta.values['general.quantization_version'])}, want 2"
        )


def _head_dim(meta: Metadata, prefix: str) -> int:
    """Columns of one head; by default the hidden size is divided among the heads."""
    num_heads = meta.count(f"{prefix}.attention.head_count")
    hidden = meta.count(f"{prefix}.embedding_length")
    return meta.count(f"{prefix}.attention.key_length", max(hidden // num_heads, 1))


def _heads(meta: Metadata, prefix: str) -> dict[str, object]:
    """Head counts and sizes."""
    num_heads = meta.count(f"{prefix}.attention.head_count")
    head_dim = _head_dim(meta, prefix)
    value_dim = meta.count(f"{prefix}.attention.value_length", head_dim)
    rotary = meta.count(f"{prefix}.rope.dimension_count", head_dim)
    if value_dim != head_dim or rotary > head_dim:
        raise VerifyError(
            f"metadata '{prefix}.attention.*' ({meta.path}): heads of keys and values differ: "
            f"got keys {head_dim}, values {value_dim}, rotary {rotary}; want equal sizes"
        )
    found: dict[str, object] = {
        "hidden_size": meta.count(f"{prefix}.embedding_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.count(f"{prefix}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
    }
    if rotary != head_dim:
        found["partial_rotary_factor"] = rotary / head_dim
    return found


def _vocab_size(meta: Metadata, prefix: str) -> int:
    """Rows of the embedding; a file that does not say has one row per token."""
    tokens = meta.values.get("tokenizer.ggml.tokens", ())
    num_tokens = len(tokens) if isinstance(tokens, tuple) else 0
    size = meta.count(f"{prefix}.vocab_size", num_tokens or None)
    if num_tokens > size:
        raise VerifyError(
            f"metadata '{prefix}.vocab_size' ({meta.path}): smaller than the tokenizer: "
            f"got {size}, want at least {num_tokens}"
        )
    return size


def read_config(file: GgufFile) -> dict[str, object]:
    """Settings under Hugging Face keys, plus `rope_pairing` ("interleaved" or "half").

    Raises VerifyError for an unknown architecture, an unknown setting, or a missing one.
    """
    meta = Metadata(file.metadata, file.path)
    prefix = meta.text("general.architecture")
    if prefix not in ARCHITECTURES:
        raise VerifyError(
            f"file '{file.path}': unknown architecture: got {shown(prefix)}, "
            f"want one of {', '.join(ARCHITECTURES)}"
        )
    _check_keys(meta, prefix)
    model_class, pairing = ARCHITECTURES[prefix]
    return {
        "architectures": [model_class],
        "model_type": prefix,
        **_heads(meta, prefix),
        "num_hidden_layers": meta.count(f"{prefix}.block_count"),
        "intermediate_size": meta.count(f"{prefix}.feed_forward_length"),
        "vocab_size": _vocab_size(meta, prefix),
        "rms_norm_eps": meta.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number(f"{prefix}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta, prefix, file),
        "rope_pairing": pairing,
        "max_position_embeddings": meta.count(f"{prefix}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": prefix == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        "hidden_act": "silu",
        "bos_token_id": meta.token("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.token("tokenizer.ggml.eos_token_id"),
    }


def read_generation(file: GgufFile) -> Generation:
    """The tokens that end a text, and the one that starts it.

    Raises VerifyError for a token outside the vocabulary, or a start that is asked for but unnamed.
    """
    meta = Metadata(file.metadata, file.path)
    model = meta.text("tokenizer.ggml.model", "")
    # As in llama.cpp: files that do not say get the rule of their tokenizer.
    starts = model == "llama" or meta.values.get("tokenizer.ggml.pre") == "llama-bpe"
    add_bos = meta.flag("tokenizer.ggml.add_bos_token", default=starts)
    bos = meta.token("tokenizer.ggml.bos_token_id")
    if meta.flag("tokenizer.ggml.add_eos_token", default=False):
        raise VerifyError(
            f"metadata 'tokenizer.ggml.add_eos_token' ({file.path}): asks for a last token after "
            "every prompt, which would end the text: got True, want False"
        )
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [meta.token(f"tokenizer.ggml.{key}") for key in keys]
    eos_ids = tuple(dict.fromkeys(each for each in ends if each is not None))
    if add_bos and bos is None:
        raise VerifyError(
            f"metadata 'tokenizer.ggml.add_bos_token' ({file.path}): "
            "got a request for a first token, want 'tokenizer.ggml.bos_token_id' to name it"
        )
    return Generation(eos_ids, bos, add_bos)
