"""Scheduling: every token computed once and in order, blocks never mixed up, everybody finishes."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tilewright.runtime.batch import Batch, Span, assemble
from tilewright.runtime.blocks import BlockPool, BlockTable
from tilewright.runtime.cache import Cache
from tilewright.runtime.errors import RequestError
from tilewright.runtime.params import SamplingParams
from tilewright.runtime.request import FinishReason, Request, RequestState
from tilewright.runtime.scheduler import Scheduler


def make_request(
    request_id: str,
    num_prompt: int,
    max_tokens: int,
    *,
    sample_index: int = 0,
    wants_prompt_logits: bool = False,
) -> Request:
    salt = sum(request_id.encode()) * 31 + sample_index
    return Request(
        id=request_id,
        prompt_ids=tuple((salt + 7 * i) % 1009 for i in range(num_prompt)),
        params=SamplingParams(),
        seed=salt,
        max_tokens=max_tokens,
        sample_index=sample_index,
        wants_prompt_logits=wants_prompt_logits,
    )


def next_token(history: list[int]) -> int:
    """Stands in for a model: a token that depends on every token before it and on their order."""
    state = 1
    for token in history:
        state = (state * 131 + token + 1) % 1000003
    return state % 1009


def complete_alone(request: Request) -> list[int]:
    """The whole output of a request that nothing ends early."""
    history = list(request.prompt_ids)
    for _ in range(request.max_tokens):
        history.append(next_token(history))
    return history[len(request.prompt_ids) :]


@dataclass
class Device:
    """Computes batches on a cache of plain slots, so that a wrong slot or table gives wrong tokens.

    It keeps, per request, the positions computed since its last start and the logit rows delivered.
    """

    pool: BlockPool
    max_tokens: int
    cache: dict[int, tuple[Request, int, int]] = field(default_factory=dict)
    computed: dict[Request, int] = field(default_factory=dict)
    preemptions: dict[Request, int] = field(default_factory=dict)
    prompt_logits: dict[Request, list[int]] = field(default_factory=dict)

    def execute(self, batch: Batch) -> list[int]:
        check_layout(batch, self.pool.block_size)
        assert 0 < batch.num_tokens <= self.max_tokens
        for row, request in enumerate(batch.requests):
            self._check_order(batch, row, request)
        for index, slot in enumerate(batch.slots.tolist()):
            request = batch.requests[batch.request_rows[index]]
            self.cache[slot] = (request, int(batch.positions[index]), int(batch.token_ids[index]))
        return [self._logits(batch, index) for index in range(batch.num_logits)]

    def _check_order(self, batch: Batch, row: int, request: Request) -> None:
        """Each position follows the last one computed; only a preemption starts again at 0."""
        start, stop = batch.query_starts[row], batch.query_starts[row + 1]
        if self.preemptions.get(request) != request.num_preemptions:
            self.preemptions[request] = request.num_preemptions
            self.computed[request] = 0
        done = self.computed[request]
        positions = batch.positions[start:stop].tolist()
        assert positions == list(range(done, done + stop - start))
        assert batch.token_ids[start:stop].tolist() == request.token_ids(
            done, done + len(positions)
        )
        self.computed[request] = done + len(positions)
        assert batch.context_lengths[row] == self.computed[request]

    def _logits(self, batch: Batch, index: int) -> int:
        row = batch.logit_requests[index]
        request, position = batch.requests[row], int(batch.positions[batch.logit_rows[index]])
        if request.wants_prompt_logits and position < len(request.prompt_ids):
            self.prompt_logits.setdefault(request, []).append(position)
        assert bool(batch.is_sampled[index]) == (
            position == request.num_tokens - 1 and request.max_tokens > 0
        )
        history, size = [], self.pool.block_size
        for i in range(position + 1):
            slot = int(batch.block_tables[row, i // size]) * size + i % size
            owner, where, token = self.cache[slot]
            assert (owner, where) == (request, i), f"slot {slot} was overwritten"
            history.append(token)
        return next_token(history)


def check_layout(batch: Batch, block_size: int) -> None:
    """Everything that a batch promises by itself."""
    num_requests, num_tokens = len(batch.requests), batch.num_tokens
    assert len(set(batch.requests)) == num_requests
    arrays = [getattr(batch, name) for name in Batch.__slots__ if name != "requests"]
    for array in arrays:
        assert array.flags.c_contiguous
        assert array.dtype == (np.bool_ if array is batch.is_sampled else np.int32)
    assert batch.query_starts[0] == 0 and batch.query_starts[-1] == num_tokens
    counts = np.diff(batch.query_starts)
    assert (counts > 0).all()
    assert batch.request_rows.tolist() == np.repeat(np.arange(num_requests), counts).tolist()
    assert batch.block_tables.shape[0] == num_requests
    assert len(batch.context_lengths) == len(batch.num_to_verify) == num_requests
    blocks = batch.block_tables[batch.request_rows, batch.positions // block_size]
    assert batch.slots.tolist() == (blocks * block_size + batch.positions % block_size).tolist()
    assert len(set(batch.slots.tolist())) == num_tokens
    last = batch.positions[batch.query_starts[1:] - 1]
    assert batch.context_lengths.tolist() == (last + 1).tolist()
    assert (np.diff(batch.logit_rows) > 0).all()
    assert batch.logit_requests.tolist() == batch.request_rows[batch.logit_rows].tolist()
    assert len(batch.is_sampled) == batch.num_logits


def check_blocks(scheduler: Scheduler, pool: BlockPool) -> None:
    """Every block is free or in exactly one table."""
    tables = scheduler._running.values()
    blocks = [block for table in tables for block in table.blocks.blocks.tolist()]
    assert len(blocks) == len(set(blocks)), "a block is in two tables"
    assert sorted(blocks + pool._free) == list(range(pool.num_blocks))


def check_queue(scheduler: Scheduler, requests: list[Request]) -> None:
    """Live requests stand in order of arrival, those that hold blocks first."""
    queue = [*scheduler._running, *scheduler._waiting]
    assert queue == [r for r in requests if not r.is_finished]
    assert all(r.num_computed == 0 for r in scheduler._waiting)


def check_complete(device: Device, request: Request) -> None:
    """A request has the tokens of a lone one, and had each row of its prompt's logits once."""
    assert request.output_ids == complete_alone(request)
    wanted = len(request.prompt_ids) if request.wants_prompt_logits else 0
    assert device.prompt_logits.get(request, []) == list(range(wanted))


