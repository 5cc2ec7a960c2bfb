"""Samples of every op, and random graphs, for tests generated from the op registry."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
import torch

from support.paged_samples import paged_sample
from tilewright.graph import Dim, Graph, GraphBuilder, Role, TensorType, Value
from tilewright.graph.dims import evaluate, symbol
from tilewright.graph.ir import Attr
from tilewright.graph.ops import OPS, Kind
from tilewright.graph.types import BF16, F32, I32

EXTENTS = (1, 2, 3, 5, 8)
ROWS = "rows"  # the symbolic extent of every sample


@dataclass(frozen=True)
class Sample:
    """Operands of one op: types with a symbolic extent, its binding, and fitting tensors."""

    op: str
    types: tuple[TensorType, ...]
    attrs: dict[str, Attr]
    binding: dict[str, int]
    given: dict[int, torch.Tensor] = field(default_factory=dict)

    def tensors(self, seed: int) -> list[torch.Tensor]:
        """Return the operands in fp64 or int32; those not given are normally distributed."""
        torch.manual_seed(seed)
        return [self.given[i] if i in self.given else self._normal(t) for i, t in
                enumerate(self.types)]

    def _normal(self, type_: TensorType) -> torch.Tensor:
        shape = [evaluate(d, self.binding) for d in type_.shape]
        return torch.randn(shape, dtype=torch.float64)


def _f32(*shape: Dim) -> TensorType:
    return TensorType(F32, shape)


def _i32(*shape: Dim) -> TensorType:
    return TensorType(I32, shape)


def _elementwise(op: str, r: random.Random) -> Sample:
    """Operands that broadcast: all but the first may have extents of 1 or fewer axes."""
    shape: tuple[Dim, ...] = (symbol(ROWS), r.choice(EXTENTS), r.choice(EXTENTS))
    types = [_f32(*shape)]
    for _ in range(OPS[op].num_inputs - 1):
        narrowed = tuple(r.choice((d, 1)) for d in shape)
        types.append(_f32(*narrowed[r.randrange(3):]))
    attrs: dict[str, Attr] = {n: r.uniform(-2, 2) for n, t in OPS[op].attrs.items() if t is float}
    if op == "cast":
        attrs["dtype"] = r.choice(("f32", "bf16", "f16"))
    return Sample(op, tuple(types), attrs, {ROWS: r.choice(EXTENTS)})


def _simple(op: str, r: random.Random) -> Sample:
    """Ops on rows of one floating operand."""
    width = 2 * r.choice(EXTENTS)
    k = r.randint(1, width)
    attrs: dict[str, dict[str, Attr]] = {
        "split_heads": {"num_heads": r.choice((1, 2))},
        "slice_last": {"start": k - 1, "stop": width},
        "rotate_pairs": {"pairing": r.choice(("half", "interleaved"))},
        "top_k_indices": {"k": k},
        "top_k_values": {"k": k},
    }
    shape = (symbol(ROWS), r.choice(EXTENTS), width)
    return Sample(op, (_f32(*shape),), attrs.get(op, {}), {ROWS: r.choice(EXTENTS)})


def _special(op: str, r: random.Random) -> Sample:
    n, rows = r.choice(EXTENTS), symbol(ROWS)
    width, table = r.choice(EXTENTS), r.choice(EXTENTS)
    picked = torch.tensor([r.randrange(table) for _ in range(n)], dtype=torch.int32)
    binding = {ROWS: n}
    match op:
        case "linear":
            types = (_f32(rows, r.choice(EXTENTS), width), _f32(table, width))
            return Sample(op, types, {}, binding)
        case "rms_norm":
            return Sample(op, (_f32(rows, width), _f32(width)), {"eps": 1e-5}, binding)
        case "embedding":
            return Sample(op, (_i32(rows), _f32(table, width)), {}, binding, {0: picked})
        case "gather_rows":
            return Sample(op, (_f32(table, width), _i32(rows)), {}, binding, {1: picked})
        case "append":
            size, heads = r.choice(EXTENTS), r.choice(EXTENTS)
            slots = torch.tensor(r.sample(range(n * size + 1), n), dtype=torch.int32)
            cache = _f32(n + 1, heads, size, width)
            return Sample(op, (cache, _f32(rows, heads, width), _i32(rows)), {}, binding,
                          {2: slots})
        case "attend":
            return _attend(r)
    pytest.fail(f"op '{op}' has no sample: add one in tests/graph/conftest.py")


def _attend(r: random.Random) -> Sample:
    """Tokens of up to three requests, each with its own blocks in random order."""
    size, kv_heads, repeat, width = (r.choice(EXTENTS) for _ in range(4))
    lengths = [r.randint(1, 3 * size) for _ in range(r.randint(1, 3))]
    blocks = list(range(3 * len(lengths) + 1))
    r.shuffle(blocks)
    tables = torch.tensor(blocks[: 3 * len(lengths)], dtype=torch.int32).view(-1, 3)
    tokens = [(row, p) for row, n in enumerate(lengths) for p in range(n) if r.random() < 0.7]
    tokens = tokens or [(0, 0)]
    r.shuffle(tokens)
    token_rows, positions = (torch.tensor(c, dtype=torch.int32) for c in zip(*tokens, strict=True))
    rows = symbol(ROWS)
    cache = _f32(len(blocks), kv_heads, size, width)
    types = (
        _f32(rows, kv_heads * repeat, width), cache, cache, _i32(rows), _i32(rows),
        _i32(len(lengths), 3),
    )
    given = {3: positions, 4: token_rows, 5: tables}
    return Sample("attend", types, {"scale": 0.3}, {ROWS: len(tokens)}, given)


@pytest.fixture(scope="session")
def sample() -> Callable[[str, int], Sample]:
    """Return a random sample of an op. A new elementwise op or reduction needs nothing."""

    def make(op: str, seed: int) -> Sample:
        r = random.Random(f"{op} {seed}")
        paged = paged_sample(op, r)
        if paged is not None:
            return Sample(op, *paged)
        match OPS[op]:
            case definition if definition.kind is Kind.ELEMENTWISE:
                return _elementwise(op, r)
            case definition if definition.num_inputs == 1:
                return _simple(op, r)
        return _special(op, r)

    return make


@pytest.fixture(scope="session")
def shuffled() -> Callable[[Graph, random.Random], Graph]:
    """Return the graph with its nodes in another topological order and under other names."""

    def make(graph: Graph, r: random.Random) -> Graph:
        waiting, nodes = list(graph.nodes), []
        done = set(graph.types) - set(graph.node)
        while waiting:
            ready = [n for n in waiting if done.issuperset(n.inputs)]
            node = r.choice(ready)
            waiting.remove(node)
            nodes.append(node)
            done.add(node.name)
        fresh = [f"n{i}" for i in range(len(nodes))]
        r.shuffle(fresh)
        name = {n.name: f for n, f in zip(nodes, fresh, strict=True)}

        def renamed(values: Iterable[str]) -> tuple[str, ...]:
            return tuple(name.get(v, v) for v in values)

        return replace(
            graph,
            nodes=tuple(replace(n, name=name[n.name], inputs=renamed(n.inputs)) for n in nodes),
            outputs=tuple((public, name.get(v, v)) for public, v in graph.outputs),
            state_outputs=tuple((s, name.get(v, v)) for s, v in graph.state_outputs),
        )

    return make


UNARY = ("neg", "abs", "square", "tanh", "sigmoid", "silu", "softmax", "reduce_sum", "reduce_max",
         "sin", "cos")


@st.composite
def _graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph of elementwise, row and contraction ops over [rows, 4], casts among them."""
    b = GraphBuilder("random")
    rows = b.dim(ROWS, Role.BATCH, upper=8)
    values: list[Value] = [b.input("x", F32, rows, 4), b.input("y", F32, rows, 4)]
    w = b.weight("w", F32, 4, 4)
    norm = b.literal("norm", [1.0, -0.5, 2.0, 0.25], F32)
    values.append(b.rms_norm(b.linear(values[0], w), norm, eps=1e-5))

    def pick() -> Value:
        return draw(st.sampled_from(values))

    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(("unary", "binary", "cast", "scale", "linear")))
        match kind:
            case "unary":
                values.append(b.op(draw(st.sampled_from(UNARY)), pick()))
            case "binary":
                values.append(b.op(draw(st.sampled_from(("add", "sub", "mul"))), pick(), pick()))
            case "cast":
                values.append(b.cast(pick(), BF16))
            case "scale":
                values.append(pick() * draw(st.sampled_from((0.0, -0.0, 0.5, 1e-30))))
            case "linear":
                values.append(b.linear(draw(st.sampled_from([v for v in values if v.type.shape[-1]
                                                             == 4])), w))
    b.output("base", values[2])
    for index in range(draw(st.integers(1, 3))):
        b.output(f"out{index}", draw(st.sampled_from(values[2:])))
    return b.build()


@pytest.fixture(scope="session")
def graphs() -> st.SearchStrategy[Graph]:
    return _graphs()
