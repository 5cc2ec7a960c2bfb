"""One sequence being generated: a sample of a prompt, its tokens so far and how far it is computed.

A request is mutable and belongs to the scheduler; everybody else reads it. It knows no clock.
"""

from dataclasses import dataclass, field
from enum import Enum

from tilewright.runtime.errors import RequestError
from tilewright.runtime.params import SamplingParams, shown
from tilewright.runtime.snapshot import Snapshot


class RequestState(Enum):
    """Where a request stands; a preempted request goes back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


MAX_ID_CHARS = 256


def checked_id(request_id: object) -> str:
    """Return a request's id; raise RequestError for anything but a text that fits in a message."""
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(f"request id: got {shown(request_id)}, want a non-empty text")
    if len(request_id) > MAX_ID_CHARS:
        raise RequestError(
            f"request id: is too long: got {len(request_id)} characters, want at most "
            f"{MAX_ID_CHARS}"
        )
    return request_id


# Compared by identity: two requests with equal fields are still two sequences.
@dataclass(eq=False, slots=True)
class Request:
    """One sample of one prompt; the samples of a prompt share `id` and differ in `sample_index`.

    `params` is carried for the sampler and never read by the scheduler. `max_tokens` may be 0: the
    prompt is computed (for its logits) and nothing is sampled. Positions count tokens from 0, the
    prompt first and then the output. `resume`: a snapshot of its first tokens, computed on from
    unless it was dropped by then. Raises RequestError for an empty prompt.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    sample_index: int = 0
    wants_prompt_logits: bool = False
    resume: Snapshot | None = None
    state: RequestState = field(default=RequestState.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    output_ids: list[int] = field(default_factory=list, init=False)
    num_computed: int = field(default=0, init=False)
    num_prompt_logits: int = field(default=0, init=False)  # delivered; a recompute skips them
    num_preemptions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise RequestError(
                f"request '{self.id}': the prompt is empty: got 0 tokens, want at least 1"
            )
        if self.max_tokens < 0:
            raise RequestError(
                f"request '{self.id}': max_tokens is negative: got {self.max_tokens}, "
                "want 0 or more"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_positions(self) -> int:
        """Positions it can ever need: the last sampled token is never computed."""
        return len(self.prompt_ids) + max(self.max_tokens - 1, 0)

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens at positions `start` to `stop` (exclusive), prompt and output as one sequence."""
        prompt_length = len(self.prompt_ids)
        if start >= prompt_length:
            return self.output_ids[start - prompt_length : stop - prompt_length]
        return [
            *self.prompt_ids[start:stop],
            *self.output_ids[: max(stop - prompt_length, 0)],
        ]
