"""The engine: continuous batching over one artifact. Each step schedules, executes, commits.

Calls from several threads share the steps: whoever waits drives all requests.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tilewright.runtime.artifact import Manifest
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.batch import Batch
from tilewright.runtime.blocks import BlockPool
from tilewright.runtime.cache import Cache, CacheSettings, WindowPages, page_counts
from tilewright.runtime.cache_layout import cache_layout
from tilewright.runtime.decide import Decided, decide, take
from tilewright.runtime.errors import RequestError
from tilewright.runtime.executor import Executor
from tilewright.runtime.opening import Opening
from tilewright.runtime.outputs import RequestOutput, StreamEvent, Usage
from tilewright.runtime.params import SamplingParams, shown
from tilewright.runtime.prompt import (
    Message,
    Prompt,
    encode,
    listed_prompts,
    render_chat,
    token_ids,
)
from tilewright.runtime.request import FinishReason, Request, checked_id
from tilewright.runtime.sample import Sample, stacked
from tilewright.runtime.sample_logits import SampleRules, bad_word_sequences
from tilewright.runtime.scheduler import Scheduler
from tilewright.runtime.step_inputs import StepInputs
from tilewright.runtime.stream import EventStream, Submitted


class Engine:
    """Serves one artifact. A context manager; `close` stops its threads.

    `device`: `cpu`, `cuda` or `cuda:N` (default: what the artifact is for). `num_threads`: worker
    threads of a CPU (default: all cores this process may use). `cache_tokens`: positions the cache
    holds (default: four full contexts, or as many as a GPU's memory has room for). `graphs`: on a
    GPU, whether small steps are captured as graphs (default: yes). `cache_settings`: what is kept
    beside, so that requests can be set back.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        device: str | None = None,
        num_threads: int | None = None,
        cache_tokens: int | None = None,
        graphs: bool | None = None,
        cache_settings: CacheSettings | None = None,
    ) -> None:
        opening = Opening(device, num_threads, cache_tokens, graphs)
        artifact = load_artifact(path, choose_device=opening.choose)
        self.manifest: Manifest = artifact.manifest
        self.model = self.manifest.model
        self.tokenizer: Tokenizer | None = artifact.tokenizer
        self._executor = Executor(artifact, artifact.device)
        self._chooser = self._executor.chooser()
        limits = {d.name: d.upper for d in self.manifest.dims}
        self.layout = cache_layout(self.manifest)
        self._inputs = StepInputs(self.manifest)
        settings = cache_settings or CacheSettings()
        self._cache = self._open_cache(opening.cache_blocks, settings)
        self._scheduler = Scheduler(
            self._cache,
            max_tokens_per_step=limits["tokens"],
            max_requests=limits["requests"],
        )
        self._live: dict[Request, Sample] = {}
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._num_requests = 0
        self._dropped: deque[Request] = deque()
        self._is_closed = False

    def _open_cache(self, blocks: int, settings: CacheSettings) -> Cache:
        """Allocate the states, and account for their pages."""
        layout, window = self.layout, None
        counts = page_counts(self.manifest, blocks, settings)
        if layout.window is not None:
            pool = BlockPool(counts[layout.window.pages_dim], layout.window.page_positions)
            window = WindowPages(
                pool=pool, reach=layout.reach, width=layout.ring_width, replay=layout.replay
            )
        self._executor.allocate_states(counts)
        memory = self._executor.cache_memory(layout)
        pool = BlockPool(blocks, self.model.block_size)
        return Cache(pool, window, memory=memory, settings=settings)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all requests with reason `abort`, and stop the threads; no other is taken."""
        if os.getpid() != self._owner:
            return  # the process that loaded it goes on
        with self._held():
            self._is_closed = True
            self._end(list(self._live))
        self._executor.close()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock; raise RequestError in a forked process, whose copy may be held for ever.
        """
        if os.getpid() != self._owner:
            raise RequestError(
                "engine: the process was forked after it was loaded: load the artifact again in "
                "this process"
            )
        with self._lock:
            yield

    @property
    def numerics_digest(self) -> str:
        """Two artifacts with equal digests give equal bits."""
        return self.manifest.numerics_digest

    @property
    def executor(self) -> Executor:
        """The executor, for tools that look at single launches."""
        return self._executor

    # --- requests -------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        keep_logits: bool = False,
    ) -> Submitted:
        """Check a request and queue it; raise RequestError, one sentence, if it cannot be served.

        `step` computes it from then on, `abort` ends it by its `id`, and `output` gives what came
        of it once all its `samples` have `is_finished`. `keep_logits`: generate nothing, and keep
        the logits of the prompt.
        """
        params = SamplingParams() if params is None else params
        return self._submit_all([prompt], [params], [request_id], keep_logits)[0]

    def _submit_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        ids: Sequence[str | None],
        keep_logits: bool = False,
    ) -> list[Submitted]:
        """Queue all requests, or none if one is refused."""
        made = [
            self._make(*each, keep_logits=keep_logits)
            for each in zip(prompts, params, ids, strict=True)
        ]
        with self._held():
            if self._is_closed:
                raise RequestError("engine: is closed: want one that is open; load it again")
            added: list[Submitted] = []
            try:
                for submitted in made:
                    self._scheduler.add(*(s.request for s in submitted.samples))
                    added.append(submitted)
            except RequestError:
                for submitted in added:
                    self._scheduler.abort(submitted.id)
                raise
            for submitted in made:
                self._live.update({s.request: s for s in submitted.samples})
        return made

    def _make(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, *, keep_logits: bool
    ) -> Submitted:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling parameters: wrong type: got {type(params).__name__}, want SamplingParams"
            )
        prompt_ids = encode(prompt, self.tokenizer, self.model)
        if keep_logits:
            params = replace(params, max_tokens=1)
        params = params.validated(self.model.vocab_size, self.model.max_context, len(prompt_ids))
        seed = secrets.randbits(64) if params.seed is None else params.seed
        rules = SampleRules.build(
            params, eos_token_ids=self.model.eos_ids, bad_words=self._bad_words(params)
        )
        name = self._fresh_id() if request_id is None else checked_id(request_id)
        wants_prompt = keep_logits or params.prompt_logprobs is not None
        samples = tuple(
            Sample(
                Request(
                    name,
                    prompt_ids,
                    params,
                    seed,
                    0 if keep_logits else params.max_tokens,
                    sample_index=i,
                    wants_prompt_logits=wants_prompt,
                ),
                rules,
                self.tokenizer,
                keep_logits=keep_logits,
            )
            for i in range(params.n)
        )
        return Submitted(name, prompt_ids, seed, samples)

    def _fresh_id(self) -> str:
        """Name a request that came without an id; a live one may have been given any."""
        with self._held():
            while True:
                self._num_requests += 1
                name = f"request-{self._num_requests}"
                if not self._scheduler.is_live(name):
                    return name

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise RequestError("sampling parameter 'bad_words': the model has no tokenizer")
        tokenizer = self.tokenizer
        return bad_word_sequences(
            params.bad_words, lambda text: token_ids(tokenizer, text, "bad_words")
        )

    def abort(self, request_id: str) -> None:
        """End a request; its samples finish with reason `abort`. An unknown id ends nothing; one
        that no request can have raises RequestError."""
        request_id = checked_id(request_id)
        with self._held():
            for request in self._scheduler.abort(request_id):
                self._live.pop(request, None)

    def cancel(self, samples: Sequence[Sample]) -> None:
        """Abort these samples, and never others that were given the same id since."""
        with self._held():
            self._end([sample.request for sample in samples])

    def drop(self, samples: Sequence[Sample]) -> None:
        """Cancel samples at the next step; never waits for a lock."""
        self._dropped.extend(sample.request for sample in samples)

    def _end(
        self, requests: Sequence[Request], reason: FinishReason = FinishReason.ABORT
    ) -> None:
        for request in requests:  # those of another engine, or ended already, are let be
            if self._live.pop(request, None) is not None and not request.is_finished:
                self._scheduler.finish(request, reason)

    # --- steps ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step for all live requests; return False if there was nothing to do."""
        with self._held():
            return self._step()

    def _step(self) -> bool:
        while self._dropped:
            self._end([self._dropped.popleft()])
        batch = self._scheduler.schedule()
        if batch is None:
            return False
        try:
            decided = decide(batch, self._live, self._chooser, self._execute(batch))
        except Exception as error:
            self._fail(batch, error)
            raise
        except BaseException:
            # Ctrl-C, say, which is no request's fault: nothing was taken yet, so that the next
            # step computes the same positions again.
            self._scheduler.withdraw(batch)
            raise
        try:
            self._take(batch, decided)
        except BaseException as error:
            self._fail(batch, error)
            raise
        return True

    def _execute(self, batch: Batch) -> Mapping[str, Any]:
        inputs, dims = self._inputs.of(batch)
        return self._executor.launch(inputs, dims)

    def _take(self, batch: Batch, decided: Decided) -> None:
        """Give every sample what was decided for it; forget those that finished."""
        tokens, endings = take(batch, decided)
        for request in self._scheduler.commit(batch, tokens, endings):
            self._live.pop(request, None)

    def _fail(self, batch: Batch, error: BaseException) -> None:
        """End all requests of a step that failed; the others, and the engine, go on."""
        self._scheduler.withdraw(batch)
        for request in batch.requests:
            sample = self._live.get(request)
            if sample is not None:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                sample.error = f"request '{request.id}': its step failed: {why}"
        self._end(batch.requests, FinishReason.ERROR)

    def _drive(self, samples: Sequence[Sample]) -> None:
        """Run one step, under the lock, unless these samples are finished by other threads."""
        if not all(s.is_finished for s in samples):
            progressed = self._step()
            assert progressed, "live samples and no step to run"

    # --- public calls ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several (texts or lists of token ids), batched together.

        `params` is one for all or one each. Raises RequestError before anything runs if one of
        them cannot be served. A request that fails while running has `finish_reason` "error".
        """
        texts = listed_prompts(prompts)
        if params is None:
            params = SamplingParams()
        if not isinstance(params, (list, tuple)):  # one for all, or of a type that is refused
            params = [cast(SamplingParams, params)] * len(texts)
        if len(params) != len(texts):
            raise RequestError(
                f"sampling parameters: got {len(params)} for {len(texts)} prompts, "
                "want one, or one each"
            )
        submitted = self._submit_all(texts, params, [None] * len(texts))
        samples = [s for each in submitted for s in each.samples]
        try:
            while not all(s.is_finished for s in samples):
                with self._held():
                    self._drive(samples)
        finally:
            self.cancel(samples)
        return [self.output(each) for each in submitted]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> EventStream:
        """Give text and tokens as they come. Closing or dropping the stream aborts the request.

        The request is checked and queued at the call, not at the first event.
        """
        return EventStream(self, self.submit(prompt, params, request_id=request_id))

    def events(self, samples: list[Sample]) -> list[StreamEvent]:
        """Run a step for these samples unless they are finished; return what is new.

        Samples that are finished are taken off the list with their last event.
        """
        found = []
        with self._held():  # held to the end: another thread's step would add to the samples
            self._drive(samples)
            for sample in list(samples):
                finished = sample.is_finished
                event = sample.event()
                if finished:
                    samples.remove(sample)
                if event is not None:
                    found.append(event)
        return found

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after every token, float32 [tokens, vocab], for evaluation.

        Raises RequestError for a text: which tokens its rows belong to would be left open.
        """
        if isinstance(token_ids, str):
            raise RequestError(
                f"logits: got the text {shown(token_ids)}, want a list of token ids; "
                "engine.tokenizer gives those of a text"
            )
        submitted = self.submit(token_ids, SamplingParams(), keep_logits=True)
        (sample,) = submitted.samples
        try:
            while not sample.is_finished:
                with self._held():
                    self._drive([sample])
        finally:
            self.cancel([sample])
        if sample.error is not None:
            raise RequestError(sample.error)
        return stacked(sample.logits or [], self.model.vocab_size)

    def chat_prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation in the model's chat template."""
        eos = next(iter(self.model.eos_ids), None)
        special = {
            name: (self.tokenizer.id_to_token(token_id) or "")
            if self.tokenizer is not None and token_id is not None
            else ""
            for name, token_id in (("bos_token", self.model.bos_id), ("eos_token", eos))
        }
        # Where the model's files name these tokens they are not always those that end generation.
        config = self.model.config.items()
        named = {k: v for k, v in config if k.endswith("_token") and isinstance(v, str)}
        return render_chat(messages, self.model, {**special, **named})

    def output(self, submitted: Submitted) -> RequestOutput:
        """Return what a submitted request gave; raise RequestError before all its samples finished.
        """
        if not isinstance(submitted, Submitted):
            raise RequestError(
                f"output: wrong type: got {shown(submitted)}, want what `submit` gave"
            )
        if not all(s.is_finished for s in submitted.samples):
            raise RequestError(
                f"request '{submitted.id}': is not finished: step the engine until its samples are"
            )
        samples = tuple(s.output() for s in submitted.samples)
        first = submitted.samples[0]
        wanted = first.rules.params.prompt_logprobs is not None
        return RequestOutput(
            id=submitted.id,
            prompt_token_ids=submitted.prompt_ids,
            samples=samples,
            seed=submitted.seed,
            usage=Usage(len(submitted.prompt_ids), sum(len(s.token_ids) for s in samples)),
            numerics_digest=self.numerics_digest,
            prompt_logprobs=tuple(first.prompt_logprobs) if wanted else None,
        )
