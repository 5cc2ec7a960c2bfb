"""Contractions with stacks of matrices: every schedule, load, batch and thread count gives the bits
of a plain contraction with the one matrix a row meets."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.contractions import Contraction
from support.tiny import QUANTISED, quick_target
from support.weights import RandomWeights
from tilewright.graph import Graph, GraphBuilder, Role, Value, reference
from tilewright.graph.types import BF16, F32, I32, element_type

pytestmark = pytest.mark.cpu
# These kernels are many and small: half the optimisation, the same bits.
TARGET = replace(
    quick_target(), flags=tuple("-O1" if f == "-O3" else f for f in quick_target().flags)
)
EXPERTS, SLOTS, N, K = 5, 2, 40, 64
TOKENS = 48
Array = NDArray[Any]


CODED = "fp4 with coded rows"  # rows of e4m3, whose sums with FP4 are exact


def type_of(stored: str) -> Any:
    stored = "fp4" if stored == CODED else stored
    return element_type(QUANTISED.get(stored, stored))


def row_type(stored: str) -> Any:
    return element_type("fp8_e4m3[g=32,axis=1,scale=ue8m0]") if stored == CODED else BF16


def parts(name: str) -> list[str]:
    return [f"{name}.{e}" for e in range(EXPERTS)]


def experts(stored: str, *, shared: bool, gated: bool = False) -> Graph:
    """One product with chosen experts, or two that meet in a clamped, weighted gate."""
    b = GraphBuilder("experts")
    tokens = b.dim("tokens", Role.BATCH, upper=TOKENS)
    x = b.input("x", row_type(stored), *((tokens, K) if shared else (tokens, SLOTS, K)))
    ids = b.input("ids", I32, tokens, SLOTS)

    def product(name: str) -> Value:
        w = b.stack(name, type_of(stored), parts(name), N, K)
        return b.op("expert_linear", x, w, ids)

    if not gated:
        b.output("y", product("w1"))
        return b.build()
    weights = b.input("weights", F32, tokens, SLOTS)
    gate = b.op("at_most", product("w1"), limit=1.0)
    up = b.op("at_least", b.op("at_most", product("w3"), limit=1.0), limit=-1.0)
    scaled = b.silu(gate) * up * b.op("expand_last", weights)
    b.output("y", b.cast(scaled, BF16))
    return b.build()


def plain(stored: str, name: str) -> Graph:
    """The product with one expert's matrix."""
    b = GraphBuilder("plain")
    tokens = b.dim("tokens", Role.BATCH, upper=TOKENS * SLOTS)
    x = b.input("x", row_type(stored), tokens, K)
    b.output("y", b.linear(x, b.weight(name, type_of(stored), N, K)))
    return b.build()


@cache
def compiled(stored: str, shared: bool, gated: bool, folder: Path) -> Contraction:
    graph = experts(stored, shared=shared, gated=gated)
    return Contraction(graph, TARGET, folder, count=2 if "fp4" in stored and shared else 1)


def bf16(values: NDArray[np.float32]) -> Array:
    array: Array = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    return array


def draw(shared: bool, seed: int, tokens: int = TOKENS, *, coded: bool = False) -> dict[str, Array]:
    r = np.random.default_rng(seed)
    shape = (tokens, K) if shared else (tokens, SLOTS, K)
    x = r.standard_normal(shape).astype(np.float32)
    if coded:
        x = torch.from_numpy(x).to(torch.float8_e4m3fn).float().numpy()
    return {
        "x": bf16(x),
        "ids": r.integers(0, EXPERTS, (tokens, SLOTS)).astype(np.int32),
        "weights": r.uniform(0.1, 1, (tokens, SLOTS)).astype(np.float32),
    }


def rows_of(inputs: dict[str, Array]) -> Array:
    x = inputs["x"]
    return x if x.ndim == 3 else np.repeat(x[:, None], SLOTS, 1)


@cache
def single(stored: str, name: str, folder: Path) -> Contraction:
    return Contraction(plain(stored, name), TARGET, folder, rows=(1,), count=1)


def expected(stored: str, inputs: dict[str, Array], folder: Path) -> Array:
    """Results of plain kernels, one per expert, in place."""
    y = np.full((*inputs["ids"].shape, N), np.nan, np.float32)
    rows = rows_of(inputs)
    for e, name in enumerate(parts("w1")):
        mine = inputs["ids"] == e
        if mine.any():
            kernel = single(stored, name, folder)
            given_rows = {"x": np.ascontiguousarray(rows[mine])}
            (found,) = kernel.run(kernel.specs[0], given_rows, {"tokens": int(mine.sum())}).values()
            y[mine] = found
    return y


def same(a: Array, b: Array) -> bool:
    return a.tobytes() == b.tobytes()


