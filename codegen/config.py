"""Settings that may change output. Each is part of the cache key and of the manifest."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tilewright.graph.errors import LowerError

MODES = ("deterministic", "fast")
DTYPES = {"float32": "f32", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """What an artifact computes.

    `mode`: `deterministic` fixes numerics per op; `fast` lets the tuner choose them per bucket.
    `dtype`: what activations and the cache are rounded to. `max_context`, `max_tokens_per_step`,
    `max_requests`: bounds, in tokens and requests. `block_size`: cache positions per block.
    """

    mode: str = "deterministic"
    dtype: str = "bfloat16"
    max_context: int = 8192
    max_tokens_per_step: int = 512
    max_requests: int = 64
    block_size: int = 32

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise LowerError(f"setting 'mode': got {self.mode!r}, want {' or '.join(MODES)}")
        if self.dtype not in DTYPES:
            raise LowerError(f"setting 'dtype': got {self.dtype!r}, want {' or '.join(DTYPES)}")
        for name, upper in (
            ("max_context", 1 << 24),
            ("max_tokens_per_step", 1 << 16),
            ("max_requests", 1 << 14),
            ("block_size", 1 << 10),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= upper:
                raise LowerError(f"setting '{name}': got {value!r}, want an int in 1..{upper}")

    def to_json(self) -> dict[str, int | str]:
        return dataclasses.asdict(self)
