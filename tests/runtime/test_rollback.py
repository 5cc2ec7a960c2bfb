"""A request that was set back, or resumed from a snapshot, gives the bits of one that never was.

Compiled kernels; memory that nobody holds is poisoned after every step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from support.paged import BLOCK, HCA, MOST, VOCAB, Served, build_paged
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.devices.cpu import CpuDevice
from tilewright.runtime.executor import Executor
from tilewright.runtime.params import SamplingParams
from tilewright.runtime.request import FinishReason, Request

pytestmark = pytest.mark.cpu
PROMPT, LENGTH = 21, 21 + 256 + 40


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[Executor]:
    folder = tmp_path_factory.mktemp("paged") / "artifact"
    build_paged(folder, kernel_cache)
    with Executor(load_artifact(folder), CpuDevice(1), poison=True) as found:
        yield found


def make(request_id: str, num_prompt: int, *, max_tokens: int = 1500) -> Request:
    salt = sum(request_id.encode())
    prompt = tuple((salt + 11 * i * i) % VOCAB for i in range(num_prompt))
    return Request(request_id, prompt, SamplingParams(), salt, max_tokens)


@dataclass(frozen=True)
class Alone:
    """The tokens of an undisturbed request, and the bits of the logits after each."""

    tokens: list[int]
    logits: dict[int, bytes]

    @classmethod
    def of(cls, executor: Executor, request: Request, length: int) -> Alone:
        served = Served.of(executor=executor)
        served.scheduler.add(request)
        while request.num_tokens <= length:
            served.step()
        found = {position: bits for (_, position), bits in served.device.logits.items()}
        return cls(request.token_ids(0, length + 1), found)


@pytest.fixture(scope="module")
def alone(executor: Executor) -> Alone:
    return Alone.of(executor, make("a", PROMPT), LENGTH)


def stray(served: Served, request: Request, count: int, r: random.Random) -> None:
    """Let a request go on for `count` tokens that are not its own."""
    for _ in range(count):
        served.step({request.id: r.randrange(VOCAB)})


def check_step(served: Served, request: Request, alone: Alone) -> None:
    """Let a request be computed up to its last token, and take its own next one."""
    position = request.num_tokens - 1
    while request.num_computed <= position:
        served.step({request.id: alone.tokens[position + 1]})
    assert served.device.logits[request.id, position] == alone.logits[position], position


def test_compiled_and_interpreted_agree(executor: Executor) -> None:
    torch.set_num_threads(1)
    logits = []
    for served in (Served.of(executor=executor), Served.of()):
        request = make("a", 40, max_tokens=8)
        served.scheduler.add(request)
        while served.scheduler.has_work:
            served.step()
        rows = [served.device.logits["a", p] for p in range(39, 47)]
        logits.append(np.frombuffer(b"".join(rows), np.float32))
    assert abs(logits[0] - logits[1]).max() < 1e-5 * abs(logits[1]).max()


@pytest.mark.parametrize(("retained", "most_strays"), [(6, 5), (0, 5), (3, 70)])
def test_set_back_at_every_offset_of_256(
    executor: Executor, alone: Alone, retained: int, most_strays: int
) -> None:
    """Within what is retained nothing is computed again; beyond it, from the last snapshot."""
    r = random.Random(retained + most_strays)
    undisturbed = Alone.of(executor, make("b", 5), 1200)
    served = Served.of(executor=executor, retained=retained, snapshot_interval=24)
    request, other = make("a", PROMPT), make("b", 5)
    served.scheduler.add(request)
    served.scheduler.add(other)
    while request.num_computed < PROMPT:
        served.step({"a": alone.tokens[PROMPT]})
    offsets = set()
    while request.num_tokens < PROMPT + 256 + 2 and len(offsets) < 256:
        check_step(served, request, alone)
        known = request.num_tokens
        if most_strays > 8 and r.random() < 0.85:
            continue
        stray(served, request, r.randrange(1, most_strays), r)
        del request.output_ids[known - PROMPT :]
        position = known - 1 if (known - 1) % 256 not in offsets else known - r.randrange(2)
        if position == known:  # as after drafts: the next token came with the last logits
            request.output_ids.append(alone.tokens[known])
        gone = request.num_computed - position
        served.scheduler.rollback(request, position)
        assert request.num_computed <= position
        assert request.num_computed == position or gone > retained
        offsets.add(position % 256)
        served.poison()
        served.check_accounts()
    assert len(offsets) == 256 or most_strays > 8
    for position in range(5, min(other.num_computed, 1200)):
        assert served.device.logits["b", position] == undisturbed.logits[position]


def test_set_back_into_the_prompt(executor: Executor, alone: Alone) -> None:
    """Also while it is being prefilled, and with others that run beside it."""
    served = Served.of(executor=executor, retained=0, snapshot_interval=8)
    request, other = make("a", PROMPT), make("b", 60)
    served.scheduler.add(request)
    for position in (16, 9, 3, 0, 15):
        served.step({"a": alone.tokens[PROMPT]})
        request.output_ids.clear()
        served.scheduler.rollback(request, min(position, request.num_computed))
        served.poison()
        if position == 9:
            served.scheduler.add(other)
        served.check_accounts()
    while request.num_tokens < PROMPT + 30:
        check_step(served, request, alone)


def test_resumed_at_every_residue(executor: Executor, alone: Alone) -> None:
    """A request that begins with a snapshot of another goes on as if it had computed it all."""
    served = Served.of(executor=executor, snapshot_interval=0)
    request = make("a", PROMPT)
    served.scheduler.add(request)
    residues = set()
    while request.num_tokens < PROMPT + 2 * HCA + 3:
        check_step(served, request, alone)
        snapshot = served.scheduler.snapshot(request)
        first = snapshot.position
        residues.add(first % HCA)
        again = Request("again", tuple(alone.tokens[: first + 2]), SamplingParams(), 1, 9,
                        resume=snapshot)  # fmt: skip
        served.scheduler.add(again)
        served.step({"a": alone.tokens[request.num_tokens], "again": alone.tokens[first + 2]})
        assert again.num_computed == first + 2
        assert served.device.logits["again", first + 1] == alone.logits[first + 1]
        served.scheduler.drop(snapshot)
        for more in range(first + 2, first + 6):
            served.step({"again": alone.tokens[more + 1]})
            assert served.device.logits["again", more] == alone.logits[more]
        served.scheduler.finish(again, FinishReason.STOP)
        del request.output_ids[first + 1 - PROMPT :]
        served.scheduler.rollback(request, first)
        served.poison()
        served.check_accounts()
    assert len(residues) == HCA
    assert LENGTH > 256 + HCA


def test_shared_blocks_are_copied_before_they_are_written(executor: Executor) -> None:
    """Three requests leave one snapshot in different directions, twice; so does its owner."""
    served = Served.of(executor=executor, snapshot_interval=0)
    request = make("a", 40)
    served.scheduler.add(request)
    while request.num_computed < 40:
        served.step()
    snapshot = served.scheduler.snapshot(request)
    prompts = {name: (*request.token_ids(0, 40), i) for i, name in enumerate("xyz")}
    for round_id in range(2):
        for name, ids in prompts.items():
            served.scheduler.add(
                Request(f"{name}{round_id}", ids, SamplingParams(), 0, 40, resume=snapshot)
            )
        while served.scheduler.num_waiting or served.scheduler.num_running > 1:
            served.step()
            served.check_accounts()
    shared = dict(served.device.logits)
    fresh = Served.of(executor=executor)
    fresh.scheduler.add(make("a", 40, max_tokens=60))
    for name, ids in prompts.items():
        fresh.scheduler.add(Request(f"{name}1", ids, SamplingParams(), 0, 40))
    while fresh.scheduler.has_work:
        fresh.step()
    for (name, position), bits in fresh.device.logits.items():
        assert shared[name, position] == bits
        assert shared[name.replace("1", "0"), position] == bits


def test_cuts_and_company_change_no_bit(executor: Executor, alone: Alone) -> None:
    """The pools are small and steps are short: pages move, requests are preempted."""
    served = Served.of(executor=executor, blocks=7, pages=24, most=5, retained=2)
    requests = [make("a", PROMPT, max_tokens=60), *(make(n, 30, max_tokens=50) for n in "bcd")]
    for request in requests:
        served.scheduler.add(request)
    while served.scheduler.has_work:
        served.step()
        served.check_accounts()
    assert sum(r.num_preemptions for r in requests) > 0
    for position in range(PROMPT, PROMPT + 50):
        assert served.device.logits["a", position] == alone.logits[position]
    assert requests[0].output_ids == alone.tokens[PROMPT : PROMPT + 60]
    assert BLOCK * 7 < sum(r.num_tokens for r in requests) and MOST > 5
