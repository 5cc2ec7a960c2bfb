"""Paged rows: where entries of a state stand, their stores, and pooling of pending rows.

A state of rows is `[pages, entries, width]`; a page holds entries * positions_per_entry positions.
Page tables are rings: positions [page * n, ..) stand in page `tables[row, n % tables.shape[1]]`.
Position -1 marks a padding token: nothing is stored for it, and its results mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import Dim, product
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import F32, I32, TensorType

if TYPE_CHECKING:
    import torch


def check_tokens(positions: TensorType, rows: TensorType, tables: TensorType) -> None:
    """Raise ShapeError unless these index one step's tokens."""
    fits = positions.dtype == I32 and positions.rank == 1
    want(fits, f"positions do not fit: got {positions}, want i32[tokens]")
    want(rows == positions, f"request_rows do not fit: got {rows}, want {positions}")
    fits = tables.dtype == I32 and tables.rank == 2
    want(fits, f"tables do not fit: got {tables}, want i32[requests, pages]")


def page_rows(state: TensorType, name: str = "state") -> None:
    """Raise ShapeError unless `state` is paged rows."""
    fits = state.rank == 3 and isinstance(state.shape[1], int)
    want(fits, f"{name} is not paged rows: got {state}, want [pages, entries, width]")


def row_bytes(state: TensorType) -> Dim:
    """Bytes of one entry of a state [pages, entries, width]."""
    return state.with_shape(1, 1, state.shape[2]).num_bytes


