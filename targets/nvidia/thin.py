"""Few sums of long rows with fp32 weights, such as the numbers of hyper-connections: what the
template accepts, its schedules, its scratch.

Products of bf16 rows with the three bf16 parts of a weight are exact, so that the matrix unit takes
them; the plain cores would take ten times as long.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.codegen.emit.triton_thin import parts_bytes
from tilewright.codegen.spec import Numerics, Schedule
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph
from tilewright.graph.dims import evaluate, from_json, symbols_of

_MOST_COLUMNS, _LEAST_K, _STEP = 64, 2048, 128


def accepts_thin(body: Graph) -> str | None:
    """Return why a body is refused, or None."""
    if len(body.nodes) != 1 or body.nodes[0].op != "linear":
        return "is more than one product with a weight"
    x, w = (body.type_of(i) for i in body.nodes[0].inputs)
    if body.nodes[0].inputs[1] not in body.weight or symbols_of(w.shape):
        return "second operand is computed, want a weight"
    n, k = (int(d) for d in w.shape)
    if (str(x.dtype), str(w.dtype), x.rank) != ("bf16", "f32", 2):
        return f"rows are {x} and weights {w}, want bf16 rows and fp32 weights"
    if n > _MOST_COLUMNS or k < _LEAST_K or k % _STEP:
        return (
            f"weights are {w}: want at most {_MOST_COLUMNS} rows of at least {_LEAST_K} values, "
            f"a multiple of {_STEP}"
        )
    return None


def thin_schedules(body: Graph, numerics: Numerics, rows: int) -> tuple[Schedule, ...]:
    """Rows of a tile, values of k of a step, warps, stages. Steps end where the rows do."""
    values = int(body.type_of(body.nodes[0].inputs[0]).shape[-1])
    few = [(16, 128, 4, 4), (16, 256, 4, 2), (16, 64, 4, 6), (16, 128, 2, 4)]
    many = [(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 4), (64, 128, 4, 3)]
    ordered = [*few, *many] if rows <= 128 else [*many, *few]
    return tuple(
        Schedule.of(bm=m, bk=k, warps=w, stages=s) for m, k, w, s in ordered if values % k == 0
    )


def thin_scratch(
    body: Graph, numerics: Numerics, schedule: Schedule, bounds: Mapping[str, int]
) -> int:
    """Bytes of the sums of all segments."""
    return evaluate(from_json(parts_bytes(body, numerics)), bounds)


THIN = KernelTemplate(
    "thin", "contract", "triton/thin.py.j2", accepts_thin, thin_schedules, thin_scratch
)
