"""Safetensors: what a right file gives, and the sentence that each broken one gets."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from tilewright.graph.errors import VerifyError
from tilewright.models import safetensors_file
from tilewright.models.safetensors_file import INDEX_NAME, read_safetensors, read_sharded

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.bias": np.array([1.5, -2.0], np.float16),
    "c": np.arange(4, dtype=np.int64),
}


def write(path: Path, header: object, data: bytes) -> Path:
    """A file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), at: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


def refused(path: Path, sentence: str) -> None:
    """Reading fails with exactly this sentence."""
    with pytest.raises(VerifyError, match=f"^{re.escape(sentence)}$"):
        read_safetensors(path)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    found = read_safetensors(path)
    assert {k: (v.dtype, v.shape) for k, v in found.items()} == {
        "a.weight": ("f32", (2, 3)),
        "b.bias": ("f16", (2,)),
        "c": ("i64", (4,)),
    }
    for name, array in TENSORS.items():
        assert found[name].raw().tobytes() == array.tobytes()
    np.testing.assert_array_equal(found["a.weight"].dequantise(), TENSORS["a.weight"])
    np.testing.assert_array_equal(found["b.bias"].dequantise(), [1.5, -2.0])
    assert not found["a.weight"].raw().flags.writeable
    assert not found["a.weight"].raw().flags.owndata


def test_bf16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"x": entry("BF16", [2], [0, 4])}, b"\x80\x3f\x01\x80")
    values = read_safetensors(path)["x"].dequantise()
    np.testing.assert_array_equal(values.view(np.uint32), [0x3F800000, 0x80010000])


def test_dtype_without_values_is_named_when_they_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"x": entry("F8_E4M3", [8])}, bytes(8))
    with pytest.raises(VerifyError) as caught:
        read_safetensors(path)["x"].dequantise()
    assert str(caught.value) == (
        f"tensor 'x' ({path}): no formula for its dtype: got f8_e4m3, "
        "want one of f32, f16, bf16, q8_0, q4_0, q4_1, q6_k"
    )


DTYPES = ", ".join(safetensors_file.DTYPES)
KEYS = "want the keys dtype, shape, data_offsets"


@pytest.mark.parametrize(
    ("header", "data", "sentence"),
    [
        (
            {"x": entry("F31")},
            bytes(8),
            f"tensor 'x' (PATH): unknown dtype: got 'F31', want one of {DTYPES}",
        ),
        (
            {"x": entry(shape=[2, -1])},
            bytes(8),
            "tensor 'x' (PATH): bad shape: got [2, -1], want a list of at most 8 whole numbers",
        ),
        (
            {"x": entry(shape=[True, 2])},
            bytes(8),
            "tensor 'x' (PATH): bad shape: got [True, 2], want a list of at most 8 whole numbers",
        ),
        (
            {"x": entry(shape=[3])},
            bytes(8),
            "tensor 'x' (PATH): offsets do not match the shape: got 8 bytes, want 12 for f32 [3]",
        ),
        (
            {"x": entry(at=[8, 0])},
            bytes(8),
            "tensor 'x' (PATH): bad offsets: got [8, 0], want [begin, end]",
        ),
        (
            {"x": entry()},
            bytes(7),
            "tensor 'x' (PATH): ends beyond the file: got an end at 8, want at most 7; "
            "the file is truncated or its header is wrong",
        ),
        (
            {"x": entry()},
            bytes(9),
            "file 'PATH': trailing bytes after tensor 'x': got 78 bytes, want 77",
        ),
        (
            {"x": entry(), "y": entry(at=[4, 12])},
            bytes(12),
            "tensor 'y' (PATH): overlaps tensor 'x': got a begin at 4, want 8",
        ),
        (
            {"x": entry(), "y": entry(at=[12, 20])},
            bytes(20),
            "tensor 'y' (PATH): leaves a hole after tensor 'x': got a begin at 12, want 8",
        ),
        ({"x": [1]}, b"", f"tensor 'x' (PATH): bad header entry: got [1], {KEYS}"),
        (
            b'{"x": 1, "x": 2}',
            b"",
            "header of 'PATH': key 'x' appears more than once",
        ),
        (b"[]", b"", "header of 'PATH': got JSON of type list, want an object"),
        (b"[" * 100_000, b"", "header of 'PATH': JSON nested too deeply"),
        (b"\xff", b"", "file 'PATH': header is not UTF-8 at byte 0"),
    ],
)
def test_broken_file_gets_one_sentence(
    tmp_path: Path, header: object, data: bytes, sentence: str
) -> None:
    path = write(tmp_path / "model.safetensors", header, data)
    refused(path, sentence.replace("PATH", str(path)))


