"""Weights of integer codes that a kernel of their own decodes, before many rows meet them: blocks
of columns, each the high parts of its values, then the low ones, in the order in which sections
take them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_host import Launch, Pointer
from tilewright.codegen.spec import Schedule
from tilewright.graph import Graph, Node

STEP = 128  # values of k that a program decodes


def decoded_part(body: Graph, anchors: list[Node], schedule: Schedule) -> tuple[str, int]:
    """Return the buffer of decoded weights: Triton type of the elements, and bytes."""
    bn, k = schedule.values["bn"], constant(body.type_of(anchors[0].inputs[0]).shape[-1])
    columns = sum(-(-constant(a.type.shape[-1]) // bn) * bn for a in anchors)
    return "bf16", columns * 2 * k * 2


def number_blocks(sections: Sequence[Mapping[str, Any]]) -> int:
    """Give each weight its range of blocks, `start` to `stop`, and where they lie: from `first` on,
    every `count`-th. Return how many blocks there are."""
    start = 0
    for section in sections:
        weights = [w for walk in section["walks"] for w in walk["weights"]]
        each, base = section["stop"] - section["start"], start
        for i, weight in enumerate(weights):
            weight |= {
                "start": start, "stop": start + each, "first": base + i, "count": len(weights)
            }  # fmt: skip
            start += each
    return start


def decode_launch(blocks: int, k: int, work: tuple[Pointer, ...]) -> Launch:
    """Return the launch of the kernel `decode`."""
    return Launch("decode", (blocks, -(-k // STEP), 1), 4, 2, work)
