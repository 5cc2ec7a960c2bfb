"""A process that turns sources into cubins: reads one JSON request a line, answers one.

It runs apart from the compiler so that several sources are compiled at once, and so that a crash
of the toolchain is an error message. No GPU is needed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.codegen.emit.cuda_chip import SHARED_BYTES
from tilewright.graph.errors import TargetError
from tilewright.targets.nvidia.overlap import check_waits, stages_hook

REPORT = "tilewright kernel report: "
# What may not be in a kernel's PTX: sums without order, results the chip's approximations decide.
FORBIDDEN_PTX = (
    (r"\b(?:atom|red)\.", "an atomic has no fixed order of accumulation"),
    (r"\bcp\.reduce\.", "a bulk reduction has no fixed order of accumulation"),
    (r"\.approx\b", "an approximation has the chip's own bits"),
    (r"\bdiv\.full\b", "an approximate division has the chip's own bits"),
    (r"\.ftz\b", "subnormals are numbers"),
)


def scan_ptx(name: str, ptx: str) -> str | None:
    """Return why a kernel is refused, or None."""
    for number, line in enumerate(ptx.splitlines(), start=1):
        code = line.partition("//")[0]
        for pattern, why in FORBIDDEN_PTX:
            found = re.search(pattern, code)
            if found:
                shown = code.strip()[:80]
                return f"kernel '{name}': forbidden '{shown}' in line {number} of its PTX: {why}"
    return None


def load_source(path: Path) -> Any:
    """Import a generated module; what it imports lies beside it."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
        for name in [n for n in sys.modules if n.startswith("tw_")]:
            del sys.modules[name]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def compile_launch(launch: Mapping[str, Any], capability: int) -> Any:
    """Compile one kernel ahead of time; contraction is off, so that every fma is ours."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tiled = launch["kernel"].is_gluon()
    described = launch.get("descriptors", ())
    signature = {d[0]: descriptor_type(d[2], d[-1], tiled=tiled) for d in described}
    first = len(signature)
    signature |= {name: f"*{dtype}" for name, _, dtype, _ in launch["pointers"]}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(first, len(signature))}
    signature |= {name: "i32" for name in launch["ints"]}
    language: Any = ASTSource
    if tiled:
        from triton.experimental.gluon._runtime import GluonASTSource

        language = GluonASTSource
    source = language(fn=launch["kernel"], signature=signature, constexprs={}, attrs=aligned)
    triton.knobs.runtime.add_stages_inspection_hook = stages_hook
    options = {
        "num_warps": launch["num_warps"],
        "num_stages": launch["num_stages"],
        "enable_fp_fusion": False,
    }
    if "registers" in launch:
        options["maxnreg"] = launch["registers"]
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def descriptor_type(dtype: str, box: tuple[int, int], *, tiled: bool) -> str:
    """Return the type of a descriptor argument; a kernel that names its layouts needs that of the
    tiles too."""
    shape = f"{dtype}[{box[0]}, {box[1]}]"
    if not tiled:
        return f"tensordesc<{shape}>"
    from triton.experimental.gluon.language import NVMMASharedLayout

    bits = 8 if dtype.startswith("fp8") else 16
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    return f"tensordesc<{shape},{layout!r}>"


def check_descriptors(name: str, launch: Mapping[str, Any], metadata: Any) -> None:
    """The host describes matrices as the kernel expects them; raise TargetError where not."""
    found = getattr(metadata, "tensordesc_meta", None) or []
    for described, meta in zip(launch.get("descriptors", ()), found, strict=True):
        if meta["swizzle"] != 3 or tuple(meta["block_size"]) != tuple(described[-1]):
            raise TargetError(
                f"kernel '{name}': tiles of '{described[0]}' are not what the host describes: "
                f"got {meta}"
            )


def threads_of(made: Any) -> int:
    """Threads of a block, those of specialised warps included."""
    found = re.search(r"\.reqntid (\d+)", made.asm["ptx"])
    return int(found[1]) if found else int(made.metadata.num_warps) * 32


def build_in_triton(
    path: Path, module: Any, launch: Mapping[str, Any], capability: int
) -> tuple[str, dict[str, Any]]:
    """Write the cubin of one kernel; return its line of the host text, and what it uses."""
    name = launch["kernel"].__name__
    made = compile_launch(launch, capability)
    refused = scan_ptx(f"{path.stem}.{name}", made.asm["ptx"])
    if refused:
        raise TargetError(refused)
    check_waits(f"{path.stem}.{name}", made.asm["ptx"])
    if made.metadata.shared > SHARED_BYTES:
        raise TargetError(
            f"kernel '{path.stem}.{name}': too much shared memory for a block: got "
            f"{made.metadata.shared} bytes, want at most {SHARED_BYTES}"
        )
    if made.metadata.global_scratch_size or made.metadata.profile_scratch_size:
        raise TargetError(f"kernel '{path.stem}.{name}': wants scratch memory of Triton's own")
    check_descriptors(f"{path.stem}.{name}", launch, made.metadata)
    cubin = path.with_name(f"{path.stem}.{name}.cubin")
    cubin.write_bytes(made.asm["cubin"])
    cubin.with_suffix(".ptx").write_text(made.asm["ptx"])
    threads, shared = threads_of(made), made.metadata.shared
    line = f'TW_CUBIN({name}, "{cubin}", "{made.metadata.name}", {threads}, {shared});'
    return line, {
        "source": path.stem, "kernel": name, "threads": threads, "shared_bytes": shared,
        "tensor_memory_columns": getattr(made.metadata, "tmem_size", 0) or 0, **usage(cubin),
    }  # fmt: skip


def build_in_cuda(
    path: Path, module: Any, launch: Mapping[str, Any], capability: int
) -> tuple[str, dict[str, Any]]:
    """The same of the kernel that a source has in CUDA."""
    from tilewright.targets.nvidia.build_cuda import build_image, needed_nvcc

    name, nvcc = launch["kernel"], needed_nvcc()
    source = path.with_name(f"{path.stem}.{name}.cu")
    source.write_text(module.CUDA)
    cubin, (used,) = build_image(nvcc, source, capability)
    threads, shared = launch["num_warps"] * 32, launch["shared"]
    line = f'TW_CUBIN({name}, "{cubin}", "{name}", {threads}, {shared});'
    found = {"threads": threads, "shared_bytes": shared, "tensor_memory_columns": 0}
    return line, {**used, "source": path.stem, **found}


def build_in_tilelang(
    path: Path, module: Any, launch: Mapping[str, Any], capability: int
) -> tuple[str, dict[str, Any]]:
    """The same of the kernel that a source has in TileLang."""
    from tilewright.targets.nvidia.build_cuda import build_image, needed_nvcc
    from tilewright.targets.nvidia.build_tilelang import check_maps, include_folders

    name, nvcc = launch["kernel"], needed_nvcc()
    printed = printed_program(path, module, launch, capability)
    check_maps(f"{path.stem}.{name}", launch, printed.boxes)
    source = path.with_name(f"{path.stem}.{name}.cu")
    cubin, (used,) = build_image(nvcc, source, capability, includes=include_folders())
    order = ", ".join(f"&{p}" for p in printed.parameters)
    threads, shared = printed.threads, printed.shared_bytes
    line = (
        f'#define TW_ORDER_{name} {order}\n'
        f'TW_CUBIN({name}, "{cubin}", "{name}", {threads}, {shared});'
    )
    found = {"threads": threads, "shared_bytes": shared}
    return line, {**used, "source": path.stem, **found, "tensor_memory_columns": printed.columns}


def printed_program(path: Path, module: Any, launch: Mapping[str, Any], capability: int) -> Any:
    """Write the program of a source, and the CUDA that TileLang prints for it, beside it."""
    from tilewright.targets.nvidia.build_tilelang import print_program

    program = path.with_name(f"{path.stem}.{launch['kernel']}.tl.py")
    program.write_text(module.TILELANG)
    printed = print_program(program, capability)
    path.with_name(f"{path.stem}.{launch['kernel']}.cu").write_text(printed.text)
    return printed


def print_source(path: Path, capability: int) -> dict[str, Any]:
    """Return the CUDA that TileLang prints for the program of a source."""
    module = load_source(path)
    (launch,) = (launch for launch in module.LAUNCHES if "named" in launch)
    printed = built("TileLang", printed_program, path, module, launch, capability)
    return {"kernels": [], "printed": printed.text}


def builder_of(launch: Mapping[str, Any]) -> tuple[str, Callable[..., tuple[str, dict[str, Any]]]]:
    """Return the language of a launch's kernel, and what builds it."""
    if "named" in launch:
        return "TileLang", build_in_tilelang
    return ("CUDA", build_in_cuda) if "shared" in launch else ("Triton", build_in_triton)


