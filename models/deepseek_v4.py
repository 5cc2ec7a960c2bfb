"""DeepSeek-V4 (Flash and Pro): latent attention over a window and compressed entries.

Layers by ratio: 0 sees the window alone; a small ratio selects entries by an index (CSA); a large
one sees all of them (HCA). Source: the V4 technical report and the released configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.graph import Graph, GraphBuilder, Value
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import F32, element_type
from tilewright.models import deepseek_settings
from tilewright.models.deepseek_config import DeepseekConfig, read_ratios, read_shared
from tilewright.models.deepseek_layers import (
    MXFP4,
    Layer,
    attend_operands,
    embed,
    feed_forward,
    head,
    index_queries,
    index_rounded,
    index_weights,
    project_output,
    queries,
    query_latent,
    store_window,
)
from tilewright.models.deepseek_settings import check_settings
from tilewright.models.hyper_connections import collapse, head_collapse, mix, update
from tilewright.models.layers import Formats, Limits
from tilewright.models.paged_step import PagedStep, declare_paged_step, rotate
from tilewright.models.record import shown
from tilewright.models.settings import listed

CSA, HCA = 4, 128


@dataclass(frozen=True)
class V4Config(DeepseekConfig):
    """Layers below `num_hash_layers` choose their experts by token id."""

    num_hash_layers: int = 0


def read_config(config: Mapping[str, Any]) -> V4Config:
    """Read a configuration; raise VerifyError naming the key that does not fit."""
    check_settings(config, deepseek_settings.V4)
    ratios = read_ratios(config)
    for layer, ratio in enumerate(ratios):
        if ratio not in (0, CSA, HCA):
            raise VerifyError(
                f"config 'compress_ratios': unknown mode of layer {layer}: got {ratio}, "
                f"want 0, {CSA} or {HCA}"
            )
    shared = read_shared(config, ratios, group=128)
    return V4Config(**vars(shared), num_hash_layers=_hash_layers(config, shared.num_layers))


def _hash_layers(config: Mapping[str, Any], num_layers: int) -> int:
    kinds = listed(config, "mlp_layer_types", "a list of names")
    known = all(kind in ("hash_moe", "moe") for kind in kinds)
    if kinds and (len(kinds) < num_layers or not known):
        raise VerifyError(
            f"config 'mlp_layer_types': got {shown(kinds)}, want hash_moe or moe for each of "
            f"{num_layers} layers"
        )
    found = config.get("num_hash_layers")
    if found is None:
        found = kinds.count("hash_moe")
        if kinds[:found] != ["hash_moe"] * found:
            raise VerifyError(
                f"config 'mlp_layer_types': hash layers do not come first: got {shown(kinds)}, "
                "want hash_moe before moe"
            )
    if type(found) is not int or not 0 <= found <= num_layers:
        raise VerifyError(
            f"config 'num_hash_layers': got {shown(found)}, want an int of at most {num_layers}"
        )
    return found


def build(
    name: str, c: V4Config, formats: Formats, limits: Limits, *, expose_streams: bool = False
) -> Graph:
    """Return the graph of one step; with `expose_streams` the draft layer's input is an output."""
    b = GraphBuilder(name)
    step = declare_paged_step(b, limits, max(c.attention.window, 2 * CSA, *c.ratios))
    streams = b.op("repeat_streams", embed(b, c, formats, step.token_ids), streams=c.hyper.streams)
    for i in range(*c.layers):
        with b.scope(f"layers.{i}"):
            rope = c.compress_rope if c.ratios[i] else c.rope
            w = Layer(b, f"layers.{i}", c, formats, step, rope)
            streams = block(w, streams, str(i), c.ratios[i], hashed=i < c.num_hash_layers)
    if expose_streams:
        b.output("streams", streams)
    last = b.op("gather_rows", streams, step.logit_rows)
    top = Layer(b, "", c, formats, step, c.rope)
    head(b, c, formats, head_collapse(top, last, "hc_head"), "norm.weight")
    return b.build()


