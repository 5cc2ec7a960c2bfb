"""Ops by targets, found by making a kernel for the smallest use of each op (op_samples.py)."""

from __future__ import annotations

from tilewright.codegen.config import CompileConfig
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.flags import Flags
from tilewright.codegen.op_samples import sample_graph
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import first_candidate, plan_groups
from tilewright.codegen.target import Target
from tilewright.graph.errors import LowerError, TargetError
from tilewright.graph.ops import OPS, Kind, op_def
from tilewright.graph.ops.layout import VIEWS

_SMALL = CompileConfig(max_tokens_per_step=16)


def coverage(target: Target) -> dict[str, str]:
    """Map every op to the template whose kernel was emitted for it on a target, or to `decomposed`,
    `view` (another name for a buffer: no kernel), or `missing`."""
    return {name: _cover(name, target) for name in sorted(OPS)}


def _cover(op: str, target: Target) -> str:
    if op_def(op).kind is Kind.COMPOSITE:
        return "decomposed"
    return "view" if op in VIEWS else _template_of(op, target)


def _template_of(op: str, target: Target) -> str:
    graph = lower(sample_graph(op), Flags()).graph
    try:
        plans = plan_groups(graph, target, _SMALL, first_candidate(target))
        for plan in plans:
            emit(next(iter(plan.specs.values())), plan.choice.template)
    except (LowerError, TargetError):
        return "missing"
    return next(p.choice.template.name for p in plans if op in p.group.nodes)
