"""From a batch to the inputs and dims that a graph declares, by name.

| input | | dims |
|---|---|---|
| `token_ids`, `positions` | i32 per token | `tokens` |
| `request_rows` | row in the tables per token | |
| `slots` | slot in the block states per token, where the graph does not derive them | |
| `block_tables` | blocks of each request, in order | `requests`, `request_blocks` |
| `window_tables` | ring of window pages of each request | `requests`, a fixed width |
| `logit_rows` | tokens whose logits are wanted, ascending | `logit_rows` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from tilewright.runtime.artifact import Manifest
from tilewright.runtime.batch import Batch
from tilewright.runtime.cache_layout import PAGES_DIM, TABLES_INPUT, WINDOW
from tilewright.runtime.errors import ArtifactError

INPUTS = (
    "token_ids", "positions", "request_rows", "slots", "block_tables", "window_tables", "logit_rows"
)  # fmt: skip
_COUNTS: Mapping[str, Callable[[Batch], int]] = {
    "tokens": lambda batch: batch.num_tokens,
    "requests": lambda batch: len(batch.requests),
    "logit_rows": lambda batch: batch.num_logits,
    "request_blocks": lambda batch: batch.block_tables.shape[1],
}


class StepInputs:
    """What a manifest's steps are given. Raises ArtifactError for a name that is not known."""

    def __init__(self, manifest: Manifest) -> None:
        self._inputs = tuple(i.name for i in manifest.inputs)
        for name in self._inputs:
            if name not in INPUTS:
                raise ArtifactError(f"input '{name}': unknown: have {', '.join(INPUTS)}")
        self._width_dim = _window_width(manifest)
        names = [d.name for d in manifest.dims if d.name not in PAGES_DIM.values()]
        for name in names:
            if name not in _COUNTS and name != self._width_dim:
                raise ArtifactError(f"dim '{name}': unknown: have {', '.join(_COUNTS)}")
        self._dims = tuple(n for n in names if n != self._width_dim)

    def of(self, batch: Batch) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
        """Return the inputs and the dims of a step."""
        dims = {name: _COUNTS[name](batch) for name in self._dims}
        if self._width_dim is not None:
            dims[self._width_dim] = batch.window_tables.shape[1]
        return {name: getattr(batch, name) for name in self._inputs}, dims


def _window_width(manifest: Manifest) -> str | None:
    """Return the dim that is the width of the window tables, if it is one."""
    for tensor in manifest.inputs:
        if tensor.name == TABLES_INPUT[WINDOW] and len(tensor.shape) == 2:
            width = tensor.shape[1]
            return width if isinstance(width, str) else None
    return None