def block(w: Layer, streams: Value, label: str, ratio: int, *, hashed: bool) -> Value:
    """One layer on the streams [tokens, n, hidden]."""
    mixed = mix(w, streams, "attn")
    h = w.norm(collapse(w, streams, mixed), "attn_norm")
    streams = update(w, streams, attention(w, h, label, ratio), mixed)
    mixed = mix(w, streams, "ffn")
    h = w.norm(collapse(w, streams, mixed), "ffn_norm")
    return update(w, streams, feed_forward(w, h, hashed=hashed), mixed)


def attention(w: Layer, h: Value, label: str, ratio: int) -> Value:
    """Attention of one layer: [tokens, hidden] -> [tokens, hidden]."""
    sizes, step = w.c.attention, w.step
    latent = query_latent(w, h)
    q = queries(w, latent, unit=True)
    window = store_window(w, h, label, cache_format(sizes.rope_width))
    operands = attend_operands(w, q, window)
    attrs = {"scale": sizes.width**-0.5, "window": sizes.window}
    if not ratio:
        return project_output(w, w.b.op("attend_window", *operands, **attrs))
    entries = _store_entries(w, h, label, ratio)
    operands = (*operands, entries, step.block_tables)
    if ratio == HCA:
        mixed = w.b.op("attend_compressed", *operands, ratio=ratio, **attrs)
    else:
        mixed = w.b.op("attend_selected", *operands, _select(w, h, latent, label, ratio), **attrs)
    return project_output(w, mixed)


def cache_format(rope_width: int) -> Any:
    """Rows of the cache: fp8 with a scale per 64, and the rotated columns in bf16."""
    return element_type(f"fp8_e4m3[g=64,axis=1,scale=ue8m0,tail={rope_width}xbf16]")


def _store_entries(w: Layer, h: Value, label: str, ratio: int) -> Value:
    """Compress, rotate by the window's first position, store: the compressed state."""
    sizes = w.c.attention
    pooled = _compressed(w, h, "attn.compressor", sizes.width, label, ratio)
    rotary = w.step.rotary(w.rope, sizes.width, back=ratio - 1)
    target = cache_format(sizes.rope_width)
    rows = w.cached(rotate(w.b, rotary, pooled, flat=True), target)
    state = w.step.context_state(f"entries.{label}", w.state_type(target), sizes.width, ratio)
    return w.step.append_context(state, rows, ratio)


def _select(w: Layer, h: Value, latent: Value, label: str, ratio: int) -> Value:
    """Store this step's index keys and choose the entries each token attends to."""
    sizes = w.c.index
    pooled = _compressed(w, h, "attn.indexer.compressor", sizes.width, f"{label}.index", ratio)
    rotary = w.step.rotary(w.rope, sizes.width, back=ratio - 1)
    keys = index_rounded(w, rotate(w.b, rotary, pooled, flat=True), spread=True)
    state = w.step.context_state(f"index.{label}", w.state_type(MXFP4), sizes.width, ratio)
    state = w.step.append_context(state, keys, ratio)
    q, weights = index_queries(w, latent, spread=True), index_weights(w, h)
    operands = (q, weights, state, *w.step.context_operands())
    return w.b.op("select_entries", *operands, k=sizes.k, ratio=ratio)


def _compressed(w: Layer, h: Value, prefix: str, width: int, state: str, ratio: int) -> Value:
    """Keep pending values and gates; pool each full window of `ratio` rows, normed, rounded."""
    b, step, overlap = w.b, w.step, ratio == CSA
    columns = 2 * width if overlap else width
    values, gates = w.wide(h, f"{prefix}.wkv", columns), w.wide(h, f"{prefix}.wgate", columns)
    table = w.tensor(f"{prefix}.ape", ratio, columns)
    gates = gates + b.op("embedding", _place(step, ratio), table)
    window = 2 * ratio if overlap else ratio
    stored = []
    for part, rows in (("values", values), ("gates", gates)):
        pending = step.window_state(f"pending.{state}.{part}", F32, columns, window)
        stored.append(step.append_window(pending, rows))
    operands = (*stored, *step.window_operands())
    pooled = b.op("pool_window", *operands, ratio=ratio, overlap=overlap)
    return w.norm(w.round(pooled), f"{prefix}.norm")


def _place(step: PagedStep, ratio: int) -> Value:
    """Place of each token in its window of `ratio` positions."""
    return step.b.op("modulo", step.positions, divisor=ratio)
