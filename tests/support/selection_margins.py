"""How clear each selection of a run was: the gap between the last chosen score and the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilewright.graph import Graph, Node
from tilewright.graph.ops.index import index_scores


def _gap(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Per row: k-th largest less the next; infinite where fewer are finite."""
    if scores.shape[-1] <= k:
        return torch.full(scores.shape[:1], torch.inf, dtype=scores.dtype)
    top = scores.sort(dim=-1, descending=True).values
    gap = top[:, k - 1] - top[:, k]
    return gap.where(top[:, k] > -torch.inf, torch.inf)


def _index_gap(node: Node, operands: list[torch.Tensor]) -> torch.Tensor:
    scores, attrs = index_scores(operands, node.attr), node.attr
    size = int(str(attrs.get("block_size", 1)))
    if node.op == "select_within":
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        for t, blocks in enumerate(operands[6].tolist()):
            for block in blocks:
                if block >= 0:
                    allowed[t, block * size : (block + 1) * size] = True
        scores = scores.masked_fill(~allowed, -torch.inf)
    gap = _gap(scores, int(str(attrs["k"])))
    if node.op == "select_with_blocks":
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
        best = padded.reshape(len(padded), padded.shape[1] // size, size).amax(-1)
        newest = (operands[3] + 1) // int(str(attrs["ratio"])) - 1
        for t, entry in enumerate(newest.tolist()):
            if entry >= 0:
                best[t, entry // size] = torch.inf
        gap = gap.minimum(_gap(best, int(str(attrs["blocks"]))).nan_to_num(nan=torch.inf))
    return gap


def margins(graph: Graph, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Smallest gap of any selection, per token."""
    found = None
    for node in graph.nodes:
        operands = [values[name] for name in node.inputs]
        if node.op.startswith("select_"):
            gap = _index_gap(node, operands)
        elif node.op == "top_k_indices":
            gap = _gap(operands[0], int(str(node.attr["k"])))
        else:
            continue
        found = gap if found is None else found.minimum(gap)
    assert found is not None
    return found
