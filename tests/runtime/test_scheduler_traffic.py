"""Scheduling under random traffic: every token computed once and in order, everybody finishes."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from support.scheduling import (
    Device,
    check_blocks,
    check_complete,
    check_queue,
    complete_alone,
    make_pair,
    make_request,
    run_to_end,
    step,
)
from tilewright.runtime.batch import Batch
from tilewright.runtime.blocks import BlockPool
from tilewright.runtime.cache import Cache
from tilewright.runtime.errors import RequestError
from tilewright.runtime.request import FinishReason, Request, RequestState
from tilewright.runtime.scheduler import Scheduler


class Traffic(RuleBasedStateMachine):
    """Random requests, aborts and early ends over a small pool and any budget."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.batch: Batch | None = None

    @initialize(
        num_blocks=st.integers(2, 9),
        block_size=st.integers(1, 3),
        max_tokens=st.integers(1, 9),
        max_requests=st.integers(1, 5),
    )
    def start(self, num_blocks: int, block_size: int, max_tokens: int, max_requests: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.max_requests = max_requests
        self.scheduler = Scheduler(
            Cache(self.pool), max_tokens_per_step=max_tokens, max_requests=max_requests
        )
        self.device = Device(self.pool, max_tokens)

    @rule(
        num_prompt=st.integers(1, 9),
        max_tokens=st.integers(0, 14),
        num_samples=st.integers(1, 3),
        wants_prompt_logits=st.booleans(),
    )
    def add(
        self, num_prompt: int, max_tokens: int, num_samples: int, wants_prompt_logits: bool
    ) -> None:
        samples = [
            make_request(
                f"r{len(self.requests)}",
                num_prompt,
                max_tokens,
                sample_index=i,
                wants_prompt_logits=wants_prompt_logits,
            )
            for i in range(num_samples)
        ]
        room = self.pool.num_blocks * self.pool.block_size
        if num_prompt + max(max_tokens - 1, 0) > room:
            with pytest.raises(RequestError, match="can never fit in the cache"):
                self.scheduler.add(*samples)
        else:
            self.scheduler.add(*samples)
            self.requests.extend(samples)

    @precondition(lambda self: any(not r.is_finished for r in self.requests))
    @rule(draw=st.data())
    def abort(self, draw: st.DataObject) -> None:
        live = [r for r in self.requests if not r.is_finished]
        chosen = draw.draw(st.sampled_from(live))
        ended = self.scheduler.abort(chosen.id)
        assert set(ended) == {r for r in live if r.id == chosen.id}
        assert all(r.finish_reason is FinishReason.ABORT for r in ended)
        assert self.scheduler.abort(chosen.id) == ()

    @precondition(lambda self: self.batch is None)
    @rule()
    def schedule(self) -> None:
        self.batch = self.scheduler.schedule()
        assert (self.batch is not None) == any(not r.is_finished for r in self.requests)
        if self.batch is not None:
            decodes = [
                len(r.output_ids) > 0 and r.state is RequestState.RUNNING
                for r in self.batch.requests
            ]
            assert decodes == sorted(decodes, reverse=True), "a prefill stands before a decode"

    @precondition(lambda self: self.batch is None)
    @rule(num_steps=st.integers(1, 8))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.scheduler.has_work:
                step(self.scheduler, self.device)
                self.accounts_are_right()

    @precondition(lambda self: self.batch is not None)
    @rule(draw=st.data())
    def commit(self, draw: st.DataObject) -> None:
        assert self.batch is not None
        reasons = st.sampled_from([FinishReason.STOP, FinishReason.ERROR])
        rows = st.integers(0, len(self.batch.requests) - 1)
        endings = draw.draw(st.dictionaries(rows, reasons, max_size=1))
        live = [not r.is_finished for r in self.batch.requests]
        tokens = self.device.execute(self.batch)
        finished = self.scheduler.commit(self.batch, tokens, endings)
        for row, reason in endings.items():
            if live[row]:
                assert self.batch.requests[row] in finished
                assert self.batch.requests[row].finish_reason is reason
        self.batch = None

    @invariant()
    def accounts_are_right(self) -> None:
        check_blocks(self.scheduler, self.pool)
        check_queue(self.scheduler, self.requests)
        assert self.scheduler.num_running <= self.max_requests
        prefills = [r.state is RequestState.PREFILL for r in self.scheduler._running]
        assert self.batch is not None or not any(prefills[:-1])

    @invariant()
    def outputs_are_those_of_a_lone_request(self) -> None:
        for request in self.requests:
            expected = complete_alone(request)
            assert request.output_ids == expected[: len(request.output_ids)]
            if request.finish_reason is FinishReason.LENGTH:
                check_complete(self.device, request)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.batch is not None:
            self.scheduler.commit(self.batch, self.device.execute(self.batch))
        run_to_end(self.scheduler, self.device)
        assert self.pool.num_free == self.pool.num_blocks
        assert all(r.is_finished for r in self.requests)
        self.outputs_are_those_of_a_lone_request()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@settings(max_examples=150, deadline=None)
@given(
    block_size=st.integers(1, 4),
    max_tokens=st.integers(1, 12),
    max_requests=st.integers(1, 6),
    shapes=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 20), st.booleans()), min_size=1, max_size=8
    ),
    spare_blocks=st.integers(0, 4),
)
def test_all_requests_finish_in_a_pool_that_just_holds_the_largest(
    block_size: int,
    max_tokens: int,
    max_requests: int,
    shapes: list[tuple[int, int, bool]],
    spare_blocks: int,
) -> None:
    requests = [
        make_request(f"r{i}", num_prompt, limit, wants_prompt_logits=wants)
        for i, (num_prompt, limit, wants) in enumerate(shapes)
    ]
    largest = max(request.max_positions for request in requests)
    scheduler, device = make_pair(
        num_blocks=-(-largest // block_size) + spare_blocks,
        block_size=block_size,
        max_tokens=max_tokens,
        max_requests=max_requests,
    )
    for request in requests:
        scheduler.add(request)
    for _ in range(5000):
        if not scheduler.has_work:
            break
        step(scheduler, device)
        check_blocks(scheduler, device.pool)
        check_queue(scheduler, requests)
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        check_complete(device, request)
    assert device.pool.num_free == device.pool.num_blocks
