"""Run a generated Triton source on the CPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from support.hopper_run import run_part
from support.kernel_case import Case
from support.tile_run import run_program
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.runtime.artifact import evaluate
from tilewright.targets.registry import resolve

# Triton reads it when it is first imported, and its own library of functions is decorated then.
os.environ["TRITON_INTERPRET"] = "1"

_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "i32": torch.int32,
    "fp8e4nv": torch.float8_e4m3fn,
    "u8": torch.uint8,
}  # fmt: skip


def correct_interpreter() -> None:
    """Give the interpreter the hardware's bf16: products of values, not of their bits, and
    conversions that round to nearest even and keep subnormals; and e4m3's NaN."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if hasattr(InterpreterBuilder, "plain_dot"):
        return
    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    InterpreterBuilder.plain_dot = plain_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain_dot(self, *(_wide(x) for x in (a, b)), *rest)

    def cast(self: Any, source: Any, wanted: Any) -> Any:
        if source.dtype.scalar == tl.float8e4nv and wanted.scalar == tl.float32:
            found = plain_cast(self, source, wanted)
            found.data = np.where(source.data & 127 == 127, np.float32(np.nan), found.data)
            return found
        if source.dtype.scalar == tl.bfloat16 and wanted.scalar == tl.float32:
            return _wide(source)
        if wanted.scalar != tl.bfloat16 or source.dtype.scalar == tl.bfloat16:
            return plain_cast(self, source, wanted)
        values = torch.from_numpy(np.array(source.data, np.float32))
        rounded = values.to(torch.bfloat16).view(torch.uint16).numpy()
        return TensorHandle(rounded, tl.bfloat16)

    def assembly(self: Any, text: str, _: str, values: Any, types: Any, *rest: Any) -> Any:
        found = TensorHandle(_assembly(text, values[0].data), types[0].scalar)
        return SimpleNamespace(get_result=lambda i: found)

    InterpreterBuilder.create_inline_asm = assembly
    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.cast_impl = cast


def dot_in_order(self: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
    """A product that adds one value of k after the other in fp32, whatever the shape of its tile:
    with it as `InterpreterBuilder.create_dot` bits say whether two kernels add alike."""
    from triton.runtime.interpreter import TensorHandle

    left, right, found = _wide(a).data, _wide(b).data, sums.data.astype(np.float32)
    with np.errstate(all="ignore"):
        for k in range(left.shape[1]):
            found = found + left[:, k : k + 1] * right[k : k + 1]
    return TensorHandle(found, sums.dtype.scalar)


_PTX = {
    "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}  # fmt: skip


def _assembly(text: str, data: Any) -> Any:
    """Run lines of PTX on 32-bit words, each of four neighbouring bytes: `$1` to `$0`."""
    packed = np.ascontiguousarray(data)
    registers: dict[str, Any] = {"$1": packed.view(np.uint32)}
    for line in re.findall(r"(\w+)\.b32 (\S+), (\S+), (\S+);", text):
        op, to, *operands = line
        a, b = (registers[o] if o in registers else np.uint32(int(o, 0)) for o in operands)
        registers[to] = _PTX[op](a, b)
    return registers["$0"].view(np.uint8).reshape(packed.shape)


def _wide(operand: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if operand.dtype.scalar == tl.float8e4nv:
        codes = torch.from_numpy(np.ascontiguousarray(operand.data))
        return TensorHandle(codes.view(torch.float8_e4m3fn).float().numpy(), tl.float32)
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    bits = operand.data.astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


def load(text: str, name: str, folder: Path) -> Any:
    """Import a source with the modules it needs, interpreted."""
    correct_interpreter()
    support = resolve("sm90")[1].support_sources()
    for file, content in support.items():
        if file.endswith(".py"):
            (folder / file).write_text(content)
    path = folder / f"{name}.py"
    path.write_text(text)
    for module in [m for m in sys.modules if m.startswith("tw_")]:
        del sys.modules[module]
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules[name] = found
        spec.loader.exec_module(found)
        return found
    finally:
        sys.path.remove(str(folder))


def _described(
    arguments: Mapping[str, torch.Tensor], ints: Mapping[str, int], name: str, tensor: str,
    dtype: str, offset: Any, rows: Any, cols: int, box: tuple[int, int],
) -> Any:  # fmt: skip
    """What the host makes of a matrix that is loaded by tiles."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    kind, count = _DTYPES[dtype], evaluate(rows, ints) * cols
    raw = arguments[tensor].reshape(-1).view(torch.uint8)[evaluate(offset, ints) :]
    matrix = raw[: count * kind.itemsize].view(kind).reshape(-1, cols)
    return TensorDescriptor(matrix, list(matrix.shape), [cols, 1], list(box))


def _map(
    arguments: Mapping[str, torch.Tensor], ints: Mapping[str, int], name: str, tensor: str,
    dtype: str, offset: Any, rows: Any, cols: int, box: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """The same for a kernel in CUDA: as tw_map of support/hopper has it."""
    raw = arguments[tensor].reshape(-1).view(torch.uint8)[evaluate(offset, ints) :]
    size = cols * _DTYPES[dtype].itemsize
    found = [raw.data_ptr(), evaluate(rows, ints), size, *box, *[0] * 11]
    return torch.tensor(found, dtype=torch.int64)


def run(module: Any, arguments: Mapping[str, torch.Tensor], ints: Mapping[str, int]) -> None:
    """Run every launch of a source on tensors by name; `workspace` among them where needed."""
    for launch in module.LAUNCHES:
        if "named" in launch:
            grid = tuple(evaluate(g, ints) for g in launch["grid"])
            run_program(module, launch, arguments, ints, grid)
            continue
        described = _described if "shared" not in launch else _map
        pointers = [described(arguments, ints, *d) for d in launch.get("descriptors", ())]
        for _, tensor, dtype, offset in launch["pointers"]:
            raw = arguments[tensor].reshape(-1).view(torch.uint8)[evaluate(offset, ints) :]
            size = _DTYPES[dtype].itemsize
            pointers.append(raw[: raw.numel() // size * size].view(_DTYPES[dtype]))
        grid = tuple(evaluate(g, ints) for g in launch["grid"])
        if all(grid) and "shared" in launch:
            run_part(module, launch, pointers, [ints[n] for n in launch["ints"]], grid)
        elif all(grid):
            launch["kernel"][grid](*pointers, *(ints[n] for n in launch["ints"]))


def run_spec(
    spec: KernelSpec, template: KernelTemplate, case: Case, folder: Path
) -> dict[str, torch.Tensor]:
    """Emit and run a kernel; outputs and workspace are poisoned."""
    module = load(emit(spec, template).text, spec.symbol, folder)
    arguments = case.fresh()
    need = template.scratch_bytes(spec.body, spec.numerics, spec.schedule, case.dims)
    arguments["workspace"] = torch.full((max(need, 1),), 255, dtype=torch.uint8)
    run(module, arguments, case.dims)
    return arguments
