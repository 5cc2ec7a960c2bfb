"""Compare selections: what a kernel chose may differ from the reference where scores tie.

Scores tie if they are within TOLERANCE_F32 of the largest finite one of their row. A ranking
(argmax, top_k_indices) may have at a place another index of a score that ties with the reference's.
A set (select_*) may differ by entries whose scores tie with the lowest score that the reference
chose. Indices must be distinct, in range and as many, sets ascending with -1 after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tilewright.graph import Node
from tilewright.graph.ops.index import choices
from tilewright.tools.differences import TOLERANCE_F32, Difference, exact

RANKINGS = ("argmax", "top_k_indices")
SETS = ("select_entries", "select_with_blocks", "select_within")


def choice_difference(
    node: Node, inputs: Sequence[torch.Tensor], got: torch.Tensor, want: torch.Tensor
) -> Difference:
    """Compare what a selection gave, int [tokens, ..], with the reference's for its inputs."""
    if got.shape != want.shape:
        return exact(False)
    if node.op in RANKINGS:
        parts = [(inputs[0].flatten(0, -2), want.shape[-1] if node.op != "argmax" else 1)]
        ties = _tied_ranking
    else:
        parts, ties = list(choices(inputs, node.attr)), _tied_set
    count, at = 0, 0
    rows, wanted = (x.long().reshape(len(parts[0][0]), -1) for x in (got, want))
    for scores, k in parts:
        mine, theirs = rows[:, at : at + k], wanted[:, at : at + k]
        at += k
        for row in (mine != theirs).any(-1).nonzero().flatten().tolist():
            if not ties(scores[row], mine[row].tolist(), theirs[row].tolist()):
                return exact(False)
            count += 1
    return replace(exact(True), ties=count)


def _margin(scores: torch.Tensor) -> float:
    finite = scores[scores.isfinite()].abs()
    return TOLERANCE_F32 * float(finite.max()) if finite.numel() else 0.0


def _tied_ranking(scores: torch.Tensor, got: list[int], want: list[int]) -> bool:
    if len(set(got)) < len(got) or min(got) < 0 or max(got) >= len(scores):
        return False
    return bool(((scores[got] - scores[want]).abs() <= _margin(scores)).all())


def _tied_set(scores: torch.Tensor, got: list[int], want: list[int]) -> bool:
    mine, theirs = ({i for i in row if i >= 0} for row in (got, want))
    ascending = sorted(mine) + [-1] * (len(got) - len(mine))
    if got != ascending or len(mine) != len(theirs) or max(mine, default=0) >= len(scores):
        return False
    changed, lowest = sorted(mine ^ theirs), scores[sorted(theirs)].min()
    return bool(((scores[changed] - lowest).abs() <= _margin(scores)).all())
