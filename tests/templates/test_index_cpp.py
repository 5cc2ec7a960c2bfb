"""Selection of entries on the CPU: exact on whole numbers, bits that depend on the token alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.launch import Kernels, equal_bytes
from support.paged_rows import format_of, random_rows
from support.paged_steps import make_tables, make_tokens, poisoned
from support.tiny import quick_target
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.ops import op_def
from tilewright.graph.ops.index import index_scores
from tilewright.graph.types import F32, I32, element_type

pytestmark = pytest.mark.cpu
Array = NDArray[Any]
PICKED = {16: (0, 2, 19), 64: (0, 9)}  # schedules that differ in every field
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
MXFP4 = "fp4_e2m1[g=32,axis=1,scale=ue8m0]"


@dataclass(frozen=True)
class Problem:
    """What is selected. `op` is select_entries, select_with_blocks or select_within."""

    op: str = "select_entries"
    heads: int = 20
    width: int = 32
    ratio: int = 1
    per_page: int = 16
    k: int = 5
    blocks: int = 3  # selected, or given as candidates
    block_size: int = 4
    key_format: str = "f32"
    query: str = "f32"

    @property
    def attrs(self) -> dict[str, Any]:
        found: dict[str, Any] = {"k": self.k, "ratio": self.ratio}
        if self.op == "select_with_blocks":
            return {**found, "blocks": self.blocks, "block_size": self.block_size}
        return {**found, "block_size": self.block_size} if self.op == "select_within" else found


PROBLEMS = {
    "entries": Problem(k=40, ratio=2, heads=7, width=40),
    "blocks": Problem("select_with_blocks", key_format="mxfp4", query=MXFP4, k=9, blocks=4),
    "within": Problem("select_within", key_format="mxfp4", query=MXFP4, blocks=6, k=12),
    "large": Problem("select_with_blocks", heads=16, width=32, k=700, blocks=40, block_size=7),
}


def build(p: Problem) -> Graph:
    b = GraphBuilder("index")
    tokens = b.dim("tokens", Role.BATCH, upper=64)
    requests = b.dim("requests", Role.BATCH, upper=8)
    blocks = b.dim("cache_blocks", Role.CONTEXT, upper=1 << 17)
    pages = b.dim("pages", Role.BATCH, upper=1 << 17)
    operands = [
        b.input("q", element_type(p.query), tokens, p.heads, p.width),
        b.input("w", F32, tokens, p.heads),
        b.state("keys", format_of(p.key_format), pages, p.per_page, p.width),
        b.input("positions", I32, tokens), b.input("request_rows", I32, tokens),
        b.input("tables", I32, requests, blocks),
    ]  # fmt: skip
    if p.op == "select_within":
        operands.append(b.input("candidates", I32, tokens, p.blocks))
    b.output("out", b.op(p.op, *operands, **p.attrs))
    return b.build()


@dataclass(frozen=True, eq=False)
class Step:
    """Operands by name as kernels take them, their values, and bound dims."""

    arrays: dict[str, Array]
    values: dict[str, Array]
    dims: dict[str, int]

    def take(self, chosen: Array) -> Step:
        names = [n for n in ("q", "w", "positions", "request_rows", "candidates")
                 if n in self.arrays]  # fmt: skip
        cut = {n: np.ascontiguousarray(self.arrays[n][chosen]) for n in names}
        values = {n: self.values[n][chosen] for n in names}
        return Step({**self.arrays, **cut}, {**self.values, **values},
                    {**self.dims, "tokens": len(chosen)})  # fmt: skip


def make_step(
    p: Problem, spans: list[tuple[int, int]], seed: int, *, whole: bool = True, padding: int = 1
) -> Step:
    """Queries, weights and keys are small whole numbers unless told otherwise; entries that no
    token sees are NaN."""
    rng = np.random.default_rng(seed)
    tokens = make_tokens(spans, padding)
    end = max(a + n for a, n in spans)
    tables = make_tables(rng, len(spans), end // p.ratio + 1, p.per_page)
    rows = random_rows(rng, p.key_format, tables.num_pages, p.per_page, p.width, whole=whole)
    shape = (tokens.count, p.heads, p.width)
    q = rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)
    if not whole and p.query != "f32":  # codes times a power of two per group
        groups = (*shape[:2], p.width // 32, 32)
        q = (rng.choice(CODES, groups) * 2.0 ** rng.integers(-9, 9, (*groups[:3], 1))).reshape(
            shape
        )
    w = rng.integers(-2, 3, shape[:2]) if whole else rng.standard_normal(shape[:2])
    q, w = q.astype(np.float32), w.astype(np.float32)
    visible = [np.arange((position + 1) // p.ratio) for position in tokens.positions]
    slots = [tables.slots(int(r), v) for r, v in zip(tokens.rows, visible, strict=True)]
    arrays: dict[str, Array] = {
        "q": q if p.query == "f32" else (q.view(np.uint32) >> 16).astype(np.uint16), "w": w,
        "keys": poisoned(rows.memory, slots), "positions": tokens.positions,
        "request_rows": tokens.rows, "tables": tables.pages,
    }  # fmt: skip
    values = {**arrays, "q": q, "keys": rows.values}
    if p.op == "select_within":
        candidates = np.full((tokens.count, p.blocks), -1, np.int32)
        for t, seen in enumerate(visible):
            known = -(-len(seen) // p.block_size)
            count = int(rng.integers(0, min(known, p.blocks) + 1))
            candidates[t, :count] = np.sort(rng.permutation(known)[:count])
            if t % 3 == 0:
                rng.shuffle(candidates[t])
        arrays["candidates"] = values["candidates"] = candidates
    dims = {
        "tokens": tokens.count, "requests": len(spans), "pages": tables.num_pages,
        "cache_blocks": tables.pages.shape[1],
    }  # fmt: skip
    return Step(arrays, values, dims)


def expected(p: Problem, step: Step) -> Array:
    order = ["q", "w", "keys", "positions", "request_rows", "tables"]
    order += ["candidates"] if p.op == "select_within" else []
    operands = [torch.from_numpy(step.values[n]) for n in order]
    operands = [o.double() if o.is_floating_point() else o for o in operands]
    found: Array = op_def(p.op).reference(operands, p.attrs).numpy()
    return found


@cache
def kernels(name: str, folder: Path, rows: int) -> Kernels:
    return Kernels(build(PROBLEMS[name]), quick_target(), folder, rows=rows, picked=PICKED[rows])


def output(kernels: Kernels, step: Step, index: int, threads: int = 2) -> Array:
    spec = kernels.specs[index % len(kernels.specs)]
    (found,) = kernels.run(spec, step.arrays, step.dims, threads=threads).values()
    return found


SPANS = [(0, 3), (137, 6), (9, 1), (2060, 2), (300, 1)]


@pytest.fixture(scope="module", autouse=True)
def drop_kernels() -> Iterator[None]:
    yield
    kernels.cache_clear()


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_schedule_equals_the_reference(name: str, kernel_cache: Path) -> None:
    """Whole numbers make many ties, and sums exact in any order."""
    p, step = PROBLEMS[name], make_step(PROBLEMS[name], SPANS, seed=3)
    want = expected(p, step)
    for rows in (16, 64):
        made = kernels(name, kernel_cache, rows)
        assert made.num_legal >= 8
        for index, threads in zip(range(len(made.specs)), (1, 3, 4), strict=False):
            found = output(made, step, index, threads)
            np.testing.assert_array_equal(found, want, err_msg=str(made.specs[index].schedule))


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_token_alone_equals_the_token_among_others(name: str, kernel_cache: Path) -> None:
    p, many = PROBLEMS[name], kernels(name, kernel_cache, 64)
    few = kernels(name, kernel_cache, 16)
    step = make_step(p, SPANS, seed=5, whole=False)
    whole = output(many, step, 0)
    for t in range(step.dims["tokens"]):
        found = output(few, step.take(np.array([t])), t, threads=1 + t % 3)
        assert found.tobytes() == whole[t : t + 1].tobytes(), t
    order = np.random.default_rng(0).permutation(step.dims["tokens"])
    assert output(many, step.take(order), 1).tobytes() == whole[order].tobytes()


@pytest.mark.parametrize("name", ["entries", "within"])
def test_prefill_cut_at_every_offset(name: str, kernel_cache: Path) -> None:
    p, made = PROBLEMS[name], kernels(name, kernel_cache, 64)
    step = make_step(p, [(45, 19)], seed=7, whole=False, padding=0)
    whole = output(made, step, 0)
    for cut in range(1, 19):
        chosen = (np.arange(cut), np.arange(cut, 19))
        parts = [output(made, step.take(c), cut) for c in chosen]
        assert np.concatenate(parts).tobytes() == whole.tobytes(), cut


@pytest.mark.parametrize("name", ["entries", "blocks", "within"])
def test_random_scores_select_as_in_fp64_where_the_margin_is_clear(
    name: str, kernel_cache: Path
) -> None:
    p, made = PROBLEMS[name], kernels(name, kernel_cache, 16)
    step = make_step(p, SPANS, seed=13, whole=False)
    found = output(made, step, 1)[:, : p.k]
    operands = [torch.from_numpy(step.values[n]) for n in
                ("q", "w", "keys", "positions", "request_rows", "tables")]  # fmt: skip
    wide = [o.double() if o.is_floating_point() else o for o in operands]
    scores = index_scores(wide, {"k": p.k, "ratio": p.ratio}).numpy()
    for t in range(step.dims["tokens"]):
        row = scores[t].copy()
        if name == "within":
            row[
                ~np.isin(np.arange(len(row)) // p.block_size, step.values["candidates"][t])
            ] = -np.inf
        visible = int((row > -np.inf).sum())
        mine = found[t][found[t] >= 0]
        assert len(mine) == min(p.k, visible) and (np.diff(mine) > 0).all()
        if visible > p.k:
            border = np.sort(row)[-p.k]
            near = 1e-5 * float(np.abs(row[np.isfinite(row)]).max())
            assert (row[mine] >= border - near).all()
            assert np.isin(np.flatnonzero(row > border + near), mine).all()


def test_scores_that_are_not_numbers(kernel_cache: Path) -> None:
    """A NaN score takes a place and comes out as none; -inf is never selected; +inf is first."""
    for name in ("entries", "large"):
        p, made = PROBLEMS[name], kernels(name, kernel_cache, 16)
        step = make_step(p, [(1990, 2)], seed=1, padding=0)
        flat = step.arrays["keys"].reshape(-1, p.width).copy()
        rng = np.random.default_rng(2)
        for value in (np.nan, np.inf, -np.inf):
            flat[rng.permutation(len(flat))[:20]] = value
        keys = flat.reshape(step.arrays["keys"].shape)
        given = Step({**step.arrays, "keys": keys}, {**step.values, "keys": keys}, step.dims)
        # A product 0 * inf is NaN in the kernel and in the reference alike.
        want = expected(p, given)
        for index in range(len(made.specs)):
            np.testing.assert_array_equal(output(made, given, index), want)


def test_a_row_of_a_hundred_thousand_entries(kernel_cache: Path) -> None:
    p = Problem("select_with_blocks", heads=2, width=8, k=4096, blocks=64, block_size=64,
                per_page=256)  # fmt: skip
    made = Kernels(build(p), quick_target(), kernel_cache, rows=4, picked=(0, 1))
    step = make_step(p, [(99_999, 1)], seed=1, padding=0)
    want = expected(p, step)
    for index in range(len(made.specs)):
        np.testing.assert_array_equal(output(made, step, index), want)
    made.close()


@settings(
    max_examples=3,
    phases=[Phase.generate],  # every example compiles a kernel
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_shape(kernel_cache: Path, data: st.DataObject) -> None:
    def draw(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    p = Problem(
        op=draw("select_entries", "select_with_blocks", "select_within"),
        heads=draw(1, 3, 16, 33), width=draw(32, 64), ratio=draw(1, 2, 3), per_page=draw(1, 5, 64),
        k=draw(1, 8, 40, 300), blocks=draw(1, 4, 40), block_size=draw(1, 3, 64),
        key_format=draw("f32", "bf16", "mxfp4"), query=draw("f32", MXFP4),
    )  # fmt: skip
    made = Kernels(build(p), quick_target(), kernel_cache, rows=draw(4, 64), picked=(0, 6))
    spans = data.draw(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 4)), min_size=1,
                               max_size=4))  # fmt: skip
    step = make_step(p, spans, seed=data.draw(st.integers(0, 99)))
    found = [output(made, step, i, threads=1 + i) for i in range(2)]
    made.close()
    assert equal_bytes({"out": found[0]}, [{"out": f} for f in found])
    np.testing.assert_array_equal(found[0], expected(p, step))
