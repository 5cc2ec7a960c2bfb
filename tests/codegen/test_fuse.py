"""Fusion: few launches, the same for permuted and renamed graphs, no cycles, casts untouched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.graphs import random_graph, shuffled
from support.tiny import SETTINGS, quick_target, tiny, tiny_graph
from tilewright.codegen.body import extract
from tilewright.codegen.compile import distinct_specs
from tilewright.codegen.flags import Flags
from tilewright.codegen.passes.fuse import RULES, fuse
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import first_candidate, plan_groups
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.rewrite import canonical_order, expand_composites
from tilewright.graph.text import parse_graph, print_graph
from tilewright.graph.types import BF16, F32, I32
from tilewright.graph.verify import Stage, verify

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
Build = Callable[[GraphBuilder], None]


def bodies(graph: Graph) -> list[tuple[str, str]]:
    """Kinds and normalised bodies of the fused graph, in the order of the launches."""
    fused = lower(graph, Flags()).graph
    return [(g.kind, extract(fused, g).graph.digest) for g in fused.groups]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_at_most_six_launches_a_layer(family: str, pairing: str) -> None:
    """One layer more is at most six launches more, and no kernel more."""
    found = [
        bodies(tiny_graph(family=family, num_hidden_layers=n, rope_pairing=pairing))
        for n in (2, 3, 6)
    ]
    assert len(found[1]) - len(found[0]) <= 6
    assert len(found[2]) - len(found[1]) == 3 * (len(found[1]) - len(found[0]))
    assert len({len(set(each)) for each in found}) == 1


def test_equal_layers_share_kernels() -> None:
    target = quick_target()
    counts = set()
    for layers in (2, 5):
        graph = lower(tiny_graph(num_hidden_layers=layers), Flags()).graph
        counts.add(
            len(distinct_specs(plan_groups(graph, target, SETTINGS, first_candidate(target))))
        )
    assert len(counts) == 1


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_permuted_and_renamed_graphs_fuse_alike(seed: int, order: int) -> None:
    graph = random_graph(seed, components=2).graph
    assert bodies(shuffled(graph, order)) == bodies(graph)


@pytest.mark.parametrize("family", FAMILIES)
def test_permuted_models_fuse_alike(family: str) -> None:
    graph = tiny_graph(family=family)
    for order in range(4):
        assert bodies(shuffled(graph, order)) == bodies(graph)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_groups_are_acyclic_and_casts_stay(seed: int) -> None:
    """The verifier refuses groups that wait for each other; casts are counted, chains included."""
    graph = canonical_order(expand_composites(random_graph(seed, components=2).graph)[0])
    fused, _ = fuse(graph)
    verify(fused, Stage.FUSED)
    assert fused.nodes == graph.nodes

    def casts(of: Graph) -> Counter[str]:
        return Counter(str(n.type) for n in of.nodes if n.op == "cast")

    inside: Counter[str] = Counter()
    for group in fused.groups:
        inside += casts(extract(fused, group).graph)
    assert inside == casts(graph)


def test_rules_that_apply_to_a_decoder() -> None:
    """Queries are rotated in the kernel that stores the keys, so no attention takes a prologue."""
    decisions = lower(tiny("f32").graph, Flags()).decisions
    used = {d.rule for d in decisions if d.stage == "fuse"}
    assert used == {r.name for r in RULES} - {"attend_prologue", "row_cousins"}


# --- one small graph a rule: text in, text out ------------------------------------------------


def _horizontal_contract(b: GraphBuilder) -> None:
    x = b.input("x", F32, b.dim("rows", Role.BATCH), 32)
    for part in ("q", "k", "v"):
        b.output(part, b.linear(x, b.weight(f"{part}.weight", F32, 16, 32), name=part))


def _epilogue(b: GraphBuilder) -> None:
    x = b.input("x", F32, b.dim("rows", Role.BATCH), 32)
    y = b.linear(x, b.weight("up", F32, 16, 32), name="up") + b.weight("bias", F32, 16)
    z = b.linear(x, b.weight("gate", F32, 16, 32), name="gate")
    b.output("y", b.cast(b.silu(z) * y, BF16))


def _join_reader(b: GraphBuilder) -> None:
    """One index is read by two table rows, each of which belongs to the kernel that adds it."""
    rows = b.dim("rows", Role.BATCH)
    x, ids = b.input("x", F32, rows, 32), b.op("modulo", b.input("i", I32, rows), divisor=4)
    for layer in ("a", "b"):
        table = b.op("embedding", ids, b.weight(f"{layer}.table", F32, 4, 32))
        x = b.linear(b.op("hadamard", x + table), b.weight(f"{layer}.w", F32, 32, 32))
    b.output("y", x)


def _join_consumers(b: GraphBuilder) -> None:
    x = b.input("x", F32, b.dim("rows", Role.BATCH), 32)
    y = b.op("exp", x)
    b.output("sum", b.op("reduce_sum", y))
    b.output("max", b.op("reduce_max", y))


def _row_siblings(b: GraphBuilder) -> None:
    rows = b.dim("rows", Role.BATCH)
    x, slots = b.input("x", F32, rows, 32), b.input("slots", I32, rows)
    cache = b.state("cache", F32, b.dim("blocks", Role.BATCH), 2, 8, 16)
    positions, requests = b.input("positions", I32, rows), b.input("requests", I32, rows)
    tables = b.input("tables", I32, b.dim("count", Role.BATCH), b.dim("chain", Role.CONTEXT))
    y = b.linear(x, b.weight("w", F32, 32, 32))
    heads = b.op("split_heads", y, num_heads=2)
    stored = b.append(cache, b.op("exp", heads), slots)
    turned = b.op("rotate_pairs", heads, pairing="half")
    b.output(
        "y", b.op("attend", turned, stored, stored, positions, requests, tables, scale=1.0)
    )


def _contract_prologue(b: GraphBuilder) -> None:
    x = b.input("x", BF16, b.dim("rows", Role.BATCH), 32)
    h = b.cast(b.rms_norm(x, b.weight("norm", F32, 32), eps=1e-5), BF16)
    b.output("y", b.linear(h, b.weight("w", F32, 16, 32)))


def _attend_prologue(b: GraphBuilder) -> None:
    rows, blocks = b.dim("rows", Role.BATCH), b.dim("blocks", Role.BATCH)
    q = b.input("q", F32, rows, 2, 16)
    k, v = b.state("k", BF16, blocks, 2, 8, 16), b.state("v", BF16, blocks, 2, 8, 16)
    positions, requests = b.input("positions", I32, rows), b.input("requests", I32, rows)
    tables = b.input("tables", I32, b.dim("count", Role.BATCH), b.dim("chain", Role.CONTEXT))
    mixed = b.op("attend", b.cast(q, BF16), k, v, positions, requests, tables, scale=0.25)
    b.output("y", b.cast(mixed, BF16))


def _row_chain(b: GraphBuilder) -> None:
    """The sum is read by a contraction too, so it is stored; its other reader still joins it."""
    rows = b.dim("rows", Role.BATCH)
    x = b.linear(b.input("x", F32, rows, 32), b.weight("up", F32, 32, 32))
    top = b.op("reduce_max", x)
    b.output("y", b.op("top_k_values", x * top, k=2))
    b.output("z", b.linear(x * top, b.weight("down", F32, 16, 32)))


def _row_cousins(b: GraphBuilder) -> None:
    rows = b.dim("rows", Role.BATCH)
    x = b.linear(b.input("x", F32, rows, 32), b.weight("w", F32, 32, 32))
    b.output("y", b.op("top_k_values", x, k=2))
    b.output("z", b.op("hadamard", x))


EXAMPLES: dict[str, Build] = {
    "horizontal_contract": _horizontal_contract,
    "epilogue": _epilogue,
    "join_reader": _join_reader,
    "join_consumers": _join_consumers,
    "row_siblings": _row_siblings,
    "contract_prologue": _contract_prologue,
    "attend_prologue": _attend_prologue,
    "row_chain": _row_chain,
    "row_cousins": _row_cousins,
}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_rule(rule: str, golden: Callable[[str], None]) -> None:
    assert list(EXAMPLES) == [r.name for r in RULES]
    b = GraphBuilder(rule)
    EXAMPLES[rule](b)
    lowered = lower(b.build(), Flags())
    assert rule in {d.rule for d in lowered.decisions}
    text = print_graph(lowered.graph)
    assert print_graph(parse_graph(text)) == text
    golden("\n".join(line.partition("  # ")[0] for line in text.splitlines()) + "\n")