def step(scheduler: Scheduler, device: Device) -> Batch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.commit(batch, device.execute(batch))
    return batch


def run_to_end(scheduler: Scheduler, device: Device, limit: int = 5000) -> list[Batch]:
    batches = []
    while scheduler.has_work:
        batches.append(step(scheduler, device))
        assert len(batches) < limit, "the requests do not finish"
    assert scheduler.schedule() is None
    return batches


def make_pair(
    *, num_blocks: int, block_size: int = 4, max_tokens: int, max_requests: int = 8
) -> tuple[Scheduler, Device]:
    pool = BlockPool(num_blocks, block_size)
    scheduler = Scheduler(Cache(pool), max_tokens_per_step=max_tokens, max_requests=max_requests)
    return scheduler, Device(pool, max_tokens)


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


def test_prefill_is_cut_where_the_budget_ends() -> None:
    scheduler, device = make_pair(num_blocks=20, max_tokens=5)
    requests = [make_request("a", 7, 4), make_request("b", 3, 4), make_request("c", 6, 1)]
    scheduler.add(requests[0])
    scheduler.add(requests[1])
    scheduler.add(requests[2])
    batches = run_to_end(scheduler, device)
    cuts = [
        [(r.id, count) for r, count in zip(b.requests, np.diff(b.query_starts), strict=True)]
        for b in batches
    ]
    assert cuts == [
        [("a", 5)],
        [("a", 2), ("b", 3)],
        [("a", 1), ("b", 1), ("c", 3)],
        [("a", 1), ("b", 1), ("c", 3)],
        [("a", 1), ("b", 1)],
    ]
    assert [b.logit_rows.tolist() for b in batches] == [[], [1, 4], [0, 1], [0, 1, 4], [0, 1]]


def test_budget_of_one_token_serves_one_request_at_a_time() -> None:
    scheduler, device = make_pair(num_blocks=20, max_tokens=1)
    requests = [make_request("a", 3, 3), make_request("b", 2, 2)]
    for request in requests:
        scheduler.add(request)
    batches = run_to_end(scheduler, device)
    assert [b.requests[0].id for b in batches] == list("aaaaabbb")
    assert [b.positions.tolist() for b in batches] == [[0], [1], [2], [3], [4], [0], [1], [2]]
    assert [r.output_ids for r in requests] == [complete_alone(r) for r in requests]


def test_batch_of_a_decode_and_a_prefill() -> None:
    scheduler, device = make_pair(num_blocks=8, max_tokens=16)
    first, second = make_request("a", 5, 3), make_request("b", 6, 2)
    scheduler.add(first)
    step(scheduler, device)
    scheduler.add(second)
    batch = step(scheduler, device)
    assert batch.requests == (first, second)
    assert batch.token_ids.tolist() == [first.output_ids[0], *second.prompt_ids]
    assert batch.positions.tolist() == [5, 0, 1, 2, 3, 4, 5]
    assert batch.request_rows.tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert batch.block_tables.tolist() == [[0, 1], [2, 3]]
    assert batch.slots.tolist() == [5, 8, 9, 10, 11, 12, 13]
    assert batch.context_lengths.tolist() == [6, 6]
    assert batch.query_starts.tolist() == [0, 1, 7]
    assert batch.num_to_verify.tolist() == [0, 0]
    assert batch.logit_rows.tolist() == [0, 6]
    assert batch.logit_requests.tolist() == [0, 1]
    assert batch.is_sampled.tolist() == [True, True]


