"""Weights with scales of their own: values against independent tables, and what broken ones get."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilewright.graph.errors import VerifyError
from tilewright.models.float_codes import E2M1, E4M3, E8M0, power_of_two_bytes, scaled_values
from tilewright.models.record import TensorEntry
from tilewright.models.safetensors_file import read_safetensors
from tilewright.models.scales import join_scales, read_rows, read_scaled

Bytes = NDArray[np.uint8]
Stored = dict[str, tuple[str, list[int], Bytes]]


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Bits, with one pattern for all NaN."""
    return np.where(np.isnan(values), np.float32(np.nan), values).astype(np.float32).view(np.uint32)


def codes(dtype: type) -> NDArray[np.float32]:
    """Values of all codes by the tables of ml_dtypes."""
    count = 16 if dtype is ml_dtypes.float4_e2m1fn else 256
    return np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)


def test_every_code_has_its_value() -> None:
    for table, dtype in (
        (E4M3, ml_dtypes.float8_e4m3fn),
        (E2M1, ml_dtypes.float4_e2m1fn),
        (E8M0, ml_dtypes.float8_e8m0fnu),
    ):
        np.testing.assert_array_equal(bits(table), bits(codes(dtype)))


def test_every_fp4_code_times_every_scale() -> None:
    packed = np.tile(np.arange(16, dtype=np.uint8).reshape(8, 2), (1, 1))
    row = np.tile((packed[:, 0] | packed[:, 1] << 4).astype(np.uint8), (256, 2))
    scale = np.arange(256, dtype=np.uint8)[:, None]
    got = scaled_values("fp4_e2m1", row, scale, (1, 32))
    with np.errstate(over="ignore", invalid="ignore"):
        want = np.outer(codes(ml_dtypes.float8_e8m0fnu), np.tile(codes(ml_dtypes.float4_e2m1fn), 2))
    np.testing.assert_array_equal(bits(got), bits(want.astype(np.float32)))


def test_every_fp8_code_times_every_scale() -> None:
    row = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.arange(256, dtype=np.uint8)[:, None].repeat(8, 1)
    got = scaled_values("fp8_e4m3", row, scale, (1, 32))
    with np.errstate(over="ignore", invalid="ignore"):
        want = np.outer(codes(ml_dtypes.float8_e8m0fnu), codes(ml_dtypes.float8_e4m3fn))
    np.testing.assert_array_equal(bits(got), bits(want.astype(np.float32)))


@given(st.integers(-126, 127))
def test_fp32_scales_become_bytes(exponent: int) -> None:
    found = power_of_two_bytes(np.array([2.0**exponent], np.float32))
    assert found is not None and found.tolist() == [exponent + 127]
    for other in (1.5 * 2.0**exponent, -(2.0**exponent), 0.0, 2.0**-127, np.inf, np.nan):
        assert power_of_two_bytes(np.array([other], np.float32)) is None


