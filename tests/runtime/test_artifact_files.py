"""An artifact loads only if everything about it is right; each refusal is one sentence."""

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.runtime.artifact_files import load_artifact, verify_weights
from tilewright.runtime.devices import cpu
from tilewright.runtime.errors import ArtifactError

pytestmark = pytest.mark.cpu
Write = Callable[..., Path]
Tree = dict[str, Any]


def refusal(root: Path) -> str:
    """Load, expect an error, and return its text after the artifact's name."""
    with pytest.raises(ArtifactError) as caught:
        load_artifact(root)
    start = f"artifact '{root}': "
    text = str(caught.value)
    assert text.startswith(start) and "\n" not in text
    return text.removeprefix(start)


def test_weights_are_read_only_views(write_artifact: Write) -> None:
    artifact = load_artifact(write_artifact())
    weight = artifact.weights["w"]
    np.testing.assert_array_equal(weight, np.arange(1, 9, dtype=np.float32))
    assert not weight.flags.writeable and weight.ctypes.data % 64 == 0
    verify_weights(artifact)


def test_packed_weight_is_bytes(write_artifact: Write) -> None:
    def edit(tree: Tree) -> None:
        tree["weights"][0].update(layout="panels16", format="q4_1[g=32,axis=1]")

    weight = load_artifact(write_artifact(edit)).weights["w"]
    assert weight.dtype == np.uint8 and weight.shape == (32,)


def test_kernels_are_callable_one_by_one(write_artifact: Write) -> None:
    import torch

    scale = load_artifact(write_artifact()).library.module["scale"]
    x, w, y = torch.rand(3, 8), torch.rand(8), torch.zeros(3, 8)
    scale(y, x, w, 3)
    assert torch.equal(y, x * w)
    with pytest.raises(ValueError) as caught:
        scale(y, x, w, 4)
    assert str(caught.value) == "kernel 'scale': tensor 'y': extent of axis 0: got 3, want 4"


def test_wrong_weight_bytes_are_found_by_the_full_check(write_artifact: Write) -> None:
    root = write_artifact()
    artifact = load_artifact(root)
    data = bytearray((root / "weights.bin").read_bytes())
    data[70] ^= 1
    (root / "weights.bin").write_bytes(data)
    with pytest.raises(ArtifactError, match="file 'weights.bin' is damaged: got SHA-256 "):
        verify_weights(artifact)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("manifest.json", "file 'manifest.json' is missing"),
        ("weights.bin", "file 'weights.bin' is missing"),
        ("kernels/kernels.so", "file 'kernels/kernels.so' is missing"),
        ("sources/kernels.cpp", "file 'sources/kernels.cpp' is missing"),
    ],
)
def test_missing_file(write_artifact: Write, name: str, text: str) -> None:
    root = write_artifact()
    (root / name).unlink()
    assert refusal(root) == text


def test_missing_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == "there is no such directory"


@pytest.mark.parametrize("wrong", [None, 5, b"out", ["out"]])
def test_what_is_no_path_is_refused(wrong: Any) -> None:
    with pytest.raises(ArtifactError) as caught:
        load_artifact(wrong)
    kind = type(wrong).__name__
    assert str(caught.value) == f"artifact: wrong type: got {kind}, want a path"


def test_an_empty_path_is_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError) as caught:
        load_artifact("")
    assert str(caught.value) == (
        "artifact '': got an empty path, want the directory of an artifact"
    )


@pytest.mark.parametrize("name", ["kernels/kernels.so", "sources/kernels.cpp"])
@pytest.mark.parametrize("change", ["edit", "truncate"])
def test_edited_file(write_artifact: Write, name: str, change: str) -> None:
    root = write_artifact()
    data = (root / name).read_bytes()
    (root / name).write_bytes(data[:-1] if change == "truncate" else data[:-1] + b"?")
    text = refusal(root)
    assert text.startswith(f"file '{name}' was edited or damaged: got SHA-256 ")
    assert text.endswith("; compile the model again")


def test_truncated_weights(write_artifact: Write) -> None:
    root = write_artifact()
    (root / "weights.bin").write_bytes(bytes(127))
    assert refusal(root) == (
        "file 'weights.bin' has the wrong size: got 127 bytes, want 128; compile the model again"
    )


