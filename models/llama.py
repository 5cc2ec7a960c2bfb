"""Llama: RMSNorm, rotary grouped-query attention, SwiGLU (Touvron et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.graph import Graph, GraphBuilder, Value
from tilewright.graph.errors import VerifyError
from tilewright.models.layers import (
    AttentionShape,
    Formats,
    KvState,
    LayerWeights,
    Limits,
    Refine,
    Rope,
    Rotary,
    Step,
    attention,
    declare_kv,
    declare_rotary,
    declare_step,
    gated_mlp,
    keep,
)
from tilewright.models.llama_settings import check_scaling, check_settings, read_window
from tilewright.models.record import shown
from tilewright.models.settings import MAX_INT, MAX_REAL, below, flag, section

MAX_WIDTH = 1 << 14  # of a head, in elements
_DERIVED = ("head_dim", "num_key_value_heads")  # null: what the other sizes make of it


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama-like decoder, under the names of its published configuration.

    `window`: attention here sees all positions, so the context must not be longer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: AttentionShape
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    max_context: int
    attention_bias: bool = False
    output_bias: bool = False
    window: int | None = None


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Read a Hugging Face configuration; raise VerifyError naming the key that does not fit."""
    check_settings(config)
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise VerifyError(
            f"config 'num_key_value_heads': does not divide the heads: got {kv_heads}, "
            f"want a divisor of {heads}"
        )
    width = positive(config, "head_dim", hidden // heads, most=MAX_WIDTH)
    if width % 2:
        raise VerifyError(f"config 'head_dim': is odd: got {width}, want an even width")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise VerifyError(f"config 'hidden_act': not supported: got {activation!r}, want 'silu'")
    rope = section(config, "rope_parameters") or section(config, "rope_scaling")
    check_scaling(rope)
    num_layers = positive(config, "num_hidden_layers")
    bias = flag(config, "attention_bias", default=False)
    return LlamaConfig(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=num_layers,
        attention=AttentionShape(heads, kv_heads, width),
        rms_norm_eps=real(config, "rms_norm_eps", 1e-6),
        rope=Rope(
            theta=real({**rope, **config}, "rope_theta", 10000.0),
            width=width,
            pairing=str(config.get("rope_pairing", "half")),
            scaling=rope,
        ),
        tie_word_embeddings=flag(config, "tie_word_embeddings", default=False),
        max_context=positive(config, "max_position_embeddings", 2048),
        attention_bias=bias,
        output_bias=bias,
        window=read_window(config, num_layers),
    )


def positive(
    config: Mapping[str, Any], key: str, default: int | None = None, *, most: int | None = None
) -> int:
    """Return a positive int of the configuration, or its default where the key is absent; null
    means the default where a published file may have it. `most`: a bound far beyond any model's,
    where something loops over the number."""
    value = config.get(key, default)
    value = default if value is None and key in _DERIVED else value
    if value is None and default is None:
        raise VerifyError(f"config '{key}': is missing: want a positive int")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MAX_INT:
        want = f"a positive int{below(value, MAX_INT)}"
        raise VerifyError(f"config '{key}': got {shown(value)}, want {want}")
    if most is not None and value > most:
        raise VerifyError(f"config '{key}': got {value}, want a positive int of at most {most}")
    return value


def real(config: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive number of the configuration, its default where the key is absent."""
    value = config.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < MAX_REAL:
        want = f"a positive number{below(value, MAX_REAL)}"
        raise VerifyError(f"config '{key}': got {shown(value)}, want {want}")
    return float(value)


def block(
    w: LayerWeights,
    x: Value,
    kv: KvState,
    step: Step,
    rotary: Rotary,
    c: LlamaConfig,
    refine: Refine,
) -> Value:
    """One decoder layer: [tokens, hidden] -> [tokens, hidden] in the activation dtype."""
    b, dtype = w.b, w.formats.activation

    def normed(value: Value, name: str) -> Value:
        scale = w.vector(name, c.hidden_size)
        return b.cast(b.rms_norm(value, scale, eps=c.rms_norm_eps, name=name), dtype)

    h = normed(x, "input_layernorm")
    mixed = attention(
        w,
        h,
        kv,
        step,
        rotary,
        c.attention,
        bias=c.attention_bias,
        output_bias=c.output_bias,
        refine=refine,
    )
    x = x + mixed
    h = normed(x, "post_attention_layernorm")
    return x + gated_mlp(w, h, c.intermediate_size)


def build(
    name: str, c: LlamaConfig, formats: Formats, limits: Limits, *, refine: Refine = keep
) -> Graph:
    """Return the graph of one step of the decoder.

    Raises VerifyError where a layer's window would hide a part of the context.
    """
    if c.window is not None and limits.max_context > c.window:
        raise VerifyError(
            f"config 'sliding_window': shorter than the context, and windows are not built: "
            f"got {c.window}, want at least {limits.max_context}; "
            f"compile with --max-context {c.window}"
        )
    b, dtype = GraphBuilder(name), formats.activation
    step = declare_step(b, limits)
    embedding = "model.embed_tokens.weight"
    table = b.weight(embedding, formats.of(embedding), c.vocab_size, c.hidden_size)
    x = b.op("embedding", step.token_ids, table)
    rotary = declare_rotary(b, step.positions, c.rope)
    shape = c.attention
    for i in range(c.num_layers):
        with b.scope(f"layers.{i}"):
            kv = declare_kv(b, i, step, shape.num_kv_heads, shape.width, dtype)
            x = block(LayerWeights(b, f"model.layers.{i}", formats), x, kv, step, rotary, c, refine)
    last = b.op("gather_rows", x, step.logit_rows)
    scale = b.weight("model.norm.weight", formats.of("model.norm.weight"), c.hidden_size)
    h = b.cast(b.rms_norm(last, scale, eps=c.rms_norm_eps, name="norm"), dtype)
    head = table
    if not c.tie_word_embeddings:
        head = b.weight("lm_head.weight", formats.of("lm_head.weight"), c.vocab_size, c.hidden_size)
    logits = b.linear(h, head, name="logits")
    b.output("logits", logits)
    b.output("argmax", b.op("argmax", logits, name="argmax"))
    return b.build()
