"""Choosing tokens where the logits lie on a GPU: only ids, and log-probabilities if asked, return.

Answers are those of the host's sampler for the same logits, bit for bit; log-probabilities agree
within 1e-12, since exp and log of a GPU round otherwise in the last place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilewright.runtime.choose import HostChooser, Logits, Question
from tilewright.runtime.devices.chip import Chip
from tilewright.runtime.devices.padding import next_power
from tilewright.runtime.errors import RequestError
from tilewright.runtime.sample_bench import REFUSED, UNSURE, SamplingBench
from tilewright.runtime.sample_torch import (
    choose,
    log_softmax_row,
    pack_settings,
    unpack_settings,
)
from tilewright.runtime.sample_torch_edits import adjust
from tilewright.runtime.sample_torch_math import Tensor, ids_of_keys, order_keys
from tilewright.runtime.sampler import SampledToken

ROWS_AT_ONCE = 32
Answers = dict[int, SampledToken | RequestError]


class TorchChooser:
    """Chooses for all rows of a step together, on the stream of its session."""

    def __init__(self, chip: Chip, *, graphs: bool = True) -> None:
        """`graphs`: capture the launches of sampling, one graph for each power of two of rows."""
        self._chip = chip
        self._graphs = graphs
        self._host = HostChooser()
        self._benches: dict[tuple[int, int], SamplingBench] = {}

    def close(self) -> None:
        """Give the memory back."""
        self._benches.clear()

    def choose(
        self, outputs: Mapping[str, Any], questions: Sequence[Question]
    ) -> list[SampledToken | RequestError]:
        """Answer every question: a token, or why that row allows none."""
        with self._chip.active():
            answers: Answers = {}
            plain = [i for i, q in enumerate(questions) if _is_plain(q)]
            others = [i for i, q in enumerate(questions) if not _is_plain(q)]
            if plain:
                self._take_argmax(outputs, questions, plain, answers)
            for start in range(0, len(others), ROWS_AT_ONCE):
                part = others[start : start + ROWS_AT_ONCE]
                self._sample(outputs, questions, part, answers)
            self._add_logprobs(outputs, questions, answers)
            return [answers[i] for i in range(len(questions))]

    def _take_argmax(
        self, outputs: Mapping[str, Any], questions: Sequence[Question],
        chosen: Sequence[int], answers: Answers,
    ) -> None:  # fmt: skip
        """Take what the kernel found for greedy rows, if the largest logit is a number."""
        logits = self._pick(outputs["logits"], questions, chosen)
        found = self._pick(outputs["argmax"], questions, chosen)
        at_found = logits.gather(1, found.long().clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        largest = logits.amax(1)  # NaN if the row has one
        host = torch.stack((found.double(), at_found.double(), largest.double())).cpu().numpy()
        is_sure = np.isfinite(host[2]) & (host[1] == host[2])
        token_ids = np.where(is_sure, host[0], -1).astype(np.int64).tolist()
        self._answer(outputs, questions, chosen, token_ids, answers)

    def _sample(
        self, outputs: Mapping[str, Any], questions: Sequence[Question],
        chosen: Sequence[int], answers: Answers,
    ) -> None:  # fmt: skip
        asked = [questions[i] for i in chosen]
        logits = self._pick(outputs["logits"], questions, chosen).float()
        vocab_size = logits.shape[1]
        is_refused = None
        if any(q.rules.changes_logits(len(q.output_token_ids)) for q in asked):
            is_refused = ~logits.amax(1).isfinite()
            logits = adjust(logits, asked)
        table = pack_settings(asked, vocab_size)
        token_ids, states = self._bench(len(asked), vocab_size).choose(logits, table, is_refused)
        again = [i for i, state in enumerate(states) if state == UNSURE]
        if again:
            picked = logits.index_select(0, torch.tensor(again, device=logits.device))
            settings = unpack_settings(_moved(table[:, again], picked))
            more = choose(picked, settings, vocab_size).token_ids.tolist()
            for i, token_id in zip(again, more, strict=True):
                token_ids[i] = token_id
        found = [
            -1 if state == REFUSED else token_id
            for token_id, state in zip(token_ids, states, strict=True)
        ]
        self._answer(outputs, questions, chosen, found, answers)

    def _bench(self, num_rows: int, vocab_size: int) -> SamplingBench:
        rows = next_power(num_rows)
        key = (rows, vocab_size)
        if key not in self._benches:
            self._benches[key] = SamplingBench(self._chip, *key, graphs=self._graphs)
        return self._benches[key]

    def _answer(
        self, outputs: Mapping[str, Any], questions: Sequence[Question],
        chosen: Sequence[int], token_ids: Sequence[int], answers: Answers,
    ) -> None:  # fmt: skip
        """Keep the tokens; a row that allows none is read on the host, which words the error."""
        for i, token_id in zip(chosen, token_ids, strict=True):
            if token_id >= 0:
                answers[i] = SampledToken(token_id)
            else:
                row = self._on_host(outputs, questions[i].row)
                answers[i] = self._host.answer(row, questions[i], argmax=None)

    def _add_logprobs(
        self, outputs: Mapping[str, Any], questions: Sequence[Question], answers: Answers
    ) -> None:
        for i, answer in answers.items():
            wanted = questions[i].rules.params.logprobs
            if wanted is not None and isinstance(answer, SampledToken):
                answers[i] = self.score(outputs, questions[i].row, answer.token_id, wanted)

    def score(
        self, outputs: Mapping[str, Any], row: int, token_id: int, num_top: int
    ) -> SampledToken:
        """Log-probability of a given token in a row, and of the most likely ones."""
        with self._chip.active():
            logits = outputs["logits"][row].float()
            logprobs = log_softmax_row(logits)
            keys = order_keys(logits[None])[0].topk(min(num_top, len(logits))).values
            ids = torch.cat((torch.tensor([token_id], device=logits.device), ids_of_keys(keys)))
            chosen, *top = zip(ids.tolist(), logprobs[ids].tolist(), strict=True)
            return SampledToken(token_id, chosen[1], tuple(t for t in top if t[1] > -np.inf))

    def logits(self, outputs: Mapping[str, Any], row: int) -> Logits:
        """Return a copy of a row on the host."""
        with self._chip.active():
            return self._on_host(outputs, row)

    @staticmethod
    def _on_host(outputs: Mapping[str, Any], row: int) -> Logits:
        found: Logits = outputs["logits"][row].float().cpu().numpy().copy()
        return found

    @staticmethod
    def _pick(rows: Tensor, questions: Sequence[Question], chosen: Sequence[int]) -> Tensor:
        """Return the rows that questions are about; neighbours in order need no copy."""
        wanted = [questions[i].row for i in chosen]
        first = wanted[0]
        if wanted == list(range(first, first + len(wanted))):
            return rows[first : first + len(wanted)]
        return rows.index_select(0, torch.tensor(wanted, device=rows.device))


def _moved(table: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(table)).to(like.device)


def _is_plain(asked: Question) -> bool:
    """Say whether the answer is the argmax of the raw logits."""
    return asked.rules.params.is_greedy and not asked.rules.changes_logits(
        len(asked.output_token_ids)
    )
