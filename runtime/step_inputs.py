"""From a batch to the inputs and dims that a graph declares, by name.

| input | | dims |
|---|---|---|
| `token_ids`, `positions` | i32 per token | `tokens` |
| `request_rows` | row in the tables per token | |
| `slots` | slot in the block states per token, where the graph does not derive them | |
| `block_tables` | blocks of each request, in order | `requests`, `request_blocks` |
| `window_tables` | ring of window pages of each request | `requests`, a fixed width |
| `logit_rows` | tokens whose logits are wanted, ascending | `logit_rows` |
| `tail_rows` | tokens that go through the last layers, where not all do | `tail` |
| `tail_window_positions` | their positions, counted from the request's first of them | `tail` |
| `tail_window_tables` | rings of window pages by those positions | as `window_tables` |

With a tail, `logit_rows` count its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.artifact import Manifest
from tilewright.runtime.batch import Batch
from tilewright.runtime.cache_layout import PAGES_DIM, TABLES_INPUT, WINDOW
from tilewright.runtime.errors import ArtifactError

INPUTS = (
    "token_ids", "positions", "request_rows", "slots", "block_tables", "window_tables",
    "logit_rows", "tail_rows", "tail_window_positions", "tail_window_tables",
)  # fmt: skip
_COUNTS: Mapping[str, tuple[str, int]] = {  # dim: the input and the axis whose extent it is
    "tokens": ("token_ids", 0),
    "requests": ("block_tables", 0),
    "request_blocks": ("block_tables", 1),
    "logit_rows": ("logit_rows", 0),
    "tail": ("tail_rows", 0),
}
Arrays = Mapping[str, NDArray[Any]]


class StepInputs:
    """What a manifest's steps are given. Raises ArtifactError for a name that is not known."""

    def __init__(self, manifest: Manifest) -> None:
        self._inputs = tuple(i.name for i in manifest.inputs)
        for name in self._inputs:
            if name not in INPUTS:
                raise ArtifactError(f"input '{name}': unknown: have {', '.join(INPUTS)}")
        counts = {**_COUNTS, **_window_width(manifest)}
        names = [d.name for d in manifest.dims if d.name not in PAGES_DIM.values()]
        for name in names:
            if name not in counts:
                raise ArtifactError(f"dim '{name}': unknown: have {', '.join(counts)}")
        self._dims = tuple((name, *counts[name]) for name in names)

    def of(self, batch: Batch) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
        """Return the inputs and the dims of a step."""
        arrays = {name: getattr(batch, name) for name in INPUTS if hasattr(batch, name)}
        return self.pick({**arrays, "tail_starts": batch.tail_starts})

    def pick(self, arrays: Arrays) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
        """Return, of arrays for all inputs, those that are declared, and the dims.

        Inputs of a tail are made here, from `tail_starts` [requests].
        """
        if "tail_rows" in self._inputs:
            arrays = {**arrays, **_tail(arrays)}
        dims = {name: arrays[of].shape[axis] for name, of, axis in self._dims}
        return {name: arrays[name] for name in self._inputs}, dims


def _tail(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Return the rows of the tail, their positions in it, and rows of logits among them."""
    counted = arrays["positions"] - arrays["tail_starts"][arrays["request_rows"]]
    rows = np.flatnonzero(counted >= 0).astype(np.int32)
    wanted = np.searchsorted(rows, arrays["logit_rows"]).astype(np.int32)
    return {"tail_rows": rows, "tail_window_positions": counted[rows], "logit_rows": wanted}


def bound_step(
    manifest: Manifest, arrays: Arrays
) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
    """Return the inputs and dims of one step, of arrays for all inputs."""
    return StepInputs(manifest).pick(arrays)


def _window_width(manifest: Manifest) -> dict[str, tuple[str, int]]:
    """Return the dim that is the width of the window tables, if it is one."""
    for tensor in manifest.inputs:
        if tensor.name == TABLES_INPUT[WINDOW] and len(tensor.shape) == 2:
            width = tensor.shape[1]
            return {width: (tensor.name, 1)} if isinstance(width, str) else {}
    return {}
