"""What the bench measures of an artifact: prefill and decode, through the engine and below it.

Rates count prompt tokens computed, or tokens generated over all requests of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tilewright.runtime import Engine, SamplingParams
from tilewright.runtime.artifact import KernelRecord, LaunchRecord, Manifest, evaluate
from tilewright.runtime.cache_layout import cache_layout, ring_pages
from tilewright.runtime.executor import Executor
from tilewright.tools.plain_step import Step, plain_step

_GREEDY = 0.0


def prompt_ids(count: int, vocab_size: int, *, salt: int = 0) -> list[int]:
    """Return `count` token ids that look like no particular text, the same at every call."""
    steps = np.arange(count, dtype=np.int64) + 7919 * salt
    ids: list[int] = ((steps * 2654435761 >> 7) % vocab_size).tolist()
    return ids


def make_step(manifest: Manifest, *, requests: int, start: int, tokens: int) -> Step:
    """Return a step of `requests` requests, each computing `tokens` positions from `start`.

    One row of logits per request, as in serving.
    """
    ids = prompt_ids(requests * tokens, manifest.model.vocab_size)
    layout, pages = cache_layout(manifest), None
    if layout.window is not None:
        pages = ring_pages(layout.reach, tokens, layout.window.page_positions)
    return plain_step(manifest, ids, requests=requests, start=start, window_pages=pages)


def prefill_steps(manifest: Manifest, tokens: int) -> list[Step]:
    """Cut a prompt into steps as the engine does: as many tokens as a step may hold."""
    most = next(d.upper for d in manifest.dims if d.name == "tokens")
    return [
        make_step(manifest, requests=1, start=start, tokens=min(most, tokens - start))
        for start in range(0, tokens, most)
    ]


def run_seconds(executor: Executor, steps: Sequence[Step]) -> float:
    """Return the time of running steps on the executor alone."""
    start = time.perf_counter()
    for step in steps:
        executor.run(step.inputs, step.dims)
    return time.perf_counter() - start


def first_token_seconds(engine: Engine, tokens: int) -> float:
    """Return the time from handing in a prompt of token ids to its first sampled token."""
    params = SamplingParams(max_tokens=1, temperature=_GREEDY, ignore_eos=True)
    prompt = prompt_ids(tokens, engine.model.vocab_size)
    start = time.perf_counter()
    for event in engine.stream(prompt, params):
        if event.token_ids:
            break
    return time.perf_counter() - start


def decode_seconds(engine: Engine, *, batch: int, start: int, tokens: int) -> float:
    """Return the time in which each of `batch` requests generates `tokens` more tokens.

    Each begins with `start` tokens in the cache. Sampling and text are part of the time.
    """
    params = SamplingParams(max_tokens=tokens + 1, temperature=_GREEDY, ignore_eos=True)
    vocab = engine.model.vocab_size
    prompts = [prompt_ids(start, vocab, salt=i) for i in range(batch)]
    samples = [engine.submit(p, params).samples[0] for p in prompts]
    while not all(s.request.output_ids for s in samples):
        engine.step()
    counts = [len(s.request.output_ids) for s in samples]
    begin = time.perf_counter()
    while not all(s.is_finished for s in samples):
        engine.step()
        for sample in samples:
            sample.event()
    seconds = time.perf_counter() - begin
    done = sum(len(s.request.output_ids) for s in samples) - sum(counts)
    return seconds * batch * tokens / done  # requests that prefilled early were ahead


@dataclass(frozen=True)
class StepCost:
    """Operations of a step, the bytes its kernels move, and the bytes of weights among them."""

    flops: int
    num_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class CostTable:
    """Costs of launches, from the manifest."""

    manifest: Manifest

    @cached_property
    def kernels(self) -> Mapping[str, KernelRecord]:
        return {k.symbol: k for k in self.manifest.kernels}

    def launch(self, launch: LaunchRecord, dims: Mapping[str, int]) -> tuple[int, int]:
        """Return operations and bytes of one launch."""
        kernel = self.kernels[launch.kernel]
        return evaluate(kernel.flops, dims), evaluate(kernel.num_bytes, dims)

    def step(self, launches: Sequence[LaunchRecord], dims: Mapping[str, int]) -> StepCost:
        """Return the cost of all launches of a step."""
        costs = [self.launch(launch, dims) for launch in launches]
        weights = sum(evaluate(self.kernels[la.kernel].weight_bytes, dims) for la in launches)
        return StepCost(sum(f for f, _ in costs), sum(b for _, b in costs), weights)


def cache_bytes_per_token(manifest: Manifest) -> int:
    """Return the bytes by which every position lets the cache grow, rounded down."""
    return int(cache_layout(manifest).bytes_per_token)
