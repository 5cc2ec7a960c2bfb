"""Sampling of up to so many rows in fixed memory, so that its launches are captured as a graph."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tilewright.runtime.devices.chip import Chip, Replay
from tilewright.runtime.sample_torch import LEADING, NUM_COLUMNS, choose, unpack_settings
from tilewright.runtime.sample_torch_math import Tensor

# What became of a row: its token is right, has to be looked for again, or there is none.
SURE, UNSURE, REFUSED = 0, 1, 2


class SamplingBench:
    """Logits and settings of rows, and their answers; rows that are not used are sampled too."""

    def __init__(self, chip: Chip, num_rows: int, vocab_size: int, *, graphs: bool) -> None:
        self._chip = chip
        self._graphs = graphs
        self._replay: Replay | None = None
        shape = (NUM_COLUMNS, num_rows)
        self._staging = chip.staging(8 * NUM_COLUMNS * num_rows)
        self._staged: NDArray[np.int64] = self._staging.numpy().view(np.int64).reshape(shape)
        self._staged[...] = 1
        self._staged[-2:].view(np.float64)[...] = 1.0
        self._pool = torch.zeros_like(self._staging, device=chip.device)
        self._table = self._pool.view(torch.int64).reshape(shape)
        self._logits = torch.zeros(num_rows, vocab_size, device=chip.device)
        self._answers = torch.zeros(2, num_rows, dtype=torch.int64, device=chip.device)

    def choose(
        self, logits: Tensor, table: NDArray[np.int64], is_refused: Tensor | None
    ) -> tuple[list[int], list[int]]:
        """Return tokens and states of rows [n, vocab] with settings [NUM_COLUMNS, n]."""
        n = len(logits)
        self._chip.wait_for_copies()
        self._staged[:, :n] = table
        self._chip.copy(self._pool, self._staging)
        self._logits[:n] = logits
        if self._replay is not None:
            self._replay()
        else:
            self._launch()
            if self._graphs:
                self._replay = self._chip.capture(self._launch)
        answers = self._answers[:, :n]
        if is_refused is not None:
            answers[1] = torch.where(is_refused, REFUSED, answers[1])
        token_ids, states = answers.tolist()
        return token_ids, states

    def _launch(self) -> None:
        found = choose(self._logits, unpack_settings(self._table), LEADING)
        state = torch.where(found.is_sure, SURE, UNSURE)
        is_finite = self._logits.amax(1).isfinite() & found.largest.isfinite()
        self._answers[0] = found.token_ids
        self._answers[1] = torch.where(is_finite, state, REFUSED)
