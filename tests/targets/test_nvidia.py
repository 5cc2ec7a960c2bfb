"""NVIDIA targets without a GPU: kernels compile to cubins, PTX is scanned, host functions check."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm_ffi

from support.kernel_case import distinct_bodies
from support.tiny import SETTINGS, tiny, tiny_graph
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.compile import CompileJob, compile_graph, distinct_specs
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import first_candidate, plan_groups
from tilewright.codegen.spec import KernelSpec
from tilewright.graph.errors import TargetError
from tilewright.runtime.artifact_files import read_manifest
from tilewright.targets.nvidia.build import scan_ptx
from tilewright.targets.nvidia.build_cuda import find_nvcc
from tilewright.targets.registry import resolve

BF16 = CompileConfig(
    max_context=256, max_tokens_per_step=64, max_requests=24, block_size=8, dtype="bfloat16"
)
TARGETS = ("sm90", "sm100")
LAUNCH = """LAUNCHES = [{"kernel": f, "pointers": [("x", "x", "fp32", 4)], "ints": [],
             "num_warps": 1, "num_stages": 1}]"""


def row_spec(kind: str = "row", name: str = "argmax") -> KernelSpec:
    target = resolve("sm90")[0]
    graph = tiny_graph("q4_1", settings=BF16)
    group, found, body = next(b for b in distinct_bodies(graph) if b[0] == name and b[1] == kind)
    template = next(t for t in target.kernels if t.kind == found)
    numerics = derive(found, body.graph, target)
    schedule = template.schedules(body.graph, numerics, 1)[0]
    return KernelSpec(found, body.graph, template.name, numerics, schedule, body.buffers)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of one row kernel."""
    folder = tmp_path_factory.mktemp("nvidia")
    target, toolchain = resolve("sm90")
    spec = row_spec()
    template = next(t for t in target.kernels if t.name == spec.template)
    cache = KernelCache(folder, toolchain)
    built = cache.build([emit(spec, template)], jobs=1, progress=lambda *_: None)
    toolchain.link(built.objects, folder / "kernels.so")
    return folder / "kernels.so"


def test_scan_refuses_unordered_sums_and_approximations() -> None:
    for line, found in (
        ("red.global.add.f32 [%rd1], %f1;", "an atomic has no fixed order of accumulation"),
        ("atom.add.f32 %f1, [%rd1], %f2;", "an atomic has no fixed order of accumulation"),
        ("ex2.approx.f32 %f1, %f2;", "an approximation has the chip's own bits"),
        ("div.full.f32 %f1, %f2, %f3;", "an approximate division has the chip's own bits"),
        ("add.ftz.f32 %f1, %f2, %f3;", "subnormals are numbers"),
    ):
        text = scan_ptx("row_1.rows", f"// atom.\n{line}")
        assert text == f"kernel 'row_1.rows': forbidden '{line}' in line 2 of its PTX: {found}"
    assert scan_ptx("row_1.rows", "fma.rn.f32 %f1, %f2, %f3, %f4; // red.x") is None
    assert scan_ptx("row_1.rows", "redux.sync.max.s32 %r1, %r2, -1;") is None


@pytest.mark.parametrize(("text", "wanted"), [
    ("import triton\n@triton.jit\ndef f(x):\n    unknown(x)\n" + LAUNCH,
     "kernel 'k.f': Triton failed: "),
    ("KERNEL = 1\nTILELANG = 'KERNEL = unknown'\nLAUNCHES = [{'kernel': 'f', 'named': ()}]",
     "kernel 'k.f': TileLang failed: name 'unknown' is not defined"),
    ("CUDA = 'int unknown() { return missing; }'\n"
     "LAUNCHES = [{'kernel': 'f', 'shared': 0, 'num_warps': 1}]", "kernel 'k.f': nvcc failed: "),
    ("1 / 0", "kernel 'k': the source fails: division by zero"),
])  # fmt: skip
def test_failures_name_kernel_and_compiler(text: str, wanted: str, tmp_path: Path) -> None:
    no_nvcc = find_nvcc() is None  # which compiles what TileLang prints
    missing = {"nvcc": no_nvcc, "TileLang": no_nvcc or find_spec("tilelang") is None}
    if any(is_missing and name in wanted for name, is_missing in missing.items()):
        pytest.skip("the compiler is not installed")
    _, toolchain = resolve("sm90")
    (tmp_path / "k.py").write_text(text)
    with pytest.raises(TargetError) as failed:
        toolchain.compile(tmp_path / "k.py", tmp_path / "k.o")
    assert str(failed.value).startswith(wanted)


def test_schedules_are_many_and_first_is_taken() -> None:
    target = resolve("sm90")[0]
    for _, kind, body in distinct_bodies(tiny_graph("q4_1", settings=BF16)):
        template = next(t for t in target.kernels if t.name == kind)
        numerics = derive(kind, body.graph, target)
        for rows in (1, 16, 512):
            found = template.schedules(body.graph, numerics, rows)
            assert len(set(found)) == len(found)
            assert len(found) >= (8 if kind == "contract" else 3)


def test_unknown_variants_are_refused() -> None:
    for name in TARGETS:
        with pytest.raises(TargetError) as caught:
            resolve(f"{name}:x")
        assert str(caught.value) == f"{name} variant 'x': unknown: have {name}a"


