"""Steps that device checks are made of: one request or several, in any cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.runtime.executor import Executor
from tilewright.tools.bench_engine import Step


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of one request: its token ids, the first position, its cache blocks."""

    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]


def step_of(parts: Sequence[Part], block_size: int) -> Step:
    """Lay out parts of different requests as one step, with the logits of every token."""
    counts = [len(p.token_ids) for p in parts]
    width = max(-(-(p.start + len(p.token_ids)) // block_size) for p in parts)
    tables = np.zeros((len(parts), width), np.int32)
    slots = []
    for row, part in enumerate(parts):
        used = -(-(part.start + len(part.token_ids)) // block_size)
        tables[row, :used] = part.blocks[:used]
        places = np.arange(part.start, part.start + len(part.token_ids))
        slots.append(tables[row, places // block_size] * block_size + places % block_size)
    n = sum(counts)
    starts = [np.arange(p.start, p.start + len(p.token_ids), dtype=np.int32) for p in parts]
    inputs = {
        "token_ids": np.array([t for p in parts for t in p.token_ids], np.int32),
        "positions": np.concatenate(starts),
        "request_rows": np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        "slots": np.concatenate(slots).astype(np.int32),
        "block_tables": tables,
        "logit_rows": np.arange(n, dtype=np.int32),
    }
    dims = {"tokens": n, "requests": len(parts), "logit_rows": n, "request_blocks": width}
    return Step(inputs, dims)


def logits_in_cuts(
    executor: Executor, token_ids: Sequence[int], cuts: Sequence[int], *, block_size: int
) -> bytes:
    """Logits of every position of one request, its prompt cut before each of `cuts`."""
    blocks = tuple((5 * i + 3) % 64 for i in range(64))
    found = []
    for start, stop in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
        step = step_of([Part(tuple(token_ids[start:stop]), start, blocks)], block_size)
        found.append(executor.run(step.inputs, step.dims)["logits"].tobytes())
    return b"".join(found)


def logits_in_company(
    executor: Executor, token_ids: Sequence[int], others: Sequence[int], *, block_size: int,
    num_prefilled: int, at: int,
) -> bytes:  # fmt: skip
    """Logits of one request as row `at` among others of other lengths, decoding token by token."""
    parts = []
    lengths = [*others[:at], num_prefilled, *others[at:]]
    num_decoded = len(token_ids) - num_prefilled
    width = -(-(max(lengths) + num_decoded) // block_size)
    for row, length in enumerate(lengths):
        ids = token_ids
        if row != at:
            ids = [(7 * t + row) % 1000 for t in range(length + num_decoded)]
        blocks = tuple(range(row * width + width, row * width, -1))  # block 0 is nobody's
        for start in range(0, length, 16):
            part = Part(tuple(ids[start : min(start + 16, length)]), start, blocks)
            step = step_of([part], block_size)
            executor.run(step.inputs, step.dims)
        parts.append((ids, length, blocks))
    found = []
    for i in range(num_decoded):
        rows = [Part((ids[n + i],), n + i, blocks) for ids, n, blocks in parts]
        step = step_of(rows, block_size)
        found.append(executor.run(step.inputs, step.dims)["logits"][at].tobytes())
    return b"".join(found)
