"""A tiny artifact, written by hand: two kernels, two buckets, a state, weights and scratch."""

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi.libinfo

from tilewright.targets.cpu.toolchain import HOST_SOURCES

HOST = Path(__file__).parents[2] / "templates" / "cpp"

KERNELS = r"""
#include "tw_host.h"
struct Rows { float* y; const float* x; const float* w; };
static void scale_rows(void* arg, int64_t begin, int64_t end, int) {
  Rows* r = static_cast<Rows*>(arg);
  for (int64_t i = begin; i < end; ++i)
    for (int k = 0; k < 8; ++k) r->y[8 * i + k] = r->x[8 * i + k] * r->w[k];
}
TW_KERNEL(scale) {
  TW_ARGUMENTS(4);
  TW_TENSOR(y, 0, kDLFloat, 32, 2);
  TW_TENSOR(x, 1, kDLFloat, 32, 2);
  TW_TENSOR(w, 2, kDLFloat, 32, 1);
  TW_INT(num_rows, 3, 0, 64);
  TW_EXTENT(y, 0, num_rows);
  TW_EXTENT(x, 0, num_rows);
  TW_EXTENT(x, 1, 8);
  Rows rows = {TW_DATA(float, y), TW_DATA(float, x), TW_DATA(float, w)};
  tw_parallel(num_rows, scale_rows, &rows);
  return 0;
}
// state[slot] += h, row by row; y = state[slot]; a negative slot is refused.
TW_KERNEL(accumulate) {
  TW_ARGUMENTS(7);
  TW_TENSOR(y, 0, kDLFloat, 32, 2);
  TW_TENSOR(state, 1, kDLFloat, 32, 2);
  TW_TENSOR(slots, 2, kDLInt, 32, 1);
  TW_TENSOR(h, 3, kDLFloat, 32, 2);
  TW_TENSOR(scratch, 4, kDLUInt, 8, 1);
  TW_INT(num_rows, 5, 0, 64);
  TW_INT(num_slots, 6, 1, 1 << 30);
  TW_EXTENT(state, 0, num_slots);
  TW_EXTENT(slots, 0, num_rows);
  for (int64_t i = 0; i < num_rows; ++i) {
    int32_t slot = TW_DATA(int32_t, slots)[i];
    if (slot < 0 || slot >= num_slots) return tw_fail(tw_kernel, "slot %d out of range", slot);
    float* sum = TW_DATA(float, state) + 8 * slot;
    TW_DATA(uint8_t, scratch)[0] = 1;
    for (int k = 0; k < 8; ++k) {
      sum[k] += TW_DATA(float, h)[8 * i + k];
      TW_DATA(float, y)[8 * i + k] = sum[k];
    }
  }
  return 0;
}
"""

Edit = Callable[[dict[str, Any]], None]


def compile_library(source: str, path: Path) -> None:
    text = path.with_suffix(".cpp")
    text.write_text(source)
    includes = [f"-I{HOST}", f"-I{tvm_ffi.libinfo.find_include_path()}"]
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"]
    host = [str(HOST / name) for name in HOST_SOURCES]
    subprocess.run([*command, *includes, str(text), *host, "-o", str(path)], check=True)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "kernels.so"
    compile_library(KERNELS, path)
    return path