def one_entry(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    """Bytes of a table of which each token reads one entry."""
    return 4 * output.shape[0]


def entry_slots(
    entries: torch.Tensor, rows: torch.Tensor, tables: torch.Tensor, per_page: int
) -> torch.Tensor:
    """Return the flat slots of entries [tokens, n] of the requests `rows` [tokens]; -1 stays -1."""
    page = entries.clamp_min(0) // per_page % tables.shape[1]
    slots = tables.long()[rows.long()[:, None], page.long()] * per_page + entries % per_page
    return slots.where(entries >= 0, -1)


def rows_at(state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows [.., width] of a state at slots [..]; slot -1 gives some row.

    One index_select, whose gradient adds rows up without sorting them first.
    """
    flat = state.flatten(0, 1).index_select(0, slots.clamp_min(0).flatten())
    return flat.reshape(*slots.shape, state.shape[2])


def _int(attrs: Attrs, name: str) -> int:
    value = attrs[name]
    assert isinstance(value, int)
    want(value > 0, f"{name} is not positive: got {value}, want at least 1")
    return value


def _infer_page_slots(inputs: Types, attrs: Attrs) -> TensorType:
    check_tokens(*inputs)
    _int(attrs, "ratio"), _int(attrs, "entries")
    return inputs[0]


def _page_slots(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    positions, rows, tables = inputs
    ratio, entries = _int(attrs, "ratio"), _int(attrs, "entries")
    completes = (positions >= 0) & ((positions + 1) % ratio == 0)
    entry = (positions // ratio).where(completes, -1)
    return entry_slots(entry[:, None], rows, tables, entries)[:, 0].int()


register(
    OpDef(
        name="page_slots",
        kind=Kind.ROW,
        num_inputs=3,
        infer=_infer_page_slots,
        reference=_page_slots,
        flops=lambda inputs, output, attrs: 0,
        far=(2,),
        touched={2: lambda inputs, output, attrs: output.num_bytes},
        attrs={"ratio": int, "entries": int},
        doc="Slot of the entry that a token completes (position + 1 a multiple of `ratio`), else "
        "-1. Operands: positions, request_rows, tables; `entries` stand in a page.",
    )
)


def _infer_append_rows(inputs: Types, attrs: Attrs) -> TensorType:
    state, x, slots = inputs
    page_rows(state)
    entries = TensorType(state.dtype, (*x.shape[:1], state.shape[2]))
    want(x == entries, f"entries do not fit the state: got {x}, want {entries}")
    indices = TensorType(I32, x.shape[:1])
    want(slots == indices, f"slots do not fit: got {slots}, want {indices}")
    return state


def _append_rows(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    state, x, slots = inputs
    kept = (slots >= 0).nonzero()[:, 0]
    flat = state.flatten(0, 1).index_put((slots.long()[kept],), x.to(state.dtype)[kept])
    return flat.reshape(state.shape)


register(
    OpDef(
        name="append_rows",
        kind=Kind.STORE,
        num_inputs=3,
        infer=_infer_append_rows,
        reference=_append_rows,
        flops=lambda inputs, output, attrs: 0,
        touched={0: lambda inputs, output, attrs: inputs[1].num_bytes},
        doc="The state with row i of x stored in slot slots[i]; a slot of -1 stores nothing. The "
        "slots of a step are distinct.",
    )
)


def _infer_modulo(inputs: Types, attrs: Attrs) -> TensorType:
    (x,) = inputs
    _int(attrs, "divisor")
    want(x.dtype == I32, f"operand is no index: got {x}, want i32")
    return x


register(
    OpDef(
        name="modulo",
        kind=Kind.ROW,
        num_inputs=1,
        infer=_infer_modulo,
        reference=lambda inputs, attrs: inputs[0] % _int(attrs, "divisor"),
        flops=lambda inputs, output, attrs: 0,
        attrs={"divisor": int},
        doc="x mod divisor, never negative.",
    )
)


def _infer_pool(inputs: Types, attrs: Attrs) -> TensorType:
    values, gates, positions, rows, tables = inputs
    floats(values, gates)
    page_rows(values, "values")
    want(gates == values, f"gates do not fit: got {gates}, want {values}")
    check_tokens(positions, rows, tables)
    _int(attrs, "ratio")
    halves = 2 if attrs["overlap"] else 1
    width = values.shape[2]
    fits = isinstance(width, int) and width % halves == 0
    want(fits, f"rows do not split: got {values}, want an even width")
    return TensorType(F32, (positions.shape[0], width // halves))


def _pool(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    values, gates, positions, rows, tables = inputs
    ratio, overlap = _int(attrs, "ratio"), bool(attrs["overlap"])
    width = values.shape[2] // (2 if overlap else 1)
    result = values.new_zeros(positions.shape[0], width)
    mine = ((positions >= 0) & ((positions + 1) % ratio == 0)).nonzero()[:, 0]
    if not len(mine):
        return result
    count = ratio * (2 if overlap else 1)
    where = positions[mine, None] - torch.arange(count - 1, -1, -1, device=positions.device)
    slots = entry_slots(where.clamp_min(-1), rows[mine], tables, values.shape[1])
    k, g = (rows_at(s, slots) for s in (values, gates))
    if overlap:  # the older half of the slots uses the first series, the newer half the second
        k = torch.cat((k[:, :ratio, :width], k[:, ratio:, width:]), 1)
        g = torch.cat((g[:, :ratio, :width], g[:, ratio:, width:]), 1)
    absent = (slots < 0)[..., None]
    weights = g.masked_fill(absent, -torch.inf).softmax(1)
    pooled = (weights * k.masked_fill(absent, 0.0)).sum(1)
    return result.index_put((mine,), pooled)


def _pooled_rows(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    """Bytes of values or gates: on average a token reads a row, two with overlap."""
    rows = output.shape[0] * (2 if attrs["overlap"] else 1)
    return row_bytes(inputs[0]) * rows


register(
    OpDef(
        name="pool_window",
        kind=Kind.GATHER,
        num_inputs=5,
        infer=_infer_pool,
        reference=_pool,
        flops=lambda inputs, output, attrs: product(output.shape) * 12,
        far=(0, 1, 4),
        touched={0: _pooled_rows, 1: _pooled_rows, 4: one_entry},
        attrs={"ratio": int, "overlap": bool},
        reduced_axes=((0, 1), (0, 1), (), (), ()),
        doc="For a token that completes a window of `ratio` positions: per channel, the softmax of "
        "the gates over the window's rows times the values, oldest row first; other tokens give 0. "
        "With `overlap` the rows of the previous window take part with the first half of the "
        "columns, those of this one with the second. Operands: values, gates, positions, "
        "request_rows, tables.",
    )
)


def _infer_ngram(inputs: Types, attrs: Attrs) -> TensorType:
    history, positions, rows, tables = inputs
    page_rows(history, "history")
    fits = history.dtype == I32 and history.shape[2] == 1
    want(fits, f"history does not fit: got {history}, want i32[pages, entries, 1]")
    check_tokens(positions, rows, tables)
    multipliers, primes = attrs["multipliers"], attrs["primes"]
    assert isinstance(multipliers, tuple) and isinstance(primes, tuple)
    grams = len(multipliers) - 1
    fits = grams > 0 and len(primes) > 0 and len(primes) % grams == 0
    want(fits, f"primes do not fit: got {len(primes)}, want a multiple of {grams} n-gram sizes")
    return TensorType(I32, (positions.shape[0], len(primes)))


def _ngram(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    history, positions, rows, tables = inputs
    multipliers, primes = attrs["multipliers"], attrs["primes"]
    assert isinstance(multipliers, tuple) and isinstance(primes, tuple)
    back = torch.arange(len(multipliers), device=positions.device)
    where = (positions[:, None] - back).clamp_min(-1)
    slots = entry_slots(where, rows, tables, history.shape[1])
    pad = torch.tensor(int(str(attrs["pad"])), device=positions.device)
    ids = history.flatten()[slots.clamp_min(0)].long().where(slots >= 0, pad)
    products = ids * torch.tensor([int(str(m)) for m in multipliers], device=positions.device)
    heads = len(primes) // (len(multipliers) - 1)
    found, offset, mixed = [], 0, products[:, 0]
    for index, prime in enumerate(int(str(p)) for p in primes):
        if index % heads == 0:
            mixed = mixed ^ products[:, index // heads + 1]
        found.append(mixed % prime + offset)
        offset += prime
    return torch.stack(found, 1).int()


def _grams_read(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    multipliers = attrs["multipliers"]
    assert isinstance(multipliers, tuple)
    return row_bytes(inputs[0]) * output.shape[0] * len(multipliers)


register(
    OpDef(
        name="ngram_rows",
        kind=Kind.GATHER,
        num_inputs=4,
        infer=_infer_ngram,
        reference=_ngram,
        flops=lambda inputs, output, attrs: 0,
        far=(0, 3),
        touched={0: _grams_read, 3: one_entry},
        attrs={"multipliers": tuple, "primes": tuple, "pad": int},
        doc="Rows of an n-gram table (Engram): h = id[i] m[0], then h ^= id[i - k] m[k] for k = 1,"
        " 2, ..; each (k + 1)-gram has as many heads as primes share it, row = h mod prime + the "
        "sum of the primes before it. int64; positions before the first count as `pad`.",
    )
)
