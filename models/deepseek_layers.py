"""What V4 and V4.1 layers share: weights, latent projections, compressors' parts, experts.

Casts stand where the released reference rounds; with fp32 activations there are none.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.graph import GraphBuilder, Value
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import I32, BlockFormat, ElementType, element_type
from tilewright.models.deepseek_config import DeepseekConfig
from tilewright.models.layers import Formats, Rope
from tilewright.models.paged_step import PagedStep, inverse_rms, names_of, rotate


@dataclass(frozen=True)
class Layer:
    """One layer under construction: where its tensors are, and how they are stored."""

    b: GraphBuilder
    prefix: str
    c: DeepseekConfig
    formats: Formats
    step: PagedStep
    rope: Rope

    def tensor(self, name: str, *shape: int) -> Value:
        """A tensor under its full name within the layer."""
        full = f"{self.prefix}.{name}" if self.prefix else name
        return self.b.weight(full, self.formats.of(full), *shape)

    def round(self, x: Value) -> Value:
        """Round to the activation dtype."""
        return self.b.cast(x, self.formats.activation)

    def norm(self, x: Value, name: str) -> Value:
        """RMS norm over the last axis, rounded."""
        weight = self.tensor(f"{name}.weight", int(x.type.shape[-1]))
        return self.round(self.b.rms_norm(x, weight, eps=self.c.rms_norm_eps, name=name))

    def operand(self, x: Value, stored: ElementType) -> Value:
        """Quantise an activation if it meets weights that are stored quantised."""
        if isinstance(stored, BlockFormat) and self.formats.quantise_activations:
            target = element_type(f"fp8_e4m3[g={self.c.group},axis=1,scale=ue8m0]")
            return self.b.quantise(x, target)
        return x

    def project(self, x: Value, name: str, n: int) -> Value:
        """x W^T, rounded."""
        w = self.tensor(f"{name}.weight", n, int(x.type.shape[-1]))
        short = name.rpartition(".")[2]
        return self.round(self.b.linear(self.operand(x, w.type.dtype), w, name=short))

    def wide(self, x: Value, name: str, n: int) -> Value:
        """x W^T in fp32: what the reference computes without rounding."""
        w = self.tensor(f"{name}.weight", n, int(x.type.shape[-1]))
        return self.b.linear(x, w, name=name.rpartition(".")[2])

    def cached(self, x: Value, target: ElementType) -> Value:
        """Round as the cache stores it: quantised, or in the activation dtype."""
        x = self.round(x)
        return self.b.quantise(x, target) if self.formats.quantise_cache else x

    def state_type(self, target: ElementType) -> ElementType:
        """Element type of a state whose rows `cached` makes."""
        return target if self.formats.quantise_cache else self.formats.activation


def query_latent(w: Layer, h: Value) -> Value:
    """The low-rank query that attention and the indexer share: [tokens, q_rank]."""
    return w.norm(w.project(h, "attn.wq_a", w.c.attention.q_rank), "attn.q_norm")


def queries(w: Layer, latent: Value, *, unit: bool) -> Value:
    """Rotated queries [tokens, heads, width]; with `unit` each head has mean square 1 first."""
    b, sizes = w.b, w.c.attention
    q = w.project(latent, "attn.wq_b", sizes.heads * sizes.width)
    q = b.op("split_heads", q, num_heads=sizes.heads)
    if unit:
        q = w.round(q * inverse_rms(b, q, w.c.rms_norm_eps))
    return w.round(rotate(b, w.step.rotary(w.rope, sizes.width), q))


def store_window(w: Layer, h: Value, label: str, target: ElementType) -> Value:
    """Store this step's keys, which are also the values; return the window state."""
    sizes = w.c.attention
    kv = w.norm(w.project(h, "attn.wkv", sizes.width), "attn.kv_norm")
    kv = rotate(w.b, w.step.rotary(w.rope, sizes.width), kv, flat=True)
    state = w.step.window_state(f"window.{label}", w.state_type(target), sizes.width, sizes.window)
    return w.step.append_window(state, w.cached(kv, target))


def attend_operands(w: Layer, q: Value, window: Value) -> tuple[Value, ...]:
    """Operands that every attention op begins with."""
    sink = w.tensor("attn.attn_sink", w.c.attention.heads)
    return (q, window, *w.step.window_operands(), sink)


def project_output(w: Layer, mixed: Value) -> Value:
    """Rotate back (values carry a rotation too), then project group by group, then together."""
    b, sizes = w.b, w.c.attention
    rotary = w.step.rotary(w.rope, sizes.width)
    back = w.round(rotate(b, rotary, w.round(mixed), inverse=True))
    grouped = b.op("split_heads", b.op("merge_heads", back), num_heads=sizes.groups)
    k = sizes.heads * sizes.width // sizes.groups
    wo_a = w.tensor("attn.wo_a.weight", sizes.groups * sizes.o_rank, k)
    low = w.round(b.op("grouped_linear", grouped, wo_a, name="wo_a"))
    return w.project(b.op("merge_heads", low), "attn.wo_b", w.c.hidden_size)


def index_queries(w: Layer, latent: Value, *, spread: bool) -> Value:
    """Rotated, quantised index queries [tokens, heads, width]; `spread` is the Hadamard step."""
    b, sizes = w.b, w.c.index
    q = w.project(latent, "attn.indexer.wq_b", sizes.heads * sizes.width)
    q = b.op("split_heads", q, num_heads=sizes.heads)
    return index_rounded(w, rotate(b, w.step.rotary(w.rope, sizes.width), q), spread=spread)


