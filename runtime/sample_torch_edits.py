"""Changes to rows of logits before temperature, on torch tensors: `sample_logits.adjusted`.

What changes is listed on the host, entry by entry, and applied to all rows together; each change
is computed in float64 and rounded to float32, in the order of `adjusted`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tilewright.runtime.choose import Question
from tilewright.runtime.sample_logits import banned_ids

Tensor = torch.Tensor
Ids = NDArray[np.int64]


class Entries:
    """Places (row, id), each with some float64 numbers, gathered and moved to the device."""

    def __init__(self, num_numbers: int) -> None:
        self._rows: list[Ids] = []
        self._ids: list[Ids] = []
        self._numbers: list[list[NDArray[np.float64]]] = [[] for _ in range(num_numbers)]

    def add(self, row: int, ids: Ids, *numbers: NDArray[np.floating] | float) -> None:
        """Add entries of a row; a number may be one for all of them."""
        self._rows.append(np.full(len(ids), row, np.int64))
        self._ids.append(ids)
        for kept, values in zip(self._numbers, numbers, strict=True):
            kept.append(np.broadcast_to(np.asarray(values, np.float64), ids.shape))

    def apply(self, logits: Tensor, change: Callable[..., Tensor]) -> None:
        """Replace the entries by `change(value, *numbers)`, float64."""
        if not self._rows:
            return
        place = tuple(_moved(np.concatenate(p), logits) for p in (self._rows, self._ids))
        numbers = [_moved(np.concatenate(n), logits) for n in self._numbers]
        logits[place] = change(logits[place].double(), *numbers).float()


def adjust(logits: Tensor, questions: Sequence[Question]) -> Tensor:
    """Return changed logits, a copy float32 [rows, vocab]; row i is asked by question i."""
    changed = logits.clone()
    _penalise(changed, questions)
    biases, banned = Entries(1), Entries(0)
    for row, asked in enumerate(questions):
        if len(asked.rules.bias_ids):
            biases.add(row, asked.rules.bias_ids, asked.rules.bias_values)
        ids = banned_ids(asked.rules, asked.output_token_ids)
        if len(ids):
            banned.add(row, ids)
    biases.apply(changed, torch.add)
    changed = _restrict(changed, questions)
    banned.apply(changed, lambda values: torch.full_like(values, -torch.inf))
    return changed


def _penalise(logits: Tensor, questions: Sequence[Question]) -> None:
    repeated, used = Entries(1), Entries(2)
    for row, asked in enumerate(questions):
        params = asked.rules.params
        if not asked.rules.has_penalties:
            continue
        output = np.asarray(asked.output_token_ids, np.int64)
        if params.repetition_penalty != 1.0:
            # Ids that occur twice are changed twice from the same value, to the same value.
            prompt = np.asarray(asked.prompt_token_ids, np.int64)
            repeated.add(row, np.concatenate((prompt, output)), params.repetition_penalty)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            ids, counts = np.unique(output, return_counts=True)
            used.add(row, ids, params.frequency_penalty * counts, params.presence_penalty)
    repeated.apply(logits, lambda v, by: torch.where(v > 0, v / by, v * by))
    used.apply(logits, lambda v, frequent, present: (v - frequent) - present)


def _restrict(logits: Tensor, questions: Sequence[Question]) -> Tensor:
    """Ban all but the allowed ids of rows that name some."""
    named = [(row, q.rules.allowed) for row, q in enumerate(questions)]
    if all(allowed is None for _, allowed in named):
        return logits
    keeps = torch.ones_like(logits, dtype=torch.bool)
    for row, allowed in named:
        if allowed is not None:
            keeps[row] = False
            keeps[row, _moved(allowed, logits)] = True
    return torch.where(keeps, logits, -torch.inf)


def _moved(array: NDArray[np.int64] | NDArray[np.float64], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
