"""Sections of a contraction kernel: which of its products meet in an epilogue."""

from __future__ import annotations

from tilewright.codegen.arguments import ancestors
from tilewright.graph import Graph, Node


def sections_of(body: Graph, anchors: list[Node]) -> list[list[Node]]:
    """Anchors whose results meet in an epilogue share a section: their panels are walked
    together."""
    before = set(ancestors(body, anchors[0].inputs[0]))
    part = {n.name: i for i, n in enumerate(anchors)}
    for node in body.nodes:
        if node.name in part or node.name in before:
            continue
        joined = sorted({part[i] for i in node.inputs if i in part})
        for name, index in part.items():
            if index in joined:
                part[name] = joined[0]
        part[node.name] = joined[0]
    order = list(dict.fromkeys(part[a.name] for a in anchors))
    return [[n for n in body.nodes if part.get(n.name) == i] for i in order]
