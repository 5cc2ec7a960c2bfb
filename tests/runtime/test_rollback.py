"""A request that was set back, or resumed from a snapshot, gives the bits of one that never was.

The model is interpreted one token at a time; free memory is poisoned after every step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from support.paged import BLOCK, HCA, VOCAB, Served
from tilewright.runtime.params import SamplingParams
from tilewright.runtime.request import FinishReason, Request


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(request_id: str, num_prompt: int, *, max_tokens: int = 400) -> Request:
    salt = sum(request_id.encode())
    prompt = tuple((salt + 11 * i * i) % VOCAB for i in range(num_prompt))
    return Request(request_id, prompt, SamplingParams(), salt, max_tokens)


class Alone:
    """Logits of an undisturbed request, computed as far as asked for."""

    def __init__(self, request: Request) -> None:
        self.request, self.served = request, Served.of()
        self.served.scheduler.add(request)

    def logits(self, position: int) -> bytes:
        while self.request.num_computed <= position:
            self.served.step()
        return self.served.device.logits[self.request.id, position]

    def token(self, position: int) -> int:
        """The token at a position."""
        self.logits(position)
        return self.request.token_ids(position, position + 1)[0]


@pytest.fixture(scope="module")
def alone() -> Alone:
    torch.set_num_threads(1)
    return Alone(make("a", 21))


def stray(served: Served, request: Request, count: int, r: random.Random) -> None:
    """Let a request go on for `count` tokens that are not its own."""
    for _ in range(count):
        served.step({request.id: r.randrange(VOCAB)})


def check_step(served: Served, request: Request, alone: Alone) -> None:
    """Let a request be computed up to its last token, and take its own next one."""
    position = request.num_tokens - 1
    right = alone.token(position + 1)
    while request.num_computed <= position:
        served.step({request.id: right})
    assert served.device.logits[request.id, position] == alone.logits(position), position


@pytest.mark.parametrize("retained", [6, 0])
def test_set_back_at_many_offsets(alone: Alone, retained: int) -> None:
    """Within what is retained nothing is computed again; beyond it, from the last snapshot."""
    r = random.Random(retained)
    served = Served.of(retained=retained, snapshot_interval=24)
    request, other = make("a", 21), make("b", 5)
    served.scheduler.add(request)
    served.scheduler.add(other)
    while request.num_computed < 21:
        served.step({"a": alone.token(21)})
    while request.num_tokens < 22 + 2 * BLOCK:
        check_step(served, request, alone)
        if r.random() < 0.7:
            continue
        known = request.num_tokens
        stray(served, request, r.randrange(1, 9), r)
        del request.output_ids[known - 21 :]
        position = known - r.randrange(2)
        if position == known:  # as after drafts: the next token came with the last logits
            request.output_ids.append(alone.token(known))
        gone = request.num_computed - position
        served.scheduler.rollback(request, position)
        assert request.num_computed <= position
        assert request.num_computed == position or gone > retained
        served.poison()
        served.check_accounts()
    undisturbed = Alone(make("b", 5))
    for position in range(5, other.num_computed):
        assert served.device.logits["b", position] == undisturbed.logits(position)


def test_resumed_at_every_residue(alone: Alone) -> None:
    """A request that begins with a snapshot of another goes on as if it had computed it all."""
    served = Served.of(snapshot_interval=0)
    request = make("a", 21)
    served.scheduler.add(request)
    while request.num_tokens < 22 + HCA + 3:
        check_step(served, request, alone)
        snapshot = served.scheduler.snapshot(request)
        known = tuple(alone.token(p) for p in range(snapshot.position + 2))
        again = Request("again", known, SamplingParams(), 1, 3, resume=snapshot)
        served.scheduler.add(again)
        first = snapshot.position
        served.step({"a": alone.token(request.num_tokens), "again": alone.token(first + 2)})
        assert again.num_computed == first + 2
        for position in (first, first + 1):
            assert served.device.logits["again", position] == alone.logits(position)
        served.scheduler.drop(snapshot)
        if first % 5 == 0:  # also into the next window and beyond the page
            check_step(served, again, alone)
        served.scheduler.finish(again, FinishReason.STOP)
        served.poison()
        served.check_accounts()


def test_shared_blocks_are_copied_before_they_are_written(alone: Alone) -> None:
    """Three requests leave one snapshot in different directions, twice."""
    served = Served.of(snapshot_interval=0)
    request = make("a", 40)
    served.scheduler.add(request)
    while request.num_computed < 40:
        served.step()
    snapshot = served.scheduler.snapshot(request)
    for round_id in range(2):
        names = [f"{n}{round_id}" for n in "xyz"]
        prompt = request.token_ids(0, 40)
        for i, name in enumerate(names):
            ids = (*prompt, i)
            served.scheduler.add(Request(name, ids, SamplingParams(), 0, 9, resume=snapshot))
        while served.scheduler.num_waiting or served.scheduler.num_running > 1:
            served.step()
            served.check_accounts()
        if round_id == 0:
            first = dict(served.device.logits)
    for (name, position), bits in first.items():
        if name != "a":
            assert served.device.logits[f"{name[0]}1", position] == bits
    fresh = Served.of()
    for i, name in enumerate("xyz"):
        ids = (*request.token_ids(0, 40), i)
        fresh.scheduler.add(Request(f"{name}1", ids, SamplingParams(), 0, 9))
    while fresh.scheduler.has_work:
        fresh.step()
    for (name, position), bits in fresh.device.logits.items():
        if position >= 40:
            assert served.device.logits[name, position] == bits
