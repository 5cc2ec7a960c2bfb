"""Gumbel noise of every token, drawn so that the argmax needs the noise of a few tokens only.

Noise of token i is -log(E_i) with E_i independent and exponentially distributed, so that
argmax(logit / T + noise) follows softmax(logit / T). E is drawn in two levels: ids form 512
groups (id mod 512). A group's smallest E and which member has it come from one evaluation of
Philox; every other member adds an exponential of its own to the smallest, which is the same
distribution because exponentials have no memory. The group level bounds all its members, which
prunes exactly: the result is the argmax over the whole vocabulary.
"""

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.philox import GROUP_STREAM, TOKEN_STREAM, Draw, keyed_words
from tilewright.runtime.sample_math import log

NUM_GROUPS = 512
_FIRST = 48
_DIRECT = 768
# Bounds are compared with this much to spare, which covers all rounding; scores then decide.
SLACK = 1e-3

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


def draw_token(
    logits: NDArray[np.float32],
    kept: Ids | None,
    max_logit: np.float32,
    temperature: float,
    draw: Draw,
) -> int:
    """The token with the largest (logit - max) / T + noise; ties go to the lowest id.

    logits: float32 [vocab]; kept: the ids to choose from, None for all; max_logit: the largest
    finite logit among them; temperature: above 0. Evaluated in float64.
    """
    if kept is None:
        return _draw_from_all(logits, max_logit, temperature, draw)
    if len(kept) >= _DIRECT:
        masked = np.full_like(logits, -np.inf)
        masked[kept] = logits[kept]
        return _draw_from_all(masked, max_logit, temperature, draw)
    if len(kept) == 1:
        return int(kept[0])
    values = _relative(logits[kept], max_logit, temperature)
    return _lowest_best(kept, values + noise(kept, len(logits), draw))


def noise(ids: Ids, vocab_size: int, draw: Draw) -> Floats:
    """Gumbel noise of tokens, float64 [ids]: a pure function of id, vocabulary size and draw."""
    groups = ids % NUM_GROUPS
    streams = np.repeat(np.array([TOKEN_STREAM, GROUP_STREAM]), len(ids))
    words = keyed_words(np.concatenate((ids, groups)), streams, draw)
    exponentials = _exponentials(words[0])
    smallest = exponentials[len(ids) :] / _group_sizes(groups, vocab_size)
    first = _first_members(words[1, len(ids) :], groups, vocab_size)
    return _joined(ids, exponentials[: len(ids)], smallest, first)


def _joined(ids: Ids, own: Floats, smallest: Floats, first: Ids) -> Floats:
    """Noise from each token's own exponential, its group's smallest, and who has the latter."""
    return -log(smallest + np.where(ids == first, 0.0, own))


def _draw_from_all(
    logits: NDArray[np.float32], max_logit: np.float32, temperature: float, draw: Draw
) -> int:
    """`draw_token` over the whole vocabulary."""
    vocab_size = len(logits)
    groups = np.arange(min(NUM_GROUPS, vocab_size), dtype=np.int64)
    words = keyed_words(groups, np.full_like(groups, GROUP_STREAM), draw)
    smallest = _exponentials(words[0]) / _group_sizes(groups, vocab_size)
    bounds = -log(smallest)
    first = _first_members(words[1], groups, vocab_size)
    # The member that has the group's smallest E attains the bound: a score known without more.
    best = float((_relative(logits[first], max_logit, temperature) + bounds).max())
    ids = _above(logits, max_logit, temperature, bounds, best)

    def scores(chosen: Ids) -> Floats:
        own = _exponentials(keyed_words(chosen, np.full_like(chosen, TOKEN_STREAM), draw)[0])
        group = chosen % NUM_GROUPS
        added = _joined(chosen, own, smallest[group], first[group])
        return _relative(logits[chosen], max_logit, temperature) + added

    if len(ids) > _DIRECT:
        potential = _relative(logits[ids], max_logit, temperature) + bounds[ids % NUM_GROUPS]
        top = ids[np.argpartition(potential, -_FIRST)[-_FIRST:]]
        ids = ids[potential >= max(best, float(scores(top).max())) - SLACK]
    return _lowest_best(ids, scores(ids))


def _lowest_best(ids: Ids, scores: Floats) -> int:
    """The lowest id among those with the largest score."""
    return int(ids[scores == scores.max()].min())


def _above(
    logits: NDArray[np.float32],
    max_logit: np.float32,
    temperature: float,
    bounds: Floats,
    best: float,
) -> Ids:
    """Ids whose logit with the bound of their group reaches `best`, ascending."""
    need = float(max_logit) + temperature * (best - bounds - SLACK)
    # Rounding to float32 and in the sum above is relative to the numbers' own size.
    need -= 1e-6 * (np.abs(need) + abs(float(max_logit)))
    floors = np.clip(need, -3.4e38, 3.4e38).astype(np.float32)
    num_rows = len(logits) // NUM_GROUPS
    whole = num_rows * NUM_GROUPS
    rest = whole + np.flatnonzero(logits[whole:] >= floors[: len(logits) - whole])
    if num_rows == 0:
        return rest
    rows = logits[:whole].reshape(num_rows, NUM_GROUPS)
    columns = np.flatnonzero(rows.max(axis=0) >= floors)
    row_ids, column_ids = np.nonzero(rows[:, columns] >= floors[columns])
    return np.concatenate((row_ids * NUM_GROUPS + columns[column_ids], rest))


def _relative(values: NDArray[np.float32], max_logit: np.float32, temperature: float) -> Floats:
    """(logit - max) / T in float64: near 0 for likely tokens, so no noise is rounded off."""
    return (values.astype(np.float64) - float(max_logit)) / temperature


def _exponentials(words: NDArray[np.uint32]) -> Floats:
    """-log of the midpoints of the 2^32 equal parts of (0, 1), which float64 holds exactly."""
    return -log((words.astype(np.float64) + 0.5) * 2.0**-32)


def _group_sizes(groups: Ids, vocab_size: int) -> Ids:
    """How many ids of the vocabulary each group has."""
    return (vocab_size - groups + (NUM_GROUPS - 1)) // NUM_GROUPS


def _first_members(words: NDArray[np.uint32], groups: Ids, vocab_size: int) -> Ids:
    """The member with its group's smallest E: member floor(word * size / 2^32)."""
    rows = (words.astype(np.int64) * _group_sizes(groups, vocab_size)) >> 32
    return rows * NUM_GROUPS + groups
