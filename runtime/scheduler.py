"""Continuous batching with chunked prefill: which positions of which requests a step computes.

First come, first served throughout: a request never overtakes an earlier one, and the earliest
always moves on, so that every request finishes. The same calls give the same batches.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.batch import Batch, Span, assemble
from tilewright.runtime.cache import Cache, Tables
from tilewright.runtime.errors import RequestError
from tilewright.runtime.request import FinishReason, Request, RequestState
from tilewright.runtime.snapshot import Snapshot


class Scheduler:
    """Cuts live requests into steps: `schedule`, compute the batch, `commit`, and again.

    Between two steps at most one request is inside its first prefill, and it is the latest one that
    holds pages; requests that were set back may be computed again before it. Every request that
    holds pages got at least one token in some step beside the others, so all decodes always fit in
    a step.
    """

    def __init__(self, cache: Cache, *, max_tokens_per_step: int, max_requests: int) -> None:
        for name, limit in (
            ("max_tokens_per_step", max_tokens_per_step),
            ("max_requests", max_requests),
        ):
            if limit < 1:
                raise RequestError(
                    f"scheduler '{name}': out of range: got {limit}, want at least 1"
                )
        self._cache = cache
        self._max_tokens_per_step = max_tokens_per_step
        self._max_requests = max_requests
        self._live: dict[str, list[Request]] = {}
        self._waiting: deque[Request] = deque()  # in order of arrival, all after the running ones
        self._running: dict[Request, Tables] = {}  # in order of arrival
        self._in_flight: Batch | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold pages, in prefill or decode."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return a batch."""
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self._live

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
        """End a live request and free its pages; a batch in flight forgets it."""
        assert not request.is_finished, f"request '{request.id}' is finished already"
        samples = self._live[request.id]
        samples.remove(request)
        if not samples:
            del self._live[request.id]
        if request in self._running:
            self._cache.release(self._running.pop(request))
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
        self._in_flight = assemble(spans, block_size=self._cache.blocks.block_size)
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
            self._cache.settle(self._running[request], request.num_computed, lengths[row])
            _advance(request, lengths[row])
            if row in sampled and reason is not FinishReason.ERROR:
                request.output_ids.append(sampled[row])
            if reason is None and _is_complete(request):
                reason = FinishReason.LENGTH
            if reason is not None:
                self.finish(request, reason)
                finished.append(request)
        return tuple(finished)

    def withdraw(self, batch: Batch) -> None:
        """Forget a batch that was not computed; `schedule` cuts the same positions again.

        Writing a position once more writes the same, so it does not matter how far a step came.
        """
        if self._in_flight is batch:
            self._in_flight = None

    def _check_fits(self, request: Request) -> None:
        """Refuse what the empty cache could not hold to its last token."""
        pool = self._cache.blocks
        want = pool.blocks_for(request.max_positions)
        if want > pool.num_blocks:
            raise RequestError(
                f"request '{request.id}': can never fit in the cache: got "
                f"{len(request.prompt_ids)} prompt tokens and max_tokens {request.max_tokens} "
                f"({want} blocks of {pool.block_size} positions), want at most "
                f"{pool.num_blocks} blocks; shorten it or enlarge the cache"
            )

    def _decode(self) -> list[Span]:
        """One token of every running request, the earliest first; preempt the latest for room.

        Requests in prefill get room to move on, and are left to `_prefill`.
        """
        spans = []
        for request, tables in list(self._running.items()):
            if request.state is RequestState.WAITING:
                continue  # preempted by an earlier one just now
            if self._make_room(request, tables) and request.state is RequestState.RUNNING:
                spans.append(
                    Span(
                        request=request,
                        table=tables.blocks,
                        start=request.num_computed,
                        token_ids=request.output_ids[-1:],
                        num_logits=1,
                        num_sampled=1,
                        windows=tables.windows,
                    )
                )
        assert len(spans) <= self._max_tokens_per_step, (
            f"{len(spans)} decodes in a step of {self._max_tokens_per_step} tokens"
        )
        return spans

    def _make_room(self, request: Request, tables: Tables) -> bool:
        """Hold all known tokens, and the next one in the window. False if there is no room.

        Later requests go first. A decode that is itself the latest then goes too; a prefill waits.
        """
        is_decode = request.state is RequestState.RUNNING
        stop, start = _room_wanted(request), request.num_computed
        while not self._cache.make_room(tables, start, stop=stop, window_stop=start + 1):
            latest = next(reversed(self._running))
            if latest is not request or is_decode:
                self._preempt_latest()
            if latest is request:
                return False
        return True

    def _preempt_latest(self) -> None:
        """Free the latest request's pages; it keeps its tokens and is computed again."""
        request, tables = self._running.popitem()
        self._cache.release(tables)
        request.state = RequestState.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self._waiting.appendleft(request)

    def _prefill(self, spans: list[Span]) -> None:
        """Spend the budget left on prefills, the unfinished ones first, appending to `spans`."""
        budget = self._max_tokens_per_step - len(spans)
        inside = [r for r in self._running if r.state is RequestState.PREFILL]
        while budget > 0:
            request = inside.pop(0) if inside else self._admit()
            if request is None:
                return
            tables, start = self._running[request], request.num_computed
            room = self._cache.window_room(tables)
            stop = min(request.num_tokens, start + budget)
            stop = stop if room is None else min(stop, room)
            if stop <= start or not self._cache.make_room(
                tables, start, stop=_room_wanted(request), window_stop=stop
            ):
                return  # short of pages until others move on
            budget -= stop - start
            spans.append(_cut(request, tables, stop))

    def _admit(self) -> Request | None:
        """Start the first waiting request if its known tokens and one more have free pages.

        The one more keeps a request that was just preempted from coming back before a block is
        free in which it can also move on.
        """
        if not self._waiting or len(self._running) == self._max_requests:
            return None
        request = self._waiting[0]
        tables = self._cache.open(len(request.prompt_ids), whole=request.wants_prompt_logits)
        want = _room_wanted(request)
        if not self._cache.can_begin(want):
            return None
        snapshot, start = request.resume, 0
        if request.wants_prompt_logits:
            snapshot = None  # all its positions must be computed
        if snapshot is not None and self._cache.resume(tables, snapshot):
            start = snapshot.position
        if not self._cache.make_room(tables, start, stop=want, window_stop=start + 1):
            self._cache.release(tables)
            return None
        request.state = RequestState.PREFILL
        request.num_computed = start
        self._running[self._waiting.popleft()] = tables
        return request

    # --- positions in the past ------------------------------------------------------------------

    def snapshot(self, request: Request) -> Snapshot:
        """Keep what is computed of a running request, for another one to resume from.

        The cache may drop it for room; `drop` gives it back.
        """
        return self._cache.snapshot(self._running[request], request.num_computed)

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot."""
        self._cache.drop(snapshot)

    def rollback(self, request: Request, position: int) -> None:
        """Set a running request back: what was computed from `position` on never was.

        Call it between two steps. Its tokens from there on, which the caller may have changed, at
        least one, are computed again; earlier ones too if the window has moved on too far.
        """
        assert self._in_flight is None, "rollback while a batch is in flight"
        assert 0 <= position <= request.num_computed and position < request.num_tokens, (
            f"request '{request.id}': rollback to {position} of {request.num_computed} computed "
            f"and {request.num_tokens} known"
        )
        request.num_computed = self._cache.rollback(self._running[request], position)
        is_decode = request.num_computed == request.num_tokens - 1 and request.output_ids
        request.state = RequestState.RUNNING if is_decode else RequestState.PREFILL


def _room_wanted(request: Request) -> int:
    """Positions a request has blocks for: its known tokens, and one more while in prefill."""
    more = 0 if request.state is RequestState.RUNNING else 1
    return min(request.num_tokens + more, request.max_positions)


def _cut(request: Request, tables: Tables, stop: int) -> Span:
    """Cut the prefill of a request from its first position not computed up to `stop`."""
    start = request.num_computed
    decides = stop == request.num_tokens and request.max_tokens > 0
    num_logits = 1 if decides else 0
    # A request that comes back after preemption has had some or all of its prompt's logits.
    if request.wants_prompt_logits and request.num_prompt_logits < len(request.prompt_ids):
        num_logits = max(stop - max(start, request.num_prompt_logits), 0)
    return Span(
        request=request,
        table=tables.blocks,
        start=start,
        token_ids=request.token_ids(start, stop),
        num_logits=num_logits,
        num_sampled=1 if decides else 0,
        windows=tables.windows,
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
