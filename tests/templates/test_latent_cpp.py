"""Latent attention on the CPU: close to the fp64 reference; bits depend on the token alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from support.paged_steps import Tables, Tokens, make_tables, make_tokens, poisoned
from support.tiny import quick_target
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.ops import op_def
from tilewright.graph.types import BF16, F32, I32

pytestmark = pytest.mark.cpu
Array = NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """What decides the bits. `op` is attend_window, attend_compressed or attend_selected."""

    op: str = "attend_selected"
    heads: int = 20
    width: int = 72
    window: int = 12
    per_page: int = 8  # window entries of a page
    ratio: int = 4
    entries_per_page: int = 2
    selected: int = 11
    window_format: str = "f32"
    entry_format: str = "f32"
    chunk: int = 5
    epilogue: bool = True

    @property
    def attrs(self) -> dict[str, Any]:
        found: dict[str, Any] = {"scale": 0.35, "window": self.window}
        return {**found, "ratio": self.ratio} if self.op == "attend_compressed" else found


PROBLEMS = {
    "window": Problem("attend_window", heads=7, width=40, window=13, chunk=32),
    "compressed": Problem("attend_compressed", entry_format="v4_short", window_format="v4_short"),
    "selected": Problem(window_format="fp8", entry_format="nvfp4", width=64, heads=16),
    "v4": Problem(
        window_format="v4", entry_format="v4", width=512, heads=32, chunk=128, window=16,
        selected=140,
    ),
}  # fmt: skip


def build(p: Problem) -> Graph:
    b = GraphBuilder("latent")
    tokens = b.dim("tokens", Role.BATCH, upper=512)
    requests = b.dim("requests", Role.BATCH, upper=8)
    window_blocks = b.dim("window_blocks", Role.CONTEXT, upper=512)
    window_pages = b.dim("window_pages", Role.BATCH, upper=4096)
    q = b.input("q", BF16 if p.epilogue else F32, tokens, p.heads, p.width)
    if p.epilogue:
        q = b.cast(b.cast(q, F32) * 0.5, BF16)
    window = b.state("window", format_of(p.window_format), window_pages, p.per_page, p.width)
    operands = [
        q, window, b.input("positions", I32, tokens), b.input("request_rows", I32, tokens),
        b.input("window_tables", I32, requests, window_blocks), b.weight("sink", F32, p.heads),
    ]  # fmt: skip
    if p.op != "attend_window":
        blocks = b.dim("cache_blocks", Role.CONTEXT, upper=512)
        pages = b.dim("pages", Role.BATCH, upper=4096)
        kind = format_of(p.entry_format)
        operands.append(b.state("entries", kind, pages, p.entries_per_page, p.width))
        operands.append(b.input("block_tables", I32, requests, blocks))
    if p.op == "attend_selected":
        operands.append(b.input("selected", I32, tokens, p.selected))
    out = b.op(p.op, *operands, **p.attrs)
    b.output("out", b.cast(out * 2.0, BF16) if p.epilogue else out)
    return b.build()


@dataclass(frozen=True, eq=False)
class Step:
    """Operands of one launch by name, fp64-ready values of the states, and bound dims."""

    arrays: dict[str, Array]
    values: dict[str, Array]
    dims: dict[str, int]

    def take(self, chosen: Array) -> Step:
        """The same states, some of the tokens."""
        names = [n for n in ("q", "positions", "request_rows", "selected") if n in self.arrays]
        cut = {**self.arrays, **{n: np.ascontiguousarray(self.arrays[n][chosen]) for n in names}}
        values = {**self.values, **{n: cut[n] for n in names if n != "q"}}
        values["q"] = self.values["q"][chosen]
        return Step(cut, values, {**self.dims, "tokens": len(chosen)})


def make_step(p: Problem, spans: list[tuple[int, int]], seed: int, padding: int = 1) -> Step:
    """A step whose states hold NaN wherever no token of it may look."""
    rng = np.random.default_rng(seed)
    tokens = make_tokens(spans, padding)
    longest = max((n for _, n in spans), default=1)
    window = make_tables(rng, len(spans), p.window + longest, p.per_page)
    end = max(a + n for a, n in spans)
    context = make_tables(rng, len(spans), end // p.ratio + 1, p.entries_per_page)
    q = rng.standard_normal((tokens.count, p.heads, p.width)).astype(np.float32)
    q_bits = (q.view(np.uint32) >> 16).astype(np.uint16)
    q_values = (q_bits.astype(np.uint32) << 16).view(np.float32) if p.epilogue else q
    sink = rng.standard_normal(p.heads).astype(np.float32)
    arrays: dict[str, Array] = {
        "q": q_bits if p.epilogue else q, "positions": tokens.positions,
        "request_rows": tokens.rows, "window_tables": window.pages, "sink": sink,
    }  # fmt: skip
    values = {**arrays, "q": q_values}
    rows = random_rows(rng, p.window_format, window.num_pages, p.per_page, p.width)
    arrays["window"] = poisoned(rows.memory, window_slots(p, tokens, window))
    values["window"] = rows.values
    dims = {
        "tokens": tokens.count, "requests": len(spans), "window_blocks": window.pages.shape[1],
        "window_pages": window.num_pages,
    }  # fmt: skip
    if p.op != "attend_window":
        entries = random_rows(rng, p.entry_format, context.num_pages, p.entries_per_page, p.width)
        seen, selected = chosen_entries(p, tokens, rng)
        slots = [context.slots(int(tokens.rows[t]), e) for t, e in enumerate(seen)]
        arrays["entries"], values["entries"] = poisoned(entries.memory, slots), entries.values
        arrays["block_tables"] = values["block_tables"] = context.pages
        dims |= {"cache_blocks": context.pages.shape[1], "pages": context.num_pages}
        if p.op == "attend_selected":
            arrays["selected"] = values["selected"] = selected
    return Step(arrays, values, dims)


def window_slots(p: Problem, tokens: Tokens, tables: Tables) -> list[Array]:
    found = []
    for position, row in zip(tokens.positions, tokens.rows, strict=True):
        seen = np.arange(max(0, position + 1 - p.window), position + 1)
        found.append(tables.slots(int(row), seen))
    return found


def chosen_entries(
    p: Problem, tokens: Tokens, rng: np.random.Generator
) -> tuple[list[Array], NDArray[np.int32]]:
    """Entries every token may read, and a selection with holes in it."""
    selected = np.full((tokens.count, p.selected), -1, np.int32)
    seen = []
    for t, position in enumerate(tokens.positions):
        visible = np.arange(max(0, position + 1) // p.ratio)
        if p.op == "attend_compressed":
            seen.append(visible)
            continue
        count = int(rng.integers(0, min(len(visible), p.selected) + 1))
        picked = rng.permutation(visible)[:count].astype(np.int32)
        selected[t, np.sort(rng.permutation(p.selected)[:count])] = picked
        seen.append(picked)
    return seen, selected


def expected(p: Problem, step: Step) -> NDArray[np.float64]:
    """The reference in fp64, with the casts of the graph."""
    order = ["q", "window", "positions", "request_rows", "window_tables", "sink"]
    order += ["entries", "block_tables"] if p.op != "attend_window" else []
    order += ["selected"] if p.op == "attend_selected" else []
    operands = [torch.from_numpy(np.nan_to_num(step.values[n])) for n in order]
    operands = [o.double() if o.is_floating_point() else o for o in operands]
    if p.epilogue:
        operands[0] = (operands[0] * 0.5).bfloat16().double()
    out = op_def(p.op).reference(operands, p.attrs)
    found: NDArray[np.float64] = (out * 2.0 if p.epilogue else out).numpy()
    return found


PICKED = {16: (0, 4, 10, 19), 64: (0, 9, 20)}  # schedules that differ in every field


@cache
def kernels(name: str, folder: Path, rows: int) -> Kernels:
    p = PROBLEMS[name]
    return Kernels(build(p), quick_target(), folder, rows=rows, picked=PICKED[rows], chunk=p.chunk)


def output(kernels: Kernels, step: Step, index: int, threads: int = 2) -> dict[str, Array]:
    """Run the schedule numbered `index`."""
    return kernels.run(kernels.specs[index % len(kernels.specs)], step.arrays, step.dims,
                       threads=threads)  # fmt: skip


def widened(p: Problem, found: dict[str, Array]) -> NDArray[np.float64]:
    (array,) = found.values()
    if p.epilogue:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


SPANS = [(0, 3), (37, 6), (9, 1), (60, 2), (18, 1)]


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_schedule_equals_the_reference_and_the_others(name: str, kernel_cache: Path) -> None:
    p, step = PROBLEMS[name], make_step(PROBLEMS[name], SPANS, seed=3)
    want = expected(p, step)
    first: dict[str, Array] | None = None
    for rows in (16, 64):
        made = kernels(name, kernel_cache, rows)
        assert made.num_legal >= 8
        for index, threads in zip(range(len(made.specs)), (1, 3, 2, 4), strict=False):
            found = output(made, step, index, threads)
            if first is None:
                first = found
                bound = 2.0**-7 if p.epilogue else 2e-6  # rounding to bf16; sums in fp32
                limit = bound * (1 + np.abs(want))
                assert (np.abs(widened(p, found) - want) <= limit).all()
            assert equal_bytes(first, [found]), made.specs[index].schedule


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_token_alone_equals_the_token_among_others(name: str, kernel_cache: Path) -> None:
    p, made = PROBLEMS[name], kernels(name, kernel_cache, 64)
    step = make_step(p, SPANS, seed=5)
    (whole,) = output(made, step, 0).values()
    few = kernels(name, kernel_cache, 16)
    for t in range(step.dims["tokens"]):
        alone = step.take(np.array([t]))
        for index in (0, 1, 5):
            (found,) = output(few, alone, index, threads=1 + t % 3).values()
            assert found.tobytes() == whole[t : t + 1].tobytes(), (t, index)


@pytest.mark.parametrize("name", ["window", "compressed", "selected"])
def test_prefill_cut_at_every_offset(name: str, kernel_cache: Path) -> None:
    p, made = PROBLEMS[name], kernels(name, kernel_cache, 64)
    step = make_step(p, [(5, 23)], seed=7, padding=0)
    (whole,) = output(made, step, 0).values()
    for cut in range(1, 23):
        parts = []
        for chosen in (np.arange(cut), np.arange(cut, 23)):
            parts.append(next(iter(output(made, step.take(chosen), cut).values())))
        assert np.concatenate(parts).tobytes() == whole.tobytes(), cut


def test_order_of_tokens_and_neighbours_do_not_matter(kernel_cache: Path) -> None:
    p, made = PROBLEMS["selected"], kernels("selected", kernel_cache, 64)
    step = make_step(p, SPANS, seed=11)
    (whole,) = output(made, step, 0).values()
    order = np.random.default_rng(0).permutation(step.dims["tokens"])
    (found,) = output(made, step.take(order), 3).values()
    assert found.tobytes() == whole[order].tobytes()


def test_padding_gives_zeros(kernel_cache: Path) -> None:
    p, made = PROBLEMS["window"], kernels("window", kernel_cache, 16)
    step = make_step(p, [(0, 1)], seed=1, padding=3)
    (found,) = output(made, step, 0).values()
    assert not found[1:].any()
    assert found[0].any()


def test_values_that_are_not_numbers_stay_with_their_token(kernel_cache: Path) -> None:
    """A NaN in q, and -inf and +inf sinks."""
    p, made = PROBLEMS["window"], kernels("window", kernel_cache, 64)
    step = make_step(p, [(20, 4)], seed=2, padding=0)
    (plain,) = output(made, step, 0).values()
    q = step.arrays["q"].copy()
    q[1] = 0x7FC0
    (found,) = output(made, replace(step, arrays={**step.arrays, "q": q}), 0).values()
    assert found[[0, 2, 3]].tobytes() == plain[[0, 2, 3]].tobytes()
    assert np.isnan((found[1].astype(np.uint32) << 16).view(np.float32)).all()
    for sink in (-np.inf, np.inf):
        sinks = np.full(p.heads, sink, np.float32)
        values = {**step.values, "sink": sinks}
        given = Step({**step.arrays, "sink": sinks}, values, step.dims)
        got = widened(p, output(made, given, 0))
        want = expected(p, given) if sink < 0 else np.full(got.shape, np.nan)
        np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=2.0**-7)


@pytest.fixture(scope="module", autouse=True)
def close_pools() -> Iterator[None]:
    yield
    kernels.cache_clear()


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
        op=draw("attend_window", "attend_compressed", "attend_selected"),
        heads=draw(1, 3, 16, 17, 33), width=draw(8, 24, 64, 136), window=draw(1, 5, 40),
        per_page=draw(1, 3, 64), ratio=draw(1, 2, 3), entries_per_page=draw(1, 5, 32),
        selected=draw(1, 8, 40), window_format=draw("f32", "bf16", "fp8"),
        entry_format=draw("f32", "bf16", "nvfp4", "mxfp4"), chunk=draw(1, 16, 31),
        epilogue=data.draw(st.booleans()),
    )  # fmt: skip
    rows = draw(4, 64)
    made = Kernels(build(p), quick_target(), kernel_cache, rows=rows, picked=(0, 7), chunk=p.chunk)
    spans = data.draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6)), min_size=1,
                               max_size=4))  # fmt: skip
    step = make_step(p, spans, seed=data.draw(st.integers(0, 99)))
    found = [output(made, step, i, threads=1 + i) for i in range(2)]
    made.close()
    assert equal_bytes(found[0], found[1:])
    want = expected(p, step)
    # Scores are sums of up to `width` products: their error goes into every weight.
    largest = max(
        np.nanmax(np.abs(step.values[n])) for n in ("window", "entries") if n in step.values
    )
    limit = (2.0**-7 if p.epilogue else 0.0) * np.abs(want) + 1e-5 * (1 + largest)
    assert (np.abs(widened(p, found[0]) - want) <= limit).all()
