"""Inputs of a step of models whose states are paged rows, and what every layer derives from them.

Two pools: pages of `block_tables` live as long as their request, those of `window_tables` until all
their positions are older than the largest window. Both tables are rings of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tilewright.graph import Dim, GraphBuilder, Role, Value
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import F32, I32, ElementType
from tilewright.models.layers import Limits, Rope, Rotary, rotary_frequencies


@dataclass(frozen=True)
class PagedStep:
    """Inputs of one step; tables of slots and angles are made once and shared by all layers."""

    b: GraphBuilder
    token_ids: Value
    positions: Value
    request_rows: Value
    block_tables: Value
    window_tables: Value
    logit_rows: Value
    history_tables: Value
    window_positions: Value
    cache_blocks: Dim
    window_blocks: Dim
    limits: Limits
    made: dict[tuple[object, ...], Value] = field(default_factory=dict, repr=False)
    rotaries: dict[tuple[object, ...], Rotary] = field(default_factory=dict, repr=False)

    def window_operands(self) -> tuple[Value, Value, Value]:
        """Positions, requests and tables of the window pool, as ops take them."""
        return self.window_positions, self.request_rows, self.window_tables

    def history_operands(self) -> tuple[Value, Value, Value]:
        """The same for states that every token of a text writes, also in a tail."""
        return self.positions, self.request_rows, self.history_tables

    def context_operands(self) -> tuple[Value, Value, Value]:
        """Positions, requests and tables of the pool that keeps everything."""
        return self.positions, self.request_rows, self.block_tables

    def window_state(self, name: str, dtype: ElementType, width: int, window: int) -> Value:
        """Declare rows that are read while fewer than `window` positions old."""
        shape = (self.window_blocks, self.limits.window_page, width)
        return self.b.state(name, dtype, *shape, scope="window", window=window)

    def context_state(self, name: str, dtype: ElementType, width: int, ratio: int) -> Value:
        """Declare rows of `ratio` positions each that live as long as their request."""
        shape = (self.cache_blocks, self._entries(ratio), width)
        return self.b.state(name, dtype, *shape, positions_per_entry=ratio)

    def append_window(self, state: Value, rows: Value) -> Value:
        """Store one row a token."""
        return self.b.append(state, rows, self._slots(0), name="append_window", op="append_rows")

    def append_context(self, state: Value, rows: Value, ratio: int) -> Value:
        """Store the row of each token that completes `ratio` positions."""
        slots = self._slots(ratio)
        return self.b.append(state, rows, slots, name="append_entries", op="append_rows")

    def rotary(self, rope: Rope, width: int, *, back: int = 0) -> Rotary:
        """Rotation of the last pairs of `width` columns by the angles of `back` positions before.

        The columns in front have frequency 0: cos is 1 and sin is 0, which changes nothing.
        """
        key = (rope.theta, tuple(sorted(rope.scaling)), width, back)
        if key not in self.rotaries:
            self.rotaries[key] = self._rotary(rope, width, back)
        return self.rotaries[key]

    def _entries(self, ratio: int) -> int:
        page = self.limits.context_page
        if page % ratio:
            raise VerifyError(
                f"setting 'context_page': not a multiple of every ratio: got {page}, "
                f"want a multiple of {ratio}"
            )
        return page // ratio

    def _slots(self, ratio: int) -> Value:
        """Slots in a state of the context pool; ratio 0 stands for the window pool."""
        if ("slots", ratio) not in self.made:
            operands = self.context_operands() if ratio else self.window_operands()
            entries = self._entries(ratio) if ratio else self.limits.window_page
            slots = self.b.op("page_slots", *operands, ratio=max(ratio, 1), entries=entries)
            self.made["slots", ratio] = slots
        return self.made["slots", ratio]

    def _rotary(self, rope: Rope, width: int, back: int) -> Rotary:
        b = self.b
        frequencies, factor = rotary_frequencies(rope)
        if factor != 1.0:
            raise VerifyError(f"rope scaling factor on cos and sin: got {factor}, want 1")
        spread = [f for f in frequencies for _ in range(2)]
        padded = [0.0] * (width - len(spread)) + spread
        name = f"rotary_frequencies.{rope.theta:g}.{width}"
        angle = self._positions(back) * b.literal(name, padded, F32)
        cos, sin = (b.op("split_heads", b.op(fn, angle), num_heads=1) for fn in ("cos", "sin"))
        return Rotary(cos, sin, rope.pairing)

    def _positions(self, back: int) -> Value:
        """Positions `back` before each token's own, fp32 [tokens, 1]."""
        if ("positions", back) not in self.made:
            here = self.b.cast(self.positions, F32)
            moved = here + float(-back) if back else here
            self.made["positions", back] = self.b.op("expand_last", moved)
        return self.made["positions", back]


