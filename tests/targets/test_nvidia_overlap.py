"""Every kernel waits for those before it, before it touches what others write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.contract_graphs import linear, only_body
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec
from tilewright.graph.errors import TargetError
from tilewright.targets.nvidia.build_cuda import find_nvcc
from tilewright.targets.nvidia.overlap import BEGIN, FEW_BLOCKS, WAIT, check_waits, waiting
from tilewright.targets.registry import resolve

PTX = """
.visible .entry first(
	.param .u64 .ptr .global .align 1 first_param_0
)
.reqntid 128
{
	.reg .b32 %r<2>;
	ret;
}
.entry second(.param .align 64 .b8 map[128])
.maxntid 384, 1, 1
{
	ret;
}
"""
TOUCHES = re.compile(
    r"\b(?:ld\.global|st\.global|cp\.async(?!\.bulk\.prefetch)|mbarrier|ldmatrix|bar\.sync|ld\.shared)"
)


def test_entries_begin_with_the_wait() -> None:
    found = waiting(PTX)
    for name in ("first", "second"):
        body = found.partition(f"entry {name}")[2].partition("{")[2]
        trigger, _, rest = body.partition(WAIT)
        assert rest.split() and trigger.count("griddepcontrol.launch_dependents;") == 1
        assert re.findall(r"setp.le.s32 %few, %blocks, (\d+);", trigger) == [str(FEW_BLOCKS)]
    assert waiting(found) == found


def test_a_kernel_may_say_where_it_waits() -> None:
    first, second = PTX.split(".entry second")
    own = first.replace("ret;", f"{WAIT}\nret;")
    found = waiting(f"{own}.entry second{second}")
    assert found.startswith(own) and found.count(WAIT) == 2


@pytest.mark.parametrize("text", ["", ".func f() { ret; }", PTX + ".entry third"])
def test_text_without_kernels_is_refused(text: str) -> None:
    with pytest.raises(TargetError, match="PTX: . kernels were found to begin"):
        waiting(text)


@pytest.mark.parametrize("target", ["sm90", "sm100"])
@pytest.mark.parametrize("weight", ["bf16", "fp8"])
def test_kernels_wait_before_they_touch_memory(target: str, weight: str, tmp_path: Path) -> None:
    if find_nvcc() is None:
        pytest.skip("nvcc is not installed")
    found, toolchain = resolve(target)
    body = only_body(linear([(weight, 64)], 256))
    numerics = derive("contract", body.graph, found)
    template = next(t for t in found.kernels
                    if t.kind == "contract" and t.accepts(body.graph) is None)  # fmt: skip
    schedule = template.schedules(body.graph, numerics, 1)[0]
    spec = KernelSpec("contract", body.graph, template.name, numerics, schedule, body.buffers)
    source = emit(spec, template)
    for name, text in {**toolchain.support_sources(), source.file_name: source.text}.items():
        (tmp_path / name).write_text(text)
    toolchain.compile(tmp_path / source.file_name, tmp_path / "k.o")
    texts = [p.read_text() for p in tmp_path.glob("*.ptx")]
    kernels = [part for text in texts for part in re.split(r"\.entry\b", text)[1:]]
    assert kernels
    for kernel in kernels:
        touched = TOUCHES.search(kernel)
        assert kernel.count(WAIT) == 1
        assert touched is None or kernel.index(WAIT) < touched.start()


def test_a_cached_object_says_what_was_written_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that do not wait may not be launched by a host that lets them begin early."""
    _, found = resolve("sm90")
    before = found.identity()
    monkeypatch.setattr("tilewright.targets.nvidia.toolchain.BEGIN", BEGIN.replace(WAIT, ""))
    assert found.identity() != before


def test_a_compiler_that_writes_no_wait_is_refused() -> None:
    check_waits("k", waiting(PTX))
    with pytest.raises(TargetError, match="kernel 'k': does not wait for those before it"):
        check_waits("k", PTX)
