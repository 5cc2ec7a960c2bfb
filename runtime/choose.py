"""Choosing the tokens of a step: what is asked for each row, and who answers where logits lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilewright.runtime.errors import RequestError
from tilewright.runtime.philox import Draw
from tilewright.runtime.sample_logits import SampleRules, TokenIds
from tilewright.runtime.sampler import SampledToken, sample, score

Logits = NDArray[np.float32]


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    """Which token follows in a row of logits: settings, randomness, and what precedes it."""

    row: int
    rules: SampleRules
    draw: Draw
    prompt_token_ids: TokenIds = ()
    output_token_ids: TokenIds = ()


class Chooser(Protocol):
    """Reads a step's outputs `logits` [rows, vocab] and `argmax` [rows] where they lie."""

    def choose(
        self, outputs: Mapping[str, Any], questions: Sequence[Question]
    ) -> list[SampledToken | RequestError]:
        """Answer every question: a token, or why that row allows none."""

    def score(
        self, outputs: Mapping[str, Any], row: int, token_id: int, num_top: int
    ) -> SampledToken:
        """Log-probability of a given token in a row, and of the most likely ones."""

    def logits(self, outputs: Mapping[str, Any], row: int) -> Logits:
        """Return a copy of a row on the host, float32 [vocab]."""


class HostChooser:
    """Works row by row on logits in host memory."""

    def choose(
        self, outputs: Mapping[str, Any], questions: Sequence[Question]
    ) -> list[SampledToken | RequestError]:
        """Answer every question: a token, or why that row allows none."""
        return [
            self.answer(self._row(outputs, q.row), q, argmax=int(outputs["argmax"][q.row]))
            for q in questions
        ]

    def answer(
        self, row: Logits, asked: Question, *, argmax: int | None
    ) -> SampledToken | RequestError:
        """Answer one question from its row; `argmax` if a kernel has found it."""
        try:
            return sample(
                row,
                asked.rules,
                asked.draw,
                prompt_token_ids=asked.prompt_token_ids,
                output_token_ids=asked.output_token_ids,
                argmax=argmax if argmax is not None and row[argmax] == row[argmax] else None,
            )
        except RequestError as error:
            return error

    def score(
        self, outputs: Mapping[str, Any], row: int, token_id: int, num_top: int
    ) -> SampledToken:
        """Log-probability of a given token in a row, and of the most likely ones."""
        return score(self._row(outputs, row), token_id, num_top)

    def logits(self, outputs: Mapping[str, Any], row: int) -> Logits:
        """Return a copy of a row."""
        return self._row(outputs, row).copy()

    @staticmethod
    def _row(outputs: Mapping[str, Any], row: int) -> Logits:
        found: Logits = outputs["logits"][row].astype(np.float32, copy=False)
        return found
