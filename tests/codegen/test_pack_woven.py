"""Woven tiles of fp4 codes: nothing is lost; a shift and a mask of words give pairs of values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.contract_graphs import experts
from support.tiny import SETTINGS
from support.weights import RandomWeights, draw_floats, float_values
from tilewright.codegen.flags import Flags
from tilewright.codegen.pack import PACKINGS, WOVEN, pack_weights
from tilewright.codegen.pack_tiles import TILE_ROWS, pack_tiles
from tilewright.codegen.pack_woven import CODE_BYTES, SCALE_STEP, unweave, weave
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import first_candidate, plan_groups
from tilewright.graph.types import BlockFormat, TensorType, element_type
from tilewright.targets.registry import resolve

FP4, FP8 = (element_type(f"fp{text},scale=ue8m0]") for text in (
    "4_e2m1[g=32,axis=1", "8_e4m3[block=32x32"))  # fmt: skip


@given(n=st.integers(1, 150), spans=st.integers(1, 3), seed=st.integers(0, 99))
def test_weaving_is_inverted(n: int, spans: int, seed: int) -> None:
    assert isinstance(FP4, BlockFormat)
    raw = draw_floats(np.random.default_rng(seed), FP4, (n, 128 * spans))
    packed = pack_tiles("fp4_e2m1", raw, FP4.block)
    woven = weave(packed, n, 128 * spans)
    assert woven.size == packed.size
    np.testing.assert_array_equal(unweave(woven, n, 128 * spans), packed)


def bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_pairs_are_fields_of_values() -> None:
    """All eight pairs of two words, as the kernels take them (tw_woven_pairs)."""
    assert isinstance(FP4, BlockFormat)
    raw = draw_floats(np.random.default_rng(), FP4, (TILE_ROWS, 128))
    woven = weave(pack_tiles("fp4_e2m1", raw, FP4.block), TILE_ROWS, 128)
    words = woven[:CODE_BYTES].view("<u4").reshape(2, 2, TILE_ROWS, 4)  # half, group, row, word
    x, y = words[:, 0], words[:, 1]
    both = x & np.uint32(0x0C180C18) | y << 2 & np.uint32(0xF3E7F3E7)

    def turned(w: np.ndarray, bits: int) -> np.ndarray:
        return w >> bits | w << 32 - bits

    pairs = [
        [w << 6, w, turned(w, 6), last]
        for w, last in ((x, both << 2), (y, turned(both, 4)))
    ]
    scales = (woven[CODE_BYTES:] - np.uint8(SCALE_STEP)).reshape(TILE_ROWS, 4).astype(int)
    want = float_values(raw, FP4)
    for unit in range(4):
        half, which = divmod(unit, 2)
        for i, pair in enumerate(pairs[which]):
            fields = pair[half] & 0x81C081C0
            for j in range(2):
                values = bf16(fields >> 16 * j & 0xFFFF).astype(np.float64) * 2.0**126
                k = unit * 32 + i // 2 * 16 + i % 2 * 8 + 2 * np.arange(4) + j
                got = values * np.exp2(scales[:, unit, None] - 127.0)
                np.testing.assert_array_equal(got, want[:, k])


def test_experts_of_the_kernel_in_cuda_are_woven() -> None:
    target = resolve("sm90")[0]
    graph = lower(experts("fp4", n=24, k=128, shared=True, gated=False), Flags()).graph
    plans = plan_groups(graph, target, SETTINGS, first_candidate(target))
    source = RandomWeights(graph)
    (packed,) = pack_weights(graph, plans, source)
    assert packed.layout == WOVEN and packed.data.size == packed.num_bytes
    size = packed.num_bytes // 5
    third = packed.data[3 * size : 4 * size]
    dtype = packed.weight.type.dtype
    assert isinstance(dtype, BlockFormat)
    want = pack_tiles("fp4_e2m1", source.unpacked("w1.3", dtype), dtype.block)
    np.testing.assert_array_equal(unweave(third, 24, 128), want)


@pytest.mark.parametrize(("language", "layout"), [("cuda", WOVEN), ("triton", "blocks16")])
def test_a_layout_follows_the_language(language: str, layout: str) -> None:
    assert PACKINGS[language].layout(TensorType(FP4, (3, 64, 128))) == layout
    assert PACKINGS[language].layout(TensorType(FP8, (64, 128))) == "blocks16"
