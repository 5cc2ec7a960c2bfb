"""Sampling parameters of one request: the settings, their limits, and one clear refusal each.

A value of a wrong type is refused, never converted; nothing is checked against a model before
`SamplingParams.validated`, which the engine calls at submission.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeVar, cast

from tilewright.runtime.errors import RequestError

GREEDY_BELOW = 1e-6
MAX_N = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1e4
MAX_LOGIT_BIAS_IDS = 4096
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256

Settings = TypeVar("Settings")
_SEQUENCES = ("logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids")


def _named_only(kind: type[Settings]) -> type[Settings]:
    """Let a class refuse unknown and unnamed settings with RequestError, as it refuses values."""
    plain = cast(Callable[..., None], getattr(kind, "__init__"))

    @wraps(plain)
    def initialise(self: Settings, *unnamed: object, **settings: object) -> None:
        if unnamed:
            raise RequestError(
                f"sampling parameters: got {shown(unnamed[0])} without a name, want name=value"
            )
        _check_names(kind, settings)
        plain(self, **settings)

    setattr(kind, "__init__", initialise)
    return kind


@_named_only
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Lists are stored as tuples, so equal settings are hashable.

    max_tokens: most tokens generated per sample; prompt and max_tokens must fit the context.
    temperature: 0, or anything below 1e-6, is greedy (argmax). Default 1.0: the model as it is.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest most likely set whose probability reaches top_p; 1 keeps all.
    min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
    repetition_penalty: divides positive and multiplies negative logits of tokens already in
        prompt or output; 1 is off.
    presence_penalty: subtracted from the logit of every token already in the output.
    frequency_penalty: subtracted once per occurrence in the output.
    logit_bias: token id -> number added to its logit, within +-10,000; -inf bans the token.
    allowed_token_ids: when given, every other token is banned.
    bad_words: strings whose token sequences (with and without a leading space) are never
        completed by the output. Another token sequence that spells the same text is not caught.
    seed: 0 to 2^64 - 1; without one a fresh seed is drawn and returned with the output.
    stop: one string or a list; generation ends before the earliest one, which is not emitted.
    stop_token_ids: generation ends at these tokens.
    ignore_eos: go on past the model's end-of-sequence tokens.
    logprobs: None, or how many most likely tokens to report beside the sampled one (0 to 20).
        Log-probabilities are those of the raw logits, before penalties and temperature.
    prompt_logprobs: likewise for the tokens of the prompt.
    n: samples per prompt, 1 to 128.
    min_tokens: tokens that end generation are banned until this many were generated.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] = ()
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name in _SEQUENCES:
            object.__setattr__(self, name, _frozen(name, getattr(self, name)))

    @classmethod
    def from_mapping(cls, settings: Mapping[str, object]) -> "SamplingParams":
        """Build from a mapping, for example parsed JSON; raises RequestError on unknown names."""
        if not isinstance(settings, Mapping):
            raise _refusal("settings", "wrong type", settings, "a mapping of names to values")
        _check_names(cls, settings)
        return cls(**cast(dict[str, Any], settings))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whichever way they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The logit biases as pairs of token id and number."""
        bias = self.logit_bias
        return tuple(bias.items()) if isinstance(bias, Mapping) else bias

    def validated(
        self, vocab_size: int, max_context: int, num_prompt_tokens: int = 0
    ) -> "SamplingParams":
        """Return self, or raise RequestError with the first setting that cannot be honoured.

        vocab_size: number of token ids; max_context: most tokens of prompt and output together;
        num_prompt_tokens: length of the prompt, 0 where it is not known yet.
        """
        self._check_lengths(max_context, num_prompt_tokens)
        self._check_numbers()
        _check_bias(self.logit_bias, vocab_size)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size, vocab_size)
            if not self.allowed_token_ids:
                raise _refusal("allowed_token_ids", "empty", (), "None or at least one token id")
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)
        _check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        if not isinstance(self.ignore_eos, bool):
            raise _refusal("ignore_eos", "wrong type", self.ignore_eos, "True or False")
        return self

    def _check_lengths(self, max_context: int, num_prompt_tokens: int) -> None:
        """Check what counts tokens of the output."""
        _check_int("max_tokens", self.max_tokens, 1, None)
        if num_prompt_tokens + self.max_tokens > max_context:
            raise RequestError(
                f"sampling parameter 'max_tokens': beyond the context: got"
                f" {shown(self.max_tokens)} after a prompt of {num_prompt_tokens} tokens, want"
                f" at most {max_context - num_prompt_tokens} (context of {max_context} tokens)"
            )
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise _refusal(
                "min_tokens", "above max_tokens", self.min_tokens, f"at most {self.max_tokens}"
            )

    def _check_numbers(self) -> None:
        """Check every setting that is one number."""
        _check_float("temperature", self.temperature, 0.0, None)
        _check_int("top_k", self.top_k, 0, None)
        _check_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, None, above_low=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("n", self.n, 1, MAX_N)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)