def index_rounded(w: Layer, x: Value, *, spread: bool) -> Value:
    """Quantise index queries or keys; the transform before it matters through rounding alone."""
    if spread and w.formats.quantise_cache:
        x = w.b.op("hadamard", w.round(x))
    return w.cached(x, MXFP4)


def index_weights(w: Layer, h: Value) -> Value:
    """Weight of each index head [tokens, heads]."""
    sizes = w.c.index
    scale = sizes.width**-0.5 * sizes.heads**-0.5
    return w.round(w.project(h, "attn.indexer.weights_proj", sizes.heads) * scale)


MXFP4 = element_type("fp4_e2m1[g=32,axis=1,scale=ue8m0]")


def route(w: Layer, h: Value, *, hashed: bool) -> tuple[Value, Value]:
    """Experts of each token and their weights: i32 and f32 [tokens, per_token].

    The bias decides who is chosen and never enters the weights; a hash layer looks the experts up
    by token id.
    """
    b, sizes = w.b, w.c.experts
    logits = w.wide(h, "ffn.gate", sizes.count)
    if sizes.temperature != 1.0:
        logits = logits * (1.0 / sizes.temperature)
    scores = b.op("sqrt", b.op("softplus", logits))
    if hashed:
        name = f"{w.prefix}.ffn.gate.tid2eid"
        table = b.weight(name, I32, w.c.vocab_size, sizes.per_token)
        ids = b.op("gather_rows", table, w.step.token_ids, name="tid2eid")
    else:
        bias = w.tensor("ffn.gate.bias", sizes.count)
        ids = b.op("top_k_indices", scores + bias, k=sizes.per_token)
    chosen = b.op("gather_last", scores, ids)
    if sizes.normalise:
        chosen = chosen / (b.op("reduce_sum", chosen) + 1e-20)
    return ids, chosen * sizes.scaling


def gated(w: Layer, gate: Value, up: Value) -> Value:
    """silu(gate) * up, both clamped: the gate from above, `up` on both sides."""
    b, limit = w.b, w.c.experts.limit
    gate = b.op("at_most", gate, limit=limit)
    up = b.op("at_least", b.op("at_most", up, limit=limit), limit=-limit)
    return b.silu(gate) * up


def shared_expert(w: Layer, h: Value) -> Value:
    """The expert that sees every token: [tokens, hidden] -> [tokens, hidden]."""
    width, prefix = w.c.experts.width * w.c.experts.shared, "ffn.shared_experts"
    gate, up = (w.project(h, f"{prefix}.{part}", width) for part in ("w1", "w3"))
    return w.project(w.round(gated(w, gate, up)), f"{prefix}.w2", w.c.hidden_size)


def routed_experts(w: Layer, h: Value, ids: Value, weights: Value) -> Value:
    """The chosen experts, each scaled by its weight before its last product, summed: fp32."""
    b, c = w.b, w.c

    def product(x: Value, part: str, n: int, k: int) -> Value:
        stack = expert_stack(w, part, n, k)
        operand = w.operand(x, stack.type.dtype)
        return w.round(b.op("expert_linear", operand, stack, ids, name=f"experts_{part}"))

    width = c.experts.width
    gate, up = (product(h, part, width, c.hidden_size) for part in ("w1", "w3"))
    scaled = w.round(gated(w, gate, up) * b.op("expand_last", weights))
    return b.op("sum_slots", product(scaled, "w2", c.hidden_size, width))


def expert_stack(w: Layer, part: str, n: int, k: int) -> Value:
    """The matrices of all experts [experts, n, k]; raise VerifyError if formats differ."""
    prefix = f"{w.prefix}.ffn.experts"
    parts = names_of(prefix, w.c.experts.count, f"{part}.weight")
    stored = w.formats.of(parts[0])
    for part_name in parts:
        if w.formats.of(part_name) != stored:
            raise VerifyError(
                f"tensor '{part_name}': experts are stored differently: "
                f"got {w.formats.of(part_name)}, want {stored} as '{parts[0]}'"
            )
    return w.b.stack(f"{prefix}.{part}.weight", stored, parts, n, k)


def feed_forward(w: Layer, h: Value, *, hashed: bool) -> Value:
    """Routed experts and the shared one: [tokens, hidden] -> [tokens, hidden], rounded once."""
    ids, weights = route(w, h, hashed=hashed)
    return w.round(routed_experts(w, h, ids, weights) + shared_expert(w, h))


def embed(b: GraphBuilder, c: DeepseekConfig, formats: Formats, token_ids: Value) -> Value:
    """Embeddings [tokens, hidden] in the activation dtype."""
    name = "embed.weight"
    table = b.weight(name, formats.of(name), c.vocab_size, c.hidden_size)
    return b.cast(b.op("embedding", token_ids, table), formats.activation)


def head(b: GraphBuilder, c: DeepseekConfig, formats: Formats, x: Value, norm: str) -> None:
    """Final norm and logits (fp32) of x [rows, hidden]; declares the outputs."""
    scale = b.weight(norm, formats.of(norm), c.hidden_size)
    h = b.cast(b.rms_norm(x, scale, eps=c.rms_norm_eps, name="norm"), formats.activation)
    table = b.weight("head.weight", formats.of("head.weight"), c.vocab_size, c.hidden_size)
    logits = b.linear(h, table, name="logits")
    b.output("logits", logits)
    b.output("argmax", b.op("argmax", logits, name="argmax"))
