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