def test_broken_lengths_get_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    refused(path, f"file '{path}': does not exist or is not a regular file")
    path.write_bytes(b"")
    refused(path, f"file '{path}': is empty: got 0 bytes, want a header")
    path.write_bytes(b"1234")
    refused(
        path,
        f"file '{path}': too short for a safetensors header: got 4 bytes, want at least 8",
    )
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    refused(
        path,
        f"file '{path}': header is longer than the file: got a header of {2**63} bytes, "
        "want at most 2",
    )
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 8)
    write(path, {"x": entry()}, bytes(8))
    refused(path, f"file '{path}': header is too long: got 61 bytes, want at most 8")


def shards(folder: Path, weight_map: Mapping[str, object]) -> Path:
    """Two shards, each with one tensor, and any index."""
    write(folder / "one.safetensors", {"x": entry()}, bytes(8))
    write(folder / "two.safetensors", {"y": entry()}, bytes(8))
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return folder / INDEX_NAME


RIGHT = {"x": "one.safetensors", "y": "two.safetensors"}


def test_sharded_set_is_one_set_of_tensors(tmp_path: Path) -> None:
    found = read_sharded(shards(tmp_path, RIGHT))
    assert {name: each.path.name for name, each in found.items()} == RIGHT


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        (
            {**RIGHT, "z": "three.safetensors", "w": "three.safetensors"},
            f"file 'DIR/three.safetensors': shard is missing: {INDEX_NAME} places 2 tensors in it",
        ),
        (
            {**RIGHT, "z": "two.safetensors"},
            f"tensor 'z' (DIR/{INDEX_NAME}): not in its shard 'two.safetensors'",
        ),
        (
            {"x": "two.safetensors", "y": "one.safetensors"},
            f"tensor 'x' (DIR/{INDEX_NAME}): in another shard than the index says: "
            "got 'one.safetensors', want 'two.safetensors'",
        ),
        (
            {"x": "../one.safetensors"},
            f"tensor 'x' (DIR/{INDEX_NAME}): bad shard: got '../one.safetensors', "
            "want the name of a file beside the index",
        ),
        (
            None,
            f"file 'DIR/{INDEX_NAME}': bad index: got weight_map None, "
            "want an object of tensor and file names",
        ),
    ],
)
def test_broken_index_gets_one_sentence(
    tmp_path: Path, weight_map: Mapping[str, object], sentence: str
) -> None:
    index = shards(tmp_path, weight_map)
    with pytest.raises(VerifyError) as caught:
        read_sharded(index)
    assert str(caught.value) == sentence.replace("DIR", str(tmp_path))


def test_tensor_in_two_shards_or_outside_the_index_is_named(tmp_path: Path) -> None:
    index = shards(tmp_path, RIGHT)
    two = tmp_path / "two.safetensors"
    write(two, {"y": entry(), "x": entry(at=[8, 16])}, bytes(16))
    with pytest.raises(VerifyError) as caught:
        read_sharded(index)
    assert str(caught.value) == f"tensor 'x' ({two}): also in shard 'one.safetensors'"
    write(two, {"y": entry(), "z": entry(at=[8, 16])}, bytes(16))
    with pytest.raises(VerifyError) as caught:
        read_sharded(index)
    assert str(caught.value) == f"tensor 'z' ({two}): not in the index {INDEX_NAME}"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


VALID = save(TENSORS)


@settings(max_examples=150, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=3),
    size=st.just(len(VALID)) | st.integers(0, len(VALID)),
)
def test_damage_raises_only_verify_errors(
    scratch: Path, flips: list[tuple[int, int]], size: int
) -> None:
    damaged = bytearray(VALID)
    for at, byte in flips:
        damaged[at] = byte
    scratch.write_bytes(damaged[:size])
    try:
        found = read_safetensors(scratch)
    except VerifyError as error:
        assert str(error).isprintable()
        return
    # What is accepted covers the file exactly.
    assert sum(each.num_bytes for each in found.values()) == sum(x.nbytes for x in TENSORS.values())
