"""A chat template tried before a model is compiled: one that always fails should not wait until
somebody chats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2.exceptions import TemplateSyntaxError

from tilewright.graph.errors import VerifyError
from tilewright.models.record import Checkpoint, shown
from tilewright.runtime.chat_template import conversation, render

_SYSTEM = {"role": "system", "content": "Be brief."}
_USER = {"role": "user", "content": "Hello"}
_ANSWER = {"role": "assistant", "content": "Hello."}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
_TRIED = ([_USER], [_SYSTEM, _USER], [_SYSTEM, _USER, _ANSWER, _USER], [_PARTS])


class _Refused(Exception):
    """The template itself refuses a conversation, which is its right."""


def check_template(checkpoint: Checkpoint) -> None:
    """Raise VerifyError for a chat template that is malformed or fails for every conversation."""
    source = checkpoint.chat_template
    if source is None:
        return
    failures = [_failure(source, messages, checkpoint.special_tokens) for messages in _TRIED]
    if all(failures):
        raise VerifyError(
            f"chat template of '{checkpoint.name}': {failures[0]}: want one that works, or none "
            f"({checkpoint.source})"
        )


def _failure(
    source: str, messages: Sequence[Mapping[str, object]], special: Mapping[str, str]
) -> str | None:
    """Return why a template cannot render a conversation, in a few words; None where it can."""

    def refuse(text: str) -> None:
        raise _Refused(text)

    try:
        render(source, conversation(messages, special, refuse))
    except _Refused:
        return None
    except TemplateSyntaxError as error:
        return f"is malformed in line {error.lineno}: {shown(error.message)}"
    except Exception as error:  # a template is a foreign program, and may raise whatever there is
        text = " ".join(str(error).split())
        return f"cannot be rendered: {type(error).__name__}: {shown(text)}"
    return None