LOADS = {
    "spread": lambda ids: ids,
    "all on one expert": lambda ids: np.full_like(ids, 3),
    "one slot each on the last": lambda ids: np.stack((ids[:, 0], np.full(len(ids), 4)), 1),
    "two experts": lambda ids: ids % 2,
    "unknown ids": lambda ids: np.where(ids == 2, -1, np.where(ids == 4, EXPERTS, ids)),
}


@pytest.mark.parametrize(
    ("stored", "shared"),
    [("fp4", True), ("fp4", False), ("fp8", True), ("bf16", False), (CODED, True), (CODED, False)],
)
def test_every_schedule_gives_the_bits_of_plain_products(
    stored: str, shared: bool, kernel_cache: Path
) -> None:
    kernel = compiled(stored, shared, False, kernel_cache)
    inputs = draw(shared, 1, coded=stored == CODED)
    assert (kernel.specs[0].numerics.atom == "integer") == (stored == CODED)
    for load, change in LOADS.items():
        given_ids = dict(inputs, ids=change(inputs["ids"]).astype(np.int32))
        want = expected(stored, given_ids, kernel_cache)
        for turn, spec in enumerate(kernel.specs):
            (y,) = kernel.run(spec, given_ids, {"tokens": TOKENS}, threads=1 + turn % 4).values()
            nan = np.isnan(want)
            assert np.array_equal(np.isnan(y), nan), f"{load}: {spec.schedule}"
            assert same(y[~nan], want[~nan]), f"{load}: {spec.schedule}"


@pytest.mark.parametrize("stored", ["fp4", CODED])
@given(data=st.data())
@settings(max_examples=10)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(
    stored: str, kernel_cache: Path, data: st.DataObject
) -> None:
    kernel = compiled(stored, True, True, kernel_cache)
    inputs = draw(True, 2, coded=stored == CODED)
    (whole,) = kernel.run(kernel.specs[0], inputs, {"tokens": TOKENS}).values()
    picks = data.draw(st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=TOKENS))
    spec = data.draw(st.sampled_from(kernel.specs))
    some = {n: np.ascontiguousarray(a[picks]) for n, a in inputs.items()}
    threads = data.draw(st.integers(1, 4))
    (y,) = kernel.run(spec, some, {"tokens": len(picks)}, threads=threads).values()
    assert same(y, whole[picks])


@pytest.mark.parametrize("stored", ["fp4", CODED])
def test_two_products_meet_in_one_kernel(stored: str, kernel_cache: Path) -> None:
    kernel = compiled(stored, True, True, kernel_cache)
    inputs = draw(True, 3, coded=stored == CODED)
    graph = experts(stored, shared=True, gated=True)
    x = (inputs["x"].astype(np.uint32) << 16).view(np.float32)
    want = reference.run(
        graph,
        {"x": torch.from_numpy(x), "ids": torch.from_numpy(inputs["ids"]),
         "weights": torch.from_numpy(inputs["weights"])},
        states={}, weights=kernel.weights.tensors(), precision=reference.IDEAL_F64,
    ).outputs["y"].numpy()  # fmt: skip
    results = [
        kernel.run(spec, inputs, {"tokens": TOKENS}, threads=1 + i % 3)
        for i, spec in enumerate(kernel.specs)
    ]
    for result in results:
        (y,) = result.values()
        got = (y.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=2**-7)
        assert same(y, *results[0].values())


def grouped(stored: str) -> Graph:
    b = GraphBuilder("grouped")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=TOKENS), 3, K)
    b.output("y", b.cast(b.op("grouped_linear", x, b.weight("w", type_of(stored), 96, K)), BF16))
    return b.build()


@pytest.mark.parametrize("stored", ["fp8"])
def test_groups_meet_their_own_matrices(stored: str, kernel_cache: Path) -> None:
    kernel = Contraction(grouped(stored), TARGET, kernel_cache, count=1)
    x = bf16(np.random.default_rng(5).standard_normal((TOKENS, 3, K)).astype(np.float32))
    values = torch.from_numpy((x.astype(np.uint32) << 16).view(np.float32)).double()
    w = kernel.weights.tensors()["w"].double().reshape(3, 32, K)
    want = torch.einsum("tgk,gnk->tgn", values, w).numpy()
    first = None
    for turn, spec in enumerate(kernel.specs):
        for tokens in (1, 7, TOKENS):
            dims = {"tokens": tokens}
            (y,) = kernel.run(spec, {"x": x[:tokens]}, dims, threads=1 + turn % 4).values()
            got = (y.astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_allclose(got, want[:tokens], atol=1e-5, rtol=2**-7)
            first = y if first is None and tokens == TOKENS else first
            assert first is None or same(y, first[:tokens])


def test_weights_of_one_stack_are_packed_matrix_by_matrix() -> None:
    graph = experts("fp4", shared=True)
    weights = RandomWeights(graph)
    (stack,) = weights.tensors().values()
    assert stack.shape == (EXPERTS, N, K)
