"""TileLang programs to cubins: TileLang prints CUDA, nvcc compiles it with TileLang's headers.

What TileLang's own host code would do is read off it and compared with what our host does: the
order of parameters, threads, shared memory, tensor maps. No GPU is needed.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.graph.errors import TargetError

HEADER = '#include "tw_math.cuh"\n'
_NUMBERS = re.compile(r"^-?\d+$")
# Of a tensor map: bf16, two axes; elements without gaps, swizzle of 128 bytes, zeros outside.
_TYPE, _TAIL = 9, ["1", "1", "0", "3", "2", "0"]


@dataclass(frozen=True)
class Printed:
    """A kernel as CUDA, and how it is launched: parameters in order, tensor maps as TileLang's host
    code describes them (name -> rows and cols of a tile), threads and dynamic shared bytes."""

    text: str
    parameters: tuple[str, ...]
    boxes: Mapping[str, tuple[int, int]]
    threads: int
    shared_bytes: int
    columns: int  # of tensor memory


def print_program(path: Path, capability: int) -> Printed:
    """Return what TileLang prints for `KERNEL` of the module at `path`."""
    try:
        import tilelang
        from tvm.ir.transform import PassContext
        from tvm.target import Target
    except ModuleNotFoundError:
        raise TargetError(
            f"target 'sm{capability}': TileLang is not installed: want tilelang 0.1.15 or later"
        ) from None
    spec = importlib.util.spec_from_file_location(path.stem.replace(".", "_"), path)
    assert spec is not None and spec.loader is not None, path
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules.pop("tw_tile_math", None)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    target = Target({"kind": "cuda", "arch": f"sm_{capability}a"})
    # Our own bounds stand in the program; those added would be tested again for every element.
    with target, PassContext(config={"tl.disable_safe_memory_legalize": True}):
        made = tilelang.lower(module.KERNEL(), target=target)
    return read_print(made.kernel_source, str(made.host_mod))


def read_print(text: str, host: str) -> Printed:
    """Take apart what TileLang printed for device and host; raise TargetError where unlike ours."""
    signature = re.search(r"void (?:__launch_bounds__\(.*?\) )?(\w+_kernel)\(([^)]*)\)\s*\{", text)
    if signature is None:
        raise TargetError("TileLang printed no kernel")
    entry, listed = signature.groups()
    parameters = tuple(re.findall(r"\w+", p)[-1] for p in listed.split(","))
    calls = _calls(host, entry)
    if len(calls) != 1:
        raise TargetError(f"TileLang's host code launches '{entry}' {len(calls)} times, want once")
    *_, threads, height, depth, shared = calls[0]
    if (height, depth) != ("1", "1") or not _NUMBERS.match(shared):
        raise TargetError(f"TileLang launches '{entry}' unlike this host: {calls[0][-4:]}")
    boxes = {}
    for name, *facts in _calls(host, "__tvm_tensormap_create_tiled"):
        kind, rank, _, _, _, _, _, cols, rows, *tail = facts
        if [int(kind), int(rank)] != [_TYPE, 2] or tail != _TAIL:
            raise TargetError(f"TileLang describes '{name}' unlike this host: {facts}")
        boxes[name] = (int(rows), int(cols))
    columns = sum(int(n) for n in re.findall(r"\btmem_allocate\(.*, (\d+)\);", text))
    mended = _mended(text, entry)
    return Printed(mended, parameters, boxes, int(threads), int(shared), columns)


def _calls(host: str, name: str) -> list[list[str]]:
    """Return the arguments of every call of a packed function, as text."""
    found = []
    for line in host.splitlines():
        start = line.find(f'T.call_packed("{name}", ')
        if start >= 0:
            inside = line[start:].rstrip()[len(f'T.call_packed("{name}", ') : -1]
            found.append(_split(inside))
    return found


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _mended(text: str, entry: str) -> str:
    """Name the kernel as its launch does, include our functions, and mend a flaw of TileLang
    0.1.15: fences of registers that count more of an array than it has."""
    sizes = {name: int(size) for name, size in re.findall(r"^  float (\w+)\[(\d+)\];", text, re.M)}

    def fence(found: re.Match[str]) -> str:
        name, start, count = found[1], int(found[2]), int(found[3])
        return f"float*>({name} + {start}), {min(count, sizes.get(name, count) - start)})"

    text = re.sub(r"float\*>\((\w+) \+ (\d+)\), (\d+)\)", fence, text)
    text = text.replace(entry, entry.removesuffix("_kernel"))
    first = text.index("#include <tl_templates")
    return text[:first] + HEADER + text[first:]


def include_folders() -> Sequence[Path]:
    """Return the folders of TileLang's headers and of the library that they include."""
    found = importlib.util.find_spec("tilelang")
    assert found is not None and found.origin is not None
    root = Path(found.origin).parent
    return root / "src", root / "3rdparty" / "cutlass" / "include"


def check_maps(name: str, launch: Mapping[str, Any], boxes: Mapping[str, tuple[int, int]]) -> None:
    """The host describes matrices as the kernel expects them; raise TargetError where not."""
    ours = {d[0]: tuple(d[-1]) for d in launch["descriptors"]}
    if ours != dict(boxes):
        raise TargetError(
            f"kernel '{name}': tiles are not what the host describes: got {dict(boxes)}, "
            f"want {ours}"
        )
