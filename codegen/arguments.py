"""The ABI of a kernel as every language's emitter and the runtime's plan see it: names of its
arguments in order. Nothing here knows a language or a target.
"""

from __future__ import annotations

from tilewright.graph import Graph
from tilewright.graph.ops import Kind, op_def


def argument_names(body: Graph) -> tuple[str, ...]:
    """Tensor arguments in the order of the ABI: outputs, states, inputs, weights."""
    return (
        *(value for _, value in body.outputs),
        *(s.name for s in body.states),
        *(i.name for i in body.inputs),
        *(w.name for w in body.weights),
    )


def needs_scratch(kind: str) -> bool:
    """Say whether kernels of this kind take a workspace tensor after the weights."""
    return kind in ("contract", "attend", "select")


def int_names(body: Graph) -> tuple[str, ...]:
    """Symbolic extents, passed as ints after the tensors."""
    return tuple(d.name for d in body.dims)


def matrix_weights(body: Graph) -> frozenset[str]:
    """Return the weights a body reads as matrices: those of contractions and embeddings."""
    found = set()
    for node in body.nodes:
        if op_def(node.op).kind is Kind.CONTRACT or node.op == "embedding":
            if node.inputs[1] in body.weight:
                found.add(node.inputs[1])
    return frozenset(found)


def ancestors(body: Graph, value: str) -> list[str]:
    """Nodes a value depends on, itself included, in graph order."""
    needed, todo = set(), [value]
    while todo:
        name = todo.pop()
        if name in body.node and name not in needed:
            needed.add(name)
            todo += body.node[name].inputs
    return [n.name for n in body.nodes if n.name in needed]
