"""Random graphs for the whole pipeline: every op that is no attention, in any shape that fits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tilewright.codegen.body import root_of
from tilewright.graph import Dim, Graph, GraphBuilder, Role, Value
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.rewrite import eliminate_dead
from tilewright.graph.types import BF16, F16, F32, I32, ElementType, element_type

FORMATS: tuple[ElementType, ...] = tuple(
    element_type(t)
    for t in ("f32", "bf16", "q8_0[g=32,axis=1,scale=f16]", "q4_1[g=32,axis=1,scale=f16]")
)
MAX_ROWS = 20
EXACT_UNARY = ("neg", "abs", "square")
CLOSE_UNARY = ("exp", "tanh", "sigmoid", "silu", "sin", "cos", "erf")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
WIDTHS = (1, 2, 6, 16, 17, 32, 40, 64)


@dataclass(frozen=True)
class Drawn:
    """A value and how it compares with the reference: exactly, closely, or rounded after a sum."""

    value: Value
    exactness: str = "exact"  # exact | close | loose


def worst(*operands: Drawn) -> str:
    """The exactness of a value computed exactly from these."""
    order = ("exact", "close", "loose")
    return order[max(order.index(o.exactness) for o in operands)]


@dataclass
class Component:
    """One connected graph under construction inside a larger one; names start with its tag."""

    b: GraphBuilder
    r: random.Random
    tag: str
    rows: Dim
    picked: Dim
    ids: Value
    choice: Value
    values: list[Drawn] = field(default_factory=list)
    selected: list[Value] = field(default_factory=list)
    count: int = 0

    def start(self) -> None:
        for index in range(self.r.randint(1, 2)):
            width = self.r.choice(WIDTHS)
            name = f"{self.tag}.x{index}"
            dtype = self.r.choice((F32, F32, BF16))
            self.values.append(Drawn(self.b.input(name, dtype, self.rows, width)))

    def step(self) -> None:
        name = self.r.choice(tuple(_STEPS))
        made = _STEPS[name](self, self.r.choice(self.values[-6:]))
        if made is not None:
            self.values.append(made)

    def weight(self, *shape: int, dtype: ElementType = F32, kind: str = "w") -> Value:
        self.count += 1
        return self.b.weight(f"{self.tag}.{kind}{self.count}", dtype, *shape)


def _op(c: Component, op: str, *operands: Drawn, exact: bool = True, **attrs: object) -> Drawn:
    value = c.b.op(op, *(o.value for o in operands), **attrs)  # type: ignore[arg-type]
    found = worst(*operands)
    return Drawn(value, "close" if found == "exact" and not exact else found)


def _unary(c: Component, x: Drawn) -> Drawn:
    op = c.r.choice(EXACT_UNARY + CLOSE_UNARY)
    if op == "exp":  # keep values small: what is tested is structure
        x = _op(c, "neg", _op(c, "abs", x))
    return _op(c, op, x, exact=op in EXACT_UNARY)


def _constant(c: Component, x: Drawn) -> Drawn:
    number = c.r.choice((0.5, -2.0, 0.1, -0.0, 3.0))
    if c.r.random() < 0.5:
        return _op(c, "scale", x, factor=number)
    return _op(c, "shift", x, amount=number)


def _binary(c: Component, x: Drawn) -> Drawn | None:
    shape = x.value.type.shape
    fits = [v for v in c.values if _broadcasts(v.value.type.shape, shape)]
    y = c.r.choice(fits)
    if c.r.random() < 0.3 and isinstance(shape[-1], int):
        dtype = c.r.choice((F32, BF16))
        y = Drawn(c.weight(shape[-1], dtype=dtype, kind="bias"))
    op = c.r.choice(BINARY)
    return _op(c, op, *c.r.sample((x, y), 2))


def _broadcasts(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    """Operands over the same rows, with equal extents or 1 elsewhere."""
    if len(a) != len(b):
        return False
    return a[0] == b[0] and all(x == y or x == 1 or y == 1 for x, y in zip(a, b, strict=True))


def _divide(c: Component, x: Drawn) -> Drawn:
    return _op(c, "div", x, _op(c, "shift", _op(c, "abs", x), amount=0.5))


def _sqrt(c: Component, x: Drawn) -> Drawn:
    """Ours is correctly rounded; torch's is one ulp off in a fifth of cases."""
    return _op(c, "sqrt", _op(c, "abs", x), exact=False)


