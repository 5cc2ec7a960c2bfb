"""Every op of the registry: type rule, reference and cost agree, on extents that include 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from support.paged_formulas import PAGED
from tilewright.graph import scalar as s
from tilewright.graph.dims import evaluate
from tilewright.graph.errors import ShapeError
from tilewright.graph.ops import OPS, Kind, op_def
from tilewright.graph.types import F32, I32, TensorType

SEEDS = range(6)
every_op = pytest.mark.parametrize("op", sorted(OPS))
elementwise_op = pytest.mark.parametrize(
    "op", sorted(o.name for o in OPS.values() if o.kind is Kind.ELEMENTWISE)
)
Make = Callable[[str, int], Any]


@every_op
def test_type_rule_equals_reference(op: str, sample: Make) -> None:
    for seed in SEEDS:
        drawn = sample(op, seed)
        inferred = op_def(op).checked_type(drawn.types, drawn.attrs)
        result = op_def(op).reference(drawn.tensors(seed), drawn.attrs)
        assert tuple(evaluate(d, drawn.binding) for d in inferred.shape) == tuple(result.shape)
        assert result.dtype == (torch.float64 if inferred.dtype.is_float else torch.int32)


@every_op
def test_no_op_costs_less_than_nothing(op: str, sample: Make) -> None:
    for seed in SEEDS:
        drawn = sample(op, seed)
        output = op_def(op).checked_type(drawn.types, drawn.attrs)
        definition = op_def(op)
        flops = definition.flops(drawn.types, output, drawn.attrs)
        assert evaluate(flops, drawn.binding) >= 0
        for index, type_ in enumerate(drawn.types):
            touched = definition.bytes_of(index, drawn.types, output, drawn.attrs)
            assert evaluate(touched, drawn.binding) >= 0
            if index not in definition.touched:
                assert touched == type_.num_bytes


@every_op
def test_reduced_axes_exist(op: str, sample: Make) -> None:
    drawn = sample(op, 0)
    axes = op_def(op).reduced_axes
    assert len(axes) in (0, len(drawn.types))
    for type_, reduced in zip(drawn.types, axes, strict=False):
        assert all(-type_.rank <= axis < type_.rank for axis in reduced)


@every_op
def test_wrong_attributes_are_refused(op: str, sample: Make) -> None:
    drawn, definition = sample(op, 0), op_def(op)
    known = ", ".join(definition.attrs) or "none"
    with pytest.raises(ShapeError) as error:
        definition.checked_type(drawn.types, {**drawn.attrs, "surprise": 1})
    assert str(error.value) == f"unknown attribute: got surprise, want {known}"
    for name, type_ in definition.attrs.items():
        rest = {k: v for k, v in drawn.attrs.items() if k != name}
        with pytest.raises(ShapeError) as error:
            definition.checked_type(drawn.types, rest)
        have = ", ".join(rest) or "none"
        assert str(error.value) == f"attribute missing: got {have}, want {name}"
        with pytest.raises(ShapeError) as error:
            wrong: object = 1 if type_ is bool else True
            definition.checked_type(drawn.types, {**drawn.attrs, name: wrong})
        got = type(wrong).__name__
        want = f"attribute '{name}' has the wrong type: got {got}, want {type_.__name__}"
        assert str(error.value) == want


@every_op
def test_every_error_says_what_was_got_and_wanted(op: str, sample: Make) -> None:
    """Break operands one at a time: other count, element type, rank, extent."""
    drawn, definition = sample(op, 1), op_def(op)
    broken: list[tuple[TensorType, ...]] = [drawn.types[1:], (*drawn.types, drawn.types[0])]
    for i, type_ in enumerate(drawn.types):
        others = (
            type_.with_dtype(I32 if type_.dtype == F32 else F32),
            type_.with_shape(*type_.shape[1:]),
            type_.with_shape(),
            type_.with_shape(*type_.shape[:-1], 7919),
            type_.with_shape(7919, *type_.shape),
        )
        broken += [(*drawn.types[:i], other, *drawn.types[i + 1 :]) for other in others]
    refused = 0
    for types in broken:
        try:
            definition.checked_type(types, drawn.attrs)
        except ShapeError as error:
            refused += 1
            message = str(error)
            assert ": got " in message and ", want " in message and "\n" not in message, message
    assert refused >= 2


@elementwise_op
def test_scalar_expression_equals_reference(op: str, sample: Make) -> None:
    """The lowering, evaluated element by element in Python, against torch in fp64."""
    scalar = op_def(op).scalar
    assert scalar is not None
    for seed in SEEDS:
        drawn = sample(op, seed)
        tensors = drawn.tensors(seed)
        if op == "cast":
            tensors = [t.bfloat16().half().to(torch.float64) for t in tensors]
        expr = scalar(drawn.attrs, *(s.Var(str(i)) for i in range(len(tensors))))
        result = op_def(op).reference(tensors, drawn.attrs)
        rows = zip(*(t.flatten().tolist() for t in torch.broadcast_tensors(*tensors)), strict=True)
        expected = [_evaluate(expr, row) for row in rows]
        np.testing.assert_allclose(result.flatten().numpy(), expected, rtol=1e-12, atol=1e-300)


def _evaluate(expr: s.Scalar, row: tuple[float, ...]) -> float:
    try:
        return s.evaluate(expr, {str(i): x for i, x in enumerate(row)})
    except ValueError:  # the square root or logarithm of a negative number
        return math.nan


def _rotate(x: np.ndarray, pairing: str) -> np.ndarray:
    result, half = np.empty_like(x), x.shape[-1] // 2
    for i in range(half):
        a, b = (i, i + half) if pairing == "half" else (2 * i, 2 * i + 1)
        result[..., a], result[..., b] = -x[..., b], x[..., a]
    return result


def _largest(x: np.ndarray, k: int) -> np.ndarray:
    """Python's sort by (largest value, lowest index)."""
    rows = [sorted(range(x.shape[-1]), key=lambda i: (-r[i], i))[:k] for r in
            x.reshape(-1, x.shape[-1])]
    return np.array(rows, dtype=np.int32).reshape(*x.shape[:-1], k)


