"""Operands for a kernel that runs alone: random values, indices that mean something, and as many
copies of what memory holds between steps that no cache keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.codegen.arguments import argument_names, matrix_weights
from tilewright.codegen.emit.cpp_types import panel_format
from tilewright.codegen.pack_cpu import FORMATS, PANEL, pack_panels, packed_bytes
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node, Role
from tilewright.graph.dims import Dim, evaluate, to_json
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat, TensorType
from tilewright.runtime.devices.cpu import numpy_type
from tilewright.runtime.devices.memory import allocate_streamed
from tilewright.tools.synthetic_paged import paged_extents, paged_index, paged_reads

Array = NDArray[Any]

FEW_TOKENS = 16  # up to here a step is taken for decodes of one token each, beyond for one prefill
MAX_COPIES = 128
_E4M3_LEAST_NORMAL, _E4M3_NAN = 0x08, 0x7F


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor argument: one array, or copies to be used in turn. `dtype` is that of the ABI."""

    dtype: str
    arrays: tuple[Array, ...]


@dataclass(frozen=True)
class Step:
    """A plausible step: every dim of the body bound, requests with `context` positions each."""

    dims: Mapping[str, int]
    num_requests: int
    context: int


def plausible_step(body: Graph, bounds: Mapping[str, int], *, context: int) -> Step:
    """Bind the body's dims for a step at the bounds of a bucket.

    `context`: positions of each request, where the block tables hold as many. Few tokens are one
    for each request; more are the end of one request's prompt.
    """
    dims = {d.name: bounds.get(d.name, d.upper) if d.role is Role.BATCH else min(d.upper, context)
            for d in body.dims}  # fmt: skip
    requests = 1
    for node in body.nodes:
        match op_def(node.op).kind:
            case Kind.ATTEND | Kind.SELECT if paged_reads(node):
                tokens = evaluate(node.type.shape[0], dims)
                tables = body.type_of(node.inputs[paged_reads(node)[0].tables])
                requests = _num_requests(tables.shape[0], tokens, dims)
                context = max(context, tokens if requests == 1 else 1)
                for extent, value in paged_extents(body, node, context, requests):
                    _bind(dims, extent, value)
            case Kind.ATTEND:
                tables, cache = body.type_of(node.inputs[5]), body.type_of(node.inputs[1])
                tokens, size = evaluate(node.type.shape[0], dims), _size(cache)
                requests = _num_requests(tables.shape[0], tokens, dims)
                most = evaluate(tables.shape[1], {d.name: d.upper for d in body.dims}) * size
                context = max(min(context, most), tokens if requests == 1 else 1)
                _bind(dims, tables.shape[0], requests)
                _bind(dims, tables.shape[1], -(-context // size))
                _bind(dims, cache.shape[0], requests * -(-context // size))
            case Kind.STORE:
                cache, entries = (body.type_of(i) for i in node.inputs[:2])
                rows = evaluate(entries.shape[0], dims)
                size = evaluate(cache.shape[1], {}) if node.op == "append_rows" else _size(cache)
                _bind(dims, cache.shape[0], -(-rows // size))
            case _:
                pass
    return Step(dims, requests, context)


def _num_requests(extent: Dim, tokens: int, dims: Mapping[str, int]) -> int:
    return max(1, min(tokens, evaluate(extent, dims))) if tokens <= FEW_TOKENS else 1


def _size(cache: TensorType) -> int:
    return evaluate(cache.shape[2], {})


def _bind(dims: dict[str, int], extent: Dim, value: int) -> None:
    name = to_json(extent)
    if isinstance(name, str):
        dims[name] = value


def operands(spec: KernelSpec, step: Step, *, rotated_bytes: int, seed: int = 0) -> list[Operand]:
    """Return the tensor arguments of a kernel in the order of the ABI, without the workspace.

    Weights and states come in copies whose sizes add up to `rotated_bytes`, and chosen experts so
    that all are read.
    """
    rng = np.random.default_rng(seed)
    body, packed = spec.body, matrix_weights(spec.body)
    found: dict[str, tuple[str, Array]] = {}
    for name in argument_names(body):
        type_ = spec.stored_type(name)
        if name in packed:
            found[name] = "u8", random_panels(type_, rng)
        elif str(type_.dtype) == "i32":
            shape = tuple(evaluate(d, step.dims) for d in type_.shape)
            found[name] = "i32", int_operand(body, name, step, rng).reshape(shape)
        else:
            found[name] = str(type_.dtype), _random(type_, step.dims, rng)
    kept = {*body.weight, *body.state}
    size = sum(array.nbytes for name, (_, array) in found.items() if name in kept)
    copies = max(1, min(MAX_COPIES, -(-rotated_bytes // size))) if size else 1
    return [
        Operand(
            dtype,
            tuple(_placed(array) for _ in range(copies)) if name in kept
            else _turns(body, name, array, copies),
        )
        for name, (dtype, array) in found.items()
    ]  # fmt: skip


def _turns(body: Graph, name: str, array: Array, copies: int) -> tuple[Array, ...]:
    """Return an operand for each launch: chosen experts change once all copies have had a turn.

    The same few of every copy would stay in a large cache, where real steps choose others.
    """
    placed = _placed(array)
    user = body.node[body.users[name][0]] if body.users[name] else None
    if user is None or user.op != "expert_linear" or user.inputs.index(name) != 2:
        return (placed,)
    experts = evaluate(body.type_of(user.inputs[1]).shape[0], {})
    turns = [placed]
    for turn in range(1, -(-experts // array.size)):
        turns.append(_placed((array + turn * array.size) % experts))
    return tuple(ids for ids in turns for _ in range(copies))


def _placed(array: Array) -> Array:
    """Copy to pages of its own, aligned and as large as the runtime's."""
    memory = allocate_streamed(array.nbytes).view(array.dtype).reshape(array.shape)
    memory[...] = array
    return memory


def _random(type_: TensorType, dims: Mapping[str, int], rng: np.random.Generator) -> Array:
    shape = tuple(evaluate(d, dims) for d in type_.shape)
    if str(type_.dtype) == "u8":  # packed rows: ordinary numbers as fp8 and fp4, small as scales
        return rng.integers(0x38, 0x48, shape, np.uint8)
    values = rng.standard_normal(shape, np.float32)
    if str(type_.dtype) == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(numpy_type(str(type_.dtype)))


def random_panels(type_: TensorType, rng: np.random.Generator) -> Array:
    """Return a random weight [n, k], a stack of them or a table of rows, as kernels read it."""
    name = panel_format(type_.dtype)
    *stack, n, k = (evaluate(d, {}) for d in type_.shape)
    if name not in FORMATS:
        assert isinstance(type_.dtype, BlockFormat)
        return _random_floats((n, type_.dtype.row_bytes(k)), slice(k, None), rng)
    layout = FORMATS[name]
    if layout.float_codes:
        rows = math.prod(stack) * packed_bytes(name, n, k) // layout.group_bytes
        return _random_floats((rows, layout.group_bytes), slice(0, PANEL), rng)
    matrices = [_random_matrix(name, n, k, rng) for _ in range(math.prod(stack))]
    return np.concatenate(matrices) if stack else matrices[0]


def _random_floats(shape: tuple[int, int], scales: slice, rng: np.random.Generator) -> Array:
    """Bytes of fp8 or fp4 codes, none a NaN, with ue8m0 scales of about one in each row.

    No subnormal e4m3: real weights hold one in thousands, and Intel's cores take so long for one
    that they would be all that is measured.
    """
    found = rng.integers(_E4M3_LEAST_NORMAL, _E4M3_NAN, shape, np.uint8)
    found[:, scales] = rng.integers(110, 120, found[:, scales].shape, np.uint8)
    return found.reshape(-1)


def _random_matrix(name: str, n: int, k: int, rng: np.random.Generator) -> Array:
    layout = FORMATS[name]
    if not layout.words:
        values = rng.standard_normal((n, k), np.float32)
        return pack_panels(name, values=values.astype(np.float16) if name == "f16" else values)
    codes = rng.integers(0, 16, (n, k), np.uint8) if layout.has_min else rng.integers(
        -127, 128, (n, k), np.int8)  # fmt: skip
    scale = rng.uniform(0.5, 1.5, (n, k // layout.group)).astype(np.float32)
    minimum = (scale * -8).astype(np.float16) if layout.has_min else None
    return pack_panels(name, codes=codes, d=scale, m=minimum)


def int_operand(body: Graph, name: str, step: Step, rng: np.random.Generator) -> Array:
    """Return flat int32 indices that fit the first node that reads an operand."""
    user: Node = body.node[body.users[name][0]] if body.users[name] else body.nodes[0]
    place = user.inputs.index(name) if name in user.inputs else -1
    count = evaluate(body.type_of(name).num_elements, step.dims)
    numbers = np.arange(count, dtype=np.int32)
    paged = paged_index(user, place, count, step.context, step.num_requests, rng)
    if paged is not None:
        return paged
    match user.op, place:
        case "attend", 3:  # positions: the last of each request, or the last ones of one request
            one = np.full(count, step.context - 1, np.int32)
            return one if step.num_requests > 1 else numbers + np.int32(step.context - count)
        case "attend", 4:
            return numbers % np.int32(step.num_requests)
        case ("attend", 5) | ("append", 2):
            return rng.permutation(numbers) if user.op == "attend" else numbers
        case ("embedding", 0) | ("gather_rows", 1):
            source = body.type_of(user.inputs[1 - place])
            most = evaluate(source.shape[0], step.dims)
            return rng.integers(0, max(most, 1), count, np.int32)
        case ("expert_linear", 2):  # other experts for every slot of a token, an even load
            experts = evaluate(body.type_of(user.inputs[1]).shape[0], {})
            slots = evaluate(body.type_of(name).shape[1], step.dims)
            order = rng.random((count // slots, experts)).argsort(1)
            return np.resize(order[:, :slots].astype(np.int32), count)
        case _:
            return numbers % np.int32(max(step.context, 1))
