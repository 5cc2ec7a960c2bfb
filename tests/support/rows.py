"""Steps of graphs with paged states, compiled and by the reference; packed rows in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from support.execute import stored, widened
from support.tiny import SETTINGS, Tiny, build, quick_target
from support.weights import RandomWeights
from tilewright.graph import Graph, reference
from tilewright.graph.dims import evaluate
from tilewright.graph.types import BlockFormat
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.devices.cpu import CpuDevice
from tilewright.runtime.executor import Executor

Arrays = dict[str, NDArray[Any]]
Tensors = dict[str, torch.Tensor]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """What one step is given and what came out: tensors in fp32 or int32, states likewise."""

    inputs: Tensors
    dims: Mapping[str, int]
    states: Tensors


def compile_rows(graph: Graph, output: Path, cache: Path, rows: int) -> RandomWeights:
    """Compile for steps of up to `rows` tokens; return the weights."""
    weights = RandomWeights(graph)
    limits = replace(SETTINGS, max_tokens_per_step=rows)
    build(Tiny(graph, weights, limits, {}), output, cache, target=quick_target((rows, rows)))
    return weights


def run_compiled(
    path: Path, graph: Graph, step: Step, *, threads: int = 2
) -> tuple[Arrays, Arrays]:
    """Outputs (floats as fp32) and states as they lie in memory; outputs start poisoned."""
    dtypes = {i.name: str(i.type.dtype) for i in graph.inputs}
    states = {s.name: s.type for s in graph.states}
    with Executor(load_artifact(path), CpuDevice(threads), poison=True) as executor:
        executor.allocate_states({d: n for d, n in step.dims.items() if d in _PAGES})
        for name, value in step.states.items():
            kind = states[name].dtype
            if isinstance(kind, BlockFormat):
                flat = pack_rows(value.flatten(0, 1).numpy(), kind)
                executor.state(name)[...] = flat.reshape(*value.shape[:2], -1)
            else:
                executor.state(name)[...] = stored(value, str(kind))
        given = {name: stored(t, dtypes[name]) for name, t in step.inputs.items()}
        outputs = executor.run(given, dict(step.dims))
        found = {}
        for public, value in graph.outputs:
            kind = graph.type_of(value).dtype
            name = "bf16" if isinstance(kind, BlockFormat) else str(kind)
            found[public] = widened(np.array(outputs[public]), name)
        return found, {name: np.array(executor.state(name)) for name in states}


def run_expected(
    graph: Graph, step: Step, weights: RandomWeights, *, wide: bool = False
) -> reference.Result:
    """The reference: in fp32, or in fp64 for what is not rounded on the way."""
    precision = replace(reference.HONOUR_CASTS, dtype=torch.float64 if wide else torch.float32)
    return reference.run(
        graph, step.inputs, states=step.states, weights=weights.tensors(), precision=precision
    )


_RINGS = {"tables": "ring", "block_tables": "request_blocks",
          "window_tables": "request_window_blocks"}  # fmt: skip
_PAGES = ("cache_blocks", "window_blocks")


def paged_step(graph: Graph, rows: int, seed: int, *, requests: int = 3, pages: int = 8) -> Step:
    """Tokens of several requests at their own positions, some of them padding; full states."""
    r = np.random.default_rng(seed)
    dims = {"tokens": rows, "requests": requests, "logit_rows": rows}
    dims |= dict.fromkeys(_RINGS.values(), pages) | dict.fromkeys(_PAGES, requests * pages)
    used = {d.name: min(dims[d.name], d.upper) for d in graph.dims}
    per_request = np.array_split(np.arange(rows), requests)
    positions, owner = np.full(rows, -1, np.int32), np.zeros(rows, np.int32)
    for request, mine in enumerate(per_request):
        start = int(r.integers(121, 127) if request == 1 else r.integers(0, 40))  # 127 is passed
        positions[mine] = start + np.arange(len(mine))
        owner[mine] = request
    if rows > 4:
        positions[-1] = -1
    known = {"positions": positions, "request_rows": owner, "logit_rows": np.arange(rows)}
    for name, ring in _RINGS.items():
        held = used.get(ring, pages)
        known[name] = r.permutation(requests * pages).reshape(requests, pages)[:, :held]
    for node in graph.nodes:  # slots of a step are distinct, some rows store nothing
        if node.op == "append_rows" and node.inputs[2] in {i.name for i in graph.inputs}:
            extents = graph.type_of(node.inputs[0]).shape[:2]
            capacity = evaluate(extents[0], used) * evaluate(extents[1], used)
            slots = r.permutation(capacity)[:rows]
            known.setdefault(node.inputs[2], np.where(r.random(rows) < 0.2, -1, slots))
    known = {name: array.astype(np.int32) for name, array in known.items()}
    inputs = {}
    for declared in graph.inputs:
        shape = [evaluate(d, used) for d in declared.type.shape]
        if declared.name in known:
            inputs[declared.name] = torch.from_numpy(known[declared.name])
        elif str(declared.type.dtype) == "i32":
            inputs[declared.name] = torch.from_numpy(r.integers(0, 5, shape).astype(np.int32))
        else:
            inputs[declared.name] = rounded(hard_floats(r, shape), str(declared.type.dtype))
    states = {s.name: _state(r, [evaluate(d, used) for d in s.type.shape], s.type.dtype)
              for s in graph.states}  # fmt: skip
    return Step(inputs, used, states)


def _state(r: np.random.Generator, shape: list[int], dtype: Any) -> torch.Tensor:
    if str(dtype) == "i32":
        return torch.from_numpy(r.integers(0, 1 << 30, shape).astype(np.int32))
    values = rounded(r.standard_normal(shape).astype(np.float32), str(dtype))
    if isinstance(dtype, BlockFormat):
        flat = values.reshape(-1, shape[-1]).numpy()
        return torch.from_numpy(quantised(flat, dtype)[0].reshape(shape))
    return values


def rounded(values: F32, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.bfloat16().float() if dtype == "bf16" else tensor


def hard_floats(r: np.random.Generator, shape: list[int]) -> F32:
    """Normal numbers over many magnitudes by row, zeros of both signs, subnormals among them."""
    values = r.standard_normal(shape) * np.exp2(r.integers(-12, 8, [*shape[:-1], 1]))
    special = np.array([0.0, -0.0, 1e-40, -1e-42, 1e-30, 448.0, 6.0, -0.25], np.float32)
    hit = r.random(shape) < 0.1
    return np.where(hit, r.choice(special, shape), values).astype(np.float32)


# --- packed rows, written from the rules and not from the kernels -------------------------------

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _e4m3_table() -> F32:
    code = np.arange(127)
    mantissa, exponent = code % 8, code // 8
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    return np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal).astype(np.float32)


_E4M3 = _e4m3_table()


def _nearest(x: F32, table: F32) -> NDArray[np.int64]:
    """Code of the nearest entry of an ascending table, ties to the even code."""
    size = np.minimum(np.abs(x).astype(np.float64), table[-1])
    upper = np.searchsorted(table, size).clip(1, len(table) - 1)
    below, above = table[upper - 1].astype(np.float64), table[upper].astype(np.float64)
    to_above = (above - size < size - below) | ((above - size == size - below) & (upper % 2 == 0))
    return np.where(to_above, upper, upper - 1)


def quantised(rows: F32, dtype: BlockFormat) -> tuple[F32, NDArray[np.uint8]]:
    """Values and packed bytes of finite rows [n, width]: a group at a time, from tables."""
    width = rows.shape[1] - dtype.tail
    table = _E4M3 if dtype.code.bits == 8 else _E2M1
    values, codes = np.zeros_like(rows), np.zeros((len(rows), width), np.uint8)
    starts = range(0, width, dtype.block[1])
    scales = np.zeros((len(rows), len(starts)), np.uint8)
    for g, start in enumerate(starts):
        x = rows[:, start : min(start + dtype.block[1], width)]
        scale, scales[:, g] = _scale(np.abs(x).max(1), dtype)
        code = _nearest((x / scale[:, None]).astype(np.float32), table)
        values[:, start : start + x.shape[1]] = np.copysign(table[code] * scale[:, None], x)
        sign = np.signbit(x).astype(np.int64) * (128 if dtype.code.bits == 8 else 8)
        codes[:, start : start + x.shape[1]] = code + sign
    tail = torch.from_numpy(rows[:, width:].copy()).bfloat16()
    values[:, width:] = tail.float().numpy()
    if dtype.code.bits == 4:
        codes = np.pad(codes, ((0, 0), (0, width % 2)))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    halves = tail.view(torch.uint16).numpy().astype("<u2").view(np.uint8)
    pad = -scales.shape[1] % 8 if dtype.tail else 0
    return values, np.concatenate((codes, halves, np.pad(scales, ((0, 0), (0, pad)))), 1)


def _scale(most: F32, dtype: BlockFormat) -> tuple[F32, NDArray[np.uint8]]:
    if dtype.scale.name == "fp8_e4m3":
        code = _nearest(np.maximum(most, np.float32(6 * 2.0**-9)) / np.float32(6), _E4M3)
        code = np.maximum(code, 1)
        return _E4M3[code], code.astype(np.uint8)
    limit, floor = (448, 1e-4) if dtype.code.bits == 8 else (6, 6 * 2.0**-126)
    wanted = np.maximum(most, np.float32(floor)) * np.float32(1 / limit)
    mantissa, exponent = np.frexp(wanted)
    exponent = np.maximum(exponent - (mantissa == 0.5), -126)
    return np.ldexp(np.float32(1), exponent), (exponent + 127).astype(np.uint8)


def pack_rows(rows: F32, dtype: BlockFormat) -> NDArray[np.uint8]:
    """Packed rows [n, row_bytes]."""
    return quantised(rows, dtype)[1]


def unpack_rows(packed: NDArray[np.uint8], dtype: BlockFormat, width: int) -> F32:
    """Values of packed rows."""
    coded, bits = width - dtype.tail, dtype.code.bits
    code_bytes, group = -(-coded * bits // 8), dtype.block[1]
    codes = packed[:, :code_bytes]
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(len(packed), -1)[:, :coded]
    table, sign = (_E4M3, 128) if bits == 8 else (_E2M1, 8)
    table = np.pad(table, (0, sign - len(table)), constant_values=np.nan)
    values = np.concatenate((table, -table))[codes]
    halves = packed[:, code_bytes : code_bytes + 2 * dtype.tail]
    tail = np.ascontiguousarray(halves).view("<u2").astype(np.uint32) << 16
    scales = packed[:, code_bytes + 2 * dtype.tail :][:, : -(-coded // group)]
    if dtype.scale.name == "fp8_e4m3":
        factor = np.pad(_E4M3, (0, 1), constant_values=np.nan)[scales]
    else:
        factor = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
    values = values * factor.repeat(group, 1)[:, :coded].astype(np.float32)
    return np.concatenate((values, tail.view(np.float32)), 1).astype(np.float32)
