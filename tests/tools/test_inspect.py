"""Every stage as stable text, kernels by any name, and a page that is whole and asks nobody."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.graph.text import parse_graph, print_graph
from tilewright.runtime.artifact import Extent
from tilewright.tools.artifact_facts import extent_text
from tilewright.tools.artifact_text import ArtifactText
from tilewright.tools.graph_view import find_layers, view_groups, view_nodes
from tilewright.tools.inspect_html import page
from tilewright.tools.inspect_text import STAGES
from tilewright.tools.svg_graph import Box, Edge, draw, layout
from tilewright.tools.svg_memory import bytes_text, lives

pytestmark = pytest.mark.cpu

Call = Callable[..., Any]
VOID = ("meta", "input", "br", "link", "img", "hr")


@pytest.fixture(scope="module")
def opened(artifact: Path) -> ArtifactText:
    return ArtifactText(artifact)


@pytest.mark.parametrize("stage", STAGES)
def test_stages_are_stable(call: Call, artifact: Path, stage: str) -> None:
    first, second = (call("inspect", artifact, "--stage", stage) for _ in range(2))
    assert first.code == 0 and len(first.out) > 100
    assert first.out == second.out
    assert str(artifact) not in first.out  # a stage is the same wherever the artifact lies
    json.loads(call("inspect", artifact, "--stage", stage, "--json").out)


def test_graphs_read_back(call: Call, artifact: Path) -> None:
    text = call("inspect", artifact, "--stage", "fused").out
    assert print_graph(parse_graph(text)) == text and "\ngroup " in text


def test_summary(call: Call, artifact: Path) -> None:
    lines = dict(line.split(maxsplit=1) for line in call("inspect", artifact).out.splitlines())
    assert lines["model"] == "tiny" and lines["mode"] == "deterministic"
    assert re.match(r"tokens batch 1\.\.\d+, requests batch 1\.\.64, ", lines["dims"])


def test_numerics_name_the_digest_and_every_bucket(call: Call, artifact: Path) -> None:
    facts = json.loads(call("inspect", artifact, "--stage", "numerics", "--json").out)
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert facts["numerics_digest"] == manifest["numerics_digest"]
    assert sum(row["groups"] for row in facts["groups"]) == len(manifest["buckets"][0]["launches"])
    for row in facts["groups"]:
        assert row["one_for_all_buckets"]
        assert list(row["schedules"]) == [b["name"] for b in manifest["buckets"]]


def test_memory_adds_up(call: Call, artifact: Path) -> None:
    facts = json.loads(call("inspect", artifact, "--stage", "memory", "--json").out)
    # Between weights there is only alignment.
    gap = facts["weights_bytes"] - sum(row["bytes"] for row in facts["weights"].values())
    assert 0 <= gap < 64 * sum(row["tensors"] for row in facts["weights"].values())
    assert facts["cache_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    for bucket in facts["buckets"]:
        assert 0 < bucket["arena_bytes"] <= bucket["buffers_bytes"]


def test_coverage_has_no_gap(call: Call, artifact: Path) -> None:
    facts = json.loads(call("inspect", artifact, "--stage", "coverage", "--json").out)
    assert facts["linear"]["cpu"] == facts["linear"]["sm90"] == "contract"
    assert facts["rms_norm"]["cpu"] == "decomposed"
    assert facts["split_heads"]["cpu"] == "view"
    assert all(row["cpu"] != "missing" for row in facts.values())
    lines = call("inspect", artifact, "--stage", "coverage").out.splitlines()
    assert lines[0].split() == ["op", *facts["linear"]]
    assert next(line for line in lines if line.startswith("attend_window ")).split()[1] == "latent"


@pytest.mark.parametrize(
    ("extent", "text"),
    [
        (576, "576"),
        ("tokens", "tokens"),
        (["add", 347904, ["mul", 6144, "tokens"]], "347904 + 6144·tokens"),
        (["mul", 2, ["add", "a", 1], "b"], "2·(a + 1)·b"),
        (["ceildiv", ["add", "tokens", 1], 128], "ceil((tokens + 1) / 128)"),
        (["ceildiv", "tokens", 128], "ceil(tokens / 128)"),
        (["max", ["mul", 2, "a"], 4], "max(2·a, 4)"),
    ],
)
def test_extents_print_as_arithmetic(extent: Extent, text: str) -> None:
    assert extent_text(extent) == text


def test_source_by_kernel_group_and_node(call: Call, artifact: Path) -> None:
    kernel = json.loads((artifact / "manifest.json").read_text())["kernels"][0]
    text = (artifact / kernel["source"]).read_text()
    assert call("inspect", artifact, "--kernel", kernel["symbol"]).out == text
    by_node = call("inspect", artifact, "--kernel", "layers.1.down_proj").out
    assert "contract" in by_node and by_node.count('#include "tw_host.h"') >= 1


def test_refusals(call: Call, artifact: Path, tmp_path: Path) -> None:
    done = call("inspect", artifact, "--stage", "fuse")
    assert (done.code, done.err) == (
        2, "error: stage 'fuse': unknown: have model, fused, plan, kernels, numerics, memory, "
        "coverage, manifest, pipes\n"
    )  # fmt: skip
    done = call("inspect", artifact, "--stage", "pipes", "--html", tmp_path / "page.html")
    assert (done.code, done.err) == (
        2, "error: inspect 'html': a page has no pipes: want no --stage pipes beside it\n"
    )  # fmt: skip
    done = call("inspect", artifact, "--kernel", "none")
    known = [k.symbol for k in ArtifactText(artifact).manifest.kernels]
    assert done.err == (
        f"error: kernel 'none': unknown: have {', '.join(known)}, or the name of a node\n"
    )
    done = call("inspect", artifact, "--kernel", "none", "--json")
    assert done.err == (
        "error: inspect 'kernel': prints a source: want no --stage or --json beside it\n"
    )
    assert done.code == 2
    done = call("inspect", tmp_path)
    assert done.err == f"error: artifact '{tmp_path}': file 'manifest.json' is missing\n"


def test_an_edited_graph_is_refused(call: Call, artifact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    (copy / "sources" / "fused.txt").write_text("graph other\n")
    done = call("inspect", copy, "--stage", "fused")
    assert done.code == 1
    assert re.fullmatch(
        rf"error: artifact '{copy}': file 'sources/fused.txt' was edited or damaged: "
        r"got SHA-256 \w{12}, want \w{12}; compile the model again\n", done.err
    )  # fmt: skip


class Balance(HTMLParser):
    """Checks that tags close in order, and collects attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (self.open[-3:], tag, self.getpos())
        self.open.pop()


