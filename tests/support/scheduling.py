"""A device that stands in for a model, and checks of batches, blocks and queues."""

from dataclasses import dataclass, field

import numpy as np

from tilewright.runtime.batch import Batch
from tilewright.runtime.blocks import BlockPool
from tilewright.runtime.cache import Cache
from tilewright.runtime.params import SamplingParams
from tilewright.runtime.request import Request
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
