"""Choose the next token: a pure function of logits, settings, seed, position and sample index.

Order: penalties, logit bias, allowed ids, bad words, early ends (sample_logits); temperature,
top-k, top-p, min-p (sample_filter); argmax of logit / T + noise (sample_noise). Greedy is the
argmax of the changed logits. Every tie goes to the lowest token id.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.errors import RequestError
from tilewright.runtime.philox import Draw
from tilewright.runtime.sample_filter import kept_tokens, largest
from tilewright.runtime.sample_logits import SampleRules, TokenIds, adjusted
from tilewright.runtime.sample_noise import draw_token

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class SampledToken:
    """A chosen token. Log-probabilities are None or empty unless they were asked for.

    logprob: natural logarithm under the raw logits, before penalties and temperature;
    top_logprobs: the most likely (token id, logprob), most likely first.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def sample(
    logits: Logits,
    rules: SampleRules,
    draw: Draw,
    *,
    prompt_token_ids: TokenIds = (),
    output_token_ids: TokenIds = (),
    argmax: int | None = None,
) -> SampledToken:
    """Choose one token.

    logits: float32 [vocab], left unchanged; draw: seed, absolute position of the chosen token,
    and sample index; prompt_token_ids and output_token_ids: what precedes it (arrays are the
    quickest); argmax: lowest id of the largest logit, where a kernel already found it.
    Raises RequestError when logits hold NaN or +inf, or when no token is left to choose.
    """
    where = f"position {draw.position}"
    with np.errstate(over="ignore", invalid="ignore"):
        top = _top(logits, where) if argmax is None else _checked_top(logits, argmax, where)
        changed = logits
        if rules.changes_logits(len(output_token_ids)):
            changed = adjusted(logits, rules, prompt_token_ids, output_token_ids)
            top = _top(changed, f"{where} after penalties, biases and bans")
        token_id = top if rules.params.is_greedy else _drawn(changed, top, rules, draw)
    if rules.params.logprobs is None:
        return SampledToken(token_id)
    return score(logits, token_id, rules.params.logprobs)


def score(logits: Logits, token_id: int, num_top: int) -> SampledToken:
    """Log-probability of a given token and of the num_top most likely ones; logits: [vocab]."""
    logprobs = log_softmax(logits)
    top = tuple((int(i), float(logprobs[i])) for i in largest(logits, num_top)) if num_top else ()
    return SampledToken(token_id, float(logprobs[token_id]), top)


def score_prompt(
    logits: Logits, prompt_token_ids: Sequence[int], num_top: int
) -> tuple[SampledToken | None, ...]:
    """`score` of every prompt token under the logits before it; None for the first.

    logits: float32 [tokens, vocab], row i being the model's output at prompt token i.
    Raises RequestError when a row used holds NaN or +inf.
    """
    scored: list[SampledToken | None] = [None]
    for position, token_id in enumerate(prompt_token_ids[1:], start=1):
        row = logits[position - 1]
        _top(row, f"position {position}")
        scored.append(score(row, token_id, num_top))
    return tuple(scored)


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Natural log-probabilities, float64 [vocab], of float32 [vocab] logits without +inf or NaN."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def _drawn(logits: Logits, top: int, rules: SampleRules, draw: Draw) -> int:
    """Draw by temperature, top-k, top-p and min-p."""
    params = rules.params
    kept = kept_tokens(
        logits,
        logits[top],
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    return draw_token(logits, kept, logits[top], params.temperature, draw)


def _top(logits: Logits, where: str) -> int:
    """Lowest id of the largest logit, which has to be finite; numpy's argmax stops at NaN."""
    top = int(logits.argmax())
    value = logits[top]
    if not np.isfinite(value):
        raise _no_choice(value, top, where)
    return top


def _checked_top(logits: Logits, argmax: int, where: str) -> int:
    """The argmax given, if no logit is NaN or infinite above it."""
    value = logits.max()
    if not np.isfinite(value):
        raise _no_choice(value, int(logits.argmax()), where)
    assert logits[argmax] == value, f"argmax {argmax} has {logits[argmax]}, the largest is {value}"
    return argmax


def _no_choice(value: np.float32, token_id: int, where: str) -> RequestError:
    """Say why nothing can be chosen."""
    if value == -np.inf:
        return RequestError(
            f"logits '{where}': no token left to choose: got -inf for every token,"
            " want at least one finite logit"
        )
    return RequestError(
        f"logits '{where}': not finite: got {value} for token {token_id}, want numbers or -inf"
    )
