"""Continuous batching with chunked prefill: which positions of which requests a step computes.

First come, first served throughout: a request never overtakes an earlier one, and the earliest
always moves on, so that every request finishes. The same calls give the same batches.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.batch import Batch, Span, assemble
from tilewright.runtime.blocks import BlockPool, BlockTable
from tilewright.runtime.errors import RequestError
from tilewright.runtime.request import FinishReason, Request, RequestState


class Scheduler:
    """Cuts live requests into steps: `schedule`, compute the batch, `commit`, and again.

    Between two steps at most one request is inside its prefill, and it is the latest one that holds
    blocks. Every request that holds blocks got at least one token in some step beside the others,
    so all decodes always fit in a step.
    """

    def __init__(self, pool: BlockPool, *, max_tokens_per_step: int, max_requests: int) -> None:
        for name, limit in (
            ("max_tokens_per_step", max_tokens_per_step),
            ("max_requests", max_requests),
        ):
            if limit < 1:
                raise RequestError(
                    f"scheduler '{name}': out of range: got {limit}, want at least 1"
                )
        self._pool = pool
        self._max_tokens_per_step = max_tokens_per_step
        self._max_requests = max_requests
        self._live: dict[str, list[Request]] = {}
        self._waiting: deque[Request] = deque()  # in order of arrival, all after the running ones
        self._running: dict[Request, BlockTable] = {}  # in order of arrival
        self._in_flight: Batch | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks, in prefill or decode."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return a batch."""
        return bool(self._live)

    def add(self, *samples: Request) -> None:
        """Queue the samples of one request, all or none.

        Raises RequestError if the id is in use, or if a sample can never fit in the cache.
        """
        for index, request in enumerate(samples):
            assert request.state is RequestState.WAITING and request.id == samples[0].id, (
                f"request '{request.id}' is {request.state.value}, beside '{samples[0].id}'"
            )
            if request.id in self._live or request in samples[:index]:
                raise RequestError(
                    f"request '{request.id}': the id is in use: got a second live request, "
                    "want a distinct id"
                )
            self._check_fits(request)
        if samples:
            self._live[samples[0].id] = list(samples)
        self._waiting.extend(samples)

    def abort(self, request_id: str) -> tuple[Request, ...]:
        """End all live samples of a request, also while a batch computes them; returns them.

        An id that is not live ends nothing: its last token may just have finished it.
        """
        samples = tuple(self._live.get(request_id, ()))
        for request in samples:
            self.finish(request, FinishReason.ABORT)
        return samples

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a live request and free its blocks; a batch in flight forgets it."""
        assert not request.is_finished, f"request '{request.id}' is finished already"
        samples = self._live[request.id]
        samples.remove(request)
        if not samples:
            del self._live[request.id]
        if request in self._running:
            self._running.pop(request).release()
        else:
            self._waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason

    def schedule(self) -> Batch | None:
        """Choose the next step: all decodes, then prefills in order of arrival; None if idle.

        The batch must be committed before the next call.
        """
        assert self._in_flight is None, "the last batch is not committed"
        spans = self._decode()
        self._prefill(spans)
        if not spans:
            assert not self._live, f"no step for the live requests {list(self._live)}"
            return None
        self._in_flight = assemble(spans, block_size=self._pool.block_size)
        return self._in_flight

    def commit(
        self,
        batch: Batch,
        tokens: Sequence[int] | NDArray[np.integer],
        endings: Mapping[int, FinishReason] | None = None,
    ) -> tuple[Request, ...]:
        """Take the results of a computed batch; returns the requests that it finished.

        `tokens` has one entry per logit row; where `is_sampled` is false it is ignored. `endings`
        names rows of `batch.requests` that end now: with ERROR their token is dropped, otherwise it
        is kept. Requests at max_tokens end with LENGTH by themselves. Rows that were aborted in the
        meantime are skipped.
        """
        assert batch is self._in_flight, "commit of a batch that is not in flight"
        assert len(tokens) == batch.num_logits, (
            f"{len(tokens)} tokens for {batch.num_logits} logit rows"
        )
        self._in_flight = None
        chosen = np.asarray(tokens)[batch.is_sampled].tolist()
        sampled = dict(zip(batch.logit_requests[batch.is_sampled].tolist(), chosen, strict=True))
        lengths = batch.context_lengths.tolist()
        ending = endings or {}
        finished = []
        for row, request in enumerate(batch.requests):
            if request.is_finished:
                continue
            reason = ending.get(row)
            _advance(request, lengths[row])
            if row in sampled and reason is not FinishReason.ERROR:
                request.output_ids.append(sampled[row])
            if reason is None and _is_complete(request):
                reason = FinishReason.LENGTH
            if reason is not None:
                self.finish(request, reason)
                finished.append(request)
        return tuple(finished)

    def _check_fits(self, request: Request) -> None:
        """Refuse what the empty cache could not hold to its last token."""
        want = self._pool.blocks_for(request.max_positions)
        if want > self._pool.num_blocks:
            raise RequestError(
                f"request '{request.id}': can never fit in the cache: got "
                f"{len(request.prompt_ids)} prompt tokens and max_tokens {request.max_tokens} "
                f"({want} blocks of {self._pool.block_size} positions), want at most "
                f"{self._pool.num_blocks} blocks; shorten it or enlarge the cache"
            )

    def _decode(self) -> list[Span]:
        """One token of every running request, the earliest first; preempt the latest for room."""
        spans = []
        for request, table in list(self._running.items()):
            if request.state is not RequestState.RUNNING:
                continue  # in prefill, or preempted by an earlier one just now
            if self._make_room(request, table):
                spans.append(
                    Span(
                        request=request,
                        table=table,
                        start=request.num_computed,
                        token_ids=request.output_ids[-1:],
                        num_logits=1,
                        num_sampled=1,
                    )
                )
        assert len(spans) <= self._max_tokens_per_step, (
            f"{len(spans)} decodes in a step of {self._max_tokens_per_step} tokens"
        )
        return spans

    def _make_room(self, request: Request, table: BlockTable) -> bool:
        """Hold all known tokens; False if the request was itself the latest and had to go."""
        missing = table.num_missing(request.num_tokens)
        while missing > self._pool.num_free:
            if self._preempt_latest() is request:
                return False
        if missing:
            table.grow(request.num_tokens)
        return True

    def _preempt_latest(self) -> Request:
        """Free the latest request's blocks; it keeps its tokens and is computed again."""
        request, table = self._running.popitem()
        table.release()
        request.state = RequestState.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self._waiting.appendleft(request)
        return request

    def _prefill(self, spans: list[Span]) -> None:
        """Spend the budget left on prefills, the unfinished one first, appending to `spans`."""
        budget = self._max_tokens_per_step - len(spans)
        latest = next(reversed(self._running), None)
        is_inside = latest is not None and latest.state is RequestState.PREFILL
        while budget > 0:
            request = latest if is_inside else self._admit()
            if request is None:
                return
            stop = min(request.num_tokens, request.num_computed + budget)
            budget -= stop - request.num_computed
            spans.append(_cut(request, self._running[request], stop))
            is_inside = False

    def _admit(self) -> Request | None:
        """Start the first waiting request if its known tokens and one more have free blocks.

        The one more keeps a request that was just preempted from coming back before a block is
        free in which it can also move on.
        """
        if not self._waiting or len(self._running) == self._max_requests:
            return None
        request, table = self._waiting[0], BlockTable(self._pool)
        want = min(request.num_tokens + 1, request.max_positions)
        if table.num_missing(want) > self._pool.num_free:
            return None
        table.grow(want)
        request.state = RequestState.PREFILL
        self._running[self._waiting.popleft()] = table
        return request


