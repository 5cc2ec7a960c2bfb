"""The calls most users need: open an artifact, or generate with one in a single call."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from tilewright.runtime.engine import Engine
from tilewright.runtime.outputs import RequestOutput
from tilewright.runtime.params import SamplingParams
from tilewright.runtime.prompt import Prompt


def load(
    path: str | PathLike[str],
    *,
    device: str | None = None,
    num_threads: int | None = None,
    cache_tokens: int | None = None,
    graphs: bool | None = None,
) -> Engine:
    """Load an artifact; raise ArtifactError, one sentence, if it cannot be run here.

    `device`: `cpu`, `cuda` or `cuda:N` (default: what the artifact is for). `num_threads`: worker
    threads of a CPU (default: the cores this process may use). `cache_tokens`: positions the cache
    holds (default: four full contexts, or as many as a GPU's memory has room for). `graphs`: on a
    GPU, whether small steps are captured as graphs (default: yes).
    """
    return Engine(
        path,
        device=device,
        num_threads=num_threads,
        cache_tokens=cache_tokens,
        graphs=graphs,
    )


def generate(
    path: str | PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
) -> list[RequestOutput]:
    """Load an artifact, generate once, and close it."""
    with load(path) as engine:
        return engine.generate(prompts, params)
