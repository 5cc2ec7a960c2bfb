"""Scheduling, case by case: cuts of prompts, preemption, logit rows, endings."""

import numpy as np

from support.scheduling import (
    check_layout,
    check_queue,
    complete_alone,
    make_pair,
    make_request,
    run_to_end,
    step,
)
from tilewright.runtime.batch import Batch, Span, assemble
from tilewright.runtime.blocks import BlockPool, BlockTable
from tilewright.runtime.request import FinishReason, RequestState


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