def declare_paged_step(b: GraphBuilder, limits: Limits, window: int) -> PagedStep:
    """Declare the dims and inputs; `window` is the largest window of a state, in positions."""
    tokens = b.dim("tokens", Role.BATCH, upper=limits.max_tokens)
    requests = b.dim("requests", Role.BATCH, upper=limits.max_requests)
    rows = b.dim("logit_rows", Role.BATCH, lower=0, upper=limits.max_logit_rows)
    pages = -(-limits.max_context // limits.context_page)
    blocks = b.dim("request_blocks", Role.CONTEXT, upper=pages)
    held = -(-(limits.max_tokens + window) // limits.window_page) + 1
    windows = b.dim("request_window_blocks", Role.CONTEXT, upper=held)
    positions = b.input("positions", I32, tokens)
    token_ids, request_rows = (b.input(n, I32, tokens) for n in ("token_ids", "request_rows"))
    window_tables = b.input("window_tables", I32, requests, windows)
    return PagedStep(
        b=b,
        token_ids=token_ids,
        positions=positions,
        request_rows=request_rows,
        block_tables=b.input("block_tables", I32, requests, blocks),
        window_tables=window_tables,
        logit_rows=b.input("logit_rows", I32, rows),
        history_tables=window_tables,
        window_positions=positions,
        cache_blocks=b.dim("cache_blocks", Role.BATCH, upper=limits.max_cache_blocks),
        window_blocks=b.dim("window_blocks", Role.BATCH, upper=limits.max_cache_blocks),
        limits=limits,
    )


def declare_tail(step: PagedStep) -> tuple[PagedStep, Value]:
    """Declare which rows of the step go on (input `tail_rows`), and return the step of these.

    Their windows are counted from the first row of a request that ever went on: its position is 0
    in `tail_window_positions`, and `tail_window_tables` are rings of pages of the window pool by
    those. `logit_rows` then count rows of the tail.
    """
    b, limits = step.b, step.limits
    tail = b.dim("tail", Role.BATCH, lower=0, upper=limits.max_tokens)
    requests, windows = step.window_tables.type.shape
    rows = b.input("tail_rows", I32, tail)
    narrowed = replace(
        step,
        token_ids=b.op("gather_rows", step.token_ids, rows, name="tail_token_ids"),
        positions=b.op("gather_rows", step.positions, rows, name="tail_positions"),
        request_rows=b.op("gather_rows", step.request_rows, rows, name="tail_request_rows"),
        window_tables=b.input("tail_window_tables", I32, requests, windows),
        window_positions=b.input("tail_window_positions", I32, tail),
        made={},
        rotaries={},
    )
    return narrowed, rows


def rotate(
    b: GraphBuilder, rotary: Rotary, x: Value, *, inverse: bool = False, flat: bool = False
) -> Value:
    """Rotate x [tokens, heads, width], or [tokens, width] if `flat`; fp32."""
    x = b.op("split_heads", x, num_heads=1) if flat else x
    turned = b.op("rotate_pairs", x, pairing=rotary.pairing) * rotary.sin
    straight = x * rotary.cos
    y = straight - turned if inverse else straight + turned
    return b.op("merge_heads", y) if flat else y


def inverse_rms(b: GraphBuilder, x: Value, eps: float) -> Value:
    """1 / sqrt(mean(x^2) + eps) over the last axis, kept as an extent of 1."""
    mean = b.op("reduce_sum", b.op("square", x)) * (1.0 / int(x.type.shape[-1]))
    return b.op("rsqrt", mean + eps)


def names_of(prefix: str, count: int, suffix: str) -> Sequence[str]:
    """Names `prefix`.0.`suffix` and so on."""
    return tuple(f"{prefix}.{i}.{suffix}" for i in range(count))