@pytest.fixture(scope="session")
def skipping_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same kernels, but slot -1 stores nothing, as on GPUs."""
    reads = "int32_t slot = TW_DATA(int32_t, slots)[i];"
    skips = "if (slot == -1) { TW_DATA(float, y)[8 * i] = 7; continue; }"
    assert reads in KERNELS
    path = tmp_path_factory.mktemp("skipping") / "kernels.so"
    compile_library(KERNELS.replace(reads, f"{reads}\n    {skips}"), path)
    return path


def launches() -> list[dict[str, Any]]:
    def args(*pairs: tuple[str, str]) -> list[dict[str, str]]:
        return [{"kind": kind, "name": name} for kind, name in pairs]

    return [
        {
            "kernel": "scale",
            "group": "layers.0.scale",
            "arguments": args(("buffer", "h"), ("input", "x"), ("weight", "w")),
            "ints": ["tokens"],
        },
        {
            "kernel": "accumulate",
            "group": "layers.0.accumulate",
            "arguments": args(
                ("output", "y"), ("state", "sums"), ("input", "slots"), ("buffer", "h"),
                ("scratch", "scratch"),
            ),
            "ints": ["tokens", "slots"],
        },
    ]  # fmt: skip


def bucket(name: str, tokens: int) -> dict[str, Any]:
    return {
        "name": name,
        "bounds": {"tokens": tokens},
        "launches": launches(),
        "placements": [{"name": "h", "offset": 64, "num_bytes": 32 * tokens}],
        "arena_bytes": 64 + 32 * tokens,
        "scratch_bytes_per_thread": 64,
    }


def manifest() -> dict[str, Any]:
    kernel = {
        "template": "rows", "source": "sources/kernels.cpp", "nodes": [], "numerics": {},
        "schedule": {}, "flops": ["mul", "tokens", 8], "num_bytes": 0, "weight_bytes": 0,
    }  # fmt: skip
    return {
        "format": 3, "abi": "tvm-ffi/1", "version": "0.1.0", "mode": "deterministic",
        "dtype": "f32", "invariance": "proven", "numerics_digest": "", "compile_config": {},
        "target": {"name": "cpu", "variant": "x86-64", "features": [], "compiler": "g++",
                   "flags": []},
        "model": {"name": "tiny", "family": "tiny", "vocab_size": 8, "max_context": 64,
                  "block_size": 8, "bos_id": None, "eos_ids": [], "add_bos": False,
                  "chat_template": None, "tokenizer": None, "config": {}},
        "dims": [{"name": "tokens", "role": "batch", "lower": 1, "upper": 64},
                 {"name": "slots", "role": "batch", "lower": 1, "upper": 1 << 30}],
        "inputs": [{"name": "x", "dtype": "f32", "shape": ["tokens", 8]},
                   {"name": "slots", "dtype": "i32", "shape": ["tokens"]}],
        "outputs": [{"name": "y", "dtype": "f32", "shape": ["tokens", 8]}],
        "states": [{"name": "sums", "dtype": "f32", "shape": ["slots", 8], "format": "f32",
                    "scope": "block", "positions_per_entry": 1, "window": 0, "group": 1,
                    "tables": "block_tables"}],
        "buffers": [{"name": "h", "dtype": "f32", "shape": ["tokens", 8]}],
        "weights": [{"name": "w", "format": "f32", "shape": [8], "layout": "row_major",
                     "offset": 64, "num_bytes": 32}],
        "weights_file": "weights.bin", "weights_bytes": 128, "weights_digest": "",
        "kernels": [{"symbol": "scale", **kernel}, {"symbol": "accumulate", **kernel}],
        "library": "kernels/kernels.so",
        "buckets": [bucket("tokens64", 64), bucket("tokens4", 4)],
        "digests": {},
    }  # fmt: skip


@pytest.fixture
def write_artifact(tmp_path: Path, library: Path) -> Callable[..., Path]:
    """Return a function that writes the artifact, after an edit of its manifest if given."""

    def write(edit: Edit = lambda tree: None) -> Path:
        root = tmp_path / "m"
        (root / "kernels").mkdir(parents=True)
        (root / "sources").mkdir()
        (root / "kernels" / "kernels.so").write_bytes(library.read_bytes())
        (root / "sources" / "kernels.cpp").write_text(KERNELS)
        weights = np.zeros(32, np.float32)
        weights[16:24] = np.arange(1, 9)
        (root / "weights.bin").write_bytes(weights.tobytes())
        tree = manifest()
        tree["weights_digest"] = hashlib.sha256(weights.tobytes()).hexdigest()
        for name in ("kernels/kernels.so", "sources/kernels.cpp"):
            tree["digests"][name] = hashlib.sha256((root / name).read_bytes()).hexdigest()
        edit(tree)
        (root / "manifest.json").write_text(json.dumps(tree))
        return root

    return write