def built(language: str, make: Callable[..., Any], path: Path, module: Any,
          launch: Mapping[str, Any], capability: int) -> Any:  # fmt: skip
    """Call what builds a launch; raise TargetError with the compiler's last line."""
    try:
        return make(path, module, launch, capability)
    except TargetError:
        raise
    except Exception as error:
        kernel = launch["kernel"]
        name = kernel if isinstance(kernel, str) else kernel.__name__
        said = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise TargetError(f"kernel '{path.stem}.{name}': {language} failed: {said}") from error


def build(path: Path, capability: int) -> dict[str, Any]:
    """Write the cubins and the host text of a source beside it; return what each kernel uses."""
    module = load_source(path)
    host = ['#include "tw_cuda.h"']
    report = []
    for launch in module.LAUNCHES:
        line, used = built(*builder_of(launch), path, module, launch, capability)
        host.append(line)
        report.append(used)
    text = "\n".join([*host, kept_report(report), module.HOST])
    # Symbols of an object must not meet those of another.
    text = text.replace("TW_CUBIN(", f"TW_CUBIN({path.stem}_").replace(
        "TW_LAUNCH(", f"TW_LAUNCH({path.stem}_"
    )
    path.with_suffix(".host.cpp").write_text(text)
    programs = [path.with_name(f"{path.stem}.{n['kernel']}.cu") for n in module.LAUNCHES
                if "named" in n]  # fmt: skip
    return {"kernels": report, **{"printed": p.read_text() for p in programs}}


