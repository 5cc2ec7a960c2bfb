"""The calls most users need: open an artifact, or generate with one in a single call."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from tilewright.runtime.engine import Engine
from tilewright.runtime.outputs import RequestOutput
from tilewright.runtime.params import SamplingParams
from tilewright.runtime.prompt import Prompt


def load(
    path: str | PathLike[str], *, num_threads: int | None = None, cache_tokens: int | None = None
) -> Engine:
    """Load an artifact; raise ArtifactError, one sentence, if it cannot be run here.

    `num_threads`: worker threads (default: the cores this process may use). `cache_tokens`:
    positions the cache holds (default: four full contexts; memory is taken as it fills).
    """
    return Engine(path, num_threads=num_threads, cache_tokens=cache_tokens)


def generate(
    path: str | PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
) -> list[RequestOutput]:
    """Load an artifact, generate once, and close it."""
    with load(path) as engine:
        return engine.generate(prompts, params)
