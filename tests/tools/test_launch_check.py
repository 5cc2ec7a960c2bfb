"""What `check` compares: packed weights and rows, codes, selections; launches that are wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch

from support.contract_graphs import experts, only_body
from tilewright.codegen.arguments import argument_names
from tilewright.codegen.body import Body
from tilewright.codegen.pack_ascend import pack_coded
from tilewright.codegen.pack_cpu import Unpacked, pack_panels
from tilewright.codegen.pack_gpu import pack_matrix
from tilewright.codegen.pack_woven import weave
from tilewright.graph import Graph
from tilewright.graph.ops.quant import quantise_dequantise
from tilewright.graph.text import parse_graph
from tilewright.graph.types import BlockFormat, element_type
from tilewright.models.float_codes import E4M3, scaled_values
from tilewright.runtime.artifact import LaunchRecord
from tilewright.tools.differences import coded_difference
from tilewright.tools.launch_check import LaunchCheck
from tilewright.tools.launch_weights import PACKED_FOR, weight_values
from tilewright.tools.packed_rows import row_values
from tilewright.tools.selection_check import choice_difference

FP8, MXFP4 = "fp8_e4m3[block=32x32,scale=ue8m0]", "fp4_e2m1[g=32,axis=1,scale=ue8m0]"
ROWS = "fp8_e4m3[g=32,axis=1,scale=ue8m0]"
ACTIVATIONS = (ROWS, "fp4_e2m1[g=32,axis=1,scale=ue8m0]", "fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]")
GRAPH = f"""graph one
dim tokens batch 1..8
dim pages batch 1..8
input x: f32[tokens, 64]
input ids: i32[tokens, 2]
input slots: i32[tokens]
state s: {ROWS}[pages, 4, 64] window 1 4
weight w: {MXFP4}[3, 20, 64] = stack("a", "b", "c")
node y: f32[tokens, 2, 20] = expert_linear(x, w, ids)
node q: {ROWS}[tokens, 64] = quantise(x, dtype="{ROWS}")
node n: {ROWS}[pages, 4, 64] = append_rows(s, q, slots)
output y = y
next s = n
"""
RANKING = """graph t
dim tokens batch 1..8
input x: f32[tokens, 4]
node i: i32[tokens, 2] = top_k_indices(x, k=2)
output i = i
"""


def format_of(text: str) -> BlockFormat:
    found = element_type(text)
    assert isinstance(found, BlockFormat)
    return found


def drawn(rng: np.random.Generator, text: str, n: int, k: int) -> tuple[Unpacked, Any]:
    """A random matrix of a float format, and its values."""
    kind = format_of(text)
    rows, cols = kind.block
    codes = rng.integers(0, 256, (n, k * kind.code.bits // 8)).astype(np.uint8)
    if kind.code.bits == 8:
        codes[codes & 127 == 127] = 0x7E
    d = rng.integers(120, 130, (-(-n // rows), -(-k // cols))).astype(np.uint8)
    return Unpacked(codes=codes, d=d), scaled_values(kind.name, codes, d, kind.block)


@pytest.mark.parametrize("text", [FP8, MXFP4])
@pytest.mark.parametrize("packing", PACKED_FOR)
def test_values_of_stacks(text: str, packing: str) -> None:
    rng, kind = np.random.default_rng(), format_of(text)
    graph = parse_graph(GRAPH.replace(f"{MXFP4}[3", f"{text}[3"))
    parts, values = zip(*(drawn(rng, text, 20, 64) for _ in range(3)), strict=True)
    name = "fp8" if kind.code.bits == 8 else "fp4"
    pack = {
        "cpu": lambda p: pack_panels(name, codes=p.codes, d=p.d, block=kind.block),
        "gpu": lambda p: pack_matrix(kind, p),
        "hopper": lambda p: pack_matrix(kind, p),
        "ascend": lambda p: pack_coded(p, kind),
    }[packing]
    packed = np.concatenate([pack(p) for p in parts])
    got = weight_values(graph, "w", packed, packing=packing)
    assert got is not None
    np.testing.assert_array_equal(got, np.stack(values))


def test_values_of_woven_stacks() -> None:
    """Experts that the kernel in CUDA takes, in bodies for SM90 alone."""
    rng, kind = np.random.default_rng(), format_of(MXFP4)
    graph = only_body(experts("fp4", n=20, k=128, shared=True, gated=False)).graph
    parts, values = zip(*(drawn(rng, MXFP4, 20, 128) for _ in range(5)), strict=True)
    packed = [pack_matrix(kind, p) for p in parts]
    (weight,) = graph.weights
    woven = np.concatenate([weave(p, 20, 128) for p in packed])
    for packing, given in (("hopper", woven), ("gpu", np.concatenate(packed))):
        got = weight_values(graph, weight.name, given, packing=packing)
        assert got is not None
        np.testing.assert_array_equal(got, np.stack(values))


def test_rows_with_a_tail_cut_groups_and_padding() -> None:
    rng, kind = np.random.default_rng(), format_of(
        "fp8_e4m3[g=64,axis=1,scale=ue8m0,tail=8xbf16]")  # fmt: skip
    codes = rng.integers(0, 127, (3, 100)).astype(np.uint8)
    scales = rng.integers(120, 130, (3, 2)).astype(np.uint8)
    tail = rng.standard_normal((3, 8)).astype(np.float32).view(np.uint32) >> 16
    rows = np.concatenate((codes, tail.astype("<u2").view(np.uint8), scales,
                           np.full((3, 6), 255, np.uint8)), 1)  # fmt: skip
    assert rows.shape[1] == kind.row_bytes(108)
    got = row_values(kind, rows, 108)
    spread = np.exp2(scales.astype(np.float32) - 127).repeat(64, 1)[:, :100]
    np.testing.assert_array_equal(got[:, :100], E4M3[codes] * spread)
    np.testing.assert_array_equal(got[:, 100:], (tail << 16).view(np.float32))


@pytest.mark.parametrize("text", ACTIVATIONS)
def test_codes_may_tip_but_not_many_and_not_far(text: str) -> None:
    kind = format_of(text)
    x = torch.randn(50, 64, dtype=torch.float64)
    want = quantise_dequantise(x, kind)
    other = quantise_dequantise(x * (1 + 2.0**-8 * torch.rand_like(x)), kind)
    assert coded_difference(want, want, kind).tipped == 0
    assert coded_difference(want[:0], want[:0], kind).is_within
    few = torch.where(torch.rand_like(x) < 0.004, other, want)
    assert coded_difference(few, want, kind).is_within
    half = torch.where(want == want.abs().amax(-1, keepdim=True), want, want * 0.5)
    assert not coded_difference(half, want, kind).is_within
    far = want.clone()
    far[3, 5] = want[3].abs().amax() * 3
    assert not coded_difference(far, want, kind).is_within
    assert not coded_difference(want * math.nan, want, kind).is_within


def test_selections_differ_only_where_scores_tie() -> None:
    graph = parse_graph(RANKING)
    x = torch.tensor([[1.0, 5.0, 5.0 - 1e-6, 0.0]], dtype=torch.float64)
    for got, is_within, ties in (([1, 2], True, 0), ([2, 1], True, 1), ([1, 0], False, 0),
                                 ([1, 1], False, 0), ([1, 9], False, 0)):  # fmt: skip
        found = choice_difference(graph.node["i"], [x], torch.tensor([got]), torch.tensor([[1, 2]]))
        assert (found.is_within, found.ties) == (is_within, ties)


@dataclass(frozen=True)
class Launch:
    """Stands for the record of a launch."""

    kernel: str = "kernel"
    group: str = "group"


def watched(fault: str) -> bool:
    """Run a launch by the reference with one fault in what it wrote or read."""
    rng, graph = np.random.default_rng(), parse_graph(GRAPH)
    check = LaunchCheck(graph)
    check._bodies["group"] = Body(graph, {}, {}, ())
    parts, values = zip(*(drawn(rng, MXFP4, 20, 64) for _ in range(3)), strict=True)
    packed = np.concatenate([pack_panels("fp4", codes=p.codes, d=p.d, block=(1, 32))
                             for p in parts])  # fmt: skip
    x = (rng.integers(1, 8, (5, 64)) * 64.0).astype(np.float32)  # exact codes of scale 1
    ids = np.arange(10, dtype=np.int32).reshape(5, 2) % 3
    y = np.stack([[values[e] @ row for e in pair] for pair, row in zip(ids, x, strict=True)])
    state = np.zeros((2, 4, 66), np.uint8)
    arrays = {"y": np.zeros((5, 2, 20), np.float32), "s": state, "x": x, "ids": ids,
              "slots": np.arange(5, dtype=np.int32), "w": packed}  # fmt: skip
    given = [arrays[n] for n in argument_names(cast(Graph, graph))]
    ints = [{"tokens": 5, "pages": 2}[d.name] for d in graph.dims]
    record = cast(LaunchRecord, Launch())
    if fault == "weight":
        packed[5] = 140  # a scale of the first expert, far above all that are drawn
    check.before(record, given, ints)
    arrays["y"][...] = y
    codes = np.searchsorted(E4M3[:127], x).astype(np.uint8)
    flat = state.reshape(8, 66)
    flat[:5, :64], flat[:5, 64:] = codes, 127
    if fault == "output":
        arrays["y"][3, 1, 7] += np.abs(y).max()
    if fault == "row":
        flat[2, 9] ^= 0x40
    if fault == "scale":
        flat[4, 65] += 2
    if fault == "other row":
        flat[6, 3] = 0x38
    check.after(record, given, ints)
    return check.worst["kernel"].is_within


def test_a_right_launch_passes() -> None:
    assert watched("none")


@pytest.mark.parametrize("fault", ["weight", "output", "row", "scale", "other row"])
def test_a_wrong_launch_fails(fault: str) -> None:
    assert not watched(fault)
