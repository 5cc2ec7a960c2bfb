"""Text of a growing list of token ids, piece by piece, and the search for stop strings in it.

The pieces of a `Detokenizer` joined equal the tokenizer's decode of all ids, for any ids. Text
that later ids could still change is held back until they cannot, or until `finish`.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

_WINDOW = 32
_KEPT = 8
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f+][0-9A-Fa-f]>")


class _Decoding(Protocol):
    """A way of turning ids into text step by step; ids that decode skips never reach it."""

    def push(self, token_id: int, token: str) -> str: ...

    def finish(self) -> str: ...


class Detokenizer:
    """Incremental decode of one sequence.

    skip_special_tokens: as in the tokenizer's decode. The cost of a token does not grow with the
    sequence. Ids that the tokenizer does not know give no text, as in its decode.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._token_of: Callable[[int], str | None] = tokenizer.id_to_token
        self._skipped = {
            token.content for token in added.values() if token.special and skip_special_tokens
        }
        kinds = decoder_kinds(tokenizer)
        self._decoding: _Decoding
        if kinds == ("ByteLevel",):
            self._decoding = _ByteLevelDecoding()
        else:
            self._decoding = _WindowDecoding(tokenizer, has_byte_tokens="ByteFallback" in kinds)

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that is now certain, often all of it, possibly none."""
        token = self._token_of(token_id)
        if token is None or token in self._skipped:
            return ""
        return self._decoding.push(token_id, token)

    def finish(self) -> str:
        """The rest of the text, after the last id."""
        return self._decoding.finish()


def decoder_kinds(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Names of the steps of a tokenizer's decoder, in order; empty without a decoder."""
    if tokenizer.decoder is None:
        return ()
    state = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return tuple(step["type"] for step in steps)


class _ByteLevelDecoding:
    """Byte-level tokens: each is a run of bytes, and the text is their UTF-8, errors replaced."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._byte_of = _byte_alphabet()

    def push(self, token_id: int, token: str) -> str:
        """Text of all characters completed by the token."""
        return self._utf8.decode(self._bytes(token))

    def finish(self) -> str:
        """A replacement character for an incomplete end."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token: str) -> bytes:
        """Bytes of a token; one with other characters (an added token) is plain text."""
        byte_of = self._byte_of
        if all(char in byte_of for char in token):
            return bytes([byte_of[char] for char in token])
        return token.encode("utf-8")


class _WindowDecoding:
    """Any other decoder: decode a short window of ids, and emit what it adds to its last text.

    A window starts a few tokens back, so that what a decoder does to the first token of a text
    (dropping a space) happens to tokens whose text is out already. A run of byte tokens becomes
    text only when it ends: one bad byte anywhere turns every byte of a run into a replacement
    character. A trailing replacement character may be half of one still to come.
    """

    def __init__(self, tokenizer: Tokenizer, *, has_byte_tokens: bool) -> None:
        self._decode: Callable[..., str] = tokenizer.decode
        self._has_byte_tokens = has_byte_tokens
        self._ids: list[int] = []
        self._emitted = ""

    def push(self, token_id: int, token: str) -> str:
        """Text that the token makes certain."""
        self._ids.append(token_id)
        if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._ids, skip_special_tokens=False)
        if not text.startswith(self._emitted):
            return ""
        # With byte tokens a run has just ended, so a replacement character is final.
        if text.endswith(_REPLACEMENT) and not self._has_byte_tokens:
            return ""
        added = text[len(self._emitted) :]
        self._emitted = text
        self._shorten()
        return added

    def finish(self) -> str:
        """What is left of the text."""
        text = self._decode(self._ids, skip_special_tokens=False)
        added = text[len(self._emitted) :]
        self._emitted = text
        return added

    def _shorten(self) -> None:
        """Drop ids that no longer matter from the front of a long window."""
        if len(self._ids) < _WINDOW:
            return
        kept = self._ids[-_KEPT:]
        text = self._decode(kept, skip_special_tokens=False)
        if len(text) >= _KEPT // 2:
            self._ids = kept
            self._emitted = text


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for.

    Bytes that print stand for themselves; the others, in order, are numbered from U+0100.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printing)]
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class StopMatcher:
    """Cuts a text before the earliest stop string, however the text is split into pieces.

    What could be the start of a stop string is held back. If stop strings overlap, the one that
    starts first counts, so a longer one is waited for when another is complete inside it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; None so far."""
        return self._matched

    def push(self, text: str) -> str:
        """Add text; returns what can be emitted. After a match nothing is."""
        if self._matched is not None:
            return ""
        text = self._held + text
        start, stop = self._first_match(text)
        open_start = self._first_open(text, start)
        if open_start < start:
            self._held = text[open_start:]
            return text[:open_start]
        self._held = ""
        self._matched = stop
        return text[:start]

    def finish(self) -> str:
        """What was held back, up to a stop string that is complete in it."""
        if self._matched is not None:
            return ""
        start, self._matched = self._first_match(self._held)
        text, self._held = self._held[:start], ""
        return text

    def _first_match(self, text: str) -> tuple[int, str | None]:
        """Start of the earliest complete stop string, the shortest there; else the text's end."""
        found = [(text.find(stop), len(stop), stop) for stop in self._stops]
        found = [entry for entry in found if entry[0] >= 0]
        if not found:
            return len(text), None
        start, _, stop = min(found)
        return start, stop

    def _first_open(self, text: str, before: int) -> int:
        """Earliest place below `before` from which the text's end may grow into a stop string."""
        earliest = before
        for stop in self._stops:
            start = text.find(stop[0], max(len(text) - len(stop) + 1, 0), earliest)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, earliest)
            if start >= 0:
                earliest = start
        return earliest