def test_page_is_whole_and_asks_nobody(call: Call, artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert call("inspect", artifact, "--html", path).code == 0
    text = path.read_text()
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"https?://|url\(|@import|src=", text)
    links = [v for k, v in parser.attributes if k == "href"]
    assert links and all(v and v.startswith("#") for v in links)
    assert call("inspect", artifact, "--html", path).code == 0 and path.read_text() == text


def test_page_shows_all_kernels_and_rules(opened: ArtifactText) -> None:
    text = page(opened)
    assert '<a href="#coverage">Targets</a>' in text and "·tokens" in text
    assert re.search(r"<code>attend_selected</code></td>(<td><i class=.latent.></i>latent)", text)
    assert "layers 0 to 1: 2 times the same" in text
    for kernel in opened.manifest.kernels:
        assert f'data-source="{kernel.symbol}"' in text
    for rule in {r["rule"] for r in opened.decisions()["rules"]}:
        assert f"<b>{rule}</b>" in text
    data = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert data is not None
    assert not any("add(" in cost for cost in json.loads(data.group(1))["costs"].values())
    sources = json.loads(data.group(1))["sources"]
    assert sources == {k.symbol: opened.text(k.source) for k in opened.manifest.kernels}


def test_markup_in_names_is_escaped() -> None:
    evil = '<script>alert("x")</script>&'
    box = Box(evil, "row", evil, (evil,), evil)
    text = draw([box, Box("b", "row", "b")], [Edge(evil, "b", evil)])
    assert "<script" not in text and text.count("&lt;script&gt;") >= 5


def test_layers_that_are_alike_are_drawn_once(opened: ArtifactText) -> None:
    graph = parse_graph(opened.text("sources/fused.txt"))
    assert find_layers(graph).runs == (("layers", 0, 2),)
    names = {b.id for b in view_groups(graph).boxes}
    assert any(n.startswith("layers.0.") for n in names)
    assert not any(n.startswith("layers.1.") for n in names)
    view = view_nodes(parse_graph(opened.text("sources/model.txt")))
    known = {b.id for b in view.boxes}
    assert {e.source for e in view.edges} | {e.target for e in view.edges} <= known


@given(st.data())
def test_boxes_never_overlap_and_edges_point_down(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 14))
    boxes = [Box(str(i), "row", "n" * data.draw(st.integers(1, 20)),
                 ("x",) * data.draw(st.integers(0, 3))) for i in range(count)]  # fmt: skip
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    edges = [Edge(str(min(p)), str(max(p))) for p in data.draw(st.sets(pairs, max_size=24))
             if p[0] != p[1]]  # fmt: skip
    edges = list({(e.source, e.target): e for e in edges}.values())
    plan = layout(boxes, edges)
    places = list(plan.places.values())
    for i, a in enumerate(places):
        assert a.x - a.width / 2 >= 0 and a.x + a.width / 2 <= plan.width
        for b in places[:i]:
            apart_x = abs(a.x - b.x) * 2 >= a.width + b.width
            assert apart_x or abs(a.y - b.y) * 2 >= a.height + b.height
    for edge, path in zip(edges, plan.paths, strict=True):
        assert plan.places[edge.source].y < plan.places[edge.target].y
        assert all(upper[1] <= lower[1] for upper, lower in zip(path, path[1:], strict=False))


def test_lifetimes_do_not_share_memory(opened: ArtifactText) -> None:
    for bucket in opened.manifest.buckets:
        found = lives(bucket)
        assert len(found) == len(bucket.placements)
        for i, a in enumerate(found):
            for b in found[:i]:
                together = a.first <= b.last and b.first <= a.last
                overlap = a.offset < b.offset + b.num_bytes and b.offset < a.offset + a.num_bytes
                assert not (together and overlap), (a, b)


def test_sizes_in_words() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 96_577_024, 2_000_000_000)] == [
        "0 B", "999 B", "1.00 kB", "96.58 MB", "2.00 GB"
    ]  # fmt: skip
