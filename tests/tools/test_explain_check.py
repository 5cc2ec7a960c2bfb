"""`explain` and `check` on the tiny artifact, and on one whose sources were edited."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tilewright.tools.differences import TOLERANCE_BF16, TOLERANCE_F32, difference

from .conftest import Call

pytestmark = pytest.mark.cpu


def test_explain_a_fused_node(call: Call, artifact: Path) -> None:
    done = call("explain", artifact, "layers.1.k_proj")
    assert (done.code, done.err) == (0, "")
    rows = [(line[:10].strip(), line[12:]) for line in done.out.splitlines()]
    titles = [title for title, _ in rows]
    assert titles[:3] == ["model", "fused", "written in"]
    found = dict(rows)
    assert found["model"].startswith("layers.1.k_proj: f32[tokens, 32] = linear(")
    assert found["written in"].startswith("models/layers.py:")
    assert any(t == "rule" and "horizontal_contract" in text for t, text in rows)
    assert found["group"].startswith("layers.1.q_proj, contract of ")
    assert "layers.1.v_proj" in found["nodes"] and found["template"] == "contract"
    assert "accumulate=f32" in found["numerics"] and "panel_tile=" in found["schedule"]
    assert "tokens_1" in found["kernel"] or "tokens_1" in done.out
    assert Path(found["source"]).is_file()


def test_explain_as_json_says_what_the_text_says(call: Call, artifact: Path) -> None:
    plain = call("explain", artifact, "layers.1.k_proj")
    tree = json.loads(call("explain", artifact, "layers.1.k_proj", "--json").out)
    assert tree["node"] == "layers.1.k_proj"
    lines = [f"{fact['title']:>10}  {fact['text']}" for fact in tree["facts"]]
    assert " ".join(lines).split() == plain.out.split()


def test_explain_says_why_earlier_templates_refused(call: Call, artifact: Path) -> None:
    done = call("explain", artifact, "argmax")
    assert "refused by  contract: takes contract groups\n" in done.out


def test_explain_nodes_without_kernel(call: Call, artifact: Path) -> None:
    view = call("explain", artifact, "layers.0.split_heads")
    assert "none: it is a view of 'layers.0.q_proj', which owns the buffer\n" in view.out


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ("layers.0.kproj", "did you mean layers.0.k_proj, layers.1.k_proj, layers.0.v_proj"),
        ("%%%", "have embedding, "),
    ],
)
def test_explain_an_unknown_node(call: Call, artifact: Path, node: str, sentence: str) -> None:
    done = call("explain", artifact, node)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: node '{node}': unknown among ")
    assert f" nodes: {sentence}" in done.err and done.err.count("\n") == 1


def test_explain_an_operand(call: Call, artifact: Path) -> None:
    done = call("explain", artifact, "slots")
    assert done.err == (
        "error: node 'slots': is an operand, not a node: it is read by layers.0.append_k, "
        "layers.0.append_v, layers.1.append_k, layers.1.append_v\n"
    )


def test_check_compares_every_kernel(call: Call, artifact: Path) -> None:
    done = call("check", artifact, "--tokens", "5,6,7,8,9", "--json")
    assert (done.code, done.err) == (0, "")
    (report,) = done.lines
    assert report["is_within"] is True
    kernels = report["kernels"]
    assert isinstance(kernels, list)
    symbols = {k["symbol"] for k in json.loads((artifact / "manifest.json").read_text())["kernels"]}
    assert {k["kernel"] for k in kernels} == symbols
    assert all(k["relative"] <= k["tolerance"] <= TOLERANCE_F32 for k in kernels)
    assert any(0 < k["absolute"] for k in kernels)
    per_step = len(json.loads((artifact / "manifest.json").read_text())["buckets"][0]["launches"])
    steps = 5  # 4 tokens and 1 of the prompt, 3 decodes
    assert sum(k["num_launches"] for k in kernels) == steps * per_step


def test_check_as_text(call: Call, artifact: Path) -> None:
    done = call("check", artifact)
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith("weights have their digest; ")
    assert "BEYOND" not in done.out


def test_check_finds_a_kernel_that_computes_something_else(
    call: Call, artifact: Path, tmp_path: Path
) -> None:
    """Edit the graph that kernels are compared with: as wrong as an edited kernel would be."""
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    graph, manifest = copy / "sources" / "fused.txt", copy / "manifest.json"
    text = graph.read_text()
    assert "silu(layers.1.gate_proj)" in text
    graph.write_text(text.replace("silu(layers.1.gate_proj)", "sigmoid(layers.1.gate_proj)"))
    tree = json.loads(manifest.read_text())
    tree["digests"]["sources/fused.txt"] = hashlib.sha256(graph.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(tree))
    done = call("check", copy, "--tokens", "5,6", "--json")
    assert done.code == 1
    beyond = [k["group"] for k in done.lines[0]["kernels"] if not k["is_within"]]  # type: ignore
    assert set(beyond) == {"layers.1.gate_proj"}
    assert "BEYOND" in call("check", copy, "--tokens", "5,6").out


def test_check_finds_damaged_weights(call: Call, artifact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    weights = copy / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[100] ^= 1
    weights.write_bytes(data)
    done = call("check", copy)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(
        f"error: artifact '{copy}': file 'weights.bin' is damaged: got SHA-256 "
    )


def test_check_refuses_bad_tokens(call: Call, artifact: Path) -> None:
    done = call("check", artifact, "--tokens", "5,900")
    assert (done.code, done.err) == (1, "error: option '--tokens': got token 900, want 0 to 261\n")


def test_differences() -> None:
    want = torch.tensor([[1.0, -2.0], [0.0, 0.5]], dtype=torch.float64)
    got = want + torch.tensor([[0.0, 0.5], [0.25, 0.0]])
    found = difference(got, want, rounds=True)
    assert (found.absolute, found.relative) == (0.5, 0.5)
    assert found.units == 0.25 / 2.0**-8  # the step of bf16 at 0.5
    assert found.tolerance == TOLERANCE_BF16 and not found.is_within
    assert difference(want, want, rounds=False).is_within
    nan = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    assert difference(nan, nan, rounds=False).absolute == 0.0
    assert difference(nan, torch.ones(2).double(), rounds=False).absolute == math.inf
    assert not difference(torch.tensor([1, 2]), torch.tensor([1, 3]), rounds=True).is_within
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 2]), rounds=True).is_within
