"""The bench's settings, checked against an artifact before anything is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilewright.runtime import RequestError
from tilewright.runtime.artifact import Manifest


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


def check_settings(settings: BenchSettings, manifest: Manifest) -> None:
    """Raise RequestError, one sentence, for a setting that the artifact has no room for."""
    limits = {d.name: d.upper for d in manifest.dims}
    model = manifest.model.max_context
    _within("prompt-tokens", settings.prompt_tokens, 1, model - 1, "the context less one token")
    _within("decode-tokens", settings.decode_tokens, 1, model - 2, "the context less two tokens")
    most = min(limits["requests"], limits["tokens"])
    _within("batch", max(settings.batches), 1, most, "the most requests of a step")
    most = model - settings.decode_tokens - 1
    _within("context", settings.start, 1, most, "the model's context less the decoded tokens")


def _within(name: str, value: int, lower: int, upper: int, why: str) -> None:
    if not lower <= value <= upper:
        raise RequestError(f"bench '{name}': got {value}, want {lower} to {upper} ({why})")
