"""Runs AscendC text on the functional model: many variants of a kernel in one library."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from tilewright.targets.ascend950.simulation import (
    KERNEL_FLAGS,
    MODEL,
    MODEL_FLAGS,
    model_text,
    template_folder,
)

Array = NDArray[Any]
KINDS = {"__mix__": 0, "__vector__": 1, "__cube__": 2}
_MESSAGE = 1 << 14


class Launch(Protocol):
    """Arguments in the order of the kernel's pointers, then its integer; the last array is
    written."""

    @property
    def arrays(self) -> list[Array]: ...
    @property
    def value(self) -> int: ...
    @property
    def blocks(self) -> int: ...


def model_object(folder: Path) -> Path:
    """Compile the model once per content of its sources."""
    key = hashlib.sha256((model_text() + repr(MODEL_FLAGS)).encode()).hexdigest()[:16]
    path = folder / f"ascend-model-{key}.o"
    if not path.exists():
        work = path.with_suffix(".tmp.o")
        _run(["g++", *MODEL_FLAGS, "-c", str(MODEL / "tw_model.cpp"), "-o", str(work)])
        work.rename(path)
    return path


class Variants:
    """Several texts of kernels in one library; each is run by its name."""

    def __init__(
        self, texts: Mapping[str, str], cache: Path, work: Path, *, headers: str = ""
    ) -> None:
        """`headers`: text of what the kernels call."""
        source, library = work / "variants.cpp", work / "variants.so"
        self.ids = {name: i for i, name in enumerate(texts)}
        parts = [_variant(i, name, text) for i, (name, text) in enumerate(texts.items())]
        printed = any("tl_templates" in text for text in texts.values())
        source.write_text("\n".join([_PRINTED if printed else "", _HEADERS, headers, *parts]))
        model = model_object(cache)
        includes = [f"-I{MODEL}", f"-I{template_folder()}"]
        built = work / "variants.o"
        _run(["g++", *KERNEL_FLAGS, "-O1", *includes, "-c", str(source), "-o", str(built)])
        _run(["g++", "-shared", "-o", str(library), str(built), str(model), "-lpthread"])
        self.library = ctypes.CDLL(str(library))

    def run(self, name: str, launch: Launch, *, adversarial: bool = False) -> str:
        """Launch; return the model's reports, empty if it has none."""
        self.library.tw_model_set(int(adversarial), 0)
        arrays = launch.arrays
        pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        sizes = (ctypes.c_uint64 * len(arrays))(*(a.nbytes for a in arrays))
        message = ctypes.create_string_buffer(_MESSAGE)
        entry = getattr(self.library, f"run_{self.ids[name]}")
        size = ctypes.c_int64(_MESSAGE)
        failed = entry(pointers, sizes, launch.value, launch.blocks, message, size)
        text = message.value.decode()
        assert bool(failed) == bool(text)
        return text


_PRINTED = """#include <tl_templates/ascend/common.h>
#include <tl_templates/ascend/debug.h>
#include <tl_templates/ascend/gemm.h>
"""
_HEADERS = """#include "c_api/asc_simd.h"
#include "simt_api/asc_simt.h"
#include "tw_launch_kernel.h"
"""


def _variant(number: int, name: str, text: str) -> str:
    """Wrap a text in a namespace with an entry; its lines keep their numbers."""
    found = re.search(r'extern "C" __global__ (__\w+__)(?:\([^)]*\))? void (\w+)\(([^)]*)\)', text)
    assert found, f"{name}: no kernel in the text"
    kind, symbol, signature = KINDS[found.group(1)], found.group(2), found.group(3)
    types = [re.sub(r"__gm__|\s*\w+$", "", p.strip()).strip() for p in signature.split(",")]
    names = [re.findall(r"\w+", p)[-1] for p in signature.split(",")]
    body = re.sub(r"^#include.*$", "", text, flags=re.M).replace('extern "C" ', "")
    tensors = ", ".join(
        f'{{"{n}", (uintptr_t)p[{i}], size[{i}], {str(i == len(types) - 2).lower()}}}'
        for i, n in enumerate(names[:-1])
    )
    call = ", ".join(f"({t})p[{i}]" for i, t in enumerate(types[:-1]))
    return f"""namespace v{number} {{
#line 1 "{name.split(":")[0]}.asc"
{body}
}}
extern "C" __attribute__((visibility("default"))) int run_{number}(
    void** p, uint64_t* size, int value, int blocks, char* message, int64_t length) {{
  tw::Tensor tensors[] = {{{tensors}}};
  return tw::launch("{symbol}", {kind}, blocks,
                    [&]() TW_HOST_CODE {{ v{number}::{symbol}({call}, value); }}, tensors,
                    {len(types) - 1}, message, length);
}}
"""


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
