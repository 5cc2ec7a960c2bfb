"""The sampler's arithmetic on torch tensors: bit for bit what sample_math and philox give.

Every step is one IEEE operation or one integer operation of its own, rounded to nearest, and no
two are fused, so any device gives these bits. Division is by tensors only: by a Python number
torch multiplies with the reciprocal on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.runtime.philox import GROUP_STREAM, TOKEN_STREAM
from tilewright.runtime.sample_math import EXP2_TERMS, LN2, LOG_TERMS, SQRT_HALF, WEIGHT_BITS
from tilewright.runtime.sample_noise import NUM_GROUPS

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
Tensor = torch.Tensor


class Draws(NamedTuple):
    """What the randomness of each row depends on: int64 [rows, 1] each; the seed in halves."""

    seed_low: Tensor
    seed_high: Tensor
    position: Tensor
    sample_index: Tensor


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64 numbers: `sample_math.log`."""
    mantissa, exponent = torch.frexp(x)
    is_low = mantissa < SQRT_HALF
    mantissa = torch.where(is_low, mantissa * 2.0, mantissa)
    scale = exponent.double() - is_low.double()
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * LOG_TERMS[0]
    for term in LOG_TERMS[1:-1]:
        series = series + term
        series = series * square
    series = series + LOG_TERMS[-1]
    low = (s * square) * series
    return scale * LN2 + (s * 2.0 + low)


def weights(logits: Tensor, max_logits: Tensor, scales: Tensor) -> Tensor:
    """`sample_math.weights` of rows: float32 [rows, n]; largest logits and scales [rows, 1]."""
    t = (logits - max_logits) * scales
    t = torch.fmax(t, torch.full_like(max_logits, -34.0))
    whole = torch.round(t)
    t = t - whole
    series = t * float(EXP2_TERMS[0])
    for term in EXP2_TERMS[1:-1]:
        series = series + float(term)
        series = series * t
    series = series + float(EXP2_TERMS[-1])
    power = ((whole.int() + (127 + WEIGHT_BITS)) << 23).view(torch.float32)
    return (series * power).long()


def share_of(total: Tensor, share: Tensor) -> Tensor:
    """ceil(total * share / 2^32) of int64 numbers below 2^63 and shares of up to 2^32."""
    low = (total & _LOW) * share  # may wrap past 2^63; read below as an unsigned number
    carry = ((low >> 32) & _LOW) + ((low & _LOW) != 0)
    return (total >> 32) * share + carry


def keyed_words(ids: Tensor, stream: int, draws: Draws) -> tuple[Tensor, Tensor]:
    """The first two words of `philox.keyed_words` for ids [rows, n], each row with its own draw.

    Words 0 and 2 of the counter are halves of one tensor, 1 and 3 of another. A product of two
    32-bit numbers wraps in int64, and all of its bits are right; only factors must be masked.
    """
    position, sample_index = draws.position & _LOW, draws.sample_index & _LOW
    ids = ids.expand(len(position), -1)
    factors = torch.stack((position.expand_as(ids), ids))
    others = torch.stack((sample_index, torch.full_like(sample_index, stream)))
    multipliers = _pair(_MULTIPLIERS, ids)
    for keys in _key_schedule(draws):
        products = (factors * multipliers).flip(0)
        factors = ((products >> 32) ^ others ^ keys) & _LOW
        others = products
    return factors[0], others[0] & _LOW


def _key_schedule(draws: Draws) -> tuple[Tensor, ...]:
    """Both halves of the seeds, [2, rows, 1], in every round."""
    seeds = torch.stack((draws.seed_low, draws.seed_high))
    increments = _pair(_INCREMENTS, seeds)
    rounds = torch.arange(_NUM_ROUNDS, device=seeds.device)
    return ((seeds + increments * rounds) & _LOW)[..., None].unbind(2)


def _pair(numbers: tuple[int, int], like: Tensor) -> Tensor:
    """Two numbers as a tensor [2, 1, 1], made on the device: a graph cannot copy from the host."""
    return torch.cat([torch.full((1, 1, 1), n, device=like.device) for n in numbers])


def exponentials(words: Tensor) -> Tensor:
    """-log of the midpoints of the 2^32 equal parts of (0, 1)."""
    return -log((words.double() + 0.5) * 2.0**-32)


class GroupNoise(NamedTuple):
    """Per row and group: the smallest exponential, which id has it, and its noise (a bound)."""

    smallest: Tensor
    first: Tensor
    bounds: Tensor


def group_noise(vocab_size: int, draws: Draws) -> GroupNoise:
    """The first level of the noise of `sample_noise`, [rows, groups]."""
    groups = torch.arange(min(NUM_GROUPS, vocab_size), device=draws.position.device)[None]
    words, places = keyed_words(groups, GROUP_STREAM, draws)
    sizes = (vocab_size - groups + (NUM_GROUPS - 1)) >> (NUM_GROUPS.bit_length() - 1)
    smallest = exponentials(words) / sizes.double()
    first = ((places * sizes) >> 32) * NUM_GROUPS + groups
    # Bounds only decide what is looked at, with SLACK to spare: any logarithm will do.
    return GroupNoise(smallest, first, -smallest.log())


def token_noise(ids: Tensor, groups: GroupNoise, draws: Draws) -> Tensor:
    """The noise of tokens [rows, n]: float64."""
    own = exponentials(keyed_words(ids, TOKEN_STREAM, draws)[0])
    group = ids & (NUM_GROUPS - 1)
    is_first = ids == groups.first.gather(1, group)
    return -log(groups.smallest.gather(1, group) + torch.where(is_first, 0.0, own))


def order_keys(logits: Tensor) -> Tensor:
    """Distinct int64 keys [rows, vocab]: a larger logit is larger, of equal ones the lower id."""
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered << 32) | (_LOW - ids)


def ids_of_keys(keys: Tensor) -> Tensor:
    """The ids that `order_keys` put into keys."""
    return _LOW - (keys & _LOW)