def test_latest_request_is_preempted_and_computed_again() -> None:
    scheduler, device = make_pair(num_blocks=4, block_size=2, max_tokens=16)
    first, second, third = (make_request(name, 3, 5) for name in "abc")
    for request in (first, second, third):
        scheduler.add(request)
    step(scheduler, device)
    assert [r.state for r in (first, second, third)] == [
        RequestState.RUNNING,
        RequestState.RUNNING,
        RequestState.WAITING,
    ]
    step(scheduler, device)
    batch = step(scheduler, device)
    assert batch.requests == (first,)
    assert (second.state, second.num_computed) == (RequestState.WAITING, 0)
    check_queue(scheduler, [first, second, third])
    assert second.output_ids == complete_alone(second)[:2]
    batches = run_to_end(scheduler, device)
    again = next(b for b in batches if second in b.requests)
    assert again.token_ids[:5].tolist() == [*second.prompt_ids, *second.output_ids[:2]]
    assert again.logit_rows[0] == 4
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert [r.output_ids for r in (first, second, third)] == [
        complete_alone(r) for r in (first, second, third)
    ]


def test_request_waits_until_it_can_also_decode() -> None:
    """Else its prefill would be thrown away one step later."""
    scheduler, device = make_pair(num_blocks=3, block_size=2, max_tokens=8)
    first, second = make_request("a", 3, 2), make_request("b", 2, 2)
    scheduler.add(first)
    scheduler.add(second)
    batches = run_to_end(scheduler, device)
    assert [[r.id for r in b.requests] for b in batches] == [["a"], ["a"], ["b"], ["b"]]
    assert second.num_preemptions == 0


def test_prompt_logits_are_delivered_once() -> None:
    scheduler, device = make_pair(num_blocks=5, block_size=2, max_tokens=3)
    first = make_request("a", 2, 8)
    second = make_request("b", 5, 3, wants_prompt_logits=True)
    scheduler.add(first)
    scheduler.add(second)
    batches = run_to_end(scheduler, device)
    assert second.num_preemptions == 1
    assert device.prompt_logits == {second: [0, 1, 2, 3, 4]}
    assert [r.output_ids for r in (first, second)] == [complete_alone(r) for r in (first, second)]
    again = [b.logit_rows.tolist() for b in batches if b.requests == (second,)]
    assert again == [[], [2], [0]]


def test_evaluation_computes_the_prompt_and_samples_nothing() -> None:
    scheduler, device = make_pair(num_blocks=4, max_tokens=3)
    request = make_request("a", 5, 0, wants_prompt_logits=True)
    scheduler.add(request)
    batches = run_to_end(scheduler, device)
    assert [b.logit_rows.tolist() for b in batches] == [[0, 1, 2], [0, 1]]
    assert not any(b.is_sampled.any() for b in batches)
    assert (request.output_ids, request.finish_reason) == ([], FinishReason.LENGTH)


def test_abort_of_a_batch_in_flight_leaves_the_others() -> None:
    scheduler, device = make_pair(num_blocks=8, max_tokens=16)
    first, second = make_request("a", 3, 4), make_request("b", 3, 4)
    scheduler.add(first)
    scheduler.add(second)
    batch = scheduler.schedule()
    assert batch is not None
    tokens = device.execute(batch)
    assert scheduler.abort("a") == (first,)
    replacement = make_request("a", 3, 2)
    scheduler.add(replacement)
    assert scheduler.commit(batch, tokens) == ()
    assert (first.output_ids, first.num_computed) == ([], 0)
    run_to_end(scheduler, device)
    assert second.output_ids == complete_alone(second)
    assert replacement.output_ids == complete_alone(replacement)


