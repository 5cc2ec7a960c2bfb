"""Hyper-connections: parallel residual streams [tokens, n, hidden] around each sublayer."""

from __future__ import annotations

from tilewright.graph import Value
from tilewright.models.deepseek_layers import Layer
from tilewright.models.paged_step import inverse_rms


def projected(w: Layer, streams: Value, name: str, n: int) -> Value:
    """n numbers a token from all streams, divided by their root mean square: fp32."""
    b = w.b
    flat = b.op("merge_heads", streams)
    weight = w.tensor(name, n, int(flat.type.shape[-1]))
    return b.linear(flat, weight, name=name) * inverse_rms(b, flat, w.c.rms_norm_eps)


def mix(w: Layer, streams: Value, part: str) -> Value:
    """The numbers of sublayer `part` (attn or ffn) for each token: pre, post and comb."""
    n, hyper = w.c.hyper.streams, w.c.hyper
    width = n * (2 + n)
    logits = projected(w, streams, f"hc_{part}_fn", width)
    scale, base = w.tensor(f"hc_{part}_scale", 3), w.tensor(f"hc_{part}_base", width)
    return w.b.op(
        "hyper_mix", logits, scale, base, streams=n, iterations=hyper.iterations, eps=hyper.eps
    )


def collapse(w: Layer, streams: Value, pre: Value) -> Value:
    """One row a token: the streams weighted by `pre`, the first columns of a mix."""
    return w.round(w.b.op("hyper_collapse", streams, pre))


def update(w: Layer, streams: Value, y: Value, mixed: Value) -> Value:
    """The streams after a sublayer."""
    return w.round(w.b.op("hyper_update", streams, y, mixed))


def head_collapse(w: Layer, streams: Value, prefix: str) -> Value:
    """The streams weighted by numbers of their own before the head (V4)."""
    b, n = w.b, w.c.hyper.streams
    logits = projected(w, streams, f"{prefix}_fn", n)
    scale, base = w.tensor(f"{prefix}_scale", 1), w.tensor(f"{prefix}_base", n)
    pre = b.op("sigmoid", logits * scale + base) + w.c.hyper.eps
    return collapse(w, streams, pre)
