"""What a request gives back: whole outputs, and the events of a stream."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.runtime.sampler import SampledToken


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt, and tokens generated over all samples."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class SampleOutput:
    """One sample. `finish_reason`: stop, length, abort or error (then `error` says why).

    `logprobs` has one entry per token where they were asked for. A token that ended the sample is
    part of `token_ids`, not of `text`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[SampledToken, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """All samples of one prompt. Its first sample's text, tokens and reason are also its own."""

    id: str
    prompt_token_ids: tuple[int, ...]
    samples: tuple[SampleOutput, ...]
    seed: int
    usage: Usage
    numerics_digest: str
    prompt_logprobs: tuple[SampledToken | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> tuple[SampledToken, ...] | None:
        return self.samples[0].logprobs


@dataclass(frozen=True)
class StreamEvent:
    """New text and tokens of one sample; the last event of a sample has its `finish_reason`.

    Concatenated texts are the whole text. Text that might begin a stop string is held back.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[SampledToken, ...] | None = None
    error: str | None = None
