"""Selection of compressed entries: index scores of the visible ones, and the largest of them.

score(t, e) = sum_h w[t, h] relu(q[t, h] . key[e]); ties go to the lowest entry. Entry e of a state
with `ratio` positions an entry is visible to position t when e < (t + 1) // ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import Dim, product, smaller
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.pages import check_tokens, entry_slots, page_rows, row_bytes, rows_at
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import I32, TensorType

if TYPE_CHECKING:
    import torch


def _attr(attrs: Attrs, name: str) -> int:
    value = attrs[name]
    assert isinstance(value, int)
    want(value > 0, f"{name} is not positive: got {value}, want at least 1")
    return value


def _infer_select(inputs: Types, attrs: Attrs) -> TensorType:
    q, w, keys, positions, rows, tables = inputs[:6]
    floats(q, w, keys)
    want(q.rank == 3, f"queries do not fit: got {q}, want [tokens, heads, width]")
    want(w.shape == q.shape[:2], f"weights do not fit: got {w}, want [tokens, {q.shape[1]}]")
    page_rows(keys, "keys")
    want(keys.shape[2] == q.shape[2], f"widths differ: got {keys}, want width {q.shape[2]}")
    check_tokens(positions, rows, tables)
    _attr(attrs, "ratio")
    return TensorType(I32, (positions.shape[0], _attr(attrs, "k")))


def _infer_with_blocks(inputs: Types, attrs: Attrs) -> TensorType:
    selected = _infer_select(inputs, attrs)
    _attr(attrs, "block_size")
    return selected.with_shape(selected.shape[0], selected.shape[1] + _attr(attrs, "blocks"))


def _infer_within(inputs: Types, attrs: Attrs) -> TensorType:
    selected, blocks = _infer_select(inputs, attrs), inputs[6]
    _attr(attrs, "block_size")
    fits = blocks.dtype == I32 and blocks.rank == 2 and blocks.shape[0] == selected.shape[0]
    want(fits, f"candidate blocks do not fit: got {blocks}, want i32[tokens, blocks]")
    return selected


def index_scores(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    """Scores [tokens, most visible entries]; -inf where an entry is not visible."""
    import torch

    q, w, keys, positions, rows, tables = inputs[:6]
    count = (positions + 1) // _attr(attrs, "ratio")
    most = int(count.max()) if len(count) else 0
    entry = torch.arange(most, device=positions.device).expand(len(positions), -1)
    entry = entry.where(entry < count[:, None], -1)
    slots = entry_slots(entry, rows, tables, keys.shape[1])
    found = rows_at(keys, slots).to(q.dtype)
    found = found.masked_fill((slots < 0)[..., None], 0.0)
    scores = torch.einsum("th,thn->tn", w, torch.einsum("thd,tnd->thn", q, found).relu())
    return scores.masked_fill(slots < 0, -torch.inf)


def _largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest finite-or-+inf scores, ascending, then -1."""
    import torch

    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    order = order.where(scores.gather(1, order) > -torch.inf, scores.shape[1])
    order = torch.nn.functional.pad(order, (0, k - order.shape[1]), value=scores.shape[1])
    order = order.sort(-1).values
    return order.where(order < scores.shape[1], -1).int()


def _blocks(inputs: Sequence[torch.Tensor], attrs: Attrs, scores: torch.Tensor) -> torch.Tensor:
    """Scores of blocks of entries: the largest of each; +inf for the block of the newest entry."""
    import torch

    size = _attr(attrs, "block_size")
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
    best = padded.reshape(len(padded), padded.shape[1] // size, size).amax(-1)
    newest = (inputs[3] + 1) // _attr(attrs, "ratio") - 1
    mine = (newest >= 0).nonzero()[:, 0]
    best[mine, (newest[mine] // size).long()] = torch.inf
    return best


def _candidates(inputs: Sequence[torch.Tensor], attrs: Attrs, scores: torch.Tensor) -> torch.Tensor:
    """Scores of the entries of candidate blocks, -inf for others."""
    import torch

    blocks, size = inputs[6], _attr(attrs, "block_size")
    width = -(-scores.shape[1] // size)
    allowed = torch.zeros(len(scores), width + 1, dtype=torch.bool, device=scores.device)
    known = (blocks >= 0) & (blocks < width)
    allowed.scatter_(1, blocks.long().where(known, width), True)  # the last column is for no block
    seen = allowed[:, :width].repeat_interleave(size, 1)[:, : scores.shape[1]]
    return scores.masked_fill(~seen, -torch.inf)


def choices(inputs: Sequence[torch.Tensor], attrs: Attrs) -> tuple[tuple[torch.Tensor, int], ...]:
    """What a selection chooses among: scores [tokens, n], and how many; one after the other."""
    scores, k = index_scores(inputs, attrs), _attr(attrs, "k")
    if "blocks" in attrs:
        return (scores, k), (_blocks(inputs, attrs, scores), _attr(attrs, "blocks"))
    return ((_candidates(inputs, attrs, scores) if len(inputs) == 7 else scores, k),)


def _select(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    return torch.cat([_largest(scores, k) for scores, k in choices(inputs, attrs)], 1)


def _keys_read(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    """Bytes of every key of every request, read once."""
    keys, tables = inputs[2], inputs[5]
    return row_bytes(keys) * tables.num_elements * keys.shape[1]


def _candidates_read(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    """Bytes of the keys of candidate blocks, or of all if that is less."""
    keys, tables = inputs[2], inputs[5]
    read = inputs[6].num_elements * _attr(attrs, "block_size")
    return row_bytes(keys) * smaller(read, tables.num_elements * keys.shape[1])


def _flops(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    q, keys, tables = inputs[0], inputs[2], inputs[5]
    return product(q.shape) * 2 * tables.shape[1] * keys.shape[1]


_ATTRS = {"k": int, "ratio": int}
_REDUCED = ((1, 2), (1,), (2,), (), (), ())
register(
    OpDef(
        name="select_entries",
        kind=Kind.SELECT,
        num_inputs=6,
        infer=_infer_select,
        reference=_select,
        flops=_flops,
        touched={2: _keys_read},
        attrs=_ATTRS,
        reduced_axes=_REDUCED,
        doc="The k visible entries of largest score, ascending by entry, then -1. Operands: q "
        "[tokens, heads, width], w [tokens, heads], key state, positions, request_rows, tables.",
    )
)
register(
    OpDef(
        name="select_with_blocks",
        kind=Kind.SELECT,
        num_inputs=6,
        infer=_infer_with_blocks,
        reference=_select,
        flops=_flops,
        touched={2: _keys_read},
        attrs={**_ATTRS, "blocks": int, "block_size": int},
        reduced_axes=_REDUCED,
        doc="[tokens, k + blocks]: select_entries, then the `blocks` blocks of `block_size` entries"
        " with the largest maximum, ascending, then -1; the block of the newest entry is in.",
    )
)
register(
    OpDef(
        name="select_within",
        kind=Kind.SELECT,
        num_inputs=7,
        infer=_infer_within,
        reference=_select,
        flops=_flops,
        touched={2: _candidates_read},
        attrs={**_ATTRS, "block_size": int},
        reduced_axes=(*_REDUCED, ()),
        doc="select_entries among entries of candidate blocks [tokens, blocks]; -1 is no block.",
    )
)
