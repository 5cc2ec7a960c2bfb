"""Packing: one layout a weight, literals as they print, bytes that unpack to the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.tiny import SETTINGS, quick_target, tiny
from support.weights import RandomWeights
from tilewright.codegen.flags import Flags
from tilewright.codegen.pack import layouts, pack_weights, weight_record
from tilewright.codegen.pack_cpu import unpack_panels
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import first_candidate, plan_groups
from tilewright.graph import GraphBuilder, Role
from tilewright.graph.errors import LowerError
from tilewright.graph.types import F32, I32

TARGET = quick_target()


@pytest.mark.parametrize("stored", ["f32", "bf16", "q4_1", "q8_0"])
def test_packed_weights_hold_the_values(stored: str) -> None:
    model = tiny(stored)
    graph = lower(model.graph, Flags()).graph
    plans = plan_groups(graph, TARGET, SETTINGS, first_candidate(TARGET))
    wanted = model.weights.tensors()
    for packed in pack_weights(graph, plans, model.weights):
        name, shape = packed.weight.name, packed.weight.type.shape
        record = weight_record(packed, 64)
        assert record.num_bytes == packed.data.nbytes and record.shape == shape
        if packed.layout == "panels16":
            raw = model.weights.unpacked(name, packed.weight.type.dtype)
            found = unpack_panels(stored, packed.data, *shape)
            for field in ("values", "codes", "d", "m"):
                a, b = getattr(found, field), getattr(raw, field)
                assert (a is None) == (b is None)
                if a is not None:
                    np.testing.assert_array_equal(a, b)
        elif name in wanted:
            np.testing.assert_array_equal(packed.data.view(np.float32), wanted[name].numpy())
        else:
            values = torch.tensor(packed.weight.expr.args, dtype=torch.float32)
            np.testing.assert_array_equal(packed.data.view(np.float32), values.numpy())


def test_two_layouts_of_one_weight_are_refused() -> None:
    b = GraphBuilder("two")
    rows = b.dim("rows", Role.BATCH, upper=8)
    ids, x = b.input("ids", I32, rows), b.input("x", F32, 8, 32)
    table = b.weight("table", F32, 8, 32)
    b.output("row", b.op("embedding", ids, table))
    b.output("sum", x + table)
    graph = lower(b.build(), Flags()).graph
    plans = plan_groups(graph, TARGET, SETTINGS, first_candidate(TARGET))
    with pytest.raises(LowerError) as caught:
        layouts(graph, plans)
    first, second = ("panels16", "row_major")
    assert str(caught.value) in (
        f"weight 'table': is read in two layouts: got {second}, want {first}",
        f"weight 'table': is read in two layouts: got {first}, want {second}",
    )
    assert RandomWeights(graph).tensors().keys() == {"table"}
