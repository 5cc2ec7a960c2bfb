"""DeepSeek-V4.1 (text): layers share compressed entries, index keys and selections.

Modes: a layer of ratio 0 sees its window alone; a KV source compresses and indexes (full); an index
source only selects anew (reindex); any other layer reads what the last source published (reuse).
Source: the V4.1 technical report and the released configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewright.graph import Graph, GraphBuilder, Value
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import F32, element_type
from tilewright.models import deepseek_settings
from tilewright.models.deepseek_config import DeepseekConfig, read_ids, read_ratios, read_shared
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
from tilewright.models.engram import EngramSizes, append_history, bucket_primes, engram
from tilewright.models.hyper_connections import collapse, mix, update
from tilewright.models.layers import Formats, Limits
from tilewright.models.llama import positive
from tilewright.models.paged_step import PagedStep, declare_paged_step, declare_tail, rotate
from tilewright.models.record import shown
from tilewright.models.settings import listed, text_settings

WINDOW_FORMAT = element_type("fp8_e4m3[g=32,axis=1,scale=ue8m0]")
REPLAY_TOKENS = 140
MAX_HASHES = 1024  # rows of a table that one token looks up
ENTRY_FORMAT = element_type("fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]")


@dataclass(frozen=True)
class Candidates:
    """Blocks of entries that layer `source` keeps for the index sources after it."""

    source: int
    blocks: int
    block_size: int


@dataclass(frozen=True)
class V41Config(DeepseekConfig):
    """Which layers publish: KV sources are index sources too.

    With `replay_tokens` a step runs the layers from `tail_layer` on for chosen rows alone: in a
    prompt its last `replay_tokens`, whose windows begin at the first of them. An approximation.
    """

    kv_sources: tuple[int, ...] = ()
    index_sources: tuple[int, ...] = ()
    candidates: Candidates | None = None
    engram: EngramSizes | None = None
    replay_tokens: int | None = None
    tail_layer: int | None = None  # the last KV source if not given

    @property
    def default_replay(self) -> int:
        """What `replay_tokens` is for who asks for no number: 140, and never less than the window.
        """
        window = self.attention.window
        return max(REPLAY_TOKENS, window + window % 2)


@dataclass(frozen=True)
class Published:
    """What the layers after a source read: entries, index keys, the selection, candidates."""

    layer: int
    ratio: int
    entries: Value
    keys: Value
    selected: Value | None = None
    blocks: Value | None = None


def read_config(config: Mapping[str, Any]) -> V41Config:
    """Read a configuration; raise VerifyError naming the key that does not fit."""
    text = text_settings(config)
    check_settings(text, deepseek_settings.V41)
    ratios = read_ratios(text)
    shared = read_shared(text, ratios, group=32)
    count = shared.num_layers
    kv, index = (read_ids(text, f"{k}_source_layer_ids", count) for k in ("kv", "index"))
    _check_sources(shared.ratios, kv, index)
    return V41Config(
        **vars(shared),
        kv_sources=kv,
        index_sources=index,
        candidates=_read_candidates(text, kv, index),
        engram=_read_engram(text, count),
    )


def _check_sources(ratios: tuple[int, ...], kv: tuple[int, ...], index: tuple[int, ...]) -> None:
    for layer in kv:
        if layer not in index:
            raise VerifyError(
                f"config 'index_source_layer_ids': lacks a KV source: got {list(index)}, "
                f"want layer {layer} among them"
            )
    published = 0
    for layer, ratio in enumerate(ratios):
        if layer in index and not ratio:
            raise VerifyError(
                f"config 'index_source_layer_ids': layer {layer} sees its window alone: "
                "got ratio 0, want a ratio of at least 1"
            )
        published = ratio if layer in kv else published
        if ratio and ratio != published:
            raise VerifyError(
                f"config 'kv_source_layer_ids': no source at or before layer {layer}: "
                f"got {list(kv)}, want a source of ratio {ratio}"
            )


def _read_candidates(
    config: Mapping[str, Any], kv: tuple[int, ...], index: tuple[int, ...]
) -> Candidates | None:
    key = "candidate_source_layer_id"
    source = config.get(key, -1)
    if source is None or (type(source) is int and source == -1):
        return None
    if type(source) is not int or source not in kv:
        raise VerifyError(
            f"config '{key}': got {shown(source)}, want a KV source of {list(kv)} or -1"
        )
    if source != kv[-1]:
        raise VerifyError(
            f"config '{key}': KV sources come after it: got {source}, want the last of {list(kv)}"
        )
    sizes = (positive(config, f"candidate_{k}") for k in ("topk_blocks", "block_size"))
    return Candidates(source, *sizes) if len(index) else None


def _read_engram(config: Mapping[str, Any], num_layers: int) -> EngramSizes | None:
    layers = read_ids(config, "engram_layer_ids", num_layers)
    if not layers:
        return None
    rows = listed(config, "engram_num_embeddings", f"{len(layers)} positive ints")
    if len(rows) != len(layers) or not all(type(n) is int and 0 < n < 1 << 40 for n in rows):
        raise VerifyError(
            f"config 'engram_num_embeddings': got {shown(rows)}, want {len(layers)} positive ints"
        )
    pad = config.get("engram_compressed_pad_id", config.get("engram_pad_token_id", 2))
    if type(pad) is not int or pad < 0:
        raise VerifyError(f"config 'engram_pad_token_id': got {shown(pad)}, want a token id")
    sizes = EngramSizes(
        layers=layers,
        rows=tuple(rows),
        grams=positive(config, "engram_max_ngram_size"),
        heads=positive(config, "engram_n_heads"),
        width=positive(config, "engram_head_dim"),
        buckets=positive(config, "engram_vocab_size"),
        compressed=positive(config, "engram_compressed_vocab_size"),
        pad=pad,
    )
    _check_buckets(sizes)
    return sizes


def _check_buckets(sizes: EngramSizes) -> None:
    if sizes.grams < 2 or sizes.buckets < 2:
        raise VerifyError(
            f"config 'engram_max_ngram_size': got {sizes.grams} and {sizes.buckets} buckets, "
            "want at least 2 of both"
        )
    count = (sizes.grams - 1) * sizes.heads
    if count > MAX_HASHES:
        raise VerifyError(
            f"config 'engram_n_heads': too many rows a token: got {count} (heads times n-gram "
            f"sizes), want at most {MAX_HASHES}"
        )
    for layer, rows in zip(sizes.layers, sizes.rows, strict=True):
        if count * sizes.buckets > rows:  # before primes are looked for, of which any is larger
            raise VerifyError(
                f"config 'engram_num_embeddings': too few rows for layer {layer}: got {rows}, "
                f"want at least {count * sizes.buckets}"
            )
    primes = bucket_primes(sizes)
    for layer, rows in zip(sizes.layers, sizes.rows, strict=True):
        if sum(primes[layer]) > rows:
            raise VerifyError(
                f"config 'engram_num_embeddings': too few rows for layer {layer}: got {rows}, "
                f"want at least {sum(primes[layer])}"
            )


def build(name: str, c: V41Config, formats: Formats, limits: Limits) -> Graph:
    """Return the graph of one step."""
    b = GraphBuilder(name)
    largest = max(c.attention.window, *c.ratios, c.engram.grams if c.engram else 1)
    step = declare_paged_step(b, limits, largest)
    streams = b.op("repeat_streams", embed(b, c, formats, step.token_ids), streams=c.hyper.streams)
    primes = bucket_primes(c.engram) if c.engram else {}
    history = None
    if c.engram and any(layer in range(*c.layers) for layer in c.engram.layers):
        history = append_history(step, c.engram, c.vocab_size)
    pre: Value | None = None
    published: Published | None = None
    tail_layer = first_of_tail(c)
    for i in range(*c.layers):
        with b.scope(f"layers.{i}"):
            rope = c.compress_rope if c.ratios[i] else c.rope
            w = Layer(b, f"layers.{i}", c, formats, step, rope)
            if history is not None and c.engram and i in c.engram.layers:
                streams = engram(w, streams, history, c.engram, i, primes[i])
            if i == tail_layer and pre is not None:
                step, streams, pre, published = narrow(w, c, streams, pre, published, i)
                w = replace(w, step=step)
            streams, pre, published = block(w, c, streams, pre, published, i)
    assert pre is not None
    last, pre = (b.op("gather_rows", x, step.logit_rows) for x in (streams, pre))
    collapsed = collapse(Layer(b, "", c, formats, step, c.rope), last, pre)
    head(b, c, formats, collapsed, "norm.weight")
    return b.build()


def first_of_tail(c: V41Config) -> int | None:
    """The layer from which on a step may run fewer rows; None if all layers run all.

    Raises VerifyError where the settings do not fit.
    """
    tokens = c.replay_tokens
    if tokens is None:
        return None
    if tokens % 2 or tokens < c.attention.window:
        raise VerifyError(
            f"setting 'replay_tokens': got {tokens}, want an even number of at least the window, "
            f"{c.attention.window}"
        )
    layer = c.tail_layer if c.tail_layer is not None else max(c.kv_sources, default=0)
    known = c.kv_sources and c.kv_sources[-1] <= layer < c.layers[1] and layer > c.layers[0]
    if not known:
        raise VerifyError(
            f"setting 'tail_layer': got {layer}, want a layer of {c.layers[0]}:{c.layers[1]} "
            f"from the last KV source of {list(c.kv_sources)} on"
        )
    return layer


def narrow(
    w: Layer, c: V41Config, streams: Value, pre: Value, published: Published | None, layer: int
) -> tuple[PagedStep, Value, Value, Published | None]:
    """Go on with fewer rows; what `layer` publishes comes from all of them."""
    b = w.b
    if layer in c.kv_sources:
        h = w.norm(collapse(w, streams, pre), "attn_norm")
        published = publish(w, h, layer, c.ratios[layer])
    step, rows = declare_tail(w.step)

    def kept(x: Value) -> Value:
        return b.op("gather_rows", x, rows)

    if published is not None and published.selected is not None:
        published = replace(
            published,
            selected=kept(published.selected),
            blocks=kept(published.blocks) if published.blocks is not None else None,
        )
    return step, kept(streams), kept(pre), published


def block(
    w: Layer, c: V41Config, streams: Value, pre: Value | None, published: Published | None, i: int
) -> tuple[Value, Value, Published | None]:
    """One layer. Each sublayer collapses with the weights that the one before it computed."""
    first = w.b.op("take_stream", streams, index=0) if pre is None else collapse(w, streams, pre)
    mixed = mix(w, streams, "attn")
    y, published = attention(w, c, w.norm(first, "attn_norm"), published, i)
    streams = update(w, streams, y, mixed)
    h = w.norm(collapse(w, streams, mixed), "ffn_norm")
    mixed = mix(w, streams, "ffn")
    return update(w, streams, feed_forward(w, h, hashed=False), mixed), mixed, published


def attention(
    w: Layer, c: V41Config, h: Value, published: Published | None, layer: int
) -> tuple[Value, Published | None]:
    """Attention of one layer, and what the layers after it read."""
    sizes, ratio = c.attention, c.ratios[layer]
    latent = query_latent(w, h)
    q = queries(w, latent, unit=False)
    operands = attend_operands(w, q, store_window(w, h, str(layer), WINDOW_FORMAT))
    attrs = {"scale": sizes.width**-0.5, "window": sizes.window}
    if not ratio:
        return project_output(w, w.b.op("attend_window", *operands, **attrs)), published
    if layer in c.kv_sources and (published is None or published.layer != layer):
        published = publish(w, h, layer, ratio)
    if published is None:
        raise VerifyError(
            f"layers {c.layers[0]}:{c.layers[1]}: layer {layer} reads entries of a layer outside: "
            f"got none, want the slice to begin at one of {list(c.kv_sources)} or before"
        )
    if layer in c.index_sources:
        published = select(w, c, h, latent, published, layer)
    assert published.selected is not None
    operands = (*operands, published.entries, w.step.block_tables, published.selected)
    return project_output(w, w.b.op("attend_selected", *operands, **attrs)), published


def publish(w: Layer, h: Value, layer: int, ratio: int) -> Published:
    """Compress this step's tokens: entries and index keys come from one latent."""
    b, step, c = w.b, w.step, w.c
    latent = w.norm(_pooled(w, h, layer, ratio), "attn.compressor.norm")
    rotary = step.rotary(w.rope, c.attention.width, back=ratio - 1)
    rows = w.cached(rotate(b, rotary, latent, flat=True), ENTRY_FORMAT)
    entry_type = w.state_type(ENTRY_FORMAT)
    entries = step.context_state(f"entries.{layer}", entry_type, c.attention.width, ratio)
    keys = w.norm(w.round(w.wide(latent, "attn.indexer.wk", c.index.width)), "attn.indexer.k_norm")
    rotary = step.rotary(w.rope, c.index.width, back=ratio - 1)
    keys = index_rounded(w, rotate(b, rotary, keys, flat=True), spread=False)
    state = step.context_state(f"index.{layer}", w.state_type(MXFP4), c.index.width, ratio)
    return Published(
        layer,
        ratio,
        entries=step.append_context(entries, rows, ratio),
        keys=step.append_context(state, keys, ratio),
    )


