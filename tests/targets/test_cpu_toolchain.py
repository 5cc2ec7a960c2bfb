"""The C++ toolchain: prepared headers change the time of a compilation, not its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.graph.errors import TargetError
from tilewright.targets.cpu.toolchain import CppToolchain
from tilewright.targets.registry import resolve

pytestmark = pytest.mark.cpu
KERNEL = """
#include "tw_host.h"
#include "tw_math.h"
extern "C" void apply(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = tw_exp(x[i]) * 3.0f + 1.0f;
}
"""


def test_prepared_headers_give_the_same_object(tmp_path: Path) -> None:
    toolchain = CppToolchain(resolve("cpu")[0])
    for name, text in toolchain.support_sources().items():
        (tmp_path / name).write_text(text)
    source = tmp_path / "kernel.cpp"
    source.write_text(KERNEL)
    toolchain.compile(source, tmp_path / "plain.o")
    toolchain.prepare(tmp_path)
    toolchain.compile(source, tmp_path / "prepared.o")
    assert (tmp_path / "prepared.o").read_bytes() == (tmp_path / "plain.o").read_bytes()


def test_a_header_that_does_not_compile_is_said(tmp_path: Path) -> None:
    toolchain = CppToolchain(resolve("cpu")[0])
    for name, text in toolchain.support_sources().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tw_vec.h").write_text("#error no vectors")
    with pytest.raises(TargetError, match="kernel 'headers': the C\\+\\+ compiler failed:.*no vec"):
        toolchain.prepare(tmp_path)


@pytest.mark.parametrize(
    ("script", "got"),
    [("exit 3", "exit code 3"), ("exit 0", "no text"), (None, "Exec format error")],
)
def test_a_program_that_is_no_compiler_is_named(
    tmp_path: Path, script: str | None, got: str
) -> None:
    path = tmp_path / "cc"
    path.write_bytes(b"\x00" * 64 if script is None else f"#!/bin/sh\n{script}\n".encode())
    path.chmod(0o755)
    toolchain = CppToolchain(resolve("cpu")[0], cxx=str(path))
    with pytest.raises(TargetError) as caught:
        toolchain.identity()
    what = "cannot be run" if script is None else "tells no version"
    assert str(caught.value) == (
        f"C++ compiler '{path}': {what}: got {got}, want g++ or clang++; name another one in "
        "TILEWRIGHT_CXX"
    )


def test_what_a_compiler_says_need_not_be_unicode(tmp_path: Path) -> None:
    path = tmp_path / "cc"
    says = b"echo version '\xe9' 1\necho 'error: \xe9' >&2\n[ $1 = --version ]"
    path.write_bytes(b"#!/bin/sh\n" + says)
    path.chmod(0o755)
    toolchain = CppToolchain(resolve("cpu")[0], cxx=str(path))
    assert toolchain.identity().startswith("version \ufffd 1 ")
    with pytest.raises(TargetError, match="failed: error: \ufffd"):
        toolchain.compile(tmp_path / "kernel.cpp", tmp_path / "kernel.o")


@pytest.mark.parametrize("name", ["cpu:", "ascend950:", "sm90:", "sm100:"])
def test_a_colon_wants_a_variant(name: str) -> None:
    with pytest.raises(TargetError, match="variant ''"):
        resolve(name)
