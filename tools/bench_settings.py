"""The bench's settings, checked against an artifact before anything is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilewright.runtime import RequestError
from tilewright.runtime.artifact import Manifest

MAX_THREADS = 1024
MAX_REPEAT = 1000


@dataclass(frozen=True)
class BenchSettings:
    """What is measured. `start`: tokens in the cache when a decode begins."""

    threads: int
    prompt_tokens: int
    decode_tokens: int
    batches: tuple[int, ...]
    start: int
    repeat: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_batches(text: str) -> tuple[int, ...]:
    """Read `1,8`; batch 1 is always measured. Raises RequestError for anything else."""
    parts = text.split(",")
    if not all(p.strip().isdecimal() and len(p) < 9 and int(p) > 0 for p in parts):
        raise RequestError(f"bench 'batch': got {text!r}, want sizes of at least 1, such as 1,8")
    return tuple(sorted({1, *map(int, parts)}))


def check_settings(settings: BenchSettings, manifest: Manifest) -> None:
    """Raise RequestError, one sentence, for a setting that is nonsense or does not fit."""
    limits = {d.name: d.upper for d in manifest.dims}
    model = manifest.model.max_context
    _within("threads", settings.threads, 1, MAX_THREADS, "the most threads")
    _within("repeat", settings.repeat, 1, MAX_REPEAT, "the most repeats")
    _within("prompt-tokens", settings.prompt_tokens, 1, model - 1, "the context less one token")
    _within("decode-tokens", settings.decode_tokens, 1, model - 2, "the context less two tokens")
    most = min(limits["requests"], limits["tokens"])
    _within("batch", max(settings.batches), 1, most, "the most requests of a step")
    most = model - settings.decode_tokens - 1
    _within("context", settings.start, 1, most, "the model's context less the decoded tokens")


def _within(name: str, value: int, lower: int, upper: int, why: str) -> None:
    if not lower <= value <= upper:
        raise RequestError(f"bench '{name}': got {value}, want {lower} to {upper} ({why})")
