"""SIMD calls of the model that TileLang's shipped templates name: each against its documented
formula in numpy, through a kernel that loads, computes and stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.ascend import Array, Variants

pytestmark = pytest.mark.cpu
VL = 256  # bytes of a register
Formula = Callable[[Array], Array]
MASK32 = "vector_bool m = asc_create_mask_b32(PAT_M3);"
MASK8 = "vector_bool m = asc_create_mask_b8(PAT_M3);"
THIRDS = np.arange(64) % 3 == 0
# What stands in x: 64 numbers below 2^16 times 4, 64 below 32 (places), 128 words, the rest bytes.
U32, PLACES, WORDS = slice(0, 256), slice(256, 512), slice(512, 768)


def u32(x: Array, part: slice = U32) -> Array:
    return x[part].view(np.uint32)


def carried(x: Array) -> Array:
    a, b = u32(x).astype(np.uint64), u32(x, WORDS).astype(np.uint64)
    total = a + b + THIRDS
    return np.concatenate([total.astype(np.uint32), (total >> 32).astype(np.uint32)])


def borrowed(x: Array) -> Array:
    a, b = u32(x).astype(np.int64), u32(x, WORDS).astype(np.int64)
    rest = a - b - THIRDS
    return np.concatenate([rest.astype(np.uint32), (rest >= 0).astype(np.uint32)])


def product(x: Array) -> Array:
    whole = u32(x).astype(np.uint64) * u32(x, WORDS).astype(np.uint64)
    return np.concatenate([whole.astype(np.uint32), (whole >> np.uint64(32)).astype(np.uint32)])


def histogram(x: Array, *, least: int, cumulative: bool) -> Array:
    taken = x[:VL][np.arange(VL) % 3 == 0]
    values = np.arange(least, least + 128)
    counts = [(taken <= n).sum() if cumulative else (taken == n).sum() for n in values]
    return np.array(counts, np.uint16) + x[WORDS].view(np.uint16)


def squeezed(x: Array) -> Array:
    out = np.zeros(64, np.uint32)
    chosen = u32(x)[THIRDS]
    out[: len(chosen)] = chosen
    return out


def scattered(x: Array) -> Array:
    out = np.zeros(64, np.uint32)
    out[u32(x, PLACES)[THIRDS]] = u32(x)[THIRDS]
    return out


@dataclass(frozen=True)
class Call:
    """Statements on `x` and `y`, and what they leave in `y`."""

    body: str
    want: Formula


def load(call: str, formula: Formula, ctype: str = "uint16_t") -> Call:
    return Call(
        f"vector_{ctype} v; {call}(v, ({ctype}*)x); "
        f"asc_storealign(({ctype}*)y, v, 0, asc_create_mask_b8(PAT_ALL));",
        formula,
    )


def spread(x: Array, ctype: type, every: int) -> Array:
    out = np.zeros(VL // np.dtype(ctype).itemsize, ctype)
    out[::every] = x.view(ctype)[: len(out) // every]
    return out


HISTOGRAMS = {
    f"{kind}_histogram_bin{high}": Call(
        "vector_u8 v; vector_u16 d; asc_loadalign(v, x); asc_loadalign(d, (uint16_t*)(x + 512)); "
        f"{MASK8} asc_{kind}_histogram_bin{high}(d, v, m); "
        "asc_storealign((uint16_t*)y, d, 0, asc_create_mask_b8(PAT_ALL));",
        lambda x, kind=kind, high=high: histogram(  # type: ignore[misc]
            x, least=128 * high, cumulative=kind == "cumulative"
        ),
    )
    for kind in ("frequency", "cumulative")
    for high in (0, 1)
}
TWO = ("vector_u32 v, w, d, e; vector_bool c; asc_loadalign(v, (uint32_t*)x); "
       "asc_loadalign(w, (uint32_t*)(x + 512)); vector_bool all = asc_create_mask_b8(PAT_ALL); "
       f"{MASK32} ")  # fmt: skip
STORE = "asc_storealign((uint32_t*)y, d, 0, all); asc_storealign((uint32_t*)(y + 256), e, 0, all);"
BIT = "asc_duplicate_scalar(e, 1u, c); "
CALLS: Mapping[str, Call] = HISTOGRAMS | {
    "upsample": load("asc_loadalign_upsample", lambda x: x.view(np.uint16)[:64].repeat(2)),
    "downsample": load("asc_loadalign_downsample", lambda x: x.view(np.uint16)[:256:2]),
    "unpack": load("asc_loadalign_unpack", lambda x: spread(x, np.uint16, 2)),
    "unpack4": load("asc_loadalign_unpack4", lambda x: spread(x, np.uint8, 4), "uint8_t"),
    "brc_datablock": load("asc_loadalign_brc_datablock",
                          lambda x: np.tile(x.view(np.uint16)[:16], 8)),
    "brc_elem2datablock": load("asc_loadalign_brc_elem2datablock",
                               lambda x: x.view(np.uint32)[:8].repeat(8), "uint32_t"),
    "deintlv": Call(
        "vector_u16 a, b; asc_loadalign_deintlv(a, b, (uint16_t*)x); "
        "vector_bool all = asc_create_mask_b8(PAT_ALL); asc_storealign((uint16_t*)y, a, 0, all); "
        "asc_storealign((uint16_t*)(y + 256), b, 0, all);",
        lambda x: np.concatenate([x.view(np.uint16)[:256:2], x.view(np.uint16)[1:256:2]])),
    "intlv": Call(
        "vector_u16 a, b; asc_loadalign(a, (uint16_t*)x); asc_loadalign(b, (uint16_t*)(x + 256)); "
        "asc_storealign_intlv((uint16_t*)y, a, b);",
        lambda x: np.stack([x.view(np.uint16)[:128], x.view(np.uint16)[128:256]], 1).ravel()),
    "pack": Call(f"{TWO} asc_storealign_pack((uint32_t*)y, v, 0, all);",
                 lambda x: x[U32].view(np.uint16)[::2]),
    "pack_quarter": Call(f"{TWO} asc_storealign_pack_quarter((uint32_t*)y, v, 0, all);",
                         lambda x: x[U32][::4]),
    "predicates": Call(
        f"{TWO} asc_loadalign_upsample(c, (uint32_t*)x); asc_storealign((uint32_t*)y, c); "
        "asc_loadalign_downsample(c, (uint32_t*)x); asc_storealign((uint32_t*)(y + 32), c); "
        "asc_loadalign(c, (uint32_t*)x); asc_storealign_pack((uint32_t*)(y + 64), c);",
        lambda x: np.concatenate([
            np.packbits(bits, bitorder="little")
            for given in [np.unpackbits(x[:64], bitorder="little")]
            for bits in (given[:128].repeat(2), given[::2], given[:256:2])
        ])),
    "gather": Call(
        f"{TWO} asc_loadalign(w, (uint32_t*)(x + 256)); asc_gather(d, (uint32_t*)x, w, m); "
        f"asc_gather(e, v, w); {STORE}",
        lambda x: np.concatenate([u32(x)[u32(x, PLACES)] * THIRDS, u32(x)[u32(x, PLACES)]])),
    "gather_bytes": Call(
        "vector_u16 d, w; asc_loadalign(w, (uint16_t*)(x + 256)); asc_gather(d, x, w, "
        "asc_create_mask_b16(PAT_ALL)); asc_storealign((uint16_t*)y, d, 0, "
        "asc_create_mask_b16(PAT_ALL));",
        lambda x: x[x[PLACES].view(np.uint16)].astype(np.uint16)),
    "gather_datablock": Call(
        f"{TWO} asc_loadalign(w, (uint32_t*)(x + 256)); asc_mul_scalar(w, w, 32u, all); "
        "asc_gather_datablock(d, (uint32_t*)x, w); asc_gather_datablock(e, (uint32_t*)x, w, m); "
        f"{STORE}",
        lambda x: np.concatenate([
            found * chosen
            for found in [x.view(np.uint32).reshape(-1, 8)[u32(x, PLACES)[:8]].ravel()]
            for chosen in (1, THIRDS)
        ])),
    "scatter": Call(
        f"{TWO} asc_loadalign(w, (uint32_t*)(x + 256)); asc_duplicate_scalar(d, 0u, all); "
        "asc_storealign((uint32_t*)y, d, 0, all); asc_scatter((uint32_t*)y, v, w, m);",
        scattered),
    "squeeze": Call(f"{TWO} asc_squeeze(d, v, m); asc_storealign((uint32_t*)y, d, 0, all);",
                    squeezed),
    "unsqueeze": Call(f"{TWO} asc_unsqueeze(d, m); asc_storealign((uint32_t*)y, d, 0, all);",
                      lambda x: (np.cumsum(THIRDS) - THIRDS).astype(np.uint32)),
    "datablocks": Call(
        f"{TWO} asc_reduce_max_datablock(d, v, m); asc_reduce_min_datablock(e, v, m); {STORE}",
        lambda x: np.concatenate([
            np.pad([pick(row[chosen]) for row, chosen in zip(
                u32(x).reshape(8, 8), THIRDS.reshape(8, 8), strict=True)], (0, 56))
            for pick in (np.max, np.min)
        ]).astype(np.uint32)),
    "addc": Call(f"{TWO} asc_addc(c, d, v, w, m, all); {BIT} {STORE}", carried),
    "subc": Call(f"{TWO} asc_subc(c, d, v, w, m, all); {BIT} {STORE}", borrowed),
    "mull": Call(f"{TWO} asc_mull(d, e, v, w, all); {STORE}", product),
}  # fmt: skip

KERNEL = """#include "c_api/asc_simd.h"
__simd_vf__ inline void {name}_f(__ubuf__ uint8_t* x, __ubuf__ uint8_t* y) {{ {body} }}
extern "C" __global__ __vector__ void {name}(__gm__ uint8_t* x, __gm__ uint8_t* y, int32_t bytes) {{
  asc_init();
  asc_copy_gm2ub_align((__ubuf__ uint8_t*)0, x, 1, 1024, 0, 0, false, 0, 1024, 1024);
  asc_sync();
  {name}_f((__ubuf__ uint8_t*)0, (__ubuf__ uint8_t*)2048);
  asc_sync();
  asc_copy_ub2gm_align(y, (__ubuf__ uint8_t*)2048, 1, bytes, 0, bytes, bytes);
  asc_sync();
}}
"""


@dataclass(frozen=True)
class Case:
    arrays: list[Array]
    value: int
    blocks: int = 1


@pytest.fixture(scope="module")
def variants(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Variants:
    texts = {name: KERNEL.format(name=f"t_{name}", body=call.body) for name, call in CALLS.items()}
    return Variants(texts, kernel_cache, tmp_path_factory.mktemp("simd"))


def given(seed: int) -> Array:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, 1024).astype(np.uint8)
    low = rng.permutation(32)  # eight that name blocks come first
    x[PLACES] = np.append(low[:8], rng.permutation([*low[8:], *range(32, 64)])).astype(
        np.uint32
    ).view(np.uint8)
    return x


@pytest.mark.parametrize("name", CALLS)
def test_calls_compute_what_is_documented(variants: Variants, name: str) -> None:
    x = given(seed=len(name))
    want = CALLS[name].want(x)
    y = np.full(want.nbytes, 0xA5, np.uint8)
    for adversarial in (False, True):
        assert variants.run(name, Case([x, y], want.nbytes), adversarial=adversarial) == ""
        assert np.array_equal(y.view(want.dtype), want)