def test_truncated_manifest(write_artifact: Write) -> None:
    root = write_artifact()
    text = (root / "manifest.json").read_text()
    (root / "manifest.json").write_text(text[: len(text) // 2])
    assert refusal(root).startswith("file 'manifest.json' is not JSON: ")
    (root / "manifest.json").write_text("[" * 100_000)
    assert refusal(root).startswith("file 'manifest.json' is not JSON: ")
    (root / "manifest.json").write_bytes(b"\xff\xfe\xff")
    assert refusal(root).startswith("file 'manifest.json' is not JSON: ")
    (root / "manifest.json").write_text("[]")
    assert refusal(root) == "file 'manifest.json': got list, want an object"
    (root / "manifest.json").write_text('{"format": 1, "format": 1}')
    assert refusal(root) == "file 'manifest.json': field 'format' is given twice"


def test_oversized_manifest(write_artifact: Write) -> None:
    root = write_artifact()
    with (root / "manifest.json").open("r+b") as file:
        file.truncate((64 << 20) + 1)  # sparse: takes no disk
    assert refusal(root) == (
        "file 'manifest.json' is too large: got 67108865 bytes, want at most 67108864"
    )


def test_link_out_of_the_artifact(write_artifact: Write, tmp_path: Path) -> None:
    root = write_artifact()
    (root / "weights.bin").rename(tmp_path / "elsewhere.bin")
    (root / "weights.bin").symlink_to(tmp_path / "elsewhere.bin")
    assert refusal(root) == "file 'weights.bin': links outside the artifact"


def test_library_without_the_host_part(write_artifact: Write) -> None:
    import hashlib
    import subprocess

    def edit(tree: Tree) -> None:
        tree["kernels"] = []
        for bucket in tree["buckets"]:
            bucket["launches"] = []

    root = write_artifact(edit)
    source = root / "empty.cpp"
    source.write_text("int nothing;")
    library = root / "kernels" / "kernels.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    tree = json.loads((root / "manifest.json").read_text())
    tree["digests"]["kernels/kernels.so"] = hashlib.sha256(library.read_bytes()).hexdigest()
    (root / "manifest.json").write_text(json.dumps(tree))
    text = refusal(root)
    assert text.startswith("library 'kernels.so': ")
    assert text.endswith("undefined symbol: tw_pool_create")


def test_cpu_feature_is_named(write_artifact: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx2"}))

    def edit(tree: Tree) -> None:
        tree["target"].update(variant="x86-64-v4", features=["avx2", "avx512f"])

    assert refusal(write_artifact(edit)) == (
        "CPU feature 'avx512f' is missing on this machine: want variant x86-64-v4; "
        "compile the model again for this machine"
    )


def test_other_architecture(write_artifact: Write) -> None:
    other = "x86-64-v3" if platform.machine() == "aarch64" else "aarch64"
    want = other.replace("x86-64-v3", "x86_64")
    text = refusal(write_artifact(lambda tree: tree["target"].update(variant=other)))
    assert text == (
        f"variant '{other}' is for another architecture: got {platform.machine()}, "
        f"want {want}; compile the model again on this machine"
    )


def place(tree: Tree) -> Tree:
    placement: Tree = tree["buckets"][1]["placements"][0]
    return placement


def state(**changes: Any) -> Callable[[Tree], None]:
    return lambda tree: tree["states"][0].update(changes)


def window_state(**changes: Any) -> Callable[[Tree], None]:
    return state(scope="window", tables="window_tables", **changes)


def second_weight(tree: Tree) -> None:
    tree["weights"].append({**tree["weights"][0], "name": "v"})


def second_buffer(tree: Tree) -> None:
    tree["buffers"].append({**tree["buffers"][0], "name": "g"})
    for bucket in tree["buckets"]:
        bucket["placements"].append({**bucket["placements"][0], "name": "g"})
        bucket["launches"][1]["arguments"].insert(0, {"kind": "buffer", "name": "g"})


def launch(tree: Tree, launch_id: int) -> Tree:
    found: Tree = tree["buckets"][0]["launches"][launch_id]
    return found


def deep(levels: int) -> Any:
    extent: Any = 1
    for _ in range(levels):
        extent = ["add", extent]
    return extent


EDITS: dict[str, Callable[[Tree], Any]] = {
    "format 2 is not supported: want 3; compile the model again": lambda t: t.update(format=2),
    "format '3' is not supported: want 3; compile the model again": lambda t: t.update(format="3"),
    "abi other is not supported: want tvm-ffi/1; compile the model again": lambda t: t.update(
        abi="other"
    ),
    "manifest 'manifest': field 'mode' is missing": lambda t: t.pop("mode"),
    "state 'sums': scope 'ring' is unknown: have block, window": state(scope="ring"),
    "state 'sums': positions_per_entry: got 0, want at least 1": state(positions_per_entry=0),
    "state 'sums': tables 'window_tables' are not of scope block: have block_tables":
        state(tables="window_tables"),
    "state 'sums': window: got 0, want at least 1": window_state(),
    "state 'sums': group: got 0, want at least 1": state(group=0),
    "state 'sums': window of scope block: got 8 positions, want 0": state(window=8),
    "state 'sums': group: got 9, want at most 8": window_state(window=8, group=9),
    "state 'sums': group: got 2, want at most 1": state(group=2),
    "manifest 'manifest.model.vocab_size': got '8', want int": lambda t: t["model"].update(
        vocab_size="8"
    ),
    "model 'vocab_size': got 0, want at least 1": lambda t: t["model"].update(vocab_size=0),
    "model 'max_context': got -1, want at least 1": lambda t: t["model"].update(max_context=-1),
    "model 'vocab_size': differs from the output 'logits': got 8, want [9]": lambda t: t[
        "outputs"
    ].append({"name": "logits", "dtype": "f32", "shape": ["tokens", 9]}),
    "model 'eos_ids': outside the vocabulary: got 8, want 0 to 7": lambda t: t["model"].update(
        eos_ids=[0, 8]
    ),
    "model 'bos_id': outside the vocabulary: got -1, want 0 to 7": lambda t: t["model"].update(
        bos_id=-1
    ),
    "mode 'quick': unknown: have deterministic, fast": lambda t: t.update(mode="quick"),
    "target 'npu': no device runs it: have cpu, sm90, sm100, ascend950": (
        lambda t: t["target"].update(name="npu")
    ),
    "dim 'tokens': got role 'time', want batch or context": lambda t: t["dims"][0].update(
        role="time"
    ),
    "dim 'tokens': got bounds 2 to 1, want 0 <= lower <= upper": lambda t: t["dims"][0].update(
        lower=2, upper=1
    ),
    "kernel 'scale': declared twice": lambda t: t["kernels"].append(t["kernels"][0]),
    "buffer 'h': declared twice": lambda t: t["buffers"].append(t["buffers"][0]),
    "kernel 'a b': the symbol is not a C identifier": lambda t: t["kernels"][0].update(
        symbol="a b"
    ),
    "buffer 'h': dtype 'f31' is unknown: have f64, f32, f16, bf16, fp8_e4m3, fp8_e5m2, ue8m0, "
    "i64, i32, i8, u8": lambda t: t["buffers"][0].update(dtype="f31"),
    "buffer 'h': dim 'rows' is unknown: have tokens, slots": lambda t: t["buffers"][0].update(
        shape=["rows"]
    ),
    "buffer 'h': got extent -1, want an int from 0 to 2^62": lambda t: t["buffers"][0].update(
        shape=[-1]
    ),
    "buffer 'h': got extent ['ceildiv', 'tokens', 0], want a positive divisor": lambda t: t[
        "buffers"
    ][0].update(shape=[["ceildiv", "tokens", 0]]),
    "buffer 'h': an extent is nested deeper than 8": lambda t: t["buffers"][0].update(
        shape=[deep(9)]
    ),
    "buffer 'h': got extent ['sub', 1], want one of ceildiv, add, mul, max, min": lambda t: t[
        "buffers"
    ][0].update(shape=[["sub", 1]]),
    "buffer 'h': got extent 1.5, want an int from 0 to 2^62": lambda t: t["buffers"][0].update(
        shape=[["add", 1.5]]
    ),
    "weight 'w': got offset 65, want a multiple of 64": lambda t: t["weights"][0].update(offset=65),
    "weight 'w': outside the weights file: got bytes 128 to 160, want at most 128": lambda t: t[
        "weights"
    ][0].update(offset=128),
    "weight 'w': size differs from its shape: got 32 bytes, want 36": lambda t: t["weights"][
        0
    ].update(shape=[9]),
    "weight 'v': overlaps 'w': got offset 64, want at least 96": second_weight,
    "plan 'buckets': got none, want at least one": lambda t: t.update(buckets=[]),
    "bucket 'tokens4': bound of 'tokens': got 65, want 1 to 64": lambda t: t["buckets"][1].update(
        bounds={"tokens": 65}
    ),
    "bucket 'tokens4': placement 'h': outside the arena: got bytes 128 to 256, want at most 192": (
        lambda t: place(t).update(offset=128)
    ),
    "bucket 'tokens4': placement 'h': too small: got 127 bytes, want 128": (
        lambda t: place(t).update(num_bytes=127)
    ),
    "bucket 'tokens4': placement 'h': got offset 1, want a multiple of 64": (
        lambda t: place(t).update(offset=1)
    ),
    "bucket 'tokens4': placement 'q': there is no such buffer": lambda t: place(t).update(name="q"),
    "bucket 'tokens64': placements 'h' and 'g' share bytes while both are live (launch 1)": (
        second_buffer
    ),
    "bucket 'tokens64': launch 0 'layers.0.scale': there is no kernel 'scales'": (
        lambda t: launch(t, 0).update(kernel="scales")
    ),
    "bucket 'tokens64': launch 0 'layers.0.scale': there is no weight 'u'": (
        lambda t: launch(t, 0)["arguments"][2].update(name="u")
    ),
    "bucket 'tokens64': launch 0 'layers.0.scale': argument kind 'constant' is unknown: have "
    "input, output, state, weight, buffer, scratch": (
        lambda t: launch(t, 0)["arguments"][2].update(kind="constant")
    ),
    "bucket 'tokens64': launch 0 'layers.0.scale': buffer 'h' has no place in the arena": (
        lambda t: t["buckets"][0].update(placements=[])
    ),
    "bucket 'tokens64': launch 0 'layers.0.scale': dim 'rows' is unknown: have tokens, slots": (
        lambda t: launch(t, 0).update(ints=["rows"])
    ),
    "bucket 'tokens64': launch 1 'layers.0.accumulate': scratch is argument 0, want the last "
    "tensor": lambda t: launch(t, 1)["arguments"].reverse(),
    "bucket 'tokens64': launch 1 'layers.0.accumulate': uses scratch, but the bucket has 0 bytes "
    "per thread": lambda t: t["buckets"][0].update(scratch_bytes_per_thread=0),
    "file '../weights.bin': want a path inside the artifact": lambda t: t.update(
        weights_file="../weights.bin"
    ),
    "file '/etc/passwd': want a path inside the artifact": lambda t: t["digests"].update(
        {"/etc/passwd": ""}
    ),
    "file 'kernels/other.so' has no digest": lambda t: t.update(library="kernels/other.so"),
}


@pytest.mark.parametrize("text", EDITS)
def test_edited_manifest(write_artifact: Write, text: str) -> None:
    assert refusal(write_artifact(EDITS[text])) == text


def test_unknown_field(write_artifact: Write) -> None:
    text = refusal(write_artifact(lambda tree: tree.update(color="red")))
    assert text.startswith("manifest 'manifest': unknown field 'color': have format, abi, ")


def test_kernel_missing_from_the_library(write_artifact: Write) -> None:
    def edit(tree: Tree) -> None:
        tree["kernels"].append({**tree["kernels"][0], "symbol": "absent"})

    text = refusal(write_artifact(edit))
    assert text.startswith("library 'kernels.so': ")
    assert text.endswith("undefined symbol: __tvm_ffi_absent")
