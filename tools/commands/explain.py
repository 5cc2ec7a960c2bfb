"""`tilewright explain ARTIFACT NODE`: what the compiler did with a node, and why."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.tools.commands import options
from tilewright.tools.failures import CommandError

if TYPE_CHECKING:
    from tilewright.graph import Graph
    from tilewright.runtime.artifact import Manifest

Lines = Iterator[tuple[str, str]]


def explain(
    artifact: options.Artifact,
    node: Annotated[str, typer.Argument(help="A node of sources/model.txt or sources/fused.txt.")],
    as_json: options.Json = False,
) -> None:
    """Show which rules touched a node, and which kernel computes it and why."""
    from tilewright.tools.progress import result_console

    if as_json:
        facts = [{"title": title, "text": text} for title, text in explanation(artifact, node)]
        print(json.dumps({"node": node, "facts": facts}))
        return
    console = result_console()
    for name, text in explanation(artifact, node):
        console.print(f"[dim]{name:>10}[/]  ", end="")
        console.print(text, markup=False)


def explanation(artifact: Path, node: str) -> Lines:
    """Yield titles and texts; raise CommandError for a name that is no node."""
    from tilewright.graph.text import parse_graph
    from tilewright.tools.artifact_text import ArtifactText

    opened = ArtifactText(artifact)
    manifest, decisions = opened.manifest, opened.decisions()
    model, fused = (parse_graph(opened.text(f"sources/{n}.txt")) for n in ("model", "fused"))
    refuse_unknown(node, model, fused)
    yield from _origin(node, model, fused)
    yield from _rules(node, decisions)
    group = next((g for g in decisions["groups"] if node in g["nodes"]), None)
    if group is not None:
        yield from _kernel(group, manifest, artifact)
    else:
        yield from _without_kernel(node, fused, decisions)


def refuse_unknown(node: str, model: Graph, fused: Graph) -> None:
    """Raise CommandError unless a node has this name; close names are given."""
    names = {**model.node, **fused.node}
    if node in names:
        return
    for graph in (model, fused):
        if node in graph.types:
            users = ", ".join(graph.users[node][:4]) or "nobody"
            raise CommandError(f"node '{node}': is an operand, not a node: it is read by {users}")
    close = difflib.get_close_matches(node, names, n=3, cutoff=0.5)
    some = ", ".join([*names][:3])
    have = f"did you mean {', '.join(close)}" if close else f"have {some}, ..."
    raise CommandError(f"node '{node}': unknown among {len(names)} nodes: {have}")


def _origin(node: str, model: Graph, fused: Graph) -> Lines:
    from tilewright.graph.text import print_node

    for title, graph in (("model", model), ("fused", fused)):
        if node in graph.node:
            yield title, print_node(graph.node[node]).removeprefix("node ").partition("  # ")[0]
    found = model.node.get(node) or fused.node[node]
    yield "written in", found.origin or "no source line is known"


def _rules(node: str, decisions: Mapping[str, Any]) -> Lines:
    """One line per rule: how often it touched the node, and the most it joined it with."""
    found: dict[tuple[str, str], list[list[str]]] = {}
    for rule in decisions["rules"]:
        if node in rule["nodes"]:
            found.setdefault((rule["stage"], rule["rule"]), []).append(rule["nodes"])
    if not found:
        yield "rules", "none touched it"
    for (stage, rule), touched in found.items():
        widest = max(touched, key=len)
        others = ", ".join(n for n in widest if n != node)
        times = f", {len(touched)} times" if len(touched) > 1 else ""
        yield "rule", f"{stage}: {rule}{times}" + (f", with {others}" if others else "")


def _kernel(group: Mapping[str, Any], manifest: Manifest, artifact: Path) -> Lines:
    kernels = {k.symbol: k for k in manifest.kernels}
    yield "group", f"{group['group']}, {group['kind']} of {len(group['nodes'])} nodes"
    yield "nodes", ", ".join(group["nodes"])
    yield "template", group["template"]
    for refusal in group["refusals"]:
        yield "refused by", f"{refusal['template']}: {refusal['reason']}"
    shown: dict[str, list[str]] = {}
    for bucket, symbol in group["kernels"].items():
        shown.setdefault(symbol, []).append(bucket)
    numerics = [dict(kernels[symbol].numerics) for symbol in shown]
    same = all(n == numerics[0] for n in numerics)
    if same:
        yield "numerics", _pairs(numerics[0])
    for symbol, buckets in shown.items():
        kernel = kernels[symbol]
        yield "kernel", f"{symbol} for {', '.join(buckets)}"
        if not same:
            yield "numerics", _pairs(kernel.numerics)
        yield "schedule", _pairs(kernel.schedule) or "none"
        yield "source", str(artifact / kernel.source)


def _pairs(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _without_kernel(node: str, fused: Graph, decisions: Mapping[str, Any]) -> Lines:
    """Say what became of a node that no kernel computes."""
    from tilewright.codegen.body import root_of

    if node in fused.node:
        yield "kernel", f"none: it is a view of '{root_of(fused, node)}', which owns the buffer"
        return
    parts = [n for n in fused.node if n.startswith(f"{node}.")]
    if parts:
        yield "became", ", ".join(parts)
    else:
        yield "kernel", "none: it was merged with an equal node, or nothing needs it"
