"""The one door for text: unordered accumulation is refused, naming kernel and rule."""

from __future__ import annotations

import pytest

from support.tiny import SETTINGS, quick_target, tiny_graph
from tilewright.codegen.compile import distinct_specs
from tilewright.codegen.emit.cpp import emit
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import first_candidate, plan_groups
from tilewright.codegen.source import FORBIDDEN, KernelSource
from tilewright.graph.errors import LowerError, TargetError
from tilewright.targets.cpu.target import VARIANTS

ATOMIC = "an atomic has no fixed order of accumulation"
MACHINE = "the C library's functions differ between machines: use those of tw_math.h"
THREAD = "arithmetic on the thread would let bits depend on the number of threads"

PLANTED = [
    ("std::atomic<float> sum;", "std::atomic", ATOMIC),
    ("__atomic_fetch_add(&x, 1, 0);", "__atomic_fetch_add", ATOMIC),
    ("total.fetch_add(y);", "fetch_add", ATOMIC),
    ("#pragma omp parallel for", "#pragma omp",
     "OpenMP decides the order of a reduction by the number of threads"),
    ("y = std::reduce(a, b);", "std::reduce", "its order of evaluation is not fixed"),
    ("int64_t chunk = num_rows / tw_num_threads() + 1;", "tw_num_threads() +", THREAD),
    ("float* mine = sums + thread_id * 16;", "thread_id * 1", THREAD),
    ("y = expf(x);", "expf(", MACHINE),
    ("y = std::exp(x);", "std::exp(", MACHINE),
    ("#pragma STDC FP_CONTRACT ON", "FP_CONTRACT ON", "the compiler may reorder sums"),
    ('__attribute__((optimize("fast-math")))', "fast-math", "the compiler may reorder sums"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "found", "why"), PLANTED)
def test_planted_violations_are_refused(line: str, found: str, why: str) -> None:
    text = f"// first\nvoid f() {{\n  {line}\n}}\n"
    with pytest.raises(LowerError) as caught:
        KernelSource("row_1", "cpp", text)
    assert str(caught.value) == f"kernel 'row_1': forbidden text '{found}' in line 3: {why}"


MINE = "its bits are the compiler's: use the functions of tw_math"
PLANTED_TRITON = [
    ("tl.atomic_add(y + i, x)", "atomic_add", ATOMIC),
    ("@triton.autotune(configs=[])", "autotune", "schedules are chosen by the tuner, by name"),
    ("x = tl.rand(seed, i)", "tl.rand", "a kernel depends on its arguments alone"),
    ("y = tl.exp(x)", "tl.exp(", MINE),
    ("y = tl.math.exp2(x)", "tl.math.exp2(", MINE),
    ("y = tl.sum(x, axis=0)", "tl.sum(", "its order is the compiler's: use the fixed tree"),
    ("y = tl.cumsum(x, 0)", "tl.cumsum", "its order is not fixed"),
    ('y = tl.dot(a, b, input_precision="tf32")', "tf32",
     "the precision of a product is part of the numerics"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "found", "why"), PLANTED_TRITON)
def test_planted_violations_in_triton_are_refused(line: str, found: str, why: str) -> None:
    with pytest.raises(LowerError) as caught:
        KernelSource("row_1", "triton", f"# first\ndef f():\n    {line}\n")
    assert str(caught.value) == f"kernel 'row_1': forbidden text '{found}' in line 3: {why}"


PLANTED_CUDA = [
    ("atomicAdd(y + i, x);", "atomicAdd", ATOMIC),
    ('asm volatile("red.global.add.f32 [%0], %1;" :: "l"(y), "f"(x));', "red.", ATOMIC),
    ('asm("mov.b32 %0, %1;" : "=r"(y) : "r"(x));', "asm",
     "what it computes cannot be checked here: use the functions of tw_hopper"),
    ("y = __expf(x);", "__expf(", "an approximation has the chip's own bits"),
    ("y = rsqrtf(x);", "rsqrtf(", "an approximation has the chip's own bits"),
    ("y = clock64();", "clock64(", "a kernel depends on its arguments alone"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "found", "why"), PLANTED_CUDA)
def test_planted_violations_in_cuda_are_refused(line: str, found: str, why: str) -> None:
    with pytest.raises(LowerError) as caught:
        KernelSource("row_1", "cuda", f"// first\nvoid f() {{\n{line}\n}}\n")
    assert str(caught.value) == f"kernel 'row_1': forbidden text '{found}' in line 3: {why}"


def test_comments_in_triton_may_say_anything() -> None:
    KernelSource("row_1", "triton", "x = 7 // 2  # no tl.atomic_add here\n")


def test_comments_may_say_anything() -> None:
    KernelSource("row_1", "cpp", "// std::atomic\n/* fetch_add\n #pragma omp */ int x;\n")


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(LowerError) as caught:
        KernelSource("row_1", "basic", "")
    known = ", ".join(FORBIDDEN)
    assert str(caught.value) == f"kernel 'row_1': language 'basic': unknown: have {known}"


def test_flags_that_reorder_sums_are_refused() -> None:
    from dataclasses import replace

    target = next(iter(VARIANTS.values()))
    with pytest.raises(TargetError) as caught:
        replace(target, flags=(*target.flags, "-ffast-math"))
    assert str(caught.value) == "target 'cpu': flag -ffast-math lets the compiler reorder sums"


def test_text_of_a_model_depends_on_its_specs_alone() -> None:
    """Two emissions are equal byte for byte, and every kernel is named by its digest."""
    target = quick_target()
    templates = {t.name: t for t in target.kernels}
    graph = lower(tiny_graph("q8_0"), Flags()).graph
    specs = distinct_specs(plan_groups(graph, target, SETTINGS, first_candidate(target)))
    for spec in specs:
        source = emit(spec, templates[spec.template])
        assert source == emit(spec, templates[spec.template])
        assert f"TW_KERNEL({spec.symbol})" in source.text