def kept_report(report: Sequence[Mapping[str, Any]]) -> str:
    """Return the C++ that keeps a report in the object, where `read_report` finds it."""
    text = json.dumps(REPORT + json.dumps(report))
    return f"__attribute__((used)) static const char tw_report[] = {text};"


def read_report(binary: bytes) -> list[dict[str, Any]]:
    """Return the reports that an object or a library keeps; empty where it keeps none."""
    found: list[dict[str, Any]] = []
    for part in binary.split(REPORT.encode())[1:]:
        found += json.loads(part.partition(b"\0")[0])
    return found


def usage(cubin: Path) -> dict[str, int]:
    """Return registers and bytes of local memory a thread, as the assembler reports them."""
    import triton.backends.nvidia as backend

    tool = Path(backend.__path__[0]) / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    done = subprocess.run(
        [str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=False
    )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", done.stdout)
    if found is None:
        return {}
    registers, stack, _, local = map(int, found.groups())
    return {"registers": registers, "spilled_bytes": stack + local}


def serve() -> None:
    """Answer requests {source, capability} until the input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a compiler prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            do = print_source if request.get("print") else build
            answer = do(Path(request["source"]), request["capability"])
        except Exception as error:  # every failure of the toolchain is an answer
            text = (str(error).strip() or type(error).__name__).splitlines()[-1]
            if not isinstance(error, TargetError):
                text = f"kernel '{Path(request['source']).stem}': the source fails: {text}"
            answer = {"error": text[:500], "trace": traceback.format_exc()[-4000:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
