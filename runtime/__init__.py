"""Run compiled models: `load` an artifact, `generate`, `stream`, or get `logits`."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from tilewright.runtime.engine import Engine
from tilewright.runtime.errors import ArtifactError, RequestError
from tilewright.runtime.outputs import RequestOutput, SampleOutput, StreamEvent, Usage
from tilewright.runtime.params import SamplingParams
from tilewright.runtime.prompt import Prompt

__all__ = [
    "ArtifactError",
    "Engine",
    "RequestError",
    "RequestOutput",
    "SampleOutput",
    "SamplingParams",
    "StreamEvent",
    "Usage",
    "generate",
    "load",
]


def load(
    path: str | PathLike[str], *, num_threads: int | None = None, cache_tokens: int | None = None
) -> Engine:
    """Load an artifact; raise ArtifactError, one sentence, if it cannot be run here."""
    return Engine(path, num_threads=num_threads, cache_tokens=cache_tokens)


def generate(
    path: str | PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
) -> list[RequestOutput]:
    """Load an artifact, generate once, and close it."""
    with load(path) as engine:
        return engine.generate(prompts, params)
