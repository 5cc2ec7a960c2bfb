"""The few C functions of TVM-FFI that calling kernels without its Python layer needs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tvm_ffi.libinfo

from tilewright.runtime.devices.launch_table import Place

_OBJECT_BYTES = 24  # TVMFFIObject, the header before an error's cell
KernelType = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
)


class _Text(ctypes.Structure):
    """TVMFFIByteArray."""

    _fields_ = [("text", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]


class _ErrorCell(ctypes.Structure):
    """The first fields of TVMFFIErrorCell."""

    _fields_ = [("kind", _Text), ("message", _Text)]


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    library.TVMFFIErrorMoveFromRaised.argtypes = [ctypes.c_void_p]
    library.TVMFFIErrorMoveFromRaised.restype = None
    library.TVMFFIObjectDecRef.argtypes = [ctypes.c_void_p]
    library.TVMFFIEnvSetStream.argtypes = [
        ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    return library


def take_error() -> str:
    """Return the message of the error that a kernel raised in this thread, and clear it."""
    raised = ctypes.c_void_p()
    _library().TVMFFIErrorMoveFromRaised(ctypes.byref(raised))
    if not raised.value:
        return "failed without a message"
    message = _ErrorCell.from_address(raised.value + _OBJECT_BYTES).message
    text = ctypes.string_at(message.text, message.num_bytes).decode(errors="replace")
    _library().TVMFFIObjectDecRef(raised)
    return text


@contextmanager
def stream_of(place: Place, handle: int) -> Iterator[None]:
    """Have kernels of this thread launch on a stream, given by its driver handle."""
    before = ctypes.c_void_p()
    _library().TVMFFIEnvSetStream(*place, handle, ctypes.byref(before))
    try:
        yield
    finally:
        _library().TVMFFIEnvSetStream(*place, before, None)
