"""Which tokens top-k, top-p and min-p keep; ties and sums are exact.

Tokens are ordered by logit, equal ones by id. Probabilities are integers (sample_math.weights),
so that no sum depends on its order.
"""

import math

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.sample_math import CHUNK, WEIGHT_BITS, total_weight, weights

_NUM_ROWS = 64
_PREFIX = 256

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]


def kept_tokens(
    logits: Logits,
    max_logit: np.float32,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Ids | None:
    """Ids that survive top-k, then top-p over those, then min-p; None when all do.

    logits: float32 [vocab], banned tokens -inf; max_logit: the largest, finite.
    """
    kept: Ids | None = None
    if 0 < top_k < len(logits):
        kept = largest(logits, top_k)
    if top_p < 1.0:
        kept = _nucleus(logits, kept, max_logit, temperature, top_p)
    if min_p > 0.0:
        kept = _likely(logits, kept, max_logit, temperature, min_p)
    return kept


def largest(logits: Logits, count: int) -> Ids:
    """The `count` largest by logit, then by lowest id, in that order; fewer if others are -inf."""
    floor = _floor_of_largest(logits, count)
    ids = np.flatnonzero(logits >= floor if floor > -np.inf else logits > floor)
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order[:count]]


def _floor_of_largest(logits: Logits, count: int) -> np.float32:
    """A value that at least `count` logits reach, and few others."""
    width = len(logits) // _NUM_ROWS
    if count >= len(logits):
        return np.float32(-np.inf)
    if 2 * count > width:
        return np.float32(np.partition(logits, -count)[-count])
    # Of `width` column maxima, `count` reach the result; a column costs a pass, not a sort.
    maxima = logits[: width * _NUM_ROWS].reshape(_NUM_ROWS, width).max(axis=0)
    return np.float32(np.partition(maxima, -count)[-count])


def _nucleus(
    logits: Logits, kept: Ids | None, max_logit: np.float32, temperature: float, top_p: float
) -> Ids:
    """The shortest prefix, by logit, whose weight reaches top_p of the total.

    top_p is rounded to units of 2^-32; the prefix reaches ceil(top_p * total), in integers.
    """
    share = max(round(top_p * 2**32), 1)
    if kept is not None:
        ordered = weights(logits[kept], max_logit, temperature)
        return kept[: _reach(ordered, -(-share * int(ordered.sum()) >> 32))]
    target = -(-share * total_weight(logits, max_logit, temperature) >> 32)
    ids = largest(logits, _PREFIX)
    ordered = weights(logits[ids], max_logit, temperature)
    if int(ordered.sum()) >= target:
        return ids[: _reach(ordered, target)]
    # A wide nucleus: sorting values is much cheaper than sorting ids.
    values = np.sort(logits)[::-1]
    count = _count_reaching(values, max_logit, temperature, target)
    return _first_of_sorted(logits, values[count - 1], count)


def _count_reaching(values: Logits, max_logit: np.float32, temperature: float, target: int) -> int:
    """How many of the sorted values it takes to reach the target, in pieces as in total_weight."""
    done = 0
    for start in range(0, len(values), CHUNK):
        piece = weights(values[start : start + CHUNK], max_logit, temperature)
        total = int(piece.sum())
        if done + total >= target:
            return start + _reach(piece, target - done)
        done += total
    raise AssertionError(f"target {target} is above the total {done}")


def _first_of_sorted(logits: Logits, last: np.float32, count: int) -> Ids:
    """The `count` first by logit and id, in any order; `last` is the lowest logit among them."""
    above = np.flatnonzero(logits > last)
    equal = np.flatnonzero(logits == last)
    return np.concatenate((above, equal[: count - len(above)]))


def _reach(ordered: NDArray[np.int64], target: int) -> int:
    """How many leading weights it takes to reach the target."""
    return int(np.searchsorted(np.cumsum(ordered), target)) + 1


def _likely(
    logits: Logits, kept: Ids | None, max_logit: np.float32, temperature: float, min_p: float
) -> Ids:
    """Those with a weight of at least min_p times the largest, rounded down to 2^-32."""
    if kept is None:
        # A superset found cheaply; the weights below decide.
        reach = temperature * (0.01 - math.log(max(min_p, 2.0**-33))) * 1.001
        floor = np.float32(max(float(max_logit) - reach - 1e-6 * abs(float(max_logit)), -3.4e38))
        kept = np.flatnonzero(logits >= floor)
    floor_weight = max(math.floor(min_p * 2**WEIGHT_BITS), 1)
    is_likely = weights(logits[kept], max_logit, temperature) >= floor_weight
    likely: Ids = kept[is_likely]
    return likely
