"""Contractions of integer codes on NVIDIA chips with many rows: schedules in which a kernel decodes
the weights before products meet them.
"""

from __future__ import annotations

from tilewright.codegen.emit.cuda_chip import SHARED_BYTES
from tilewright.codegen.emit.triton_decoded import decoded_part
from tilewright.codegen.pack_tiles import TILE_BITS
from tilewright.codegen.sections import sections_of
from tilewright.codegen.spec import Schedule
from tilewright.graph import Graph, Node
from tilewright.graph.types import BlockFormat
from tilewright.targets.nvidia.shared_memory import Tile, value_bytes

_ROWS = 256  # so many use a weight often enough that it is worth a kernel
# Decoded weights should not leave the chip's second cache, of 50 MB, before products meet them; and
# scratch is taken once for each stream of a graph.
_MOST_BYTES = 32 << 20
_SUMS = 128  # of both parts of the columns that meet, a thread
# Rows, columns, values of k of a tile; warps; stages of its loads. From a sweep on an H200.
_TILES: tuple[Tile, ...] = (
    (128, 32, 64, 4, 3), (64, 32, 64, 4, 4), (64, 64, 64, 4, 4), (128, 64, 64, 8, 3),
    (64, 32, 64, 4, 3), (128, 128, 64, 8, 3),
)  # fmt: skip


def decoded_schedules(
    body: Graph, anchors: list[Node], rows: int, *, cores: int
) -> list[Schedule]:
    """Tiles of decoded weights, those first that leave the fewest cores idle; none where rows are
    few, or weights are of other forms or too large."""
    if rows < _ROWS or not all(_fits(body, node) for node in anchors):
        return []
    sections = sections_of(body, anchors)
    met = max(sum(n in anchors for n in nodes) for nodes in sections)
    columns = sum(int(n.type.shape[-1]) for n in anchors) // met

    def busy(schedule: Schedule) -> int:
        bm, bn = schedule.values["bm"], schedule.values["bn"]
        return min(-(-rows // bm) * -(-columns // bn), cores)

    found = [
        Schedule.of(bm=bm, bn=bn, bk=bk, warps=warps, stages=stages, row_warps=4, split=0, listed=0,
                    decoded=1)
        for bm, bn, bk, warps, stages in _TILES
        if met * bm * 2 * bn <= _SUMS * warps * 32
        and value_bytes((bm, 2 * bn, bk, warps, stages), len(sections), len(anchors))
        <= SHARED_BYTES
    ]  # fmt: skip
    small = [s for s in found if decoded_part(body, anchors, s)[1] <= _MOST_BYTES]
    return sorted(small, key=busy, reverse=True)


def _fits(body: Graph, node: Node) -> bool:
    """Whether rows of bf16 meet one matrix of integer codes."""
    rows, weight = (body.type_of(i).dtype for i in node.inputs[:2])
    coded = isinstance(weight, BlockFormat) and weight.name not in TILE_BITS
    return node.op == "linear" and rows.name == "bf16" and coded
