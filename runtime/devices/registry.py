"""The table of devices: which targets each runs. A device is imported when it is first opened."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tilewright.runtime.artifact import Manifest
from tilewright.runtime.devices.device import Device
from tilewright.runtime.errors import ArtifactError, RequestError
from tilewright.runtime.params import shown

DEVICES: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu",),
    "cuda": ("sm90", "sm100"),
    "ascend950-model": ("ascend950",),  # runs on the CPU; its kernels hold the model
}
ON_CPU = ("cpu", "ascend950-model")


def open_device(
    manifest: Manifest,
    name: str | None = None,
    *,
    num_threads: int | None = None,
    graphs: bool | None = None,
) -> Device:
    """Return the device `name` (`cpu`, `cuda`, `cuda:1`), by default the one for the artifact.

    Raises RequestError for an unknown name or a setting that is not the device's, ArtifactError
    if the artifact is for another device.
    """
    target = manifest.target.name
    if name is not None and not isinstance(name, str):
        raise RequestError(f"device: got {shown(name)}, want {', '.join(DEVICES)}, cuda:N")
    kind, colon, index = (_device_of(target) if name is None else name).partition(":")
    is_number = index.isascii() and index.isdecimal()
    if kind not in DEVICES or (colon and (kind in ON_CPU or not is_number)):
        raise RequestError(f"device {shown(name)}: unknown: have {', '.join(DEVICES)}, cuda:N")
    if target not in DEVICES[kind]:
        raise ArtifactError(
            f"target '{target}' cannot run on this device: want {' or '.join(DEVICES[kind])}"
        )
    if kind in ON_CPU:
        if graphs is not None:
            raise RequestError(f"engine 'graphs': is a setting of GPUs: got target {target}")
        return _made("cpu", "CpuDevice", num_threads)
    if num_threads is not None:
        raise RequestError(f"engine 'num_threads': is a setting of CPUs: got target {target}")
    return _made("cuda", "CudaDevice", int(index or 0), graphs=graphs is not False)


def _made(module: str, cls: str, *args: Any, **options: Any) -> Device:
    made: Device = getattr(import_module(f"tilewright.runtime.devices.{module}"), cls)(
        *args, **options
    )
    return made


def _device_of(target: str) -> str:
    for kind, targets in DEVICES.items():
        if target in targets:
            return kind
    known = ", ".join(t for targets in DEVICES.values() for t in targets)
    raise ArtifactError(f"target '{target}': no device runs it: have {known}")
