"""Operands of products with chosen experts: every expert of every copy is read in its turn."""

from __future__ import annotations

from collections import Counter

from tilewright.codegen.arguments import argument_names
from tilewright.tools.dev.expert_rate import EXPERTS, FORMATS, SLOTS, candidates, expert_product
from tilewright.tools.synthetic import Operand, operands, plausible_step


def operands_of(tokens: int, rotated_bytes: int) -> dict[str, Operand]:
    body, specs = candidates(expert_product(FORMATS["fp4"], 64, 64), tokens, 1)
    step = plausible_step(body.graph, {"tokens": tokens}, context=16)
    made = operands(specs[0], step, rotated_bytes=rotated_bytes)
    given = dict(zip(argument_names(body.graph), made, strict=True))
    (product,) = [n for n in body.graph.nodes if n.op == "expert_linear"]
    return {"w": given[product.inputs[1]], "ids": given[product.inputs[2]]}


def test_a_token_meets_other_experts_in_every_turn() -> None:
    given = operands_of(1, 1 << 18)
    copies = len(given["w"].arrays)
    chosen = [ids.ravel().tolist() for ids in given["ids"].arrays]
    assert copies > 1 and len(chosen) == copies * EXPERTS // SLOTS
    assert all(len(set(ids)) == SLOTS and set(ids) < set(range(EXPERTS)) for ids in chosen)
    assert chosen[:copies] == [chosen[0]] * copies and chosen[copies] != chosen[0]
    met = Counter(e for ids in chosen[::copies] for e in ids)
    assert len(met) > EXPERTS // 2 and max(met.values()) < EXPERTS // SLOTS


def test_tokens_that_meet_all_experts_have_one_turn() -> None:
    given = operands_of(16, 1 << 18)
    assert len(given["ids"].arrays) == len(given["w"].arrays)
    assert len({ids.ctypes.data for ids in given["ids"].arrays}) == 1
