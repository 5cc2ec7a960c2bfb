"""A contraction with fp8 weights as it is emitted, alone in a library, with fresh inputs."""

from __future__ import annotations

import numpy as np

from support.ascend_contract import FP8, plain
from support.ascend_kernels import Case, as_f32
from support.ascend_rows import TARGET
from support.ascend_run import specs_of
from support.kernel_case import distinct_bodies
from support.weights import draw_floats, float_values
from tilewright.codegen.emit.ascendc_contract import contract
from tilewright.codegen.pack_ascend import pack_coded
from tilewright.graph.types import BlockFormat, element_type
from tilewright.targets.ascend950.toolchain import AscendToolchain

N, K, ROWS, BLOCKS = 40, 160, 69, 2  # ragged tiles; each block takes more than one


def headers() -> str:
    """What emitted kernels call."""
    texts = AscendToolchain(TARGET).support_sources()
    return texts["tw_ascend_math.h"] + texts["tw_ascend_rows.h"].replace("#pragma once", "")


def coded_text() -> str:
    """The kernel of the matrix unit, with its vector functions."""
    ((_, kind, body),) = distinct_bodies(plain(FP8, K, N))
    spec = specs_of([("coded", kind, body)], TARGET)["coded"]
    (text,), _ = contract(spec)
    return text


def coded_case(name: str, rng: np.random.Generator) -> Case:
    dtype = element_type(FP8)
    assert isinstance(dtype, BlockFormat)
    raw = draw_floats(rng, dtype, (N, K))
    x = (rng.standard_normal((ROWS, K)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    want = as_f32(x) @ float_values(raw, dtype).T
    out = np.full((ROWS, N), np.nan, np.float32)
    return Case([x, pack_coded(raw, dtype), out], ROWS, BLOCKS, want)
