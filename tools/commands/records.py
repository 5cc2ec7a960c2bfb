"""What `generate --json` prints: one object per prompt, or per sample where there are several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.runtime import RequestOutput
    from tilewright.runtime.sampler import SampledToken


def records_of(output: RequestOutput) -> Iterator[dict[str, Any]]:
    """Yield the object of every sample; `index` is there where there are several."""
    for sample in output.samples:
        record: dict[str, Any] = {
            "prompt_token_ids": list(output.prompt_token_ids),
            "token_ids": list(sample.token_ids),
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "seed": output.seed,
            "numerics_digest": output.numerics_digest,
        }
        if len(output.samples) > 1:
            record["index"] = sample.index
        if sample.logprobs is not None:
            record["logprobs"] = _scores(sample.logprobs)
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = _scores(output.prompt_logprobs)
        if sample.error is not None:
            record["error"] = sample.error
        yield record


def _scores(tokens: Iterable[SampledToken | None]) -> list[dict[str, Any] | None]:
    """The first token of a prompt has no log-probability: None."""
    return [
        None if t is None else
        {"token_id": t.token_id, "logprob": _finite(t.logprob),
         "top": [{"token_id": i, "logprob": _finite(p)} for i, p in t.top_logprobs]}
        for t in tokens
    ]  # fmt: skip


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity: the log-probability of what cannot come is null."""
    return logprob if logprob is not None and math.isfinite(logprob) else None
