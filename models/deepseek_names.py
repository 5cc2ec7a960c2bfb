"""Checkpoint names of DeepSeek-V4 and V4.1: one canonical set, that of the released files.

Understood besides: the same with `model.` in front, and what `transformers` writes or holds in
memory, stacked experts among them. Tensors of parts that are not built are known by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.graph.errors import VerifyError

# Draft layers, vision, and the routing bias of image tokens: recognised, not read for text.
UNREAD = (
    "mtp.*", "vision.*", "aligner.*", "image_start", "image_end", "image_newline",
    "*.ffn.gate.bias_vl", "*.rotary_emb.*",
)  # fmt: skip

_COMPRESSOR = {"kv_proj": "wkv", "gate_proj": "wgate", "kv_norm": "norm", "position_bias": "ape"}
_RULES = (
    (r"^(model\.|language_model\.)+", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.weight_scale_inv$", ".scale"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.attn\.([qo])_([ab])_proj\.", r".attn.w\1_\2."),
    (r"\.attn\.kv_proj\.", ".attn.wkv."),
    (r"\.attn\.sinks(_param\.weight)?$", ".attn.attn_sink"),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.ffn\.gate\.e_score_correction_bias$", ".ffn.gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
)
_STACKED = re.compile(r"(.*\.ffn\.experts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class Source:
    """Where a canonical tensor lies: the whole of a stored one, or a block of its rows.

    `start` and `rows` count rows of the stored tensor with all axes but the last flattened.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    rows: int | None = None


def canonical_name(name: str) -> str:
    """Return the released name of a tensor; a released name stays."""
    for pattern, replacement in _RULES:
        name = re.sub(pattern, replacement, name)
    found = re.match(r"(.*\.compressor)\.(kv_proj|gate_proj|kv_norm|position_bias)\b(.*)", name)
    return f"{found[1]}.{_COMPRESSOR[found[2]]}{found[3]}" if found else name


def sources(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Source]:
    """Map canonical names to where they lie among stored tensors of these shapes.

    Raises VerifyError where two stored tensors are the same canonical one.
    """
    found: dict[str, Source] = {}
    for stored, shape in shapes.items():
        name = canonical_name(stored)
        stacked = _STACKED.match(name)
        parts = _unstack(stored, shape, stacked) if stacked else {name: Source(stored, shape)}
        for part, source in parts.items():
            if part in found:
                raise VerifyError(
                    f"tensor '{stored}': is in the checkpoint twice: got it and "
                    f"'{found[part].name}', want one of them"
                )
            found[part] = source
    return found


def _unstack(stored: str, shape: tuple[int, ...], match: re.Match[str]) -> dict[str, Source]:
    """The matrices of stacked experts: [experts, 2 width, hidden] or [experts, hidden, width]."""
    prefix, kind = match[1], match[2]
    halves = ("w1", "w3") if kind == "gate_up_proj" else ("w2",)
    if len(shape) != 3 or shape[1] % len(halves):
        raise VerifyError(
            f"tensor '{stored}': no stack of experts: got {list(shape)}, "
            f"want [experts, {len(halves)} * n, k]"
        )
    experts, rows, k = shape
    n = rows // len(halves)
    return {
        f"{prefix}.{e}.{part}.weight": Source(stored, (n, k), e * rows + i * n, n)
        for e in range(experts)
        for i, part in enumerate(halves)
    }
