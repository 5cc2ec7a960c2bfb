"""Settings that may change output. Each is part of the cache key and of the manifest."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from tilewright.graph.errors import LowerError

MODES = ("deterministic", "fast")
DEFAULT_REPLAY = "default"
DTYPES = {"float32": "f32", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """What an artifact computes.

    `mode`: `deterministic` fixes numerics per op; `fast` lets the tuner choose them per bucket.
    `dtype`: what activations and the cache are rounded to. `max_context`, `max_tokens_per_step`,
    `max_requests`: bounds, in tokens and requests. `block_size`: cache positions per block.
    `quantise_cache`: round cache entries as the model was trained to; only for comparisons without.
    `layers`: build layers A to B - 1 alone, as `A:B`. `replay_tokens`: compute the decoder half of
    a prompt for its last tokens only, which approximates it; `default` is the model's own number.
    """

    mode: str = "deterministic"
    dtype: str = "bfloat16"
    max_context: int = 8192
    max_tokens_per_step: int = 512
    max_requests: int = 64
    block_size: int = 32
    quantise_cache: bool = True
    layers: str | None = None
    replay_tokens: int | str | None = None

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
        if type(self.quantise_cache) is not bool:
            raise LowerError(f"setting 'quantise_cache': got {self.quantise_cache!r}, want a bool")
        self._check_slice()

    def _check_slice(self) -> None:
        if self.layers is not None and self.layer_range is None:
            raise LowerError(f"setting 'layers': got {self.layers!r}, want A:B with 0 <= A < B")
        replay = self.replay_tokens
        if replay is None or replay == DEFAULT_REPLAY:
            return
        if type(replay) is not int or not 2 <= replay <= 1 << 24 or replay % 2:
            raise LowerError(
                f"setting 'replay_tokens': got {replay!r}, want an even int from 2 on, or "
                f"'{DEFAULT_REPLAY}'"
            )

    @property
    def layer_range(self) -> tuple[int, int] | None:
        """The layers to build, first and one past the last; None for all, and where malformed."""
        match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", str(self.layers))
        first, last = (int(n) for n in match.groups()) if match else (0, 0)
        return (first, last) if first < last else None

    def to_json(self) -> dict[str, int | str | None]:
        return dataclasses.asdict(self)
