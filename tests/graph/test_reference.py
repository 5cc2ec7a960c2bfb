"""The reference interpreter: rounding at casts or not, gradients, freed values, missing tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright.graph import Graph, GraphBuilder, Node, Role
from tilewright.graph.errors import VerifyError
from tilewright.graph.reference import HONOUR_CASTS, IDEAL_F32, IDEAL_F64, run
from tilewright.graph.types import BF16, F32, I32


def attention_block() -> Graph:
    b = GraphBuilder("block")
    t, r, blocks = (b.dim(n, Role.BATCH) for n in ("t", "r", "blocks"))
    x, slots = b.input("x", F32, t, 4), b.input("slots", I32, t)
    positions, rows = b.input("positions", I32, t), b.input("rows", I32, t)
    tables = b.input("tables", I32, r, 2)
    cache = b.state("kv", BF16, blocks, 1, 2, 2)
    h = b.cast(b.rms_norm(x, b.weight("norm", F32, 4), eps=1e-5), BF16)
    q = b.cast(b.op("split_heads", b.linear(h, b.weight("wq", F32, 4, 4)), num_heads=2), BF16)
    k = b.cast(b.op("split_heads", b.linear(h, b.weight("wk", F32, 2, 4)), num_heads=1), BF16)
    kv = b.append(cache, k, slots)
    mixed = b.op("attend", q, kv, kv, positions, rows, tables, scale=0.7)
    b.output("out", b.silu(x + b.op("merge_heads", mixed)))
    return b.build()


def tensors(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)

    def ints(*values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return {
        "inputs": {
            "x": torch.randn(3, 4, dtype=torch.float64), "slots": ints(6, 7, 0),
            "positions": ints(0, 1, 2), "rows": ints(0, 0, 0), "tables": ints([3, 0]),
        },
        "states": {"kv": torch.randn(4, 1, 2, 2, dtype=torch.float64)},
        "weights": {
            "norm": torch.randn(4, dtype=torch.float64),
            "wq": torch.randn(4, 4, dtype=torch.float64),
            "wk": torch.randn(2, 4, dtype=torch.float64),
        },
    }


def test_gradients_agree_with_differences() -> None:
    graph, given = attention_block(), tensors()
    names = ("norm", "wq", "wk")

    def outputs(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = run(
            graph, {**given["inputs"], "x": x}, states=given["states"],
            weights=dict(zip(names, weights, strict=True)),
        )
        return result.outputs["out"], result.states["kv"]

    operands = [given["inputs"]["x"], *(given["weights"][n] for n in names)]
    assert torch.autograd.gradcheck(outputs, [o.clone().requires_grad_() for o in operands])


def test_casts_round_only_where_honoured() -> None:
    b = GraphBuilder("casts")
    t = b.dim("t", Role.BATCH)
    x, n = b.input("x", F32, t), b.input("n", I32, t)
    b.output("rounded", b.cast(x, BF16))
    b.output("float", b.cast(n, F32))
    graph = b.build()
    inputs = {
        "x": torch.tensor([1.0 + 2**-9, 3.0]), "n": torch.tensor([7, 2**20 + 1], dtype=torch.int32)
    }
    for precision in (IDEAL_F64, IDEAL_F32, HONOUR_CASTS):
        result = run(graph, inputs, states={}, weights={}, precision=precision).outputs
        assert {v.dtype for v in result.values()} == {precision.dtype}
        first = 1.0 if precision.honour_casts else 1.0 + 2**-9
        assert result["rounded"].tolist() == [first, 3.0]
        assert result["float"].tolist() == [7.0, 2.0**20 + 1]


def test_precisions_agree_within_their_rounding() -> None:
    graph, given = attention_block(), tensors()
    ideal = run(graph, **given).outputs["out"]
    single = run(graph, **given, precision=IDEAL_F32).outputs["out"].double()
    honoured = run(graph, **given, precision=HONOUR_CASTS).outputs["out"].double()
    torch.testing.assert_close(single, ideal, rtol=1e-5, atol=1e-5)
    assert 1e-5 < (honoured - ideal).abs().max() < 0.05


def test_next_state_holds_what_was_appended_and_all_else() -> None:
    graph, given = attention_block(), tensors()
    result = run(graph, **given, keep_values=True)
    after, before = result.states["kv"], given["states"]["kv"]
    stored = result.values["cast_2"]
    assert torch.equal(after[3, :, 0], stored[0]) and torch.equal(after[3, :, 1], stored[1])
    assert torch.equal(after[0, :, 0], stored[2])
    assert torch.equal(after[[0]][:, :, 1], before[[0]][:, :, 1])
    assert torch.equal(after[1:3], before[1:3])


def test_observer_sees_every_node_and_values_are_freed() -> None:
    graph, seen = attention_block(), []

    def observe(node: Node, value: torch.Tensor) -> None:
        seen.append(node.name)

    result = run(graph, **tensors(), observe=observe)
    assert seen == [n.name for n in graph.nodes]
    assert result.values == {}


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("inputs", "slots", "input 'slots': not given: have x, positions, rows, tables"),
        ("states", "kv", "state 'kv': not given: have none"),
        ("weights", "wq", "weight 'wq': not given: have norm, wk"),
    ],
)
def test_a_missing_tensor_is_named(kind: str, name: str, message: str) -> None:
    given = tensors()
    del given[kind][name]
    with pytest.raises(VerifyError) as error:
        run(attention_block(), **given)
    assert str(error.value) == message
