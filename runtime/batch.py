"""What one step computes, complete when constructed: tokens, cache slots, wanted logits.

Prefill, decode and verification of drafts are the same record with other counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.blocks import BlockTable
from tilewright.runtime.request import Request
from tilewright.runtime.window import WindowTable

Ints = NDArray[np.int32]


class Span(NamedTuple):
    """Consecutive positions of one request to compute in a step, from position `start`.

    Logits are wanted of the last `num_logits` rows, and of these the last `num_sampled` decide
    tokens: 1 for a plain step, more where drafts are verified, 0 inside a prompt. `windows`: the
    window table, then that of the tail.
    """

    request: Request
    table: BlockTable
    start: int
    token_ids: Sequence[int]
    num_logits: int
    num_sampled: int
    windows: tuple[WindowTable, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """One step. All arrays are contiguous int32 except `is_sampled`.

    requests        the requests, one per row below
    token_ids       [tokens], requests one after the other
    positions       [tokens] position of each token in its request
    request_rows    [tokens] row in `block_tables` of each token
    slots           [tokens] cache slot that each token's K and V are written to; no two equal
    block_tables    [requests, most blocks of a request], padded with 0
    window_tables   [requests, pages of a ring]; no columns where no state is of scope window
    tail_starts     [requests] the first position of the tail, 0 where all layers run all tokens
    tail_window_tables  like window_tables, by positions counted from the tail's start
    context_lengths [requests] positions in the cache after this step
    query_starts    [requests + 1] where each request's tokens start
    num_to_verify   [requests] drafts among the tokens, the last ones of a request
    logit_rows      [logits] index into the tokens of each row whose logits are wanted, ascending
    logit_requests  [logits] row in `requests` that each belongs to
    is_sampled      [logits] bool: the row decides a token; the others are prompt logits
    """

    requests: tuple[Request, ...]
    token_ids: Ints
    positions: Ints
    request_rows: Ints
    slots: Ints
    block_tables: Ints
    window_tables: Ints
    tail_starts: Ints
    tail_window_tables: Ints
    context_lengths: Ints
    query_starts: Ints
    num_to_verify: Ints
    logit_rows: Ints
    logit_requests: Ints
    is_sampled: NDArray[np.bool_]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_logits(self) -> int:
        return len(self.logit_rows)


def assemble(spans: Sequence[Span], *, block_size: int) -> Batch:
    """Lay out spans, at least one and each of another request, as one batch.

    The tables must already hold every position of their spans.
    """
    assert spans, "a batch of no spans"
    for span in spans:
        _check(span, block_size)
    starts = _ints([span.start for span in spans])
    counts = _ints([len(span.token_ids) for span in spans])
    num_sampled = _ints([span.num_sampled for span in spans])
    query_starts, request_rows, positions = _place_tokens(starts, counts)
    logit_rows, logit_requests, is_sampled = _place_logits(spans, query_starts, num_sampled)
    tables = _stack_tables(spans)
    return Batch(
        requests=tuple([span.request for span in spans]),
        token_ids=_ints([token for span in spans for token in span.token_ids]),
        positions=positions,
        request_rows=request_rows,
        slots=tables[request_rows, positions // block_size] * block_size + positions % block_size,
        block_tables=tables,
        window_tables=_stack_rings(spans, 0),
        tail_starts=_ints([s.windows[1].offset if len(s.windows) > 1 else 0 for s in spans]),
        tail_window_tables=_stack_rings(spans, 1),
        context_lengths=starts + counts,
        query_starts=query_starts,
        num_to_verify=np.maximum(num_sampled - 1, 0),
        logit_rows=logit_rows,
        logit_requests=logit_requests,
        is_sampled=is_sampled,
    )


def _check(span: Span, block_size: int) -> None:
    num_rows, num_slots = len(span.token_ids), span.table.num_blocks * block_size
    assert 0 <= span.num_sampled <= span.num_logits <= num_rows > 0, (
        f"request '{span.request.id}': {span.num_sampled} sampled of {span.num_logits} wanted "
        f"of {num_rows} rows"
    )
    assert span.start + num_rows <= num_slots, (
        f"request '{span.request.id}': {num_rows} rows from position {span.start} in a table of "
        f"{num_slots} positions"
    )
    for window in span.windows:
        assert span.start + num_rows <= window.room(0), (
            f"request '{span.request.id}': {num_rows} rows from position {span.start} in window "
            f"pages of positions up to {window.room(0)}"
        )


def _place_tokens(starts: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
    """Query starts, and the request row and the position of each token."""
    offsets = _offsets(counts)
    rows = np.arange(len(starts), dtype=np.int32)
    if offsets[-1] == len(starts):  # one token each: every step of a pure decode
        return offsets, rows, starts
    return offsets, rows.repeat(counts), _spread(starts, counts, offsets)


def _place_logits(
    spans: Sequence[Span], query_starts: Ints, num_sampled: Ints
) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Token and request row of each row of logits, and whether it is sampled."""
    rows = np.arange(len(spans), dtype=np.int32)
    if all([span.num_logits == 1 for span in spans]):
        return query_starts[1:] - 1, rows, num_sampled > 0
    counts = _ints([span.num_logits for span in spans])
    rank = _spread(-counts, counts, _offsets(counts))  # -1 is the last row of its request
    logit_rows = rank + query_starts[1:].repeat(counts)
    return logit_rows, rows.repeat(counts), rank >= -num_sampled.repeat(counts)


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int32)


def _offsets(counts: Ints) -> Ints:
    """Prefix sums with a leading 0."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    counts.cumsum(out=offsets[1:])
    return offsets


def _spread(firsts: Ints, counts: Ints, offsets: Ints) -> Ints:
    """Concatenate the ranges firsts[i], firsts[i] + 1, ... of counts[i] numbers each."""
    ramp: Ints = np.arange(offsets[-1], dtype=np.int32)
    ramp += (firsts - offsets[:-1]).repeat(counts)
    return ramp


def _stack_tables(spans: Sequence[Span]) -> Ints:
    """Block tables below each other, padded with block 0."""
    blocks = [span.table.blocks for span in spans]
    tables = np.zeros((len(spans), max([len(ids) for ids in blocks])), np.int32)
    for row, ids in enumerate(blocks):
        tables[row, : len(ids)] = ids
    return tables


def _stack_rings(spans: Sequence[Span], index: int) -> Ints:
    """Rings of window pages below each other."""
    rings = [span.windows[index].ring for span in spans if len(span.windows) > index]
    assert len(rings) in (0, len(spans)), f"{len(rings)} window tables for {len(spans)} spans"
    return np.array(rings, np.int32) if rings else np.zeros((len(spans), 0), np.int32)
