"""Few sums of long rows for a machine with a GPU: odd numbers of rows are checked in all schedules,
those of V4.1's hyper-connections are timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from device.cases_contract import DeviceCase
from support.contract_graphs import linear, only_body
from support.kernel_case import make_case
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec
from tilewright.targets.nvidia.thin import THIN

CHECKED = ((24, 2560), (4, 2048), (33, 2176))
TOKENS, SEED = 133, 7
ROWS_TIMED = (1, 32, 128, 1024, 4096)


def thin_cases(target: Any) -> Iterator[DeviceCase]:
    """All of them."""
    for n, k in CHECKED:
        specs = _specs(n, k, target)
        case = partial(make_case, specs[0], {"tokens": TOKENS}, seed=SEED)
        yield DeviceCase("thin", f"{n} x {k}", specs, case)
    facts = {"rows": ROWS_TIMED, "bytes_per_row": 4 * 5120 * 2, "weights": ["w0"]}
    yield DeviceCase("thin", "V4.1 hyper-connections", _specs(24, 4 * 5120, target), None, facts)


def _specs(n: int, k: int, target: Any) -> list[KernelSpec]:
    body = only_body(linear([("f32", n)], k))
    numerics = derive("contract", body.graph, target)
    return [
        KernelSpec("contract", body.graph, "thin", numerics, s, body.buffers)
        for s in THIN.schedules(body.graph, numerics, 1)
    ]
