"""Parts that Llama-like models share: step inputs, rotary embedding, attention, gated MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.graph import Dim, GraphBuilder, Role, Value
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import BF16, F32, I32, DType, ElementType
from tilewright.models.settings import scaling_number


@dataclass(frozen=True)
class Limits:
    """Bounds of one step and of the cache, in elements."""

    max_tokens: int = 512
    max_requests: int = 64
    max_logit_rows: int = 64
    max_context: int = 8192
    block_size: int = 32
    max_cache_blocks: int = 1 << 20
    context_page: int = 256  # positions of a page that lives as long as its request
    window_page: int = 64  # positions of a page that is given back when all of it is old


@dataclass(frozen=True)
class Formats:
    """How a model's tensors are stored (by checkpoint name) and what activations are rounded to."""

    stored: Mapping[str, ElementType]
    activation: DType = BF16
    quantise_cache: bool = True  # as models that were trained with it ask; others have none
    quantise_activations: bool = True  # before products with quantised weights, likewise

    def of(self, name: str) -> ElementType:
        """Return the storage type of a tensor; a missing one is found later, with all others."""
        return self.stored.get(name, F32)


@dataclass(frozen=True)
class Step:
    """Inputs of a step: tokens of all requests in one flat axis, with positions and cache slots."""

    token_ids: Value
    positions: Value
    request_rows: Value
    slots: Value
    block_tables: Value
    logit_rows: Value
    cache_blocks: Dim
    block_size: int


def declare_step(b: GraphBuilder, limits: Limits) -> Step:
    """Declare the dims and inputs every decoder has."""
    tokens = b.dim("tokens", Role.BATCH, upper=limits.max_tokens)
    requests = b.dim("requests", Role.BATCH, upper=limits.max_requests)
    rows = b.dim("logit_rows", Role.BATCH, lower=0, upper=limits.max_logit_rows)
    per_request = -(-limits.max_context // limits.block_size)
    blocks = b.dim("request_blocks", Role.CONTEXT, upper=per_request)
    cache_blocks = b.dim("cache_blocks", Role.BATCH, upper=limits.max_cache_blocks)
    return Step(
        token_ids=b.input("token_ids", I32, tokens),
        positions=b.input("positions", I32, tokens),
        request_rows=b.input("request_rows", I32, tokens),
        slots=b.input("slots", I32, tokens),
        block_tables=b.input("block_tables", I32, requests, blocks),
        logit_rows=b.input("logit_rows", I32, rows),
        cache_blocks=cache_blocks,
        block_size=limits.block_size,
    )


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base, how pairs lie in a head, and the scaling entry of the
    configuration."""

    theta: float
    width: int
    pairing: str = "half"
    scaling: Mapping[str, Any] = field(default_factory=dict)


def rotary_frequencies(rope: Rope) -> tuple[list[float], float]:
    """Return the angle per position of each pair (radians) and the factor on cos and sin.

    Sources: Su et al. 2021; llama3 scaling as in the Llama 3.1 configuration; yarn: Peng et al.
    2023.
    """
    base = [rope.theta ** (-2.0 * i / rope.width) for i in range(rope.width // 2)]
    kind = rope.scaling.get("rope_type", rope.scaling.get("type", "default"))
    match kind:
        case "default":
            return base, 1.0
        case "divisors":
            return _divided(base, rope.scaling), 1.0
        case "linear":
            return [f / scaling_number(rope.scaling, "factor") for f in base], 1.0
        case "llama3":
            return [_llama3(f, rope.scaling) for f in base], 1.0
        case "yarn":
            return _yarn(base, rope)
        case _:
            known = "default, divisors, linear, llama3, yarn"
            raise VerifyError(f"rope scaling '{kind}': unknown: have {known}")


def _divided(base: list[float], scaling: Mapping[str, Any]) -> list[float]:
    """Divide each frequency by its own number, as GGUF files of Llama 3 store the scaling."""
    divisors = scaling.get("divisors") or []
    if len(divisors) != len(base) or not all(0 < d < 1e30 for d in divisors):
        raise VerifyError(f"config 'rope_scaling.divisors': want {len(base)} positive numbers")
    return [f / d for f, d in zip(base, divisors, strict=True)]


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Keep short wavelengths, stretch long ones, interpolate between."""
    factor, low, high, original = (scaling_number(scaling, k) for k in _LLAMA3)
    if low == high:
        raise VerifyError(
            f"config 'rope_scaling.high_freq_factor': got {high}, want another than low_freq_factor"
        )
    turns = original * frequency / (2 * math.pi)
    smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(base: list[float], rope: Rope) -> tuple[list[float], float]:
    scaling = rope.scaling
    factor = scaling_number(scaling, "factor")
    original = scaling_number(scaling, "original_max_position_embeddings")
    if rope.theta == 1:
        raise VerifyError("config 'rope_theta': got 1, want another number, for yarn")

    def pair_of(turns: float) -> float:
        wavelength = original / (turns * 2 * math.pi)
        return rope.width * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(scaling_number(scaling, "beta_fast", 32))), 0)
    high = min(math.ceil(pair_of(scaling_number(scaling, "beta_slow", 1))), rope.width - 1)
    scaled = []
    for i, frequency in enumerate(base):
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        scaled.append(frequency / factor * ramp + frequency * (1 - ramp))
    default = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scaled, scaling_number(scaling, "attention_factor", default)


