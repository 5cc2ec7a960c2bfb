"""Devices that run artifacts. A device is imported when it is first asked for: reading an artifact
takes neither torch nor TVM-FFI."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.runtime.devices.cpu import CpuDevice

__all__ = ["CpuDevice"]


def __getattr__(name: str) -> object:
    if name != "CpuDevice":
        raise AttributeError(f"module 'tilewright.runtime.devices' has no attribute '{name}'")
    from tilewright.runtime.devices.cpu import CpuDevice

    return CpuDevice
