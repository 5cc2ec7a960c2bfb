"""Changes that a request's settings make to its logits before temperature.

Order: repetition, presence and frequency penalties, logit bias, allowed ids, bad words, tokens
that would end the output too early. A banned token has the logit -inf.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.params import SamplingParams

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
TokenIds = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class SampleRules:
    """The settings of one request in the form that every step needs; built once per request."""

    params: SamplingParams
    bias_ids: Ids
    bias_values: NDArray[np.float64]
    allowed: Ids | None
    bad_words: tuple[tuple[int, ...], ...]
    ending: Ids

    @classmethod
    def build(
        cls,
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> "SampleRules":
        """Prepare validated parameters.

        eos_token_ids: ids that end the model's output; bad_words: token sequences from
        `bad_word_sequences`.
        """
        ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        allowed = params.allowed_token_ids
        return cls(
            params=params,
            bias_ids=np.array([token_id for token_id, _ in params.biases], dtype=np.int64),
            bias_values=np.array([value for _, value in params.biases], dtype=np.float64),
            allowed=None if allowed is None else np.unique(np.array(allowed, dtype=np.int64)),
            bad_words=tuple(tuple(word) for word in bad_words),
            ending=np.array(sorted(ending), dtype=np.int64),
        )

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen so far matter."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    def changes_logits(self, num_output_tokens: int) -> bool:
        """Whether any setting changes the logits after this many output tokens."""
        too_early = num_output_tokens < self.params.min_tokens and len(self.ending) > 0
        restricted = self.allowed is not None or len(self.bias_ids) > 0 or len(self.bad_words) > 0
        return self.has_penalties or restricted or too_early


def bad_word_sequences(
    words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences to ban: each word as it is and after a space, without repeats.

    encode: text to token ids without special tokens.
    """
    found = {tuple(encode(text)): None for word in words for text in (word, " " + word)}
    return tuple(sequence for sequence in found if sequence)


def adjusted(
    logits: Logits, rules: SampleRules, prompt: TokenIds, output: TokenIds
) -> NDArray[np.float32]:
    """Logits after every change, a copy float32 [vocab]; each change is rounded to float32."""
    changed = logits.copy()
    if rules.has_penalties:
        _penalise(changed, rules.params, _ids(prompt), _ids(output))
    if len(rules.bias_ids):
        changed[rules.bias_ids] = changed[rules.bias_ids] + rules.bias_values
    if rules.allowed is not None:
        only = np.full_like(changed, -np.inf)
        only[rules.allowed] = changed[rules.allowed]
        changed = only
    changed[banned_ids(rules, output)] = -np.inf
    return changed


def banned_ids(rules: SampleRules, output: TokenIds) -> Ids:
    """Ids that may not follow the output: last tokens of bad words, and ends that are too early."""
    last = [word[-1] for word in rules.bad_words if _is_next_last(word, output)]
    if len(output) < rules.params.min_tokens:
        last.extend(rules.ending.tolist())
    return _ids(last)


def _penalise(logits: Logits, params: SamplingParams, prompt: Ids, output: Ids) -> None:
    """Apply the three penalties in place."""
    if params.repetition_penalty != 1.0:
        is_seen = np.zeros(len(logits), dtype=np.bool_)
        is_seen[prompt] = True
        is_seen[output] = True
        seen = np.flatnonzero(is_seen)
        values = logits[seen].astype(np.float64)
        penalty = params.repetition_penalty
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        used, counts = np.unique(output, return_counts=True)
        values = logits[used].astype(np.float64) - params.frequency_penalty * counts
        logits[used] = values - params.presence_penalty


def _is_next_last(word: tuple[int, ...], output: TokenIds) -> bool:
    """Whether the output ends with all of the word but its last token."""
    num_before = len(word) - 1
    if num_before > len(output):
        return False
    tail = output[len(output) - num_before :]
    return all(int(have) == want for have, want in zip(tail, word[:-1], strict=True))


def _ids(token_ids: TokenIds) -> Ids:
    """Token ids as an array."""
    return np.asarray(token_ids, dtype=np.int64)