def _softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def _stored(cache: np.ndarray, x: np.ndarray, slots: np.ndarray) -> np.ndarray:
    result, size = cache.copy(), cache.shape[2]
    for row, slot in zip(x, slots, strict=True):
        result[slot // size, :, slot % size] = row
    return result


def _attended(q, k, v, positions, rows, tables, scale):  # type: ignore[no-untyped-def]
    """One query and one head at a time."""
    result, size, repeat = np.empty_like(q), k.shape[2], q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        entries = [(tables[rows[t], p // size], p % size) for p in range(positions[t] + 1)]
        for h in range(q.shape[1]):
            keys = np.array([k[b, h // repeat, e] for b, e in entries])
            values = np.array([v[b, h // repeat, e] for b, e in entries])
            result[t, h] = _softmax(scale * keys @ q[t, h]) @ values
    return result


INDEPENDENT: Mapping[str, Callable[..., np.ndarray]] = {
    "linear": lambda x, w: np.einsum("...k,nk->...n", x, w),
    "rms_norm": lambda x, w, eps: x / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + eps)
    * w,
    "softmax": _softmax,
    "reduce_sum": lambda x: x.sum(-1, keepdims=True),
    "reduce_max": lambda x: x.max(-1, keepdims=True),
    "embedding": lambda ids, table: np.array([table[i] for i in ids]),
    "gather_rows": lambda x, rows: np.array([x[i] for i in rows]),
    "split_heads": lambda x, num_heads: np.stack(np.split(x, num_heads, -1), -2),
    "merge_heads": lambda x: np.concatenate(list(np.moveaxis(x, -2, 0)), -1),
    "expand_last": lambda x: x[..., None],
    "slice_last": lambda x, start, stop: np.take(x, range(start, stop), -1),
    "rotate_pairs": _rotate,
    "argmax": lambda x: _largest(x, 1)[..., 0],
    "top_k_indices": _largest,
    "top_k_values": lambda x, k: -np.sort(-x, -1)[..., :k],
    "append": _stored,
    "attend": _attended,
    **PAGED,
}


@every_op
def test_reference_equals_an_independent_formulation(op: str, sample: Make) -> None:
    if op not in INDEPENDENT:
        assert OPS[op].scalar is not None, f"op '{op}' has no second formulation: add one here"
        return
    for seed in SEEDS:
        drawn = sample(op, seed)
        tensors = drawn.tensors(seed)
        expected = INDEPENDENT[op](*(t.numpy() for t in tensors), **drawn.attrs)
        result = op_def(op).reference(tensors, drawn.attrs)
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-11, atol=1e-13)


def test_argmax_and_top_k_give_ties_to_the_lowest_index() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, -1.0, 3.0], [0.0, -0.0, 0.0, 0.0, -5.0]])
    assert op_def("argmax").reference([x], {}).tolist() == [1, 0]
    assert op_def("top_k_indices").reference([x], {"k": 4}).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_argmax_of_a_row_with_nan_is_zero() -> None:
    x = torch.tensor([[1.0, math.nan, 3.0], [math.nan] * 3, [1.0, 2.0, math.inf]])
    assert op_def("argmax").reference([x], {}).tolist() == [0, 0, 2]


@pytest.mark.parametrize("cache", [1, 2])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_attend_ignores_entries_it_may_not_see(cache: int, poison: float, sample: Make) -> None:
    """Stale entries, and those after a query's own position, do not reach its output."""
    drawn = sample("attend", 3)
    tensors = drawn.tensors(3)
    clean = op_def("attend").reference(tensors, drawn.attrs)
    positions, rows, tables = tensors[3:]
    size, limit = tensors[1].shape[2], int(positions.float().quantile(0.5, interpolation="lower"))
    poisoned = list(tensors)
    poisoned[cache] = tensors[cache].clone()
    seen = {(row, p) for row in set(rows.tolist()) for p in range(limit + 1)}
    kept = {(int(tables[row, p // size]), p % size) for row, p in seen}
    for block in range(tensors[cache].shape[0]):
        for entry in range(size):
            if (block, entry) not in kept:
                poisoned[cache][block, :, entry] = poison
    result = op_def("attend").reference(poisoned, drawn.attrs)
    early = positions <= limit
    assert early.any() and not early.all()
    assert torch.equal(result[early], clean[early])


def test_unknown_op_lists_the_known_ones() -> None:
    with pytest.raises(ShapeError) as error:
        op_def("scatter_add")
    assert str(error.value) == f"op 'scatter_add': unknown: have {', '.join(sorted(OPS))}"


def test_linear_error_in_full() -> None:
    x, w = TensorType(F32, (3, 4096)), TensorType(F32, (8, 4608))
    with pytest.raises(ShapeError) as error:
        op_def("linear").checked_type([x, w], {})
    assert str(error.value) == "inner extents differ: got f32[8, 4608], want [n, 4096]"
