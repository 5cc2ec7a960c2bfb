"""Attention whose keys are its values: one latent row per entry, shared by all heads.

One softmax covers the window (the newest `window` positions, oldest first) and then compressed
entries; a learned sink per head adds to its denominator only. Pages: see pages.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.graph.dims import Dim, product, smaller
from tilewright.graph.ir import Attrs
from tilewright.graph.ops.pages import check_tokens, entry_slots, page_rows, row_bytes, rows_at
from tilewright.graph.ops.registry import Kind, OpDef, Types, floats, register, want
from tilewright.graph.types import F32, I32, TensorType

if TYPE_CHECKING:
    import torch


def _check_window(inputs: Types, attrs: Attrs) -> None:
    q, entries, positions, rows, tables, sink = inputs[:6]
    floats(q, entries, sink)
    want(q.rank == 3, f"queries do not fit: got {q}, want [tokens, heads, width]")
    page_rows(entries, "window")
    want(entries.shape[2] == q.shape[2], f"widths differ: got {entries}, want width {q.shape[2]}")
    check_tokens(positions, rows, tables)
    want(positions.shape[0] == q.shape[0], f"positions do not fit: got {positions}, want {q}")
    want(sink.shape == (q.shape[1],), f"sink does not fit: got {sink}, want [{q.shape[1]}]")
    window = attrs["window"]
    assert isinstance(window, int)
    want(window > 0, f"window is not positive: got {window}, want at least 1")


def _check_compressed(inputs: Types, attrs: Attrs) -> None:
    _check_window(inputs, attrs)
    q, compressed, tables = inputs[0], inputs[6], inputs[7]
    floats(compressed)
    page_rows(compressed, "compressed entries")
    want(compressed.shape[2] == q.shape[2], f"widths differ: got {compressed}, want {q.shape[2]}")
    fits = tables.dtype == I32 and tables.rank == 2
    want(fits, f"tables do not fit: got {tables}, want i32[requests, pages]")


def _infer_window(inputs: Types, attrs: Attrs) -> TensorType:
    _check_window(inputs, attrs)
    return TensorType(F32, inputs[0].shape)


def _infer_all(inputs: Types, attrs: Attrs) -> TensorType:
    _check_compressed(inputs, attrs)
    return TensorType(F32, inputs[0].shape)


def _infer_selected(inputs: Types, attrs: Attrs) -> TensorType:
    _check_compressed(inputs, attrs)
    q, selected = inputs[0], inputs[8]
    fits = selected.dtype == I32 and selected.rank == 2 and selected.shape[0] == q.shape[0]
    want(fits, f"selection does not fit: got {selected}, want i32[tokens, k]")
    return TensorType(F32, q.shape)


def _window_slots(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    _, entries, positions, rows, tables, _ = inputs[:6]
    window = int(str(attrs["window"]))
    back = torch.arange(window - 1, -1, -1, device=positions.device)
    where = (positions[:, None] - back).clamp_min(-1)
    return entry_slots(where, rows, tables, entries.shape[1])


def _mix(
    q: torch.Tensor, keys: torch.Tensor, absent: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax with a sink over keys [tokens, n, width]; an absent entry adds nothing."""
    import torch

    keys = keys.to(q.dtype).masked_fill(absent[..., None], 0.0)
    scores = torch.einsum("thd,tnd->thn", q, keys) * scale
    scores = scores.masked_fill(absent[:, None], -torch.inf)
    column = sink.to(q.dtype)[None, :, None].expand(q.shape[0], -1, 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.einsum("thn,tnd->thd", weights, keys)


def _attend_window(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    q, entries, sink = inputs[0], inputs[1], inputs[5]
    slots = _window_slots(inputs, attrs)
    return _mix(q, rows_at(entries, slots), slots < 0, sink, float(str(attrs["scale"])))


def _attend_entries(
    inputs: Sequence[torch.Tensor], attrs: Attrs, chosen: torch.Tensor
) -> torch.Tensor:
    import torch

    q, entries, rows, sink, compressed, tables = (inputs[i] for i in (0, 1, 3, 5, 6, 7))
    window = _window_slots(inputs, attrs)
    slots = entry_slots(chosen, rows, tables, compressed.shape[1])
    keys = torch.cat((rows_at(entries, window), rows_at(compressed, slots)), 1)
    absent = torch.cat((window, slots), 1) < 0
    return _mix(q, keys, absent, sink, float(str(attrs["scale"])))


def _attend_all(inputs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    import torch

    positions = inputs[2]
    count = (positions + 1) // int(str(attrs["ratio"]))
    most = int(count.max()) if len(count) else 0
    entry = torch.arange(most, device=positions.device).expand(len(positions), -1)
    return _attend_entries(inputs, attrs, entry.where(entry < count[:, None], -1))


def _window_read(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    """Bytes of the windows: what each token reads, or all the tables name if that is less."""
    state, tables = inputs[1], inputs[4]
    read = inputs[0].shape[0] * int(str(attrs["window"]))
    return row_bytes(state) * smaller(read, tables.num_elements * state.shape[1])


def _compressed_read(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    """Bytes of compressed entries: every one of every request, or no more than were selected."""
    state, tables = inputs[6], inputs[7]
    entries = tables.num_elements * state.shape[1]
    read = smaller(inputs[8].num_elements, entries) if len(inputs) == 9 else entries
    return row_bytes(state) * read


def _flops(inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
    count: Dim = int(str(attrs["window"]))
    if len(inputs) == 9:
        count = count + inputs[8].shape[1]
    elif len(inputs) == 8:
        count = count + inputs[7].shape[1] * inputs[6].shape[1]
    return product(output.shape) * 4 * count


_WINDOW = {"scale": float, "window": int}
register(
    OpDef(
        name="attend_window",
        kind=Kind.ATTEND,
        num_inputs=6,
        infer=_infer_window,
        reference=_attend_window,
        flops=_flops,
        touched={1: _window_read},
        attrs=_WINDOW,
        reduced_axes=((), (0, 1), (), (), (), ()),
        doc="Operands: queries, window state, positions, request_rows, window tables, sink.",
    )
)
register(
    OpDef(
        name="attend_compressed",
        kind=Kind.ATTEND,
        num_inputs=8,
        infer=_infer_all,
        reference=_attend_all,
        flops=_flops,
        touched={1: _window_read, 6: _compressed_read},
        attrs={**_WINDOW, "ratio": int},
        reduced_axes=((), (0, 1), (), (), (), (), (0, 1), ()),
        doc="As attend_window, and every entry e < (position + 1) // ratio of a compressed state, "
        "in order. Operands: those of attend_window, compressed state, its tables.",
    )
)
register(
    OpDef(
        name="attend_selected",
        kind=Kind.ATTEND,
        num_inputs=9,
        infer=_infer_selected,
        reference=lambda inputs, attrs: _attend_entries(inputs, attrs, inputs[8]),
        flops=_flops,
        touched={1: _window_read, 6: _compressed_read},
        attrs=_WINDOW,
        reduced_axes=((), (0, 1), (), (), (), (), (0, 1), (), ()),
        doc="As attend_window, and the entries of a compressed state that `selected` [tokens, k] "
        "names, in its order; -1 is none. Operands: those of attend_compressed, selected.",
    )
)