def _cut(request: Request, table: BlockTable, stop: int) -> Span:
    """Cut the prefill of a request from its first position not computed up to `stop`."""
    start = request.num_computed
    decides = stop == request.num_tokens and request.max_tokens > 0
    num_logits = 1 if decides else 0
    # A request that comes back after preemption has had some or all of its prompt's logits.
    if request.wants_prompt_logits and request.num_prompt_logits < len(request.prompt_ids):
        num_logits = max(stop - max(start, request.num_prompt_logits), 0)
    return Span(
        request=request,
        table=table,
        start=start,
        token_ids=request.token_ids(start, stop),
        num_logits=num_logits,
        num_sampled=1 if decides else 0,
    )


def _advance(request: Request, num_computed: int) -> None:
    """Note that the first `num_computed` positions are in the cache."""
    request.num_computed = num_computed
    if request.wants_prompt_logits:
        num_prompt = min(num_computed, len(request.prompt_ids))
        request.num_prompt_logits = max(request.num_prompt_logits, num_prompt)
    if num_computed == request.num_tokens:
        request.state = RequestState.RUNNING


def _is_complete(request: Request) -> bool:
    """Whether a request has all the tokens it may have."""
    if request.state is not RequestState.RUNNING:
        return False
    return len(request.output_ids) >= request.max_tokens