def _cast(c: Component, x: Drawn) -> Drawn:
    dtype = c.r.choice((BF16, F16, F32))
    exactness = "loose" if x.exactness == "close" and dtype != F32 else x.exactness
    return Drawn(c.b.cast(x.value, dtype), exactness)


def _reduce(c: Component, x: Drawn) -> Drawn:
    op = c.r.choice(("reduce_sum", "reduce_max"))
    return _op(c, op, x, exact=op == "reduce_max")


def _norm(c: Component, x: Drawn) -> Drawn:
    scale = Drawn(c.weight(int(x.value.type.shape[-1]), kind="norm"))
    return _op(c, "rms_norm", x, scale, exact=False, eps=1e-3)


def _softmax(c: Component, x: Drawn) -> Drawn:
    return _op(c, "softmax", x, exact=False)


def _linear(c: Component, x: Drawn) -> Drawn | None:
    type_ = x.value.type
    if type_.rank != 2:
        return None
    k = int(type_.shape[-1])
    dtype = c.r.choice(FORMATS if k % 32 == 0 else FORMATS[:2])
    y = None
    for _ in range(c.r.choice((1, 1, 2, 3))):
        n = c.r.choice(WIDTHS)
        if y is not None and c.r.random() < 0.5:  # results of one width may meet in an epilogue
            n = int(y.value.type.shape[-1])
        made = c.weight(n, k, dtype=dtype, kind="matrix")
        y = _op(c, "linear", x, Drawn(made), exact=False)
        c.values.append(y)
    return y


def _rotate(c: Component, x: Drawn) -> Drawn | None:
    if int(x.value.type.shape[-1]) % 2:
        return None
    return _op(c, "rotate_pairs", x, pairing=c.r.choice(("half", "interleaved")))


def _rotary(c: Component, x: Drawn) -> Drawn | None:
    """x * a + rotated(x) * b, as rotary embeddings have it; or a sum of two rotations."""
    turned, other = _rotate(c, x), _rotate(c, x)
    if turned is None or other is None:
        return None
    if c.r.random() < 0.3:
        return _op(c, "add", turned, other)
    return _op(c, "add", _op(c, "scale", x, factor=0.5), _op(c, "scale", turned, factor=0.25))


def _slice(c: Component, x: Drawn) -> Drawn:
    width = int(x.value.type.shape[-1])
    start = c.r.randrange(width)
    return _op(c, "slice_last", x, start=start, stop=c.r.randint(start + 1, width))


def _split(c: Component, x: Drawn) -> Drawn | None:
    width = int(x.value.type.shape[-1])
    counts = [n for n in (1, 2, 4, 8) if width % n == 0]
    if x.value.type.rank > 2:
        return None
    return _op(c, "split_heads", x, num_heads=c.r.choice(counts))


def _merge(c: Component, x: Drawn) -> Drawn | None:
    return _op(c, "merge_heads", x) if x.value.type.rank > 2 else None


def _expand(c: Component, x: Drawn) -> Drawn | None:
    return _op(c, "expand_last", x) if x.value.type.rank < 3 else None


def _embedding(c: Component, x: Drawn) -> Drawn:
    dtype = c.r.choice(FORMATS)
    width = c.r.choice((32, 64)) if dtype not in FORMATS[:2] else c.r.choice(WIDTHS)
    table = c.weight(MAX_ROWS, width, dtype=dtype, kind="table")
    return Drawn(c.b.op("embedding", c.ids, table))


def _gather(c: Component, x: Drawn) -> Drawn | None:
    if x.value.type.shape[0] != c.rows:
        return None
    return Drawn(c.b.op("gather_rows", x.value, c.choice), x.exactness)


def _select(c: Component, x: Drawn) -> Drawn | None:
    """Positions only of exact values: of close ones a tie may fall either way."""
    if x.exactness != "exact" or x.value.type.dtype != F32:
        return None
    width = int(x.value.type.shape[-1])
    if c.r.random() < 0.5:
        c.selected.append(c.b.op("argmax", x.value))
        return None
    k = c.r.randint(1, min(width, 5))
    c.selected.append(c.b.op("top_k_indices", x.value, k=k))
    return _op(c, "top_k_values", x, k=k)


