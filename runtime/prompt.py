"""Prompts: text to token ids, chat messages to text, and the checks both need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Tokenizer

from tilewright.runtime.artifact import ModelRecord
from tilewright.runtime.errors import ArtifactError, RequestError

Prompt: TypeAlias = "str | Sequence[int]"
Message: TypeAlias = Mapping[str, str]
MAX_TEXT_CHARS = 64 << 20


def load_tokenizer(folder: Path, model: ModelRecord) -> Tokenizer | None:
    """Return the artifact's tokenizer, or None where the model came without one."""
    if model.tokenizer is None:
        return None
    try:
        return Tokenizer.from_file(str(folder / model.tokenizer))
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        raise ArtifactError(f"file '{model.tokenizer}': is no tokenizer: {error}") from None


def encode(prompt: Prompt, tokenizer: Tokenizer | None, model: ModelRecord) -> tuple[int, ...]:
    """Return the token ids of a prompt: a text, or ids which are checked and kept as they are.

    Raises RequestError for an empty prompt, ids outside the vocabulary, and other types.
    """
    if isinstance(prompt, str):
        ids = _encode_text(prompt, tokenizer, model)
    else:
        ids = _checked_ids(prompt, model.vocab_size)
    if not ids:
        raise RequestError("prompt: is empty: got 0 tokens, want at least 1")
    if len(ids) >= model.max_context:
        raise RequestError(
            f"prompt: is longer than the context: got {len(ids)} tokens, "
            f"want at most {model.max_context - 1} (context of {model.max_context} tokens)"
        )
    return ids


def _encode_text(text: str, tokenizer: Tokenizer | None, model: ModelRecord) -> tuple[int, ...]:
    if tokenizer is None:
        raise RequestError("prompt: the model has no tokenizer: got text, want token ids")
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(
            f"prompt: is too long: got {len(text)} characters, want at most {MAX_TEXT_CHARS}"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"prompt: is not valid Unicode: got a lone surrogate at character {error.start}, "
            "want text"
        ) from None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    outside = next((i for i in ids if i >= model.vocab_size), None)
    if outside is not None:
        raise RequestError(
            f"prompt: the tokenizer gives token {outside}, want less than {model.vocab_size}"
        )
    if model.add_bos and model.bos_id is not None and ids[:1] != [model.bos_id]:
        ids = [model.bos_id, *ids]
    return tuple(ids)


def _checked_ids(prompt: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(prompt, (list, tuple, np.ndarray)):
        raise RequestError(
            f"prompt: wrong type: got {type(prompt).__name__}, want a text or a list of token ids"
        )
    ids = []
    for index, value in enumerate(prompt):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise RequestError(
                f"prompt: token {index}: got {value!r:.40}, want an int below {vocab_size}"
            )
        if not 0 <= value < vocab_size:
            raise RequestError(
                f"prompt: token {index}: got {int(value)}, want 0 to {vocab_size - 1}"
            )
        ids.append(int(value))
    return tuple(ids)


def render_chat(messages: Sequence[Message], model: ModelRecord, special: Mapping[str, str]) -> str:
    """Return the text of a conversation in the model's own chat template, run in a sandbox.

    `messages` have `role` and `content`; `special` gives bos_token and eos_token texts.
    """
    if model.chat_template is None:
        raise RequestError(f"chat: model '{model.name}' has no chat template: want a plain prompt")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(
                    f"chat: message {index}: '{key}': got {message.get(key)!r:.40}, want text"
                )
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def refuse(text: str) -> None:
        raise RequestError(f"chat: the template refuses the messages: {text}")

    try:
        template = environment.from_string(model.chat_template)
        return template.render(
            messages=[dict(m) for m in messages],
            add_generation_prompt=True,
            raise_exception=refuse,
            **special,
        )
    except TemplateError as error:
        raise RequestError(f"chat: the model's template failed: {error}") from None
