"""Rows of logits to tokens, all rows together, on torch tensors: `sampler.sample` bit for bit.

Nothing here waits for the device. Top-k, top-p and the draw look at a number of leading entries
only; a row for which that was not enough says so, and is asked again with all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tilewright.runtime.choose import Question
from tilewright.runtime.sample_math import WEIGHT_BITS
from tilewright.runtime.sample_noise import NUM_GROUPS, SLACK
from tilewright.runtime.sample_torch_math import (
    Draws,
    Tensor,
    group_noise,
    ids_of_keys,
    order_keys,
    share_of,
    token_noise,
    weights,
)

LEADING = 1024  # entries that top-k, top-p and the draw look at first
_ALL = 1 << 32  # a share of one


class Settings(NamedTuple):
    """Sampling parameters of rows, [rows, 1] each. What a row does not use keeps everything.

    `top_k` is the vocabulary's size and `top_share` above one where the row does not use them.
    """

    draws: Draws
    is_greedy: Tensor
    temperature: Tensor
    scale: Tensor
    top_k: Tensor
    top_share: Tensor
    min_weight: Tensor


class Chosen(NamedTuple):
    """Tokens [rows], whether they are right, and the largest logit of each row."""

    token_ids: Tensor
    is_sure: Tensor
    largest: Tensor


NUM_COLUMNS = 10


def pack_settings(questions: Sequence[Question], vocab_size: int) -> NDArray[np.int64]:
    """Return the settings of rows as one table [NUM_COLUMNS, rows]; the last two are float64."""
    ints = np.array([_ints(q, vocab_size) for q in questions], np.int64)
    floats = np.array([_floats(q) for q in questions], np.float64)
    return np.concatenate((ints, floats.view(np.int64)), axis=1).T


def unpack_settings(table: Tensor) -> Settings:
    """Read a table of `pack_settings`, int64 [NUM_COLUMNS, rows] and contiguous."""
    low, high, position, sample_index, is_greedy, top_k, share, min_weight, *_ = table[:, :, None]
    temperature, scale = table[NUM_COLUMNS - 2 :].view(torch.float64)[:, :, None]
    draws = Draws(low, high, position, sample_index)
    return Settings(draws, is_greedy.bool(), temperature, scale.float(), top_k, share, min_weight)


def _ints(asked: Question, vocab_size: int) -> tuple[int, ...]:
    params, draw = asked.rules.params, asked.draw
    has_top_k = 0 < params.top_k < vocab_size and not params.is_greedy
    has_top_p = params.top_p < 1.0 and not params.is_greedy
    has_min_p = params.min_p > 0.0 and not params.is_greedy
    return (
        draw.seed & 0xFFFFFFFF,
        draw.seed >> 32,
        draw.position,
        draw.sample_index,
        int(params.is_greedy),
        params.top_k if has_top_k else vocab_size,
        max(round(params.top_p * 2**32), 1) if has_top_p else _ALL + 1,
        max(int(params.min_p * 2**WEIGHT_BITS), 1) if has_min_p else 0,
    )


def _floats(asked: Question) -> tuple[float, float]:
    params = asked.rules.params
    if params.is_greedy:
        return 1.0, 1.0
    return params.temperature, float(np.float32(min(1.4426950408889634 / params.temperature, 3e38)))


def choose(logits: Tensor, settings: Settings, leading: int) -> Chosen:
    """Choose a token for every row; float32 [rows, vocab]."""
    vocab_size = logits.shape[1]
    keys = order_keys(logits)
    ahead = keys.topk(min(leading, vocab_size), dim=1, sorted=True).values
    top = ids_of_keys(ahead[:, :1])
    largest = logits.gather(1, top)
    kept, is_sure = _kept(logits, keys, ahead, largest, settings)
    drawn, found = _draw(logits, kept, largest, settings, leading)
    token_ids = torch.where(settings.is_greedy, top, drawn)
    is_sure = settings.is_greedy | (is_sure & found)
    return Chosen(token_ids[:, 0], is_sure[:, 0], largest[:, 0])


def _kept(
    logits: Tensor, keys: Tensor, ahead: Tensor, largest: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Which tokens survive top-k, then top-p over those, then min-p; and which rows are sure."""
    vocab_size, width = logits.shape[1], ahead.shape[1]
    has_top_k, has_top_p = settings.top_k < vocab_size, settings.top_share <= _ALL
    every = weights(logits, largest, settings.scale)
    rank = torch.arange(width, device=logits.device)[None]
    ordered = every.gather(1, ids_of_keys(ahead))
    ordered = torch.where(rank < settings.top_k, ordered, 0)
    total = torch.where(has_top_k, ordered.sum(1, keepdim=True), every.sum(1, keepdim=True))
    target = share_of(total, settings.top_share)
    sums = ordered.cumsum(1)
    reach = (sums < target).sum(1, keepdim=True) + 1
    count = torch.where(has_top_p, torch.minimum(reach, settings.top_k), settings.top_k)
    is_sure = torch.where(has_top_k, settings.top_k, torch.where(has_top_p, reach, 0)) <= width
    last = ahead.gather(1, count.clamp(max=width) - 1)
    is_kept = ((keys >= last) | ~(has_top_k | has_top_p)) & (every >= settings.min_weight)
    return is_kept, is_sure


def _draw(
    logits: Tensor, kept: Tensor, largest: Tensor, settings: Settings, leading: int
) -> tuple[Tensor, Tensor]:
    """The kept token with the largest (logit - max) / T + noise; and which rows are sure."""
    vocab_size = logits.shape[1]
    relative = (logits.double() - largest.double()) / settings.temperature
    relative = torch.where(kept, relative, -torch.inf)
    groups = group_noise(vocab_size, settings.draws)
    potential = relative + _spread(groups.bounds, vocab_size)
    width = min(leading, vocab_size)
    bounds, ids = potential.topk(width, dim=1, sorted=True)
    scores = relative.gather(1, ids) + token_noise(ids, groups, settings.draws)
    best = scores.amax(1, keepdim=True)
    drawn = torch.where(scores == best, ids, vocab_size).amin(1, keepdim=True)
    is_sure = bounds[:, -1:] < best - SLACK
    return drawn, is_sure if width < vocab_size else torch.ones_like(is_sure)


def _spread(bounds: Tensor, vocab_size: int) -> Tensor:
    """Give every token the bound of its group: ids form groups by id mod NUM_GROUPS."""
    return bounds.repeat(1, -(-vocab_size // NUM_GROUPS))[:, :vocab_size]


def log_softmax_row(logits: Tensor) -> Tensor:
    """`sampler.log_softmax` of a row, float64 [vocab]; within 1e-12 of it.

    Row by row, so that the order of the sum does not depend on how many rows a step has.
    """
    shifted = logits.double() - logits.max().double()
    return shifted - shifted.exp().sum().log()


