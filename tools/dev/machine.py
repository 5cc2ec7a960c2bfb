"""What a result was measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Card, driver and versions."""
    import torch
    import tvm_ffi

    from tilewright.runtime.devices.cuda import find_facts

    facts = find_facts(0)
    return {
        "card": facts.name, "capability": facts.capability, "cuda_of_driver": facts.driver,
        "driver": _driver(), "torch": torch.__version__, "tvm_ffi": tvm_ffi.__version__,
        "memory_bytes": torch.cuda.mem_get_info()[1],
    }  # fmt: skip


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0] if path.exists() else "unknown"
