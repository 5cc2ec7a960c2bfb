"""Bits depend on the row alone: not on its batch, bucket, cut, threads or schedule.

The last tests plant a dependence and ask that the same checks find it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.tiny import SETTINGS, Tiny, build, quick_target, tiny
from support.weights import RandomWeights
from support.zoo import BLOCKS_EACH, Rows, bodies, hard_rows, joined, nth_candidate
from tilewright import runtime
from tilewright.codegen.body import Body
from tilewright.codegen.numerics import alternatives
from tilewright.codegen.plan import Bucket, Candidate, Chooser, first_candidate
from tilewright.codegen.select import Choice
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.devices.cpu import CpuDevice
from tilewright.runtime.executor import Executor

pytestmark = pytest.mark.cpu
BF16 = replace(SETTINGS, dtype="bfloat16")
TARGET = quick_target((1, 4))
COUNT = 24
Results = dict[str, NDArray[Any]]


def zoo(*, every_kernel: bool) -> Tiny:
    """Kernels of models in all weight formats and both activation types, in one graph."""
    models = [tiny("q4_1"), tiny("q8_0"), tiny("f32"), tiny("bf16", settings=BF16)]
    seen: set[str] = set()

    def keep(index: int, body: Body) -> bool:
        """All kernels, or the first contraction per format (the most complex) and all others."""
        kind = body.graph.name
        cache = str(next((s.type.dtype for s in body.graph.states), ""))
        first = kind + cache not in seen
        seen.add(kind + cache)
        return every_kernel or (index == 0 if kind == "contract" else kind == "row" or first)

    graph = joined(bodies(models, keep), models[0].graph)
    return Tiny(graph, RandomWeights(graph, spread=20), SETTINGS, {})


@contextmanager
def executor(path: Path, threads: int, rows: Rows) -> Iterator[Executor]:
    with Executor(load_artifact(path), CpuDevice(threads), poison=True) as made:
        made.allocate_states({"cache_blocks": rows.count * BLOCKS_EACH})
        yield made


def run_rows(made: Executor, rows: Rows, chosen: list[int]) -> list[Results]:
    """Run one step of these rows; return each row's outputs and the cache entries it stored."""
    for name, content in rows.caches.items():
        made.state(name)[...] = content
    inputs, dims = rows.step(chosen)
    outputs = {name: np.array(array) for name, array in made.run(inputs, dims).items()}
    found: list[Results] = []
    for index, row in enumerate(chosen):
        mine = slice(row * BLOCKS_EACH, (row + 1) * BLOCKS_EACH)
        caches = {name: np.array(made.state(name)[mine]) for name in rows.caches}
        found.append({**{name: array[index] for name, array in outputs.items()}, **caches})
    return found


def assert_same(got: Results, want: Results, where: str) -> None:
    for name in want:
        assert got[name].tobytes() == want[name].tobytes(), f"{name} differs: {where}"


def check_rows_alone(path: Path, rows: Rows, skipped: set[int], *, threads: int, seed: int) -> (
    list[Results]
):  # fmt: skip
    """Every row among all equals the row alone, and the row in random company."""
    r = random.Random(seed)
    with executor(path, threads, rows) as made:
        among = run_rows(made, rows, list(range(rows.count)))
        for row in r.sample([i for i in range(rows.count) if i not in skipped], 5):
            assert_same(run_rows(made, rows, [row])[0], among[row], f"row {row} alone")
        for size in (2, 4, r.randint(5, rows.count - 1)):
            chosen = r.sample(range(rows.count), size)
            for row, result in zip(chosen, run_rows(made, rows, chosen), strict=True):
                if row not in skipped:
                    assert_same(result, among[row], f"row {row} among {chosen}")
    return [result for row, result in enumerate(among) if row not in skipped]


