"""Random weights in every storage format, without files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from tilewright.codegen.pack_cpu import Unpacked
from tilewright.graph import Graph, TensorType
from tilewright.graph.types import BlockFormat, ElementType


class RandomWeights:
    """Tensors of a graph, drawn by name: for the packer and for the reference.

    `spread`: values are scaled by 2^e with e uniform in +-spread, column by column.
    """

    def __init__(self, graph: Graph, *, seed: int = 0, spread: int = 0) -> None:
        self._graph = graph
        self._types = {
            name: w.type.with_shape(*w.type.shape[-2:])
            for w in graph.weights
            for name in w.expr.tensors
        }
        self._seed, self._spread = seed, spread

    def unpacked(self, name: str, dtype: ElementType) -> Unpacked:
        return self._all[name]

    def pieces(self, name: str, dtype: ElementType) -> Iterator[Unpacked]:
        """Tables come in two pieces."""
        whole = self._all[name]
        assert whole.codes is not None and whole.d is not None
        for part in (slice(0, 3), slice(3, None)):
            yield Unpacked(codes=whole.codes[part], d=whole.d[part])

    @cached_property
    def _all(self) -> dict[str, Unpacked]:
        return {name: self._draw(name, type_) for name, type_ in self._types.items()}

    def _draw(self, name: str, type_: TensorType) -> Unpacked:
        key = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        r = np.random.default_rng(int.from_bytes(key[:8], "little"))
        shape = tuple(int(d) for d in type_.shape)
        scale = float(shape[-1]) ** -0.5 if len(shape) > 1 else 1.0
        exponents = r.integers(-self._spread, self._spread + 1, shape[-1])
        match type_.dtype.name:
            case "q8_0":
                d = (r.uniform(0.5, 1.0, _groups(shape, 32)) * scale / 64).astype(np.float16)
                return Unpacked(codes=r.integers(-127, 128, shape).astype(np.int8), d=d)
            case "q8_g16":
                d = (r.uniform(0.5, 1.0, _groups(shape, 16)) * scale / 64).astype(np.float32)
                return Unpacked(codes=r.integers(-127, 128, shape).astype(np.int8), d=d)
            case "q4_1":
                d = (r.uniform(0.5, 1.0, _groups(shape, 32)) * scale / 4).astype(np.float16)
                m = (d * np.float16(-7.5)).astype(np.float16)
                return Unpacked(codes=r.integers(0, 16, shape).astype(np.uint8), d=d, m=m)
            case "fp8_e4m3" | "fp4_e2m1":
                assert isinstance(type_.dtype, BlockFormat)
                return draw_floats(r, type_.dtype, shape)
            case "i32":
                return Unpacked(values=r.integers(0, 5, shape).astype(np.int32))
        values = r.standard_normal(shape) * scale * np.exp2(exponents)
        values = values + (1.0 if len(shape) == 1 and "norm" in name else 0.0)
        tensor = torch.from_numpy(values.astype(np.float32))
        match type_.dtype.name:
            case "bf16":
                return Unpacked(values=tensor.bfloat16().view(torch.uint16).numpy())
            case "f16":
                return Unpacked(values=tensor.half().numpy())
        return Unpacked(values=tensor.numpy())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The values of every weight, fp32."""
        types = self._types
        parts = {n: torch.from_numpy(_values(raw, types[n])) for n, raw in self._all.items()}
        return {
            w.name: torch.stack([parts[n] for n in w.expr.tensors])
            if w.expr.kind == "stack"
            else parts[w.expr.tensors[0]]
            for w in self._graph.weights
            if w.expr.kind != "literal"
        }


def _groups(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (shape[0], shape[1] // size)


def draw_floats(r: np.random.Generator, dtype: BlockFormat, shape: tuple[int, ...]) -> Unpacked:
    """Codes without NaN and scales of their blocks, for values of about shape[-1] ** -0.5."""
    (n, k), (rows, cols) = shape, dtype.block
    fp8 = dtype.code.name == "fp8_e4m3"
    low = 127 - int(np.log2(k)) // 2 - (8 if fp8 else 3)
    d = r.integers(low, low + 3, (-(-n // rows), -(-k // cols))).astype(np.uint8)
    if not fp8:
        return Unpacked(codes=r.integers(0, 256, (n, k // 2)).astype(np.uint8), d=d)
    values = (r.standard_normal((n, k)) * 100).clip(-448, 448)
    return Unpacked(codes=values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), d=d)


def float_values(raw: Unpacked, dtype: BlockFormat) -> NDArray[np.float32]:
    """Values of fp8 and fp4 codes by the tables of ml_dtypes."""
    assert raw.codes is not None and raw.d is not None
    codes, (rows, cols) = raw.codes, dtype.block
    if dtype.code.name == "fp8_e4m3":
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
        values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scale = raw.d.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    n, k = values.shape
    spread: NDArray[np.float32] = scale.repeat(rows, 0)[:n].repeat(cols, 1)[:, :k]
    return values * spread


def _values(raw: Unpacked, type_: TensorType) -> NDArray[np.float32]:
    if isinstance(type_.dtype, BlockFormat) and type_.dtype.code.is_float:
        return float_values(raw, type_.dtype)
    if raw.values is not None:
        if raw.values.dtype == np.int32:
            return raw.values
        if raw.values.dtype == np.uint16:
            bits = raw.values.astype(np.uint32) << 16
            return bits.view(np.float32)
        return raw.values.astype(np.float32)
    assert raw.codes is not None and raw.d is not None
    group = raw.codes.shape[1] // raw.d.shape[1]
    values = raw.codes.astype(np.float32) * raw.d.astype(np.float32).repeat(group, 1)
    return values if raw.m is None else values + raw.m.astype(np.float32).repeat(group, 1)
