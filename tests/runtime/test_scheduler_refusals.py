"""What the scheduler refuses: requests that can never fit, names in use, bad limits."""

import pytest

from support.scheduling import (
    complete_alone,
    make_pair,
    make_request,
    run_to_end,
)
from tilewright.runtime.blocks import BlockPool
from tilewright.runtime.cache import Cache
from tilewright.runtime.errors import RequestError
from tilewright.runtime.request import FinishReason, Request
from tilewright.runtime.scheduler import Scheduler


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
