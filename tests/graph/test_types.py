"""Tensor types: text, bytes of storage, broadcasting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.graph.dims import evaluate, symbol
from tilewright.graph.errors import ShapeError
from tilewright.graph.text import parse_type
from tilewright.graph.types import BF16, BLOCK_FORMATS, DTYPES, F32, TensorType, broadcast, dtype

shapes = st.lists(st.sampled_from([1, 2, 3, 5]), max_size=4).map(tuple)


@pytest.mark.parametrize("element", [*DTYPES.values(), *BLOCK_FORMATS.values()], ids=str)
def test_text_round_trip(element: object) -> None:
    type_ = TensorType(element, (symbol("t") + 1, 64))  # type: ignore[arg-type]
    assert parse_type(str(type_)) == type_


@pytest.mark.parametrize(
    ("type_", "num_bytes"),
    [
        (TensorType(BF16, (3, 5)), 30),
        (TensorType(dtype("u4"), (3, 1)), 2),
        (TensorType(BLOCK_FORMATS["q4_1[g=32,axis=1,scale=f16]"], (576, 576)), 576 * 18 * 20),
        (TensorType(BLOCK_FORMATS["q8_0[g=32,axis=1,scale=f16]"], (2, 64)), 2 * 2 * 34),
        (TensorType(BLOCK_FORMATS["fp8_e4m3[block=128x128,scale=ue8m0]"], (256, 128)), 32770),
    ],
)
def test_bytes_of_storage(type_: TensorType, num_bytes: int) -> None:
    assert type_.num_bytes == num_bytes


@given(st.integers(0, 99))
def test_bytes_of_a_symbolic_extent(n: int) -> None:
    type_ = TensorType(dtype("u4"), (symbol("t"), 3))
    assert evaluate(type_.num_bytes, {"t": n}) == (3 * n + 1) // 2


@given(shapes, shapes)
def test_broadcast_equals_torch(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    try:
        expected = tuple(torch.broadcast_shapes(a, b))
    except RuntimeError:
        with pytest.raises(ShapeError):
            broadcast(a, b)
        return
    assert broadcast(a, b) == expected


def test_messages() -> None:
    with pytest.raises(ShapeError) as error:
        dtype("float")
    assert str(error.value) == f"dtype 'float': unknown: have {', '.join(DTYPES)}"
    with pytest.raises(ShapeError) as error:
        broadcast((2, 3), (symbol("t"), 3))
    assert str(error.value) == "shapes do not broadcast: got [t, 3], want a shape that fits [2, 3]"
    with pytest.raises(ShapeError) as error:
        parse_type("f32")
    assert str(error.value) == "type 'f32': malformed: want an element type and [dims]"
    assert F32.is_float and not DTYPES["ue8m0"].is_float