@pytest.mark.cpu
def test_host_function_checks_its_arguments(library: Path) -> None:
    """Every refusal comes before the driver is touched."""
    spec = row_spec()
    kernel = tvm_ffi.load_module(str(library))[spec.symbol]
    out, x = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 67)
    for arguments, text in (
        ((out, x), "number of arguments: got 2, want 3"),
        ((out, x, 65), "argument 2 'logit_rows': got 65, want 0 to 64"),
        ((out, x, 3), "argument 0 'v0': device type: got 1, want 2"),
        ((x, x, 3), "argument 0 'v0': element type: got f32, want i32"),
        ((out, 1, 3), "argument 0 'v0': device type: got 1, want 2"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"kernel '{spec.symbol}': {text}")):
            kernel(*arguments)


_ANY = np.dtype([("type_index", "i4"), ("padding", "u4"), ("value", "i8")])


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_uint64), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


def device_tensor(shape: tuple[int, ...], code: int) -> tuple[_Tensor, Any]:
    """A tensor that claims to be on a GPU; nobody reads its data."""
    extents = (ctypes.c_int64 * len(shape))(*shape)
    place = ctypes.cast(extents, ctypes.c_void_p).value
    return _Tensor(4096, 2, 0, len(shape), code, 32, 1, place, None, 0), extents


@pytest.mark.cpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU: the launch would run")
def test_a_machine_without_driver_says_so(library: Path) -> None:
    """Also a step without rows launches nothing, and is no error."""
    spec = row_spec()
    loaded = ctypes.CDLL(str(library))
    function = getattr(loaded, f"__tvm_ffi_{spec.symbol}")
    for rows, fails in ((0, False), (3, True)):
        kept = [device_tensor((rows,), 0), device_tensor((rows, 67), 2)]
        arguments = np.zeros(3, _ANY)
        for i, (tensor, _) in enumerate(kept):
            arguments[i] = (7, 0, ctypes.addressof(tensor))
        arguments[2] = (1, 0, rows)
        result = np.zeros(1, _ANY)
        code = function(None, arguments.ctypes.data_as(ctypes.c_void_p), 3,
                        result.ctypes.data_as(ctypes.c_void_p))  # fmt: skip
        assert (code != 0) == fails, rows


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("stored", ["q4_1", "bf16", "f32"])
def test_every_kernel_of_a_tiny_model_compiles(name: str, stored: str, tmp_path: Path) -> None:
    """A whole artifact, built on a machine without a GPU; no kernel that was chosen spills."""
    target, toolchain = resolve(name)
    target = replace(target, buckets=(1, 16))
    settings = replace(SETTINGS, max_tokens_per_step=64) if stored == "f32" else BF16
    model = tiny(stored, settings=settings)
    job = CompileJob(
        model.graph, model.record(), model.weights, target, toolchain, settings,
        first_candidate(target), Flags(cache=tmp_path / "cache"), jobs=2,
    )  # fmt: skip
    compile_graph(job, tmp_path / "artifact", lambda *_: None)
    manifest = read_manifest(tmp_path / "artifact")
    assert manifest.target.name == name
    assert all(k.source.endswith(".py") for k in manifest.kernels)
    assert set(toolchain.reports) >= {k.symbol for k in manifest.kernels}
    for kernel in manifest.kernels:
        for used in toolchain.reports[kernel.symbol]:
            assert used.get("spilled_bytes", 0) == 0, (kernel.symbol, used)


def test_an_object_is_for_one_chip(tmp_path: Path) -> None:
    """The same text is another kernel on another chip."""
    source = emit(row_spec(), next(t for t in resolve("sm90")[0].kernels if t.name == "row"))
    found = {KernelCache(tmp_path, resolve(name)[1]).object_of(source) for name in TARGETS}
    assert len(found) == len(TARGETS)


def test_golden_text_depends_on_the_spec_alone() -> None:
    target = resolve("sm90")[0]
    templates = {t.name: t for t in target.kernels}
    graph = lower(tiny_graph("q8_0", settings=BF16), Flags()).graph
    for spec in distinct_specs(plan_groups(graph, target, BF16, first_candidate(target))):
        source = emit(spec, templates[spec.template])
        assert source == emit(spec, templates[spec.template])
        assert source.file_name == f"{spec.symbol}.py"
        assert f"TW_KERNEL({spec.symbol})" in source.text


@pytest.mark.parametrize("name", ["layers.0.q_proj", "layers.0.append_v", "layers.0.attend"])
def test_printed_kernels(name: str, golden: Any) -> None:
    """The text of a prologue with a reduction, of rotary pairs and stores, of an attention."""
    target = resolve("sm90")[0]
    graph = tiny_graph("q4_1", settings=BF16)
    group, kind, body = next(b for b in distinct_bodies(graph) if b[0] == name)
    template = next(t for t in target.kernels if t.name == kind)
    numerics = derive(kind, body.graph, target)
    schedule = template.schedules(body.graph, numerics, 1)[0]
    spec = KernelSpec(kind, body.graph, template.name, numerics, schedule, body.buffers)
    golden(emit(spec, template).text.replace(spec.symbol, group))