def test_endings_keep_the_last_token_except_after_an_error() -> None:
    scheduler, device = make_pair(num_blocks=8, max_tokens=16)
    requests = [make_request(name, 3, 1 if name == "c" else 4) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    batch = scheduler.schedule()
    assert batch is not None
    endings = {0: FinishReason.STOP, 1: FinishReason.ERROR}
    assert scheduler.commit(batch, np.array(device.execute(batch)), endings) == tuple(requests)
    assert [r.finish_reason for r in requests] == [
        FinishReason.STOP,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert [len(r.output_ids) for r in requests] == [1, 0, 1]
    assert all(type(token) is int for r in requests for token in r.output_ids)
    assert not scheduler.has_work and device.pool.num_free == 8


def test_same_calls_give_the_same_batches() -> None:
    runs = []
    for _ in range(2):
        scheduler, device = make_pair(num_blocks=7, block_size=2, max_tokens=4)
        for i, (prompt, limit) in enumerate([(5, 6), (3, 9), (7, 2), (1, 8)]):
            scheduler.add(make_request(f"r{i}", prompt, limit))
        names = [name for name in Batch.__slots__ if name != "requests"]
        runs.append(
            [
                [getattr(batch, name).tobytes() for name in names]
                for batch in run_to_end(scheduler, device)
            ]
        )
    assert runs[0] == runs[1]


def test_several_logit_rows_of_a_request_can_be_verified() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    spans = []
    for name, start, tokens, num_sampled in (("a", 6, [7, 8, 9], 3), ("b", 0, [1, 2], 0)):
        table = BlockTable(pool)
        table.grow(start + len(tokens))
        spans.append(
            Span(
                request=make_request(name, 6, 8),
                table=table,
                start=start,
                token_ids=tokens,
                num_logits=num_sampled,
                num_sampled=num_sampled,
            )
        )
    batch = assemble(spans, block_size=4)
    check_layout(batch, 4)
    assert batch.num_to_verify.tolist() == [2, 0]
    assert batch.logit_rows.tolist() == [0, 1, 2]
    assert batch.logit_requests.tolist() == [0, 0, 0]
    assert batch.is_sampled.all()
    assert batch.slots.tolist() == [6, 7, 8, 12, 13]


def refusal(scheduler: Scheduler, *samples: Request) -> str:
    with pytest.raises(RequestError) as error:
        scheduler.add(*samples)
    return str(error.value)


def test_request_that_can_never_fit_is_refused() -> None:
    scheduler, device = make_pair(num_blocks=3, max_tokens=4)
    assert refusal(scheduler, make_request("a", 10, 4)) == (
        "request 'a': can never fit in the cache: got 10 prompt tokens and max_tokens 4 "
        "(4 blocks of 4 positions), want at most 3 blocks; shorten it or enlarge the cache"
    )
    assert not scheduler.has_work and scheduler.schedule() is None
    request = make_request("a", 10, 3)
    scheduler.add(request)
    run_to_end(scheduler, device)
    assert request.output_ids == complete_alone(request)


def test_id_in_use_is_refused_until_its_request_ends() -> None:
    scheduler, _ = make_pair(num_blocks=30, max_tokens=4)
    samples = [make_request("a", 3, 2, sample_index=i) for i in range(2)]
    scheduler.add(*samples)
    scheduler.finish(samples[0], FinishReason.ERROR)
    assert refusal(scheduler, make_request("a", 3, 2)) == (
        "request 'a': the id is in use: got a second live request, want a distinct id"
    )
    assert scheduler.abort("a") == (samples[1],)
    scheduler.add(make_request("a", 3, 2))
    assert scheduler.num_waiting == 1


def test_samples_are_added_all_or_none() -> None:
    scheduler, _ = make_pair(num_blocks=3, max_tokens=4)
    refusal(scheduler, make_request("a", 3, 2), make_request("a", 30, 2, sample_index=1))
    assert not scheduler.has_work and scheduler.num_waiting == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"max_tokens_per_step": 0, "max_requests": 1},
            "scheduler 'max_tokens_per_step': out of range: got 0, want at least 1",
        ),
        (
            {"max_tokens_per_step": 1, "max_requests": -2},
            "scheduler 'max_requests': out of range: got -2, want at least 1",
        ),
    ],
)
def test_bad_limits_are_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError) as error:
        Scheduler(Cache(BlockPool(4, 4)), **limits)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (0, 1, "request 'a': the prompt is empty: got 0 tokens, want at least 1"),
        (1, -1, "request 'a': max_tokens is negative: got -1, want 0 or more"),
    ],
)
def test_bad_requests_are_refused(num_prompt: int, max_tokens: int, message: str) -> None:
    with pytest.raises(RequestError) as error:
        make_request("a", num_prompt, max_tokens)
    assert str(error.value) == message


def test_steps_must_be_committed_in_turn() -> None:
    scheduler, device = make_pair(num_blocks=8, max_tokens=16)
    scheduler.add(make_request("a", 3, 4))
    batch = scheduler.schedule()
    assert batch is not None
    with pytest.raises(AssertionError, match="the last batch is not committed"):
        scheduler.schedule()
    with pytest.raises(AssertionError, match="0 tokens for 1 logit rows"):
        scheduler.commit(batch, [])
    scheduler.commit(batch, device.execute(batch))
    with pytest.raises(AssertionError, match="not in flight"):
        scheduler.commit(batch, [1])
