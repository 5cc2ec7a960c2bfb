"""Prompts: text to token ids, chat messages to text, and the checks both need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from tokenizers import Tokenizer

from tilewright.runtime.artifact import ModelRecord
from tilewright.runtime.errors import ArtifactError, RequestError
from tilewright.runtime.params import shown

Prompt: TypeAlias = "str | Sequence[int]"
Message: TypeAlias = Mapping[str, str]
MAX_TEXT_CHARS = 64 << 20


def load_tokenizer(folder: Path, model: ModelRecord) -> Tokenizer | None:
    """Return the artifact's tokenizer, or None where the model came without one."""
    if model.tokenizer is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(folder / model.tokenizer))
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        raise ArtifactError(f"file '{model.tokenizer}': is no tokenizer: {error}") from None
    # What a file keeps of its training would cut a prompt, or fill it up, without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts: one is a text or a list of ints, anything else is a list of them.
    """
    if isinstance(prompts, str):
        return [prompts]
    is_scalar = isinstance(prompts, np.ndarray) and prompts.ndim == 0
    if is_scalar or not isinstance(prompts, (list, tuple, np.ndarray)):
        kind = "a 0-d array" if is_scalar else type(prompts).__name__
        raise RequestError(f"prompts: wrong type: got {kind}, want a text, token ids or a list")
    single = all(not isinstance(p, (str, list, tuple, np.ndarray)) for p in prompts)
    return [cast(Prompt, prompts)] if single else list(prompts)


def encode(prompt: Prompt, tokenizer: Tokenizer | None, model: ModelRecord) -> tuple[int, ...]:
    """Return the token ids of a prompt: a text, or ids which are checked and kept as they are.

    Raises RequestError for an empty prompt, ids outside the vocabulary, and other types.
    """
    if isinstance(prompt, str):
        ids = _encode_text(prompt, tokenizer, model)
    else:
        ids = _checked_ids(prompt, model)
    if not ids:
        raise RequestError("prompt: is empty: got 0 tokens, want at least 1")
    if len(ids) >= model.max_context:
        raise _too_long(len(ids), model)
    return ids


def _too_long(num_tokens: int, model: ModelRecord) -> RequestError:
    return RequestError(
        f"prompt: is longer than the context: got {num_tokens} tokens, "
        f"want at most {model.max_context - 1} (context of {model.max_context} tokens)"
    )


def _encode_text(text: str, tokenizer: Tokenizer | None, model: ModelRecord) -> tuple[int, ...]:
    if tokenizer is None:
        raise RequestError("prompt: the model has no tokenizer: got text, want token ids")
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(
            f"prompt: is too long: got {len(text)} characters, want at most {MAX_TEXT_CHARS}"
        )
    check_unicode(text, "prompt")
    ids = token_ids(tokenizer, text, "prompt")
    outside = next((i for i in ids if i >= model.vocab_size), None)
    if outside is not None:
        raise RequestError(
            f"prompt: the tokenizer gives token {outside}, want less than {model.vocab_size}"
        )
    if model.add_bos and model.bos_id is not None and ids[:1] != [model.bos_id]:
        ids = [model.bos_id, *ids]
    return tuple(ids)


def token_ids(tokenizer: Tokenizer, text: str, what: str) -> list[int]:
    """Return the ids of a text without special tokens; raise RequestError where it has none."""
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library raises nothing narrower
        why = " ".join(str(error).split())
        raise RequestError(
            f"{what}: the tokenizer cannot read {shown(text)}: {why}: want other text"
        ) from None


def check_unicode(text: str, what: str) -> None:
    """Raise RequestError for half of a surrogate pair, which no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what}: is not valid Unicode: got a lone surrogate at character {error.start}, "
            "want text"
        ) from None


def _checked_ids(prompt: Any, model: ModelRecord) -> tuple[int, ...]:
    is_scalar = isinstance(prompt, np.ndarray) and prompt.ndim == 0
    if is_scalar or not isinstance(prompt, (list, tuple, np.ndarray)):
        raise RequestError(
            f"prompt: wrong type: got {type(prompt).__name__}, want a text or a list of token ids"
        )
    if len(prompt) >= model.max_context:
        raise _too_long(len(prompt), model)
    ids, vocab_size = [], model.vocab_size
    for index, value in enumerate(prompt):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise RequestError(
                f"prompt: token {index}: got {shown(value)}, want an int below {vocab_size}"
            )
        if not 0 <= value < vocab_size:
            raise RequestError(
                f"prompt: token {index}: got {shown(int(value))}, want 0 to {vocab_size - 1}"
            )
        ids.append(int(value))
    return tuple(ids)


def render_chat(messages: Sequence[Message], model: ModelRecord, special: Mapping[str, str]) -> str:
    """Return the text of a conversation in the model's own chat template, run in a sandbox.

    `messages` have `role` and `content`; `special` gives texts of tokens by name, as bos_token.
    """
    if model.chat_template is None:
        raise RequestError(f"chat: model '{model.name}' has no chat template: want a plain prompt")
    _check_messages(messages)
    try:
        # jinja2 takes time to import
        from tilewright.runtime.chat_template import conversation, render
    except ModuleNotFoundError:
        raise RequestError(
            "chat: jinja2 is not installed, and a chat template needs it: want a plain prompt"
        ) from None

    def refuse(text: str) -> None:
        raise RequestError(f"chat: the template refuses the messages: {text}")

    try:
        return render(model.chat_template, conversation(messages, special, refuse))
    except RequestError:
        raise
    except Exception as error:  # a template is a foreign program, and may raise whatever there is
        raise RequestError(
            f"chat: the model's template failed: {type(error).__name__}: {error}"
        ) from None


def _check_messages(messages: object) -> None:
    """Refuse anything but a list of messages with a role and a content, both texts."""
    if not isinstance(messages, (list, tuple)):
        raise RequestError(
            f"chat: messages: wrong type: got {type(messages).__name__}, want a list of messages"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"chat: message {index}: got {shown(message)}, want role and content"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(
                    f"chat: message {index}: '{key}': got {shown(message.get(key))}, want text"
                )
            check_unicode(message[key], f"chat: message {index}: '{key}'")
