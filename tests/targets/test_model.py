"""The functional model: correct kernels are clean, every kind of fault is one exact sentence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from support.ascend import Variants
from support.ascend_kernels import TEXTS, case

pytestmark = pytest.mark.cpu


def edited(kernel: str, *edits: tuple[str, str]) -> str:
    """Return a kernel's text with each first text replaced; it must occur once."""
    text = TEXTS[kernel]
    for before, after in edits:
        assert text.count(before) == 1, f"{kernel}: {before!r} occurs {text.count(before)} times"
        text = text.replace(before, after)
    return text


DOUBLED = "  asc_sync_notify(PIPE_V, PIPE_MTE3, EVENT_ID0);"
W_COPY = "  asc_copy_gm2ub_align(w_ub, w, 1, 1024, 0, 0, false, 0, 1024, 1024);\n"
ARRIVED = "    asc_sync_intra_arrive(PIPE_FIX, 1);\n"
FINISHED = "    asc_set_l0c_copy_nz_para(1, 0, 0);\n"
# name -> kernel, kind of report, edits
FAULTS: Mapping[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {
    "ub_overflow": ("stream", "overflow", (("float*)3072", "float*)253440"),)),
    "simt_overflow": ("stream", "overflow", (("float*)3072", "float*)240000"),)),
    "l0a_overflow": (
        "cube",
        "overflow",
        (("l12l0a(a_l0 + slot * 4096", "l12l0a(a_l0 + slot * 32768"),),
    ),
    "misaligned_ub": (
        "stream",
        "misaligned",
        (("x_ub + slot * 256, x", "x_ub + slot * 256 + 1, x"),),
    ),
    "misaligned_l0c": ("cube", "misaligned", (("asc_mmad(c_l0,", "asc_mmad(c_l0 + 64,"),)),
    "row_out_of_bounds": ("stream", "out of bounds", (("x + t * 256", "x + (t + 1) * 256"),)),
    "input_written": ("stream", "out of bounds", (("ub2gm_align(y", "ub2gm_align(x"),)),
    "uninitialised_read": ("stream", "uninitialised read", ((W_COPY, "\n"),)),
    "missing_wait": (
        "reduce",
        "race",
        (("  asc_sync_wait(PIPE_MTE2, PIPE_V, EVENT_ID0);\n", "\n"),),
    ),
    "missing_notify": (
        "reduce",
        "deadlock",
        (("  asc_sync_notify(PIPE_MTE2, PIPE_V, EVENT_ID0);\n", "\n"),),
    ),
    "doubled_notify": ("reduce", "pairing", ((DOUBLED + "\n", DOUBLED + DOUBLED + "\n"),)),
    "aliased_double_buffer": (
        "stream",
        "race",
        (("w_ub, y_ub + slot * 256", "w_ub, y_ub"), ("y_ub + slot * 256, 1", "y_ub, 1")),
    ),
    "arrival_of_wrong_core": ("cube", "deadlock", (("(PIPE_FIX, 17)", "(PIPE_FIX, 1)"),)),
    "arrival_of_wrong_pipe": ("cube", "race", (("(PIPE_FIX, 17)", "(PIPE_M, 17)"),)),
    "arrival_too_much": ("cube", "pairing", ((ARRIVED, ARRIVED.rstrip("\n") + ARRIVED),)),
    "l1_to_gm": (
        "cube",
        "illegal path",
        ((FINISHED, FINISHED + "    asc_copy_l12gm(y, a_l1, 1);\n"),),
    ),
    "gm_to_l0a": (
        "cube",
        "illegal path",
        ((FINISHED, FINISHED + "    asc_copy_gm2l0a(a_l0, a);\n"),),
    ),
    "int4": ("cube", "illegal path", ((FINISHED, FINISHED + "    asc_mmad_s4(c_l0);\n"),)),
    "sparsity": ("cube", "illegal path", ((FINISHED, FINISHED + "    asc_mmad_sparse(c_l0);\n"),)),
    "mx_of_fp4_and_fp8": (
        "mx",
        "illegal path",
        (("(c_l0, a_l0, b_l0", "(c_l0, a_l0, (__cb__ fp8_e4m3fn_t*)b_l0"),),
    ),
    "mx_overflow": ("mx", "overflow", (("uintptr_t)b_l0 / 16", "uintptr_t)b_l0 + 4064"),)),
    "mx_scales_not_loaded": (
        "mx",
        "uninitialised read",
        (("uintptr_t)a_l0 / 16", "uintptr_t)a_l0 / 16 + 512"),),
    ),
    "mx_part_of_a_pair": ("mx", "field out of range", (("48, 128, 32", "48, 96, 32"),)),
    "pipe_of_another_core": (
        "cube",
        "illegal path",
        ((FINISHED, FINISHED + "    asc_sync_pipe(PIPE_MTE3);\n"),),
    ),
    "burst_count": ("cube", "field out of range", (("y_ub, 32, 128, 0", "y_ub, 5000, 128, 0"),)),
    "event_id": (
        "stream",
        "field out of range",
        (("notify(PIPE_MTE3, PIPE_V, slot)", "notify(PIPE_MTE3, PIPE_V, slot + 8)"),),
    ),
    "mutex_held_twice": ("cube", "pairing", (("      asc_unlock(PIPE_MTE1, slot);\n", "\n"),)),
    "missing_barrier": ("reduce", "race", (("  asc_syncthreads();\n", "\n"),)),
    "divergent_barrier": (
        "reduce",
        "divergence",
        (("  asc_syncthreads();\n", "  if (lane) asc_syncthreads();\n"),),
    ),
    "blocks_meet_in_gm": ("stream", "race", (("y + t * 256", "y"),)),
}

SUM = "y[i] = 2.0f * x[i] + w[i];"
STORE = "ub2gm_align(y + t * 256, y_ub + slot * 256, 1, 1024, 0, 1024, 1024)"
# What threads, and blocks, do side by side in `stream`; whether that is a race.
NEIGHBOURS: Mapping[str, tuple[bool, tuple[str, str]]] = {
    "halves_of_a_word": (
        False,
        (SUM, "for (int32_t h = i; h < 512; h += 256) ((__ubuf__ uint16_t*)y)[h] = h;"),
    ),
    "several_read": (False, (SUM, "y[i] = 2.0f * x[i] + w[0] + w[i & 7];")),
    "own_place_again": (
        False,
        (SUM, "{ y[i] = x[i]; x[i] = y[i] + w[i]; y[i] = x[i] + x[i]; }"),
    ),
    "two_write": (True, (SUM, "y[i & ~1] = 2.0f * x[i] + w[i];")),
    "several_read_one_writes": (True, (SUM, "{ y[i] = x[3] + w[i]; if (i == 77) x[3] = 0.0f; }")),
    "one_reads_one_writes": (True, (SUM, "{ y[i] = w[i]; if (i < 128) x[i] = w[i] + x[i + 1]; }")),
    "half_of_what_another_writes": (
        True,
        (SUM, "{ y[i] = x[i] + w[i]; ((__ubuf__ uint16_t*)y)[2 * i ^ 3] = 0; }"),
    ),
    "stores_abut": (
        False,
        (STORE, "ub2gm_align(y + t * 250, y_ub + slot * 256, 1, 1000, 0, 1000, 1000)"),
    ),
    "stores_overlap_by_one": (
        True,
        (STORE, "ub2gm_align(y + t * 255, y_ub + slot * 256, 1, 1024, 0, 1024, 1024)"),
    ),
}


@pytest.fixture(scope="module")
def variants(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Variants:
    texts = dict(TEXTS)
    for name, (kernel, _, edits) in FAULTS.items():
        texts[f"{kernel}:{name}"] = edited(kernel, *edits)
    for name, (_, edit) in NEIGHBOURS.items():
        texts[f"stream:{name}"] = edited("stream", edit)
    return Variants(texts, kernel_cache, tmp_path_factory.mktemp("variants"))


@pytest.mark.parametrize("adversarial", [False, True])
@pytest.mark.parametrize("kernel", TEXTS)
def test_correct_kernel_is_clean(variants: Variants, kernel: str, adversarial: bool) -> None:
    c = case(kernel, np.random.default_rng())
    assert variants.run(kernel, c, adversarial=adversarial) == ""
    np.testing.assert_allclose(c.arrays[-1], c.want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("adversarial", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_reported(variants: Variants, fault: str, adversarial: bool) -> None:
    """Whatever the order of execution; a deadlock is reported at once, not waited for."""
    _, kind, _ = FAULTS[fault]
    start = time.perf_counter()
    found = run_fault(variants, fault, adversarial=adversarial)
    assert time.perf_counter() - start < 1
    assert f"{kind}: " in found


def run_fault(variants: Variants, fault: str, *, adversarial: bool) -> str:
    kernel = FAULTS[fault][0]
    c = case(kernel, np.random.default_rng())
    return variants.run(f"{kernel}:{fault}", c, adversarial=adversarial)


@pytest.mark.parametrize("adversarial", [False, True])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_race_only_where_they_meet(
    variants: Variants, name: str, adversarial: bool
) -> None:
    """Twice, a clean launch between: nothing is left of an earlier launch."""
    said = [
        variants.run(kernel, case("stream", np.random.default_rng()), adversarial=adversarial)
        for kernel in (f"stream:{name}", "stream", f"stream:{name}")
    ]
    assert said[1] == "" and said[0] == said[2]
    assert said[0].startswith("race: ") if NEIGHBOURS[name][0] else said[0] == ""


def test_full_text_of_reports(variants: Variants, golden: Callable[[str], None]) -> None:
    found = [f"{fault}:\n  " + run_fault(variants, fault, adversarial=False).replace("; ", "\n  ")
             for fault in FAULTS]  # fmt: skip
    golden("\n".join(found) + "\n")
