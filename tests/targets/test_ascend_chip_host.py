"""What someone with CANN and a card compiles and runs: the host side of kernels for the chip, the
driver, recorded cases. Here AscendCL is a stand-in on the CPU; none of it has met the chip.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from support.ascend_artifact import SETTINGS, compile_for
from support.ascend_contract import ACTIVATION, FP4, experts
from support.ascend_rows import TARGET
from support.ascend_run import printing_folder, specs_of
from support.kernel_case import distinct_bodies
from support.tiny import tiny
from tilewright.codegen.emit.cpp import TEMPLATE_ROOT
from tilewright.codegen.emit.registry import emit
from tilewright.targets.ascend950.simulation import MODEL, template_folder
from tilewright.targets.ascend950.toolchain import AscendToolchain
from tilewright.tools.dev.ascend_cases import record

pytestmark = pytest.mark.cpu
DRIVER = TEMPLATE_ROOT / "ascendc" / "tw_ascend_driver.cpp"
# AscendCL's calls as its documentation gives them, on memory of the CPU.
ACL = """#pragma once
#include <stdlib.h>
#include <string.h>
typedef int aclError;
typedef void* aclrtStream;
#define ACL_SUCCESS 0
#define ACL_RT_THREAD_LEVEL 0
enum aclrtMemMallocPolicy { ACL_MEM_MALLOC_HUGE_FIRST };
enum aclrtMemcpyKind { ACL_MEMCPY_HOST_TO_DEVICE = 1, ACL_MEMCPY_DEVICE_TO_HOST };
inline aclError aclrtGetLastError(int) { return 0; }
inline aclError aclInit(const char*) { return 0; }
inline aclError aclFinalize() { return 0; }
inline aclError aclrtSetDevice(int) { return 0; }
inline aclError aclrtResetDevice(int) { return 0; }
inline aclError aclrtCreateStream(aclrtStream* s) { *s = 0; return 0; }
inline aclError aclrtDestroyStream(aclrtStream) { return 0; }
inline aclError aclrtSynchronizeStream(aclrtStream) { return 0; }
inline aclError aclrtMalloc(void** p, size_t n, aclrtMemMallocPolicy) { return !(*p = malloc(n)); }
inline aclError aclrtFree(void* p) { free(p); return 0; }
inline aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t n, aclrtMemcpyKind) {
  return n > room ? 1 : (memcpy(to, from, n), 0);
}
"""
# A library as a build for the chip exports it: y = 2 x, for as many values as the extent says.
TWICE = """#include <stdint.h>
extern "C" int32_t tw_chip_twice(void* const* tensors, const int64_t* extents, void*) {
  for (int64_t i = 0; i < extents[0]; ++i) ((float*)tensors[0])[i] = 2 * ((float*)tensors[1])[i];
  return 0;
}
"""


@pytest.fixture(scope="module")
def acl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acl")
    (folder / "acl").mkdir()
    (folder / "acl" / "acl.h").write_text(ACL)
    return folder


def compiled(*words: object) -> None:
    done = subprocess.run(["g++", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


@pytest.fixture(scope="module")
def driver(acl: Path) -> Path:
    compiled("-std=c++17", "-Wall", "-Werror", f"-I{acl}", DRIVER, "-o", acl / "driver", "-ldl")
    (acl / "twice.cpp").write_text(TWICE)
    compiled("-shared", "-fPIC", acl / "twice.cpp", "-o", acl / "kernels.so")
    return acl / "driver"


def run(driver: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [driver, driver.parent / "kernels.so", folder]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def cases(folder: Path, kernel: str, want: np.ndarray) -> Path:
    x = np.array([1.0, -2.0, np.nan], np.float32)
    for stem, array in (("0.0.in", x * 0), ("0.0.want", want), ("0.1.in", x)):
        (folder / stem).write_bytes(array.astype(np.float32).tobytes())
    (folder / "cases.txt").write_text(f"{kernel} 1 3 2 12 f32 12 -\n")
    return folder


def test_the_driver_compares_what_kernels_leave(driver: Path, tmp_path: Path) -> None:
    done = run(driver, cases(tmp_path, "twice", np.array([2.0, -4.0, np.nan])))
    assert (done.returncode, done.stdout) == (0, "near twice 0.00e+00\n")
    done = run(driver, cases(tmp_path, "twice", np.array([2.0, -3.0, np.nan])))
    assert done.returncode == 1 and done.stdout.startswith("FAR twice 3.33e-01")
    done = run(driver, cases(tmp_path, "twice", np.array([2.0, -4.0, 1.0])))
    assert (done.returncode, done.stdout) == (1, "FAR twice inf\n")


def test_the_driver_says_what_is_missing(driver: Path, tmp_path: Path) -> None:
    done = run(driver, cases(tmp_path, "thrice", np.zeros(3)))
    assert (done.returncode, done.stderr) == (2, "kernel 'thrice': is not in the library\n")
    (tmp_path / "0.1.in").write_bytes(b"few")
    done = run(driver, tmp_path)
    assert done.returncode == 2 and done.stderr.endswith("got 3 bytes, want 12\n")


def test_the_host_side_of_a_kernel_is_cpp(acl: Path, tmp_path: Path) -> None:
    """But for the launch itself, whose <<< >>> only CANN's compiler knows."""
    graph = experts(FP4, 352, 50, 2, 7, shared=True, activation=ACTIVATION)
    bodies = [(name, kind, b) for name, kind, b in distinct_bodies(graph)]
    spec = list(specs_of(bodies, TARGET).values())[-1]
    text = emit(spec, {t.name: t for t in TARGET.kernels}[spec.template]).text
    assert f"TW_CHIP_KERNEL({spec.symbol})" in text
    assert len(re.findall(r"<<<[48], 0, stream>>>", text)) == 3  # sort, codes, products
    for name, support in AscendToolchain(TARGET).support_sources().items():
        (tmp_path / name).write_text(support)
    source = tmp_path / "kernel.cpp"
    source.write_text(re.sub(r"<<<\d+, 0, stream>>>", "", text))
    folders = [f"-I{p}" for p in (acl, tmp_path, MODEL, template_folder())]
    compiled("-std=gnu++20", "-w", "-fsyntax-only", *folders, source)


def test_every_kernel_of_an_artifact_is_recorded(tmp_path: Path, kernel_cache: Path) -> None:
    model = tiny("bf16", settings=SETTINGS)
    compile_for("950-4+model", model, tmp_path / "m", kernel_cache)
    printing_folder(kernel_cache)
    count = record(tmp_path / "m", tmp_path / "cases")
    lines = (tmp_path / "cases" / "cases.txt").read_text().splitlines()
    assert count == len(lines) > 5 and len({line.split()[0] for line in lines}) == count
    for number, line in enumerate(lines):
        words = line.split()
        first = 3 + int(words[1])
        sizes, kinds = words[first::2], words[first + 1 :: 2]
        assert len(sizes) == int(words[first - 1]) and set(kinds) & {"f32", "bf16", "bytes"}
        for place, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
            stem = tmp_path / "cases" / f"{number}.{place}"
            assert Path(f"{stem}.in").stat().st_size == int(size)
            assert Path(f"{stem}.want").exists() == (kind != "-")