_STEPS: dict[str, Callable[[Component, Drawn], Drawn | None]] = {
    "unary": _unary, "unary2": _unary, "constant": _constant, "binary": _binary,
    "binary2": _binary, "binary3": _binary, "divide": _divide, "sqrt": _sqrt, "cast": _cast,
    "cast2": _cast, "reduce": _reduce, "norm": _norm, "softmax": _softmax, "linear": _linear,
    "linear2": _linear, "rotate": _rotate, "rotary": _rotary, "slice": _slice, "split": _split,
    "merge": _merge, "expand": _expand, "embedding": _embedding, "gather": _gather,
    "select": _select,
}  # fmt: skip


@dataclass(frozen=True)
class RandomGraph:
    """A graph of several components, and the exactness of every output."""

    graph: Graph
    exactness: dict[str, str]


def random_graph(seed: int, *, components: int = 4, steps: int = 12) -> RandomGraph:
    """Draw a graph over `rows` rows and `picked` rows chosen of them by the input `choice`."""
    r, b = random.Random(seed), GraphBuilder("random")
    rows = b.dim("rows", Role.BATCH, upper=MAX_ROWS)
    picked = b.dim("picked", Role.BATCH, upper=MAX_ROWS)
    ids, choice = b.input("ids", I32, rows), b.input("choice", I32, picked)
    exactness: dict[str, str] = {}
    for index in range(components):
        with b.scope(f"c{index}"):
            c = Component(b, r, f"c{index}", rows, picked, ids, choice)
            c.start()
            for _ in range(r.randint(2, steps)):
                c.step()
        _declare_outputs(b, c, exactness)
    return RandomGraph(_without_unused_inputs(b.build()), exactness)


def _declare_outputs(b: GraphBuilder, c: Component, exactness: dict[str, str]) -> None:
    """Every value nobody reads, and one or two others; each has memory of its own."""
    graph = b.build()
    merged = _first_of_equals(graph)
    computed = [d for d in c.values if root_of(graph, d.value.name) in graph.node]
    sinks = [d for d in computed if not graph.users[d.value.name]]
    chosen = sinks + c.r.sample(computed, min(len(computed), c.r.randint(0, 2)))
    chosen += [Drawn(v) for v in c.selected]
    memory = {merged[root_of(graph, d.value.name)]: d for d in reversed(chosen)}
    for index, drawn in enumerate(memory.values()):
        name = f"{c.tag}.out{index}"
        b.output(name, drawn.value)
        exactness[name] = drawn.exactness


def _first_of_equals(graph: Graph) -> dict[str, str]:
    """Map every value to the first one that computes the same."""
    first: dict[object, str] = {}
    found = {name: name for name in graph.types}
    for node in graph.nodes:
        inputs = tuple(found[i] for i in node.inputs)
        same = first.setdefault((node.op, inputs, repr(node.attrs)), node.name)
        found[node.name] = found[inputs[0]] if node.op in VIEWS else same
    return found


def _without_unused_inputs(graph: Graph) -> Graph:
    graph = eliminate_dead(graph)
    read = {w for node in graph.nodes for w in node.inputs}
    graph = replace(graph, weights=tuple(w for w in graph.weights if w.name in read))
    kept = {i.name for i in graph.inputs if graph.users[i.name]}
    dims = {str(d) for i in graph.inputs if i.name in kept for d in i.type.shape}
    return replace(
        graph,
        inputs=tuple(i for i in graph.inputs if i.name in kept),
        dims=tuple(d for d in graph.dims if d.name in dims),
    )


def shuffled(graph: Graph, seed: int) -> Graph:
    """The graph with its nodes in another topological order and under other names."""
    r, waiting, nodes = random.Random(seed), list(graph.nodes), []
    done = set(graph.types) - set(graph.node)
    while waiting:
        node = r.choice([n for n in waiting if done.issuperset(n.inputs)])
        waiting.remove(node)
        nodes.append(node)
        done.add(node.name)
    fresh = [f"n{i}" for i in range(len(nodes))]
    r.shuffle(fresh)
    name = {n.name: f for n, f in zip(nodes, fresh, strict=True)}
    return replace(
        graph,
        nodes=tuple(
            replace(n, name=name[n.name], inputs=tuple(name.get(i, i) for i in n.inputs))
            for n in nodes
        ),
        outputs=tuple((public, name.get(v, v)) for public, v in graph.outputs),
        state_outputs=tuple((s, name.get(v, v)) for s, v in graph.state_outputs),
    )
