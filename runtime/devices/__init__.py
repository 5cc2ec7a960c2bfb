"""Devices that run artifacts."""

from tilewright.runtime.devices.cpu import CpuDevice

__all__ = ["CpuDevice"]