def _check_names(kind: type[Any], settings: Mapping[str, object]) -> None:
    """Refuse a name that is no setting's."""
    known = tuple(field.name for field in fields(kind))
    for name, value in settings.items():
        if name not in known:
            raise _refusal(str(name), "unknown name", value, f"one of {', '.join(known)}")


def _frozen(name: str, value: object) -> object:
    """Turn lists and mappings into tuples; any other type is kept for `validated` to refuse."""
    if name == "logit_bias" and isinstance(value, Mapping):
        return tuple(value.items())
    if name == "stop" and isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        # A nested list would make the whole unhashable, and is refused later all the same.
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return value


def shown(value: object) -> str:
    """Write a value for a message, briefly whatever its size."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else f"a {value.bit_length()}-bit integer"
    if isinstance(value, float):
        return repr(float(value))  # numpy's own is written otherwise
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:40]!r}... of {len(value)} characters"
    if isinstance(value, (tuple, list, dict, set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _refusal(name: str, problem: str, got: object, want: str) -> RequestError:
    """Build the one sentence that refuses a setting."""
    return RequestError(f"sampling parameter '{name}': {problem}: got {shown(got)}, want {want}")


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    """Refuse anything but an int within low..high; bool is not an int here."""
    want = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        kind = f"wrong type {type(value).__name__}"
        raise _refusal(name, kind, value, want)
    if value < low or (high is not None and value > high):
        raise _refusal(name, "out of range", value, want)


def _check_float(
    name: str, value: object, low: float, high: float | None, *, above_low: bool = False
) -> None:
    """Refuse anything but a finite number within the bounds; an int counts as a number."""
    bound = f"above {low:g}" if above_low else f"of at least {low:g}"
    want = f"a finite number {bound}" + ("" if high is None else f" and at most {high:g}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        kind = f"wrong type {type(value).__name__}"
        raise _refusal(name, kind, value, want)
    limit = sys.float_info.max if high is None else high
    # NaN fails the comparison, and so does an int too large for a float.
    if not low <= value <= limit or (above_low and value == low):
        raise _refusal(name, "out of range", value, want)


def _check_count(name: str, values: object, want: str, max_count: int) -> tuple[object, ...]:
    """Refuse anything but a tuple (given as a list or tuple) of bounded length."""
    if not isinstance(values, tuple):
        raise _refusal(name, f"wrong type {type(values).__name__}", values, want)
    if len(values) > max_count:
        raise _refusal(name, "too many entries", values, f"at most {max_count}")
    return values


def _check_id(name: str, token_id: object, vocab_size: int) -> None:
    """Refuse anything but a token id of the vocabulary."""
    want = f"an integer from 0 to {vocab_size - 1}"
    if isinstance(token_id, bool) or not isinstance(token_id, int):
        raise _refusal(name, f"token id of wrong type {type(token_id).__name__}", token_id, want)
    if not 0 <= token_id < vocab_size:
        raise _refusal(name, "token id outside the vocabulary", token_id, want)


def _check_ids(name: str, values: object, vocab_size: int, max_count: int) -> None:
    """Refuse anything but a bounded list of token ids of the vocabulary."""
    for token_id in _check_count(name, values, "a list of token ids", max_count):
        _check_id(name, token_id, vocab_size)


def _check_bias(bias: object, vocab_size: int) -> None:
    """Refuse biases of unknown tokens and values other than bounded numbers and -inf."""
    want = "a mapping of token ids to numbers"
    for pair in _check_count("logit_bias", bias, want, MAX_LOGIT_BIAS_IDS):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise _refusal("logit_bias", "wrong type of entry", pair, want)
        token_id, value = pair
        _check_id("logit_bias", token_id, vocab_size)
        if value != -math.inf or not isinstance(value, float):
            _check_bias_value(token_id, value)
    if isinstance(bias, tuple) and len({token_id for token_id, _ in bias}) < len(bias):
        raise _refusal("logit_bias", "a token id given twice", bias, want)


def _check_bias_value(token_id: int, value: object) -> None:
    """Refuse a bias that is not a number within the bound."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:  # type: ignore[operator]
        want = f"-inf or a number from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
        raise _refusal("logit_bias", f"bad value for token {token_id}", value, want)


def _check_strings(name: str, values: object, max_count: int, max_chars: int) -> None:
    """Refuse anything but a bounded list of bounded, non-empty, encodable strings."""
    for text in _check_count(name, values, "a list of strings", max_count):
        if not isinstance(text, str):
            raise _refusal(name, f"entry of wrong type {type(text).__name__}", text, "a string")
        if not 0 < len(text) <= max_chars:
            problem = "string too long" if text else "empty string"
            raise _refusal(name, problem, text, f"1 to {max_chars} characters")
        half = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if half is not None:
            problem = f"half of a surrogate pair at character {half}"
            raise _refusal(name, problem, text, "valid Unicode text")
