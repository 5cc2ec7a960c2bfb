"""GGUF: the header parser against the gguf package, and the sentence for each kind of damage."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.graph.errors import VerifyError
from tilewright.models.gguf_file import read_gguf

FORMATS = "f32, f16, bf16, q8_0, q4_0, q4_1, q6_k"


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def record(name: str, extents: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor record; extents in the file's order, innermost first."""
    form = f"<I{len(extents)}QIQ"
    return text(name) + struct.pack(form, len(extents), *extents, kind, offset)


def file(
    pairs: tuple[bytes, ...] = (),
    records: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file out of any parts, right or wrong."""
    num_tensors, num_pairs = counts or (len(records), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)
    head += b"".join(pairs) + b"".join(records)
    return head + bytes(-len(head) % alignment) + data


F32, Q4_1, Q4_K = 0, 3, 12
ONE = record("x", (8,), F32, 0)


def refusal(folder: Path, data: bytes) -> str:
    """The sentence that reading this file ends with; the path reads PATH."""
    path = folder / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(VerifyError) as caught:
        read_gguf(path)
    return str(caught.value).replace(str(path), "PATH")


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_agrees_with_the_gguf_package(
    build_gguf: Callable[..., Path], arch: str, quant: str
) -> None:
    path = build_gguf(arch, quant=quant, metadata={"x.floats": [0.5, 2.0], "x.flag": True})
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    wanted = {k: v.contents() for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert dict(ours.metadata) == {
        key: tuple(value) if isinstance(value, list) else value for key, value in wanted.items()
    }
    assert list(ours.tensors) == [each.name for each in theirs.tensors]
    for each in theirs.tensors:
        mine = ours.tensors[each.name]
        assert mine.shape == tuple(int(extent) for extent in reversed(each.shape))
        assert mine.dtype == each.tensor_type.name.lower()
        assert (mine.offset, mine.num_bytes) == (each.data_offset, each.n_bytes)
        np.testing.assert_array_equal(mine.raw(), each.data.view(np.uint8).reshape(-1))
        want = gguf.quants.dequantize(each.data, each.tensor_type)
        np.testing.assert_array_equal(mine.dequantise(), want.reshape(mine.shape))


def test_versions_alignments_and_value_types(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    pairs = [pair(f"k{kind}", kind, struct.pack(f"<{code}", 3)) for kind, code in numbers.items()]
    for kind, code in numbers.items():
        values = struct.pack(f"<IQ3{code}", kind, 3, 1, 2, 3)
        pairs.append(pair(f"a{kind}", 9, values))
    pairs.append(pair("flags", 9, struct.pack("<IQ2B", 7, 2, 1, 0)))
    pairs.append(pair("general.alignment", 4, struct.pack("<I", 64)))
    records = (record("y", (2,), F32, 64), ONE)
    data = bytes(range(32)) + bytes(32) + bytes(8)
    path.write_bytes(file(tuple(pairs), records, data, version=2, alignment=64))
    found = read_gguf(path)
    assert all(found.metadata[f"k{kind}"] == 3 for kind in numbers)
    assert all(found.metadata[f"a{kind}"] == (1, 2, 3) for kind in numbers)
    assert found.metadata["flags"] == (True, False)
    assert found.tensors["x"].raw().tobytes() == bytes(range(32))
    assert found.tensors["y"].raw().size == 8


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"GG", "file 'PATH': truncated in the magic: got 2 bytes at 0, want 4"),
        (b"PK\3\4" + bytes(9), "file 'PATH': not a GGUF file: got magic b'PK\\x03\\x04', "
         "want b'GGUF'"),
        (file(version=1), "file 'PATH': unknown GGUF version: got 1, want 2 or 3"),
        (file(version=3 << 24), "file 'PATH': is big-endian, want a little-endian GGUF file"),
        (file(counts=(1 << 40, 0)), "file 'PATH': number of tensors is too large: "
         "got 1099511627776, want at most 1048576"),
        (file(counts=(0, 2))[:24], "file 'PATH': truncated in length of metadata key 0: "
         "got 0 bytes at 24, want 8"),
        (file((pair("k", 13, b""),)), "file 'PATH': metadata 'k' has an unknown type: got 13, "
         "want 0 to 12"),
        (file((pair("k", 7, b"\2"),)), "file 'PATH': metadata 'k' is too large: got 2, "
         "want at most 1"),
        (file((pair("k", 8, text(b"\xff")),)), "file 'PATH': metadata 'k' is not UTF-8 "
         "at byte 45"),
        (file((pair("k", 9, struct.pack("<IQ", 9, 0)),)), "file 'PATH': metadata 'k' is an array "
         "of an unsupported type: got 9, want numbers, booleans or strings"),
        (file((pair("k", 9, struct.pack("<IQQ", 8, 1, 99)),)), "file 'PATH': truncated in "
         "metadata 'k': got a string of 99 bytes at 49, want at most 7"),
        (file((pair("k", 0, b"\0"),) * 2), "file 'PATH': metadata 'k' appears more than once"),
        (file((pair("general.alignment", 4, struct.pack("<I", 24)),)), "file 'PATH': bad metadata "
         "'general.alignment': got 24, want a power of two up to 1048576"),
        (file((), (record("x", (), F32, 0),)), "tensor 'x' (PATH): bad number of dims: got 0, "
         "want 1 to 4"),
        (file((), (record("x", (8, 0), F32, 0),)), "tensor 'x' (PATH): bad shape: got [0, 8], "
         "want extents from 1 to 281474976710656"),
        (file((), (record("x", (256,), Q4_K, 0),)), "tensor 'x' (PATH): unsupported quantisation: "
         f"got q4_k, want one of {FORMATS}"),
        (file((), (record("x", (256,), 99, 0),)), "tensor 'x' (PATH): unsupported quantisation: "
         f"got type 99, want one of {FORMATS}"),
        (file((), (record("x", (48,), Q4_1, 0),)), "tensor 'x' (PATH): rows do not divide into "
         "blocks of q4_1: got 48 columns, want a multiple of 32"),
        (file((), (ONE, ONE), bytes(32)), "tensor 'x' (PATH): appears more than once"),
        (file((), (ONE, record("y", (8,), F32, 16)), bytes(64)), "tensor 'y' (PATH): is not "
         "aligned after tensor 'x': got offset 16, want 32"),
        (file((), (ONE, record("y", (8,), F32, 0)), bytes(64)), "tensor 'y' (PATH): overlaps "
         "tensor 'x': got offset 0, want 32"),
        (file((), (ONE, record("y", (8,), F32, 64)), bytes(96)), "tensor 'y' (PATH): leaves a "
         "hole after tensor 'x': got offset 64, want 32"),
        (file((), (ONE,), bytes(31)), "tensor 'x' (PATH): ends beyond the file: got a file of "
         "95 bytes, want at least 96; the file is truncated"),
        (file((), (ONE,), bytes(33)), "file 'PATH': trailing bytes after tensor 'x': "
         "got 97 bytes, want at most 96"),
    ],
)
def test_broken_file_gets_one_sentence(tmp_path: Path, data: bytes, sentence: str) -> None:
    assert refusal(tmp_path, data) == sentence


def test_padding_after_the_last_tensor_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for padding in (0, 24):
        path.write_bytes(file((), (record("x", (2,), F32, 0),), bytes(8 + padding)))
        assert read_gguf(path).tensors["x"].num_bytes == 8


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.gguf"


VALID = file(
    (
        pair("general.alignment", 4, struct.pack("<I", 32)),
        pair("words", 9, struct.pack("<IQ", 8, 2) + text("one") + text("two")),
        pair("numbers", 9, struct.pack("<IQ3h", 3, 3, 1, -2, 3)),
        pair("flag", 7, b"\1"),
    ),
    (ONE, record("y", (32, 2), Q4_1, 32)),
    bytes(32 + 40),
)


@settings(max_examples=200, deadline=None)
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
        found = read_gguf(scratch)
    except VerifyError as error:
        assert str(error).isprintable()
        return
    for each in found.tensors.values():
        assert each.raw().size == each.num_bytes
        assert each.dequantise().shape == each.shape