@pytest.mark.parametrize(
    ("every_kernel", "schedules"),
    [
        pytest.param(False, (0, 7, 13), id="some"),
        pytest.param(True, tuple(range(16)), id="every", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_in_every_schedule_gives_a_row_its_bits(
    every_kernel: bool, schedules: tuple[int, ...], tmp_path: Path, kernel_cache: Path
) -> None:
    """Rows alone, in any batch, on any number of threads, under schedules the tuner may take."""
    model, nan_rows = zoo(every_kernel=every_kernel), {3, 11}
    rows = hard_rows(model.graph, COUNT, seed=1, nan_rows=nan_rows)
    expected: list[Results] | None = None
    for n in schedules:
        path = tmp_path / f"zoo{n}"
        build(
            model, path, kernel_cache, target=TARGET,
            choose=nth_candidate(TARGET, model.settings, n),
        )  # fmt: skip
        for threads in (1, 2, 4):
            found = check_rows_alone(path, rows, nan_rows, threads=threads, seed=n)
            expected = expected or found
            for row, (got, want) in enumerate(zip(found, expected, strict=True)):
                assert_same(got, want, f"row {row}, schedule {n}, {threads} threads")


# --- whole models ---------------------------------------------------------------------------


def whole_logits(made: Executor, tokens: list[int], cuts: list[int], block: int) -> bytes:
    """Logits of every position, the prompt cut before each of `cuts`, its blocks in odd places."""
    blocks = -(-len(tokens) // block)
    table = np.array([(5 * i + 3) % 32 for i in range(blocks)], np.int32)
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        positions = np.arange(start, stop, dtype=np.int32)
        used = -(-stop // block)
        n = stop - start
        inputs = {
            "token_ids": np.array(tokens[start:stop], np.int32),
            "positions": positions,
            "request_rows": np.zeros(n, np.int32),
            "slots": (table[positions // block] * block + positions % block).astype(np.int32),
            "block_tables": table[None, :used],
            "logit_rows": np.arange(n, dtype=np.int32),
        }
        dims = {"tokens": n, "requests": 1, "logit_rows": n, "request_blocks": used}
        parts.append(made.run(inputs, dims)["logits"].tobytes())
    return b"".join(parts)


def check_cuts(path: Path, tokens: list[int], block: int, *, threads: int, seed: int) -> bytes:
    """A prompt cut at every step of 1, at one place, and at random places gives the same logits."""
    r, n = random.Random(seed), len(tokens)
    plans = [list(range(1, n)), [n // 2], [1], [n - 1], [4, 5], [n - 4]]
    plans += [sorted(r.sample(range(1, n), r.randint(1, 5))) for _ in range(6)]
    with Executor(load_artifact(path), CpuDevice(threads), poison=True) as made:
        made.allocate_states({"cache_blocks": 32})
        whole = whole_logits(made, tokens, [], block)
        for cuts in plans:
            got = whole_logits(made, tokens, cuts, block)
            assert got == whole, f"cut at {cuts} on {threads} threads"
    return whole


MODELS: dict[str, Callable[[], Tiny]] = {
    "f32": lambda: tiny("f32", settings=replace(SETTINGS, max_tokens_per_step=96)),
    "q4_1-bf16": lambda: tiny("q4_1", settings=replace(BF16, max_tokens_per_step=96)),
    "q8_0-qwen2": lambda: tiny(
        "q8_0", family="Qwen2ForCausalLM", settings=replace(SETTINGS, max_tokens_per_step=96)
    ),
}


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> Callable[[str], tuple[Tiny, Path]]:
    done: dict[str, tuple[Tiny, Path]] = {}

    def get(name: str) -> tuple[Tiny, Path]:
        if name not in done:
            model, path = MODELS[name](), tmp_path_factory.mktemp("model") / name
            build(model, path, kernel_cache, target=TARGET)
            done[name] = model, path
        return done[name]

    return get


TOKENS = [random.Random(9).randrange(67) for _ in range(90)]


@pytest.mark.parametrize("name", [
    "q4_1-bf16",
    pytest.param("f32", marks=pytest.mark.slow),
    pytest.param("q8_0-qwen2", marks=pytest.mark.slow),
])  # fmt: skip
def test_cut_prefill_gives_equal_logits(
    name: str, built: Callable[[str], tuple[Tiny, Path]]
) -> None:
    model, path = built(name)
    found = {
        check_cuts(path, TOKENS, model.settings.block_size, threads=threads, seed=threads)
        for threads in (1, 2, 4)
    }
    assert len(found) == 1


def test_artifacts_of_equal_digests_give_equal_bits(
    tmp_path: Path, kernel_cache: Path, built: Callable[[str], tuple[Tiny, Path]]
) -> None:
    """Other limits, other buckets, other schedules: the engine cuts the prompt elsewhere."""
    model, path = built("q4_1-bf16")
    small = tiny("q4_1", settings=replace(BF16, max_tokens_per_step=5, max_requests=3))
    target = quick_target((5, 5))
    build(
        small, tmp_path / "m", kernel_cache, target=target,
        choose=nth_candidate(target, small.settings, 5),
    )  # fmt: skip
    assert small.graph != model.graph
    with runtime.load(path) as one, runtime.load(tmp_path / "m", num_threads=1) as other:
        assert one.numerics_digest == other.numerics_digest
        assert one.logits(TOKENS).tobytes() == other.logits(TOKENS).tobytes()


def requests(count: int) -> list[tuple[list[int], runtime.SamplingParams]]:
    """Greedy and sampled requests of different lengths."""
    r = random.Random(4)
    return [
        (
            [r.randrange(67) for _ in range(r.choice((1, 2, 7, 30, 61)))],
            runtime.SamplingParams(
                max_tokens=r.randint(1, 24), temperature=float(i % 2), seed=i, logprobs=1
            ),
        )
        for i in range(count)
    ]


def outcome(output: Any) -> Any:
    (sample,) = output.samples
    return sample.token_ids, sample.logprobs


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("cache_tokens", [None, 96])
def test_company_leaves_a_request_its_tokens(
    threads: int, cache_tokens: int | None, built: Callable[[str], tuple[Tiny, Path]]
) -> None:
    """Requests that join late, leave early, are aborted or preempted change nothing for others."""
    _, path = built("q4_1-bf16")
    todo = requests(9)
    with runtime.load(path, num_threads=2) as engine:
        alone = [outcome(engine.generate(prompt, params)[0]) for prompt, params in todo]
    r = random.Random(threads)
    with runtime.load(path, num_threads=threads, cache_tokens=cache_tokens) as engine:
        together = engine.generate([p for p, _ in todo], [s for _, s in todo])
        assert [outcome(o) for o in together] == alone
        waiting = list(range(len(todo)))
        r.shuffle(waiting)
        live: dict[int, Any] = {}
        for step in range(400):
            if waiting and r.random() < 0.4:
                index = waiting.pop()
                live[index] = engine.submit(*todo[index])
            if step % 7 == 0:
                engine.submit(todo[0][0], todo[1][1], request_id=f"extra-{step}")
            if step % 7 == 4:
                engine.abort(f"extra-{step - 4}")
            if not engine.step() and not waiting:
                break
        for index, submitted in live.items():
            assert outcome(engine.output(submitted)) == alone[index], f"request {index}"
        assert len(live) == len(todo)


# --- the same checks find a planted dependence ----------------------------------------------


def by_bucket(kind: str) -> Chooser:
    """Other numerics in every bucket for one kind of kernel, as `fast` mode may choose."""
    first = first_candidate(TARGET)
    order = ["tokens_1", "tokens_4"]

    def choose(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        candidate = first(body, choice, bucket)
        options = alternatives(choice.template.kind, body.graph, TARGET)
        if choice.template.kind != kind or bucket.name not in order:
            return candidate
        numerics = options[(1 + order.index(bucket.name)) % len(options)]
        return replace(candidate, numerics=numerics)

    return choose


@pytest.mark.parametrize("kind", ["contract", "attend"])
def test_checks_find_numerics_that_depend_on_the_bucket(
    kind: str, tmp_path: Path, kernel_cache: Path
) -> None:
    # fp32 activations: rounding to bf16 would hide most of what an attention chunk changes
    model = tiny("q4_1", settings=replace(SETTINGS, max_tokens_per_step=96, mode="fast"))
    build(model, tmp_path / "m", kernel_cache, target=TARGET, choose=by_bucket(kind))
    with pytest.raises(AssertionError, match="cut at"):
        check_cuts(tmp_path / "m", TOKENS, model.settings.block_size, threads=2, seed=0)


def test_row_check_finds_numerics_that_depend_on_the_bucket(
    tmp_path: Path, kernel_cache: Path
) -> None:
    model = zoo(every_kernel=False)
    model = replace(model, settings=replace(model.settings, mode="fast"))
    rows = hard_rows(model.graph, COUNT, seed=1)
    build(model, tmp_path / "m", kernel_cache, target=TARGET, choose=by_bucket("contract"))
    with pytest.raises(AssertionError, match="differs: row"):
        check_rows_alone(tmp_path / "m", rows, set(), threads=2, seed=0)
