"""What the outputs of a step decide: first all of it, which changes nothing, then each sample takes
its part. A step that fails or is interrupted between the two leaves every request as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.runtime.batch import Batch
from tilewright.runtime.choose import Chooser, Question
from tilewright.runtime.errors import RequestError
from tilewright.runtime.request import FinishReason, Request
from tilewright.runtime.sample import PromptRow, Sample
from tilewright.runtime.sampler import SampledToken


@dataclass(frozen=True)
class Decided:
    """Rows of prompts, and answers by row of logits; `owner` is a row of `batch.requests`."""

    prompt_rows: list[tuple[int, Sample, PromptRow]] = field(default_factory=list)
    answers: list[tuple[int, Sample, int, SampledToken | RequestError]] = field(
        default_factory=list
    )


def decide(
    batch: Batch, live: Mapping[Request, Sample], chooser: Chooser, outputs: Mapping[str, Any]
) -> Decided:
    """Choose for every row that decides a token, and read the rows of prompts that are wanted."""
    decided = Decided()
    asked: list[tuple[int, Sample, Question]] = []
    for row, owner in enumerate(batch.logit_requests.tolist()):
        request = batch.requests[owner]
        sample = live.get(request)
        if sample is None or request.is_finished:
            continue
        position = int(batch.positions[batch.logit_rows[row]])
        if request.wants_prompt_logits and position < len(request.prompt_ids):
            read = sample.read_prompt_row(position, chooser, outputs, row)
            decided.prompt_rows.append((owner, sample, read))
        if batch.is_sampled[row]:
            asked.append((owner, sample, sample.question(row)))
    answers = chooser.choose(outputs, [question for _, _, question in asked])
    for (owner, sample, question), answer in zip(asked, answers, strict=True):
        decided.answers.append((owner, sample, question.row, answer))
    return decided


def take(batch: Batch, decided: Decided) -> tuple[list[int], dict[int, FinishReason]]:
    """Hand everything to its sample; return a token per row of logits, and the requests that end.
    """
    tokens = [0] * batch.num_logits
    endings: dict[int, FinishReason] = {}
    for owner, sample, read in decided.prompt_rows:
        if not sample.take_prompt_row(read):
            endings[owner] = FinishReason.ERROR
    for owner, sample, row, answer in decided.answers:
        if owner in endings:
            continue
        tokens[row], reason = sample.take(answer)
        if reason is not None:
            endings[owner] = reason
    return tokens, endings
