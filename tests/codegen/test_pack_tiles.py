"""Tiles of float codes: nothing is lost, codes decode to their values, bad scales are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import triton_run
from support.contract_graphs import experts
from support.tiny import SETTINGS
from support.weights import RandomWeights, draw_floats, float_values
from tilewright.codegen.flags import Flags
from tilewright.codegen.pack import pack_weights
from tilewright.codegen.pack_cpu import Unpacked
from tilewright.codegen.pack_gpu import packed_bytes, refuses_format
from tilewright.codegen.pack_tiles import (
    matrix_bytes,
    pack_tiles,
    row_bytes,
    scales_at,
    unpack_tiles,
)
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import first_candidate, plan_groups
from tilewright.graph.errors import LowerError
from tilewright.graph.types import BlockFormat, TensorType, element_type
from tilewright.targets.registry import resolve

FORMATS = {
    "fp8": "fp8_e4m3[block=32x32,scale=ue8m0]", "fp8_128": "fp8_e4m3[block=128x128,scale=ue8m0]",
    "fp4": "fp4_e2m1[g=32,axis=1,scale=ue8m0]",
}  # fmt: skip


def format_of(stored: str) -> BlockFormat:
    found = element_type(FORMATS[stored])
    assert isinstance(found, BlockFormat)
    return found


@given(stored=st.sampled_from(list(FORMATS)), n=st.integers(1, 150), k=st.integers(1, 9))
def test_packing_is_inverted(stored: str, n: int, k: int) -> None:
    dtype, k = format_of(stored), 32 * k
    raw = draw_floats(np.random.default_rng(n * k), dtype, (n, k))
    packed = pack_tiles(dtype.name, raw, dtype.block)
    assert packed.size == matrix_bytes(dtype.name, n, k) and packed.size % 256 == 0
    found = unpack_tiles(dtype.name, packed, n, k, dtype.block)
    assert raw.codes is not None and found.codes is not None
    np.testing.assert_array_equal(found.codes, raw.codes)
    by_group = BlockFormat(dtype.name, dtype.code, (1, 32), dtype.scale)
    np.testing.assert_array_equal(float_values(found, by_group), float_values(raw, dtype))


@given(
    stored=st.sampled_from(["fp8", "fp8_128"]), n=st.integers(1, 150), k=st.integers(1, 9),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_rows_of_a_block_share_its_scale_unless_all_are_zeros(
    stored: str, n: int, k: int, seed: int
) -> None:
    """Kernels read the scale of one row for its whole block: rows of zeros keep it."""
    dtype, k = format_of(stored), 32 * k
    rng = np.random.default_rng(seed)
    raw = draw_floats(rng, dtype, (n, k))
    assert raw.codes is not None and raw.d is not None
    raw.codes[rng.random(n) < 0.5] = 0
    packed = pack_tiles(dtype.name, raw, dtype.block)
    found = unpack_tiles(dtype.name, packed, n, k, dtype.block).d
    assert found is not None
    rows, columns = dtype.block
    for i in range(0, n, rows):
        for j in range(0, k, columns):
            is_empty = not (raw.codes[i : i + rows, j : j + columns] & 127).any()
            wanted = 127 if is_empty else raw.d[i // rows, j // columns]
            assert (found[i : i + rows, j // 32 : (j + columns) // 32] == wanted).all()


_DECODE = """
import triton
import triton.language as tl
from tw_codes import *

@triton.jit
def decode(out, codes, scales, PAIRS: tl.constexpr):
    rows, at = tl.arange(0, 64)[:, None], tl.arange(0, 32)[None, :]
    words = tl.load(scales + tl.arange(0, 64))
    for group in tl.static_range(4):
        if PAIRS:
            some = tl.load(codes + group * 1024 + rows * 16 + tl.arange(0, 16)[None, :])
            code = tw_pair_codes(some, 64)
        else:
            code = tw_part_codes(tl.load(codes + tw_part_place(rows, group * 32 + at)), 64)
        value = code.to(tl.float32) * tw_group_scale(words, group)[:, None]
        tl.store(out + rows * 128 + group * 32 + at, value)
