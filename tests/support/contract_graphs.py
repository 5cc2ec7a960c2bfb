"""Small graphs that are one contraction kernel each: products with stored weights, experts,
groups."""

from __future__ import annotations

from collections.abc import Sequence

from support.tiny import QUANTISED
from tilewright.codegen.body import Body, extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.graph import Graph, GraphBuilder, Role, Value
from tilewright.graph.types import BF16, F32, I32, ElementType, element_type

TOKENS = 8192


def stored_type(stored: str) -> ElementType:
    """Return a storage type by its short name or its own."""
    return element_type(QUANTISED.get(stored, stored))


def only_body(graph: Graph) -> Body:
    """Return the body of a graph that is one kernel."""
    lowered = lower(graph, Flags()).graph
    (group,) = lowered.groups
    return extract(lowered, group)


def _activation(stored: Sequence[str]) -> ElementType:
    """Rows of fp8 where the weights are of float codes, as in the released models."""
    if all(s == "fp8_128" for s in stored):
        return element_type("fp8_e4m3[g=128,axis=1,scale=ue8m0]")
    if all(s.startswith("fp") for s in stored):
        return element_type("fp8_e4m3[g=32,axis=1,scale=ue8m0]")
    return BF16


def _gate(b: GraphBuilder, gate: Value, up: Value) -> Value:
    """The clamped gate of an expert."""
    limited = b.op("at_least", b.op("at_most", b.cast(up, BF16), limit=1.0), limit=-1.0)
    return b.silu(b.op("at_most", b.cast(gate, BF16), limit=1.0)) * limited


def linear(weights: Sequence[tuple[str, int]], k: int, *, gated: bool = False) -> Graph:
    """Products of one activation with weights (format, columns); `gated`: the first two meet."""
    b = GraphBuilder("linear")
    tokens = b.dim("tokens", Role.BATCH, upper=TOKENS)
    x = b.input("x", _activation([s for s, _ in weights]), tokens, k)
    sums = [b.linear(x, b.weight(f"w{i}", stored_type(s), n, k))
            for i, (s, n) in enumerate(weights)]  # fmt: skip
    if gated:
        b.output("gated", b.cast(_gate(b, *sums[:2]), BF16))
        sums = sums[2:]
    for i, value in enumerate(sums):
        b.output(f"y{i}", b.cast(value, BF16) if i % 2 else value)
    return b.build()


def experts(
    stored: str, *, n: int, k: int, shared: bool, gated: bool, count: int = 5, slots: int = 2
) -> Graph:
    """Products with chosen experts: one, or two that meet in a gate with a weight per slot."""
    b = GraphBuilder("experts")
    tokens = b.dim("tokens", Role.BATCH, upper=TOKENS)
    shape = (tokens, k) if shared else (tokens, slots, k)
    x = b.input("x", _activation([stored]), *shape)
    ids = b.input("ids", I32, tokens, slots)

    def product(name: str) -> Value:
        parts = [f"{name}.{e}" for e in range(count)]
        return b.op("expert_linear", x, b.stack(name, stored_type(stored), parts, n, k), ids)

    if not gated:
        b.output("y", product("w1"))
        return b.build()
    weights = b.input("weights", F32, tokens, slots)
    gate = _gate(b, product("w1"), product("w3"))
    b.output("y", b.cast(gate * b.op("expand_last", weights), BF16))
    return b.build()


def groups(stored: str, *, n: int, k: int, count: int = 3) -> Graph:
    """A product by groups."""
    b = GraphBuilder("groups")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=TOKENS), count, k)
    w = b.weight("w", stored_type(stored), n * count, k)
    b.output("y", b.cast(b.op("grouped_linear", x, w), BF16))
    return b.build()


def residual(n: int, k: int, stored: str = "bf16") -> Graph:
    """A product whose result, rounded, is scaled by columns and added to rows."""
    b = GraphBuilder("residual")
    tokens = b.dim("tokens", Role.BATCH, upper=TOKENS)
    x, rest = b.input("x", BF16, tokens, k), b.input("rest", BF16, tokens, n)
    product = b.linear(x, b.weight("w", stored_type(stored), n, k))
    scaled = b.cast(product, BF16) * b.weight("scale", F32, n)
    b.output("y", b.cast(scaled + rest, BF16))
    return b.build()