def _pooled(w: Layer, h: Value, layer: int, ratio: int) -> Value:
    """The gated mean of each full window; a ratio of 1 is a projection."""
    width, step = w.c.attention.width, w.step
    values = w.wide(h, "attn.compressor.wkv", width)
    if ratio == 1:
        return w.round(values)
    gates = w.wide(h, "attn.compressor.wgate", width)
    stored = []
    for part, rows in (("values", values), ("gates", gates)):
        pending = step.window_state(f"pending.{layer}.{part}", F32, width, ratio)
        stored.append(step.append_window(pending, rows))
    operands = (*stored, *step.window_operands())
    return w.round(w.b.op("pool_window", *operands, ratio=ratio, overlap=False))


def select(
    w: Layer, c: V41Config, h: Value, latent: Value, published: Published, layer: int
) -> Published:
    """Choose entries for each token; the candidate source keeps blocks for those after it."""
    b, k = w.b, c.index.k
    q, weights = index_queries(w, latent, spread=False), index_weights(w, h)
    operands = (q, weights, published.keys, *w.step.context_operands())
    ratio, kept = published.ratio, c.candidates
    if kept and layer == kept.source:
        both = b.op(
            "select_with_blocks", *operands,
            k=k, ratio=ratio, blocks=kept.blocks, block_size=kept.block_size,
        )  # fmt: skip
        blocks = b.op("slice_last", both, start=k, stop=k + kept.blocks)
        return replace(published, selected=b.op("slice_last", both, start=0, stop=k), blocks=blocks)
    if published.blocks is not None and kept:
        within = (*operands, published.blocks)
        selected = b.op("select_within", *within, k=k, ratio=ratio, block_size=kept.block_size)
    else:
        selected = b.op("select_entries", *operands, k=k, ratio=ratio)
    return replace(published, selected=selected)