"""


@pytest.mark.parametrize("stored", ["fp8", "fp4"])
def test_every_code_decodes_to_its_value(stored: str, tmp_path: Path) -> None:
    """Times any scale that is admitted; pairs of fp4 codes to 2^-6 of it."""
    dtype, r = format_of(stored), np.random.default_rng(0)
    codes = r.permuted(np.arange(64 * 128) % 256).reshape(64, 128).astype(np.uint8)
    if stored == "fp8":
        codes[codes & 127 == 127] = 0
    else:
        codes = codes[:, ::2].copy()
    rows, cols = dtype.block
    groups = r.integers(28, 135, (-(-64 // rows), 128 // cols)).astype(np.uint8)
    raw = Unpacked(codes=codes, d=groups)
    packed = torch.from_numpy(pack_tiles(dtype.name, raw, dtype.block))
    start = scales_at(dtype.name, 64, 128)
    assert start == 64 * row_bytes(dtype.name)
    module = triton_run.load(_DECODE, "decode", tmp_path)
    tile, out = packed[:start], torch.full((64, 128), torch.nan)
    tile = tile if stored == "fp4" else tile.view(torch.float8_e4m3fn)
    module.decode[(1,)](out, tile, packed[start:].view(torch.int32), stored == "fp4")
    want = torch.from_numpy(float_values(raw, dtype))
    assert torch.equal(out * (64.0 if stored == "fp4" else 1.0), want)


def test_scales_out_of_range_are_refused_unless_they_scale_nothing() -> None:
    dtype = format_of("fp4")
    codes = np.full((3, 32), 0x21, np.uint8)
    for scale, text in ((135, "2^8"), (27, "2^-100"), (255, "2^128")):
        d = np.full((3, 2), 120, np.uint8)
        d[1, 1] = scale
        with pytest.raises(LowerError) as caught:
            pack_tiles(dtype.name, Unpacked(codes=codes, d=d), dtype.block)
        assert str(caught.value) == (
            f"weight format 'fp4_e2m1': scale out of range: got {text}, want 2^-99 to 2^7"
        )
        empty = codes.copy()
        empty[1, 16:] = 0x80  # zeros of both signs
        packed = pack_tiles(dtype.name, Unpacked(codes=empty, d=d), dtype.block)
        found = unpack_tiles(dtype.name, packed, 3, 64, dtype.block)
        assert found.d is not None and found.d[1, 1] == 127


@pytest.mark.parametrize(
    ("codes", "d", "text"),
    [
        (np.zeros((3, 40), np.uint8), np.zeros((1, 2), np.uint8),
         "codes do not fit: got uint8 [3, 40], want bytes of whole groups of 32 k"),
        (np.zeros((3, 64), np.uint8), np.zeros((1, 3), np.uint8),
         "scales do not fit the codes: got uint8 [1, 3], want uint8 [1, 2] for blocks of 32x32"),
        (np.zeros((3, 64), np.uint8), None, "codes or scales are missing"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(codes: Any, d: Any, text: str) -> None:
    with pytest.raises(LowerError) as caught:
        pack_tiles("fp8_e4m3", Unpacked(codes=codes, d=d), (32, 32))
    assert str(caught.value) == f"weight format 'fp8_e4m3': {text}"


def test_formats_of_tables_and_caches_are_no_matrices() -> None:
    for text, k, reason in (
        ("fp8_e4m3[g=32,axis=1,scale=ue8m0]", 64, "has no packed layout"),
        ("fp4_e2m1[g=16,axis=1,scale=fp8_e4m3]", 64, "has no packed layout"),
        (FORMATS["fp8"], 40, "k = 40 is no multiple of the group of 32"),
        ("q4_1[g=32,axis=1,scale=f16]", 48, "k = 48 is no multiple of the group of 32"),
    ):
        found = refuses_format(TensorType(element_type(text), (8, k)))
        assert found is not None and found.endswith(reason)
    assert refuses_format(TensorType(element_type(FORMATS["fp4"]), (4, 8, 64))) is None
    assert refuses_format(TensorType(element_type("bf16"), (8, 40))) is None


@pytest.mark.parametrize("stored", ["fp4", "bf16"])
def test_a_stack_is_packed_matrix_by_matrix(stored: str) -> None:
    target = resolve("sm90")[0]
    graph = lower(experts(stored, n=24, k=64, shared=True, gated=False), Flags()).graph
    plans = plan_groups(graph, target, SETTINGS, first_candidate(target))
    source = RandomWeights(graph)
    (packed,) = pack_weights(graph, plans, source)
    type_ = packed.weight.type
    raw = source.unpacked("w1.3", type_.dtype)
    size = packed.num_bytes // 5
    assert packed.data.size == packed.num_bytes
    third = packed.data[3 * size : 4 * size]
    if stored == "bf16":
        assert raw.values is not None and packed.layout == "row_major"
        np.testing.assert_array_equal(third.view(np.uint16), raw.values.reshape(-1))
        return
    assert packed.layout == "blocks16"
    assert size == matrix_bytes("fp4_e2m1", 24, 64) == packed_bytes(type_) // 5
    found = unpack_tiles("fp4_e2m1", third, 24, 64, (1, 32))
    assert raw.codes is not None and found.codes is not None
    np.testing.assert_array_equal(found.codes, raw.codes)
