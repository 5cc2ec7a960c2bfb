"""Public-domain English as token ids: training and held-out parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tilewright.tools.small.shape import SPECIAL, VOCAB

Ids = NDArray[np.int32]
HELD_OUT = 0.05  # of each file, from its end
_VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):\d+ (.*)$")


@dataclass(frozen=True)
class Corpus:
    """Token ids to train on and to evaluate on."""

    train: Ids
    held_out: Ids


def read_text(path: Path) -> str:
    """Return a file's text; verses of `bible`'s output lose their references, chapters their
    breaks."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or not _VERSE.match(lines[0]):
        return "\n".join(lines) + "\n"
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        match = _VERSE.match(line)
        if match is None:
            raise ValueError(f"corpus '{path}': a line is no verse: got {line[:40]!r}")
        chapters.setdefault((match[1], match[2]), []).append(match[3].strip())
    return "\n".join(" ".join(verses) for verses in chapters.values()) + "\n"


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE of `VOCAB` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def split(text: str) -> tuple[str, str]:
    """Return the part to train on and the held-out end, cut at a line."""
    at = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1
    return text[:at], text[at:]


def tokenise(tokenizer: Tokenizer, texts: Sequence[str]) -> Corpus:
    """Encode every text's two parts."""
    parts = [split(text) for text in texts]
    train, held_out = (
        np.concatenate([np.array(tokenizer.encode(p[i]).ids, np.int32) for p in parts])
        for i in (0, 1)
    )
    return Corpus(train, held_out)


def windows(ids: Ids, length: int, count: int, random: np.random.Generator) -> Ids:
    """Return `count` random windows of `length` + 1 ids: [count, length + 1]."""
    starts = random.integers(0, len(ids) - length - 1, count)
    found: Ids = ids[starts[:, None] + np.arange(length + 1)]
    return found