@dataclass(frozen=True)
class Rotary:
    """cos and sin of a step's positions, [tokens, 1, width], shared by all layers."""

    cos: Value
    sin: Value
    pairing: str

    def apply(self, b: GraphBuilder, x: Value) -> Value:
        """Rotate the pairs of x [tokens, heads, width]."""
        turned = b.op("rotate_pairs", x, pairing=self.pairing)
        return x * self.cos + turned * self.sin


def declare_rotary(b: GraphBuilder, positions: Value, rope: Rope) -> Rotary:
    """Compute cos and sin once a step; the angle is rounded to fp32 as published models do."""
    frequencies, factor = rotary_frequencies(rope)
    if rope.pairing == "half":
        spread = [*frequencies, *frequencies]
    else:
        spread = [f for f in frequencies for _ in range(2)]
    table = b.literal("rotary_frequencies", spread, F32)
    angle = b.op("expand_last", b.cast(positions, F32)) * table
    tables = []
    for fn in ("cos", "sin"):
        value = b.op(fn, angle)
        value = value * factor if factor != 1.0 else value
        tables.append(b.op("split_heads", value, num_heads=1))
    return Rotary(tables[0], tables[1], rope.pairing)


@dataclass(frozen=True)
class KvState:
    """One layer's paged keys and values."""

    k: Value
    v: Value

    def append(self, b: GraphBuilder, k: Value, v: Value, step: Step) -> KvState:
        """Store this step's rows; the result is what attention reads."""
        return KvState(
            b.append(self.k, k, step.slots, name="append_k"),
            b.append(self.v, v, step.slots, name="append_v"),
        )


def declare_kv(
    b: GraphBuilder, layer: int, step: Step, num_kv_heads: int, width: int, dtype: DType
) -> KvState:
    """Declare the cache of one layer."""
    shape = (step.cache_blocks, num_kv_heads, step.block_size, width)
    k, v = (b.state(f"kv.{layer}.{part}", dtype, *shape) for part in ("k", "v"))
    return KvState(k, v)


@dataclass(frozen=True)
class AttentionShape:
    """Head counts and width of an attention layer."""

    num_heads: int
    num_kv_heads: int
    width: int


@dataclass(frozen=True)
class LayerWeights:
    """Names a layer's tensors in the checkpoint and declares them with their stored formats."""

    b: GraphBuilder
    prefix: str
    formats: Formats

    def matrix(self, name: str, rows: int, cols: int) -> Value:
        full = f"{self.prefix}.{name}.weight"
        return self.b.weight(full, self.formats.of(full), rows, cols)

    def vector(self, name: str, length: int, *, suffix: str = "weight") -> Value:
        full = f"{self.prefix}.{name}.{suffix}"
        return self.b.weight(full, self.formats.of(full), length)


Refine = Callable[[LayerWeights, Value, str], Value]


def keep(w: LayerWeights, x: Value, part: str) -> Value:
    """The refinement of queries (part `q`) and keys (`k`) that changes nothing."""
    return x


def attention(
    w: LayerWeights,
    h: Value,
    kv: KvState,
    step: Step,
    rotary: Rotary,
    shape: AttentionShape,
    *,
    bias: bool = False,
    output_bias: bool = False,
    refine: Refine = keep,
) -> Value:
    """Grouped-query attention over the paged cache: [tokens, hidden] -> [tokens, hidden], fp32."""
    b, dtype = w.b, w.formats.activation
    hidden = h.type.shape[-1]

    def heads(part: str, count: int) -> Value:
        name = f"self_attn.{part}_proj"
        y = b.linear(h, w.matrix(name, count * shape.width, hidden), name=f"{part}_proj")
        if bias:
            y = y + w.vector(name, count * shape.width, suffix="bias")
        return b.op("split_heads", y, num_heads=count)

    q = rotary.apply(b, refine(w, heads("q", shape.num_heads), "q"))
    k = rotary.apply(b, refine(w, heads("k", shape.num_kv_heads), "k"))
    v = heads("v", shape.num_kv_heads)
    kv = kv.append(b, b.cast(k, dtype), b.cast(v, dtype), step)
    mixed = b.op(
        "attend",
        b.cast(q, dtype),
        kv.k,
        kv.v,
        step.positions,
        step.request_rows,
        step.block_tables,
        name="attend",
        scale=shape.width**-0.5,
    )
    merged = b.op("merge_heads", b.cast(mixed, dtype))
    out = w.matrix("self_attn.o_proj", hidden, shape.num_heads * shape.width)
    y = b.linear(merged, out, name="o_proj")
    return y + w.vector("self_attn.o_proj", hidden, suffix="bias") if output_bias else y


def gated_mlp(w: LayerWeights, h: Value, intermediate: int) -> Value:
    """down(silu(gate(h)) * up(h)) (Shazeer 2020): [tokens, hidden] -> [tokens, hidden], fp32."""
    b, dtype = w.b, w.formats.activation
    hidden = h.type.shape[-1]
    gate = b.linear(h, w.matrix("mlp.gate_proj", intermediate, hidden), name="gate_proj")
    up = b.linear(h, w.matrix("mlp.up_proj", intermediate, hidden), name="up_proj")
    mixed = b.cast(b.silu(gate) * up, dtype)
    return b.linear(mixed, w.matrix("mlp.down_proj", hidden, intermediate), name="down_proj")
