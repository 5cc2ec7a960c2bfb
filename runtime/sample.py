"""One sample under way: its request, and the text, log-probabilities and logits it has so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tilewright.runtime.choose import Chooser, Question
from tilewright.runtime.detokenize import Detokenizer, StopMatcher
from tilewright.runtime.errors import RequestError
from tilewright.runtime.outputs import SampleOutput, StreamEvent
from tilewright.runtime.philox import Draw
from tilewright.runtime.request import FinishReason, Request
from tilewright.runtime.sample_logits import SampleRules
from tilewright.runtime.sampler import SampledToken

Logits = NDArray[np.float32]


@dataclass(frozen=True, eq=False, slots=True)
class PromptRow:
    """What was read at a position of a prompt: its logits, the score of the token after it."""

    position: int
    logits: Logits | None
    scored: SampledToken | None


class Sample:
    """Samples tokens for a request and turns them into text; knows nothing of the batch."""

    def __init__(
        self,
        request: Request,
        rules: SampleRules,
        tokenizer: Tokenizer | None,
        *,
        keep_logits: bool = False,
    ) -> None:
        self.request, self.rules = request, rules
        self.prompt_logprobs: list[SampledToken | None] = [None]
        self.logits: list[Logits] | None = [] if keep_logits else None
        self.error: str | None = None
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._stops = StopMatcher(rules.params.stop_strings)
        self._ending = frozenset(rules.ending.tolist())
        self._text: list[str] = []
        self._logprobs: list[SampledToken] = []
        self._prompt = np.asarray(request.prompt_ids)
        self._num_seen = [0, 0, 0]  # pieces of text, tokens, log-probabilities already streamed
        self._closed = False

    def read_prompt_row(
        self, position: int, chooser: Chooser, outputs: Mapping[str, Any], row: int
    ) -> PromptRow:
        """Read what a prompt row's logits are wanted for: themselves, or the next token's score."""
        logits = chooser.logits(outputs, row) if self.logits is not None else None
        wanted, scored = self.rules.params.prompt_logprobs, None
        if wanted is not None and position + 1 < len(self.request.prompt_ids):
            token_id = self.request.prompt_ids[position + 1]
            scored = chooser.score(outputs, row, token_id, wanted)
        return PromptRow(position, logits, scored)

    def take_prompt_row(self, read: PromptRow) -> bool:
        """Keep what was read of a prompt row; False if it ends this sample with an error."""
        if self.logits is not None and read.logits is not None:
            self.logits.append(read.logits)
        if read.scored is None:
            return True
        if read.scored.logprob != read.scored.logprob:  # only NaN differs from itself
            self.error = (
                f"request '{self.request.id}': logits 'position {read.position + 1}': not finite: "
                "got no log-probability for the prompt's token, want numbers or -inf"
            )
            return False
        self.prompt_logprobs.append(read.scored)
        return True

    def question(self, row: int) -> Question:
        """Return what is to be decided in a row of a step's logits."""
        request = self.request
        draw = Draw(request.seed, request.num_tokens, request.sample_index)
        return Question(row, self.rules, draw, self._prompt, request.output_ids)

    def take(self, answer: SampledToken | RequestError) -> tuple[int, FinishReason | None]:
        """Take the next token; return it and why the sample ends now, if it does.

        Logits that allow no choice end this sample with an error and touch no other.
        """
        if isinstance(answer, RequestError):
            self.error = f"request '{self.request.id}': {answer}"
            return 0, FinishReason.ERROR
        if self.rules.params.logprobs is not None:
            self._logprobs.append(answer)
        return answer.token_id, self._push(answer.token_id)

    def _push(self, token_id: int) -> FinishReason | None:
        """Add a token's text; say whether it ends the sample."""
        count = len(self.request.output_ids) + 1
        if token_id in self._ending and count > self.rules.params.min_tokens:
            return FinishReason.STOP
        if self._detokenizer is None:
            return None
        text = self._detokenizer.push(token_id)
        if count <= self.rules.params.min_tokens:
            self._text.append(text)
            return None
        self._text.append(self._stops.push(text))
        return FinishReason.STOP if self._stops.matched is not None else None

    def close(self) -> None:
        """Add the text still held back: no stop string can begin any more."""
        if self._closed:
            return
        self._closed = True
        if self._detokenizer is not None and self._stops.matched is None:
            self._text.append(self._stops.push(self._detokenizer.finish()))
            if self._stops.matched is None:
                self._text.append(self._stops.finish())

    @property
    def is_finished(self) -> bool:
        return self.request.is_finished

    @property
    def finish_reason(self) -> str:
        reason = self.request.finish_reason
        assert reason is not None, f"request '{self.request.id}' is not finished"
        return reason.value

    def event(self) -> StreamEvent | None:
        """Return what came since the last event, or None for nothing."""
        if self.is_finished:
            self.close()
        text = "".join(self._text[self._num_seen[0] :])
        tokens = tuple(self.request.output_ids[self._num_seen[1] :])
        logprobs = tuple(self._logprobs[self._num_seen[2] :])
        self._num_seen = [len(self._text), len(self.request.output_ids), len(self._logprobs)]
        if not text and not tokens and not self.is_finished:
            return None
        return StreamEvent(
            index=self.request.sample_index,
            text=text,
            token_ids=tokens,
            finish_reason=self.finish_reason if self.is_finished else None,
            logprobs=logprobs if self.rules.params.logprobs is not None else None,
            error=self.error,
        )

    def output(self) -> SampleOutput:
        """Return the finished sample."""
        self.close()
        wanted = self.rules.params.logprobs is not None
        return SampleOutput(
            index=self.request.sample_index,
            text="".join(self._text),
            token_ids=tuple(self.request.output_ids),
            finish_reason=self.finish_reason,
            logprobs=tuple(self._logprobs) if wanted else None,
            error=self.error,
        )


def stacked(rows: Sequence[Logits], vocab_size: int) -> Logits:
    """Return rows as one array [tokens, vocab]."""
    return np.stack(rows) if rows else np.zeros((0, vocab_size), np.float32)
