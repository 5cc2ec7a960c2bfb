"""Coverage says what really happens: a kernel is emitted for the smallest use of every op."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.tiny import quick_target
from tilewright.codegen.coverage import coverage
from tilewright.codegen.op_samples import USES, sample_graph
from tilewright.codegen.target import Target
from tilewright.graph import Graph
from tilewright.graph.ops import OPS, Kind
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.verify import Stage, verify
from tilewright.targets.cpu.target import VARIANTS
from tilewright.targets.registry import TARGETS, resolve


@pytest.mark.parametrize("op", OPS)
def test_a_sample_uses_its_op_once(op: str) -> None:
    graph = sample_graph(op)
    verify(graph, Stage.MODEL)
    assert [n.op for n in graph.nodes] == [op]
    assert USES.keys() <= OPS.keys()


@pytest.mark.parametrize("name", [*TARGETS, *(f"cpu:{v}" for v in VARIANTS)])
def test_every_op_is_covered(name: str) -> None:
    target, _ = resolve(name)
    table, known = coverage(target), {t.name for t in target.kernels}
    assert table.keys() == OPS.keys()
    assert {op for op, how in table.items() if how == "view"} == set(VIEWS)
    assert {op for op, how in table.items() if how == "decomposed"} == {
        name for name, op in OPS.items() if op.kind is Kind.COMPOSITE
    }
    assert set(table.values()) <= known | {"view", "decomposed"}
    assert table["attend"] in ("attend", "attend_cube")  # on the matrix unit where there is one
    assert table["attend_selected"] in ("latent", "latent_cube")


def _missing(target: Target) -> list[str]:
    return [op for op, how in coverage(target).items() if how == "missing"]


def test_a_template_that_refuses_leaves_its_ops_missing() -> None:
    """The kind of a template alone covers nothing: it is asked, op by op."""
    target = quick_target()
    others = tuple(k for k in target.kernels if k.name not in ("latent", "select"))
    assert _missing(replace(target, kernels=others)) == [
        "attend_compressed", "attend_selected", "attend_window", "select_entries",
        "select_with_blocks", "select_within",
    ]  # fmt: skip
    lists = ("expert_linear", "grouped_linear")

    def plain(body: Graph) -> str | None:
        return "no lists" if any(n.op in lists for n in body.nodes) else None

    refusing = tuple(
        replace(k, accepts=plain) if k.name == "contract" else k for k in target.kernels
    )
    assert _missing(replace(target, kernels=refusing)) == list(lists)
