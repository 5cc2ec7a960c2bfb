"""Kernels as they are emitted, alone in a library, with fresh inputs: a contraction whose weights
vector cores decode, one in the MX form, attention and selection on both kinds of core.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch

from support import ascend_gqa, index_cases
from support.ascend_contract import FP4, FP8, plain, quantised_operand
from support.ascend_kernels import Case, as_f32
from support.ascend_latent import graph_of, halved
from support.ascend_rows import TARGET
from support.ascend_run import specs_of
from support.index_cases import MXFP4
from support.kernel_case import distinct_bodies
from support.latent_cases import Problem, expected, make_step
from support.weights import draw_floats, float_values
from tilewright.codegen.body import Body
from tilewright.codegen.emit.ascendc_attend_cube import attend_cube
from tilewright.codegen.emit.ascendc_contract import contract
from tilewright.codegen.emit.ascendc_latent import Latent
from tilewright.codegen.emit.ascendc_latent_cube import latent_cube
from tilewright.codegen.emit.ascendc_mx import contract_mx
from tilewright.codegen.emit.ascendc_select import select_cube
from tilewright.codegen.pack_ascend import pack_coded, padded
from tilewright.graph import Graph
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


# --- codes with codes ---------------------------------------------------------------------------


def mx_text() -> str:
    """The matrix unit's kernel of fp4 weights, which the vector cores turn into e4m3 codes."""
    ((_, kind, body),) = [
        b for b in distinct_bodies(quantised_operand(FP4, K, N)) if b[1] == "contract"
    ]
    spec = specs_of([("mx", kind, body)], TARGET)["mx"]
    assert spec.template == "contract_mx"
    return contract_mx(spec)[0][-1]


def mx_case(name: str, rng: np.random.Generator) -> Case:
    dtype = element_type(FP4)
    assert isinstance(dtype, BlockFormat)
    raw, width = draw_floats(rng, dtype, (N, K)), padded(K)
    values = (rng.standard_normal((ROWS, width)) * 40).astype(ml_dtypes.float8_e4m3fn)
    values[:, K:] = 0
    scales = rng.integers(120, 134, (ROWS, width // 32)).astype(np.uint8)
    x = values.astype(np.float32) * np.exp2(scales.astype(np.float32) - 127).repeat(32, 1)
    want = x[:, :K] @ float_values(raw, dtype).T
    out = np.full((ROWS, N), np.nan, np.float32)
    packed = pack_coded(raw, dtype)
    return Case([values.view(np.uint8), scales, packed, out], ROWS, BLOCKS, want)


# --- attention and selection --------------------------------------------------------------------

LATENT = Problem(window_format="fp8", entry_format="mxfp4", width=64, heads=20, window=40, ratio=1,
                 entries_per_page=8, selected=150)  # fmt: skip
LATENT_SPANS = [(0, 1), (60, 1), (200, 2)]
PAGED = ascend_gqa.Problem(heads=20, kv_heads=2, width=48, block_size=32)  # ten heads: half a tile
PAGED_SPANS = [(0, 9), (250, 7), (126, 4), (390, 1)]
SELECTIONS = {
    "blocks": index_cases.Problem("select_with_blocks", key_format="mxfp4", query=MXFP4, k=9,
                                  blocks=4, block_size=7),
    "within": index_cases.Problem("select_within", key_format="mxfp4", query=MXFP4, blocks=150,
                                  k=12),
}  # fmt: skip
SELECT_SPANS = [(0, 2), (137, 2), (900, 2)]


def standing_alone(text: str, body: Body, dims: Mapping[str, int]) -> str:
    """A kernel with its run-time numbers as constants: a launch of the library has one."""
    start = text.index('extern "C"')
    device, kernel = text[:start], text[start:]
    signature, brace, rest = kernel.partition("{")
    extents = re.findall(r", int32_t (\w+)", signature)[1:]
    signature = re.sub(r"(int32_t num_tokens), [^)]*\)", r"\1)", signature)
    known = {body.binding.get(n, n): v for n, v in dims.items()}
    fixed = " ".join(f"const int32_t {e} = {known[e]};" for e in extents)
    return f"{device}{signature}{brace} {fixed}{rest}"


def body_of(graph: Graph, kind: str) -> Body:
    return next(b for _, k, b in distinct_bodies(graph) if k == kind)


def latent_text() -> str:
    body = body_of(graph_of(LATENT), "attend")
    ((text,), _) = latent_cube(specs_of([("x", "attend", body)], TARGET)["x"])
    return standing_alone(text, body, make_step(LATENT, LATENT_SPANS, seed=1).dims)


def latent_case(name: str, rng: np.random.Generator) -> Case:
    body = body_of(graph_of(LATENT), "attend")
    step = make_step(LATENT, LATENT_SPANS, seed=int(rng.integers(99)), padding=0)
    arrays = halved(step) | {"sink": step.arrays["sink"]}
    order = [n for _, n in Latent.of(body.graph).pointers]
    given = [arrays[body.binding[n]] for n in order[:-1]]
    want = torch.from_numpy(expected(LATENT, step)).float().numpy()
    out = np.full(want.shape, 0x7FC0, np.uint16)
    return Bf16Case([*given, out], step.dims["tokens"], BLOCKS, want)


def attend_text() -> str:
    body = body_of(ascend_gqa.build(PAGED), "attend")
    spec = specs_of([("x", "attend", body)], TARGET)["x"]
    assert spec.template == "attend_cube"
    blocks = ascend_gqa.make_step(PAGED, PAGED_SPANS, seed=1).dims["request_blocks"]
    return standing_alone(attend_cube(spec)[0][0], body, {"table_stride": blocks})


def attend_case(name: str, rng: np.random.Generator) -> Case:
    step = ascend_gqa.make_step(PAGED, PAGED_SPANS, seed=int(rng.integers(99)))
    given = [step.arrays[n] for n in ("q", "k", "v", "positions", "request_rows", "tables")]
    want = step.want.float().numpy()
    out = np.full(want.shape, 0x7FC0, np.uint16)
    return Bf16Case([*given, out], step.dims["tokens"], BLOCKS, want)


def select_text(name: str) -> str:
    body = body_of(index_cases.build(SELECTIONS[name]), "select")
    spec = specs_of([("x", "select", body)], TARGET)["x"]
    assert spec.template == "select_cube"
    dims = index_cases.make_step(SELECTIONS[name], SELECT_SPANS, 1).dims
    return standing_alone(select_cube(spec)[0][0], body, dims)


def select_case(name: str, rng: np.random.Generator) -> Case:
    problem = SELECTIONS[name]
    step = index_cases.make_step(problem, SELECT_SPANS, int(rng.integers(99)), padding=0)
    names = ["q", "w", "keys", "positions", "request_rows", "tables"]
    names += ["candidates"] if problem.op == "select_within" else []
    want = index_cases.expected(problem, step).astype(np.int32)
    out = np.full(want.shape, -9, np.int32)
    return Case([*(step.arrays[n] for n in names), out], step.dims["tokens"], BLOCKS, want)


class Bf16Case(Case):
    """A case whose last array holds bf16."""

    @property
    def right(self) -> bool:
        got = as_f32(self.arrays[-1])
        return bool(np.allclose(got, self.want, rtol=2.0**-7, atol=2.0**-10))