def write(path: Path, tensors: Stored) -> dict[str, TensorEntry]:
    """Write a file by hand, so that tensors may have any dtype, and read its header."""
    header, at = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + raw.size]}
        at += raw.size
    text = json.dumps(header).encode()
    body = b"".join(raw.tobytes() for _, _, raw in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return read_safetensors(path)


def fp8(n: int, k: int, rows: int, cols: int, seed: int = 0) -> Stored:
    r = np.random.default_rng(seed)
    grid = [-(-n // rows), -(-k // cols)]
    values = (r.standard_normal(n * k) * 60).astype(ml_dtypes.float8_e4m3fn)
    return {
        "w.weight": ("F8_E4M3", [n, k], values.view(np.uint8)),
        "w.scale": ("F8_E8M0", grid, r.integers(100, 140, grid[0] * grid[1]).astype(np.uint8)),
    }


def fp4(n: int, k: int, dtype: str = "I8", seed: int = 0) -> Stored:
    r = np.random.default_rng(seed)
    shape = [n, k] if dtype == "F4" else [n, k // 2]
    return {
        "w.weight": (dtype, shape, r.integers(0, 256, n * k // 2).astype(np.uint8)),
        "w.scale": ("F8_E8M0", [n, k // 32], r.integers(100, 140, n * k // 32).astype(np.uint8)),
    }


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    block=st.sampled_from([(128, 128), (32, 32), (1, 32), (1, 64), (1, 128)]),
    seed=st.integers(0, 999),
)
def test_fp8_blocks_are_found_and_values_are_products(
    tmp_path_factory: pytest.TempPathFactory, n: int, k: int, block: tuple[int, int], seed: int
) -> None:
    stored = fp8(n, k, *block, seed)
    path = tmp_path_factory.mktemp("fp8") / "m"
    joined = join_scales(write(path, stored))
    entry = joined["w.weight"]
    assert list(joined) == ["w.weight"] and entry.shape == (n, k)
    scale = stored["w.scale"][2].view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    spread = scale.reshape(stored["w.scale"][1]).repeat(block[0], 0).repeat(block[1], 1)[:n, :k]
    values = stored["w.weight"][2].view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(n, k)
    np.testing.assert_array_equal(entry.dequantise(), values * spread)
    if block[0] == 1 and "g=" in entry.dtype:
        pieces = list(read_rows(entry))
        assert sum(len(c) for c, _ in pieces) == n


@pytest.mark.parametrize("dtype", ["I8", "U8", "F4"])
def test_fp4_has_the_even_column_in_the_low_nibble(tmp_path: Path, dtype: str) -> None:
    stored = fp4(5, 64, dtype)
    entry = join_scales(write(tmp_path / "m", stored))["w.weight"]
    assert entry.shape == (5, 64) and entry.dtype == "fp4_e2m1[g=32,axis=1,scale=ue8m0]"
    values, (got, scale) = entry.dequantise(), read_scaled(entry)
    assert got.shape == (5, 32) and scale.shape == (5, 2)
    table = codes(ml_dtypes.float4_e2m1fn)
    assert values[3, 40] == table[got[3, 20] & 15] * 2.0 ** (int(scale[3, 1]) - 127)
    assert values[3, 41] == table[got[3, 20] >> 4] * 2.0 ** (int(scale[3, 1]) - 127)


@pytest.mark.parametrize("name", ["w.scale", "w.weight_scale_inv", "w.weight_scale"])
def test_scales_are_found_under_their_names(tmp_path: Path, name: str) -> None:
    stored = fp8(64, 64, 32, 32)
    joined = join_scales(write(tmp_path / "m", {n.replace("w.scale", name): t
                                                for n, t in stored.items()}))  # fmt: skip
    assert list(joined) == ["w.weight"]


def test_fp32_powers_of_two_are_scales_and_other_numbers_are_not(tmp_path: Path) -> None:
    stored = fp8(64, 64, 32, 32)
    exact = np.array([0.5, 1, 2, 4], np.float32)
    stored["w.scale"] = ("F32", [2, 2], exact.view(np.uint8))
    entry = join_scales(write(tmp_path / "m", stored))["w.weight"]
    assert read_scaled(entry)[1].tolist() == [[126, 127], [128, 129]]
    stored["w.scale"] = ("F32", [2, 2], (exact * np.float32(1.1)).view(np.uint8))
    entry = join_scales(write(tmp_path / "n", stored))["w.weight"]
    sentence = f"tensor 'w.scale' ({tmp_path / 'n'}): holds a scale that is no normal power of two"
    with pytest.raises(VerifyError, match=f"^{re.escape(sentence)}$"):
        read_scaled(entry)


def without_scale(stored: Stored) -> None:
    del stored["w.scale"]


def reshaped(*shape: int) -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        dtype = stored["w.scale"][0]
        stored["w.scale"] = (dtype, list(shape), np.full(int(np.prod(shape)), 120, np.uint8))

    return change


def halves(stored: Stored) -> None:
    stored["w.scale"] = ("F16", [2, 2], np.zeros(8, np.uint8))


def flat(stored: Stored) -> None:
    stored["w.weight"] = ("F8_E4M3", [4096], np.zeros(4096, np.uint8))


BROKEN = {
    "tensor 'w.weight' (@): its scale is missing: got f8_e4m3 without a tensor 'w.scale'": (
        fp8(64, 64, 32, 32), without_scale),
    "tensor 'w.weight' (@): its scale is missing: got i8 without a tensor 'w.scale'": (
        fp4(64, 64), without_scale),
    "tensor 'w.scale' (@): shape does not fit 'w.weight' [64, 64]: got [2, 3], want [1, 1] for "
    "blocks of 128x128 or [2, 2] for blocks of 32x32 or [64, 1] for blocks of 1x128 or [64, 1] for "
    "blocks of 1x64 or [64, 2] for blocks of 1x32": (fp8(64, 64, 32, 32), reshaped(2, 3)),
    "tensor 'w.scale' (@): shape does not fit 'w.weight' [64, 64]: got [63, 2], want [64, 2] for "
    "blocks of 1x32": (fp4(64, 64), reshaped(63, 2)),
    "tensor 'w.scale' (@): is no scale of 'w.weight': got f16 [2, 2], want f8_e8m0 or u8 or f32 "
    "[rows, cols]": (fp8(64, 64, 32, 32), halves),
    "tensor 'w.weight' (@): quantised tensors are matrices: got [4096], want [n, k]": (
        fp8(64, 64, 32, 32), flat),
    "tensor 'w.weight' (@): rows do not divide into groups: got 48 columns of fp4, want a multiple "
    "of 32": (fp4(64, 48), reshaped(64, 2)),
}  # fmt: skip


@pytest.mark.parametrize("sentence", BROKEN)
def test_broken_headers_get_one_sentence(tmp_path: Path, sentence: str) -> None:
    stored, change = BROKEN[sentence]
    changed = dict(stored)
    change(changed)
    tensors = write(tmp_path / "m", changed)
    want = sentence.replace("@", str(tmp_path / "m"))
    with pytest.raises(VerifyError, match=f"^{re.escape(want)}$"):
        join_scales(tensors)


@pytest.mark.parametrize(
    ("name", "at", "value", "sentence"),
    [
        ("w.scale", 3, 255, "holds NaN: got scale 255 at [1, 1], want 0 to 254"),
        ("w.weight", 65, 127, "holds NaN: got fp8 code 127 at [1, 1], want a number"),
        ("w.weight", 66, 255, "holds NaN: got fp8 code 127 at [1, 2], want a number"),
    ],
)
def test_nan_is_refused_when_values_are_read(
    tmp_path: Path, name: str, at: int, value: int, sentence: str
) -> None:
    stored = {n: (d, s, raw.copy()) for n, (d, s, raw) in fp8(64, 64, 32, 32).items()}
    stored[name][2][at] = value
    entry = join_scales(write(tmp_path / "m", stored))["w.weight"]
    want = f"tensor '{name}' ({tmp_path / 'm'}): {sentence}"
    with pytest.raises(VerifyError, match=f"^{re.escape(want)}$"):
        read_scaled(entry)


def test_plain_tensors_and_stray_scales_stay(tmp_path: Path) -> None:
    plain: Stored = {
        "a.weight": ("BF16", [2, 2], np.zeros(8, np.uint8)),
        "b.scale": ("F8_E8M0", [1, 1], np.zeros(1, np.uint8)),
        "tid2eid": ("I64", [1, 2], np.zeros(16, np.uint8)),
    }
    tensors = write(tmp_path / "m", plain)
    assert join_scales(tensors) == tensors
