"""Second formulations, in numpy and one element at a time, of the ops of paged_samples.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewright.graph.types import BlockFormat, element_type

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)


def nearest(x: float, grid: np.ndarray) -> float:
    """The nearest point of an ascending grid by code; a tie goes to the even code."""
    distance = np.abs(np.abs(x) - grid)
    near = np.flatnonzero(distance == distance.min())
    code = near[0] if len(near) == 1 else next(c for c in near if c % 2 == 0)
    return float(np.copysign(grid[code], x))


def _power_at_least(x: float) -> float:
    mantissa, exponent = np.frexp(x)  # 0.5 <= mantissa < 1
    return float(np.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))


def _scale(group: np.ndarray, target: BlockFormat) -> float:
    largest = np.abs(group).max()
    if target.code.name == "fp8_e4m3":
        return _power_at_least(np.float32(max(largest, np.float32(1e-4))) * np.float32(1 / 448))
    if target.scale.name == "ue8m0":
        floor = np.float32(6 * 2.0**-126)
        return _power_at_least(np.float32(max(largest, floor)) * np.float32(1 / 6))
    return nearest(np.float32(max(largest, 6 * 2.0**-9)) / np.float32(6), E4M3)


def _bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def _quantise(x: np.ndarray, dtype: str) -> np.ndarray:
    target = element_type(dtype)
    assert isinstance(target, BlockFormat)
    grid = E2M1 if target.code.name == "fp4_e2m1" else E4M3
    x = x.astype(np.float32)
    result, coded = _bf16(x).astype(np.float64), x.shape[-1] - target.tail
    for row in np.ndindex(x.shape[:-1]):
        for start in range(0, coded, target.block[1]):
            columns = slice(start, min(start + target.block[1], coded))
            scale = np.float32(_scale(x[row][columns], target))
            result[row][columns] = [
                nearest(min(max(v / scale, -grid[-1]), grid[-1]), grid) * scale
                for v in x[row][columns]
            ]
    return result


def _hadamard(x: np.ndarray) -> np.ndarray:
    n = x.shape[-1]
    signs = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    return x @ np.array(signs) / np.sqrt(n)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _mix(m: np.ndarray, scale: np.ndarray, base: np.ndarray, **attrs: Any) -> np.ndarray:
    n, eps, result = attrs["streams"], attrs["eps"], np.empty_like(m)
    for t, row in enumerate(m):
        result[t, :n] = _sigmoid(row[:n] * scale[0] + base[:n]) + eps
        result[t, n : 2 * n] = 2 * _sigmoid(row[n : 2 * n] * scale[1] + base[n : 2 * n])
        c = np.exp(row[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
        c = c / c.sum(1)[:, None] + eps
        for step in range(attrs["iterations"]):
            c = c if step == 0 else c / (c.sum(1)[:, None] + eps)
            c = c / (c.sum(0)[None] + eps)
        result[t, 2 * n :] = c.ravel()
    return result


def _update(x: np.ndarray, y: np.ndarray, mix: np.ndarray) -> np.ndarray:
    n = x.shape[1]
    post, comb = mix[:, n : 2 * n], mix[:, 2 * n :].reshape(-1, n, n)
    return post[..., None] * y[:, None] + np.einsum("tjk,tjd->tkd", comb, x)


def _experts(x: np.ndarray, w: np.ndarray, ids: np.ndarray) -> np.ndarray:
    rows = x if x.ndim == 3 else np.repeat(x[:, None], ids.shape[1], 1)
    return np.einsum("tsnk,tsk->tsn", w[ids], rows)


def _grouped(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    blocks = np.split(w, x.shape[1])
    return np.stack([x[:, g] @ block.T for g, block in enumerate(blocks)], 1)


def _appended(state: np.ndarray, x: np.ndarray, slots: np.ndarray) -> np.ndarray:
    result, size = state.copy(), state.shape[1]
    for row, slot in zip(x, slots, strict=True):
        if slot >= 0:
            result[slot // size, slot % size] = row
    return result


def _at(state: np.ndarray, tables: np.ndarray, row: int, entry: int) -> np.ndarray:
    """The entry of a request in a ring of pages."""
    size, pages = state.shape[1], tables.shape[1]
    return state[tables[row, entry // size % pages], entry % size]


def _page_slots(
    positions: np.ndarray, rows: np.ndarray, tables: np.ndarray, ratio: int, entries: int
) -> np.ndarray:
    numbered = np.arange((tables.max() + 1) * entries).reshape(-1, entries, 1)
    return np.array([
        _at(numbered, tables, row, p // ratio)[0] if p >= 0 and p % ratio == ratio - 1 else -1
        for p, row in zip(positions, rows, strict=True)
    ])


def _pooled(values, gates, positions, rows, tables, ratio, overlap):  # type: ignore[no-untyped-def]
    width = values.shape[2] // (2 if overlap else 1)
    result = np.zeros((len(positions), width))
    for t, (p, row) in enumerate(zip(positions, rows, strict=True)):
        if p < 0 or (p + 1) % ratio:
            continue
        first = p + 1 - ratio
        late = slice(width, 2 * width) if overlap else slice(0, width)
        window = [(q, late) for q in range(first, p + 1)]
        if overlap and first > 0:
            window = [(q, slice(0, width)) for q in range(first - ratio, first)] + window
        g = np.array([_at(gates, tables, row, q)[part] for q, part in window])
        k = np.array([_at(values, tables, row, q)[part] for q, part in window])
        weights = np.exp(g - g.max(0))
        result[t] = (weights / weights.sum(0) * k).sum(0)
    return result


def _ngram(history, positions, rows, tables, **attrs):  # type: ignore[no-untyped-def]
    multipliers, primes = attrs["multipliers"], attrs["primes"]
    heads, result = len(primes) // (len(multipliers) - 1), []
    for p, row in zip(positions, rows, strict=True):
        ids = [int(_at(history, tables, row, p - i)[0]) if p >= i else attrs["pad"]
               for i in range(len(multipliers))]
        line = []
        for index, prime in enumerate(primes):
            mixed = ids[0] * multipliers[0]
            for i in range(1, index // heads + 2):
                mixed ^= ids[i] * multipliers[i]
            line.append(mixed % prime + sum(primes[:index]))
        result.append(line)
    return np.array(result)


def _attended(q, entries, positions, rows, tables, sink, *rest, scale, window, ratio=None):  # type: ignore[no-untyped-def]
    result = np.zeros_like(q)
    for t, (p, row) in enumerate(zip(positions, rows, strict=True)):
        keys = [_at(entries, tables, row, e) for e in range(max(0, p - window + 1), p + 1)]
        if rest:
            chosen = range((p + 1) // ratio) if ratio else [e for e in rest[2][t] if e >= 0]
            keys += [_at(rest[0], rest[1], row, e) for e in chosen]
        if not keys:
            continue
        for h in range(q.shape[1]):
            weights = np.exp(scale * np.array(keys) @ q[t, h])
            result[t, h] = weights @ np.array(keys) / (weights.sum() + np.exp(sink[h]))
    return result


def _scores(q, w, keys, positions, rows, tables, t, ratio):  # type: ignore[no-untyped-def]
    visible = range((positions[t] + 1) // ratio)
    return [
        float(np.maximum(q[t] @ _at(keys, tables, rows[t], e), 0) @ w[t]) for e in visible
    ]


def _best(scores: dict[int, float], k: int) -> list[int]:
    order = sorted(sorted(scores, key=lambda e: (-scores[e], e))[:k])
    return order + [-1] * (k - len(order))


def _select(*operands, k, ratio, block_size=0, blocks=0):  # type: ignore[no-untyped-def]
    result = []
    for t in range(len(operands[3])):
        scores = dict(enumerate(_scores(*operands[:6], t, ratio)))
        if len(operands) > 6:
            scores = {e: s for e, s in scores.items() if e // block_size in operands[6][t]}
        line = _best(scores, k)
        if blocks:
            best: dict[int, float] = {}
            for e, s in scores.items():
                best[e // block_size] = max(best.get(e // block_size, -np.inf), s)
            if scores:
                best[max(scores) // block_size] = np.inf
            line += _best(best, blocks)
        result.append(line)
    return np.array(result)


PAGED: Mapping[str, Callable[..., np.ndarray]] = {
    "quantise": _quantise,
    "hadamard": _hadamard,
    "modulo": lambda x, divisor: np.vectorize(lambda i: int(i) % divisor)(x),
    "hyper_mix": _mix,
    "hyper_collapse": lambda x, pre: np.einsum("tid,ti->td", x, pre[:, : x.shape[1]]),
    "hyper_update": _update,
    "repeat_streams": lambda x, streams: np.stack([x] * streams, 1),
    "take_stream": lambda x, index: np.moveaxis(x, 1, 0)[index],
    "sum_slots": lambda x: x.sum(1),
    "expert_linear": _experts,
    "grouped_linear": _grouped,
    "gather_last": lambda x, ids: np.array([[x[t, i] for i in r] for t, r in enumerate(ids)]),
    "append_rows": _appended,
    "page_slots": _page_slots,
    "pool_window": _pooled,
    "ngram_rows": _ngram,
    "attend_window": _attended,
    "attend_compressed": _attended,
    "attend_selected": _attended,
    "select_entries": _select,
    "select_with_blocks": _select,
    "select_within": _select,
}
