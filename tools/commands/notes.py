"""What commands say on stderr after an answer: speed, and what it takes to get the answer again."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.runtime import SamplingParams

MOST_SEEDS = 8  # that are listed: --json gives all


def with_seed(params: SamplingParams) -> SamplingParams:
    """Return parameters whose seed is known before the answer comes: the one given, or a drawn one.

    A seed that is out of range stays, for the engine to refuse.
    """
    return params if params.seed is not None else replace(params, seed=secrets.randbits(64))


def speed_note(count: int, seconds: float) -> str:
    """Say how many tokens came, and how fast."""
    return f"{count} tokens, {count / max(seconds, 1e-9):.1f} tokens/s"


def origin_note(seeds: Sequence[int | None], digest: str) -> str:
    """Say which seeds and which numerics gave the answers: equal ones give them again."""
    listed = ", ".join(map(str, seeds[:MOST_SEEDS]))
    more = f" and {len(seeds) - MOST_SEEDS} more (--json gives all)"
    name = "seed" if len(seeds) == 1 else "seeds"
    rest = more if len(seeds) > MOST_SEEDS else ""
    return f"{name} {listed}{rest}, numerics {digest[:12]}"
