"""Selection: the first template of a target that accepts a fused group, and why others did not."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.body import Body
from tilewright.codegen.target import KernelTemplate, Target
from tilewright.graph import Group
from tilewright.graph.errors import TargetError
from tilewright.graph.ops import op_def


@dataclass(frozen=True)
class Choice:
    """The template that took a group, and the refusals of those asked before."""

    template: KernelTemplate
    refusals: tuple[tuple[str, str], ...]


def select(group: Group, body: Body, target: Target) -> Choice:
    """Return the first template that accepts the group; TargetError gives every refusal of those
    for groups of its kind."""
    refusals: list[tuple[str, str]] = []
    for template in target.kernels:
        if template.kind != group.kind:
            reason: str | None = f"takes {template.kind} groups"
        else:
            reason = template.accepts(body.graph)
        if reason is None:
            return Choice(template, tuple(refusals))
        refusals.append((template.name, reason))
    anchor = next(
        (n for n in body.graph.nodes if op_def(n.op).kind.value == group.kind), body.graph.nodes[-1]
    )
    asked = {t.name for t in target.kernels if t.kind == group.kind}
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals if name in asked)
    reasons = reasons or f"it has no template for {group.kind} groups"
    raise TargetError(
        f"no kernel accepts '{anchor.op}' of '{group.name}' on {target.name}: {reasons}"
    )
