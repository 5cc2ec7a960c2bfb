"""Tokenizers as Hugging Face `tokenizers` JSON: checked as found, or built from GGUF metadata.

Every tokenizer is used without its special-token template: the runtime adds the first token itself.
"""

import json
import string
from dataclasses import dataclass

import tokenizers

from tilewright.graph.errors import VerifyError
from tilewright.models.gguf_config import Metadata
from tilewright.models.record import Checkpoint, shown

Json = dict[str, object]
Merge = tuple[str, str]

# ggml's token types (llama.h, enum llama_token_type); others are ordinary text.
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
_TYPES = range(7)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_MARKS}|{_SPACES}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# What llama.cpp does where a file says "default": not GPT-2's rule, it parts punctuation first.
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging: every digit alone, then regular expressions in order.

    `words` ends with GPT-2's own rule, which the library has built in. `whole_words` takes a piece
    that is itself a token without merging. `normalise` composes characters (NFC) first.
    """

    cuts: tuple[str, ...] = ()
    digits: bool = False
    words: bool = False
    whole_words: bool = False
    normalise: bool = False


# Names as in the GGUF key tokenizer.ggml.pre.
PRE_TOKENIZERS = {
    "default": PreTokenizer(_DEFAULT),
    "gpt-2": PreTokenizer(words=True),
    "smollm": PreTokenizer(digits=True, words=True),
    "starcoder": PreTokenizer(digits=True, words=True),
    "llama-bpe": PreTokenizer((_LLAMA3,), whole_words=True),
    "qwen2": PreTokenizer((_QWEN2,), normalise=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,), normalise=True),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
}

_SPACE = "\u2581"


def load_tokenizer(text: str, where: str) -> tokenizers.Tokenizer:
    """Load a tokenizer from JSON text. Raises VerifyError if the library refuses it."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # The library raises nothing narrower.
        raise VerifyError(f"{where}: not a tokenizer: {shown(str(error))}") from error


def check_tokenizer(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Raise VerifyError for a tokenizer that reads no text, or whose own vocabulary has tokens that
    the model lacks.

    Tokens added to it may lie beyond: published files add one for padding that nothing was trained
    with. A text that names one is refused when it comes.
    """
    if checkpoint.tokenizer_json is None:
        return
    where = f"tokenizer of '{checkpoint.name}'"
    tokenizer = load_tokenizer(checkpoint.tokenizer_json, where)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise VerifyError(
            f"{where}: its vocabulary is empty: got 0 tokens, want some ({checkpoint.source})"
        )
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    own = {token: i for token, i in vocab.items() if token not in added}
    token, last = max(own.items(), key=lambda item: item[1], default=("", -1))
    if last >= vocab_size:
        raise VerifyError(
            f"{where}: gives tokens that the model lacks: got {last} for {shown(token)}, want "
            f"below {vocab_size} ({checkpoint.source})"
        )
    # Some models read no English: notes, proteins, one script alone.
    texts = (string.printable, *string.printable, *own)
    failures = []
    for text in texts:
        why = _failure(tokenizer, text)
        if why is None:
            return
        failures.append(why)
    raise VerifyError(f"{where}: reads no text: {failures[0]} ({checkpoint.source})")


def _failure(tokenizer: tokenizers.Tokenizer, text: str) -> str | None:
    """Say why a tokenizer cannot read a text; None where it can."""
    try:
        reads = bool(tokenizer.encode(text, add_special_tokens=False).ids)
    except Exception as error:  # The library raises nothing narrower.
        return shown(str(error))
    return None if reads else "got no tokens for the characters of ASCII, want some"


def _token_types(meta: Metadata, count: int) -> tuple[int, ...]:
    """The type of every token; ordinary text where the file has no types."""
    if "tokenizer.ggml.token_type" not in meta.values:
        return (1,) * count
    types = meta.numbers("tokenizer.ggml.token_type")
    if len(types) != count or not all(each in _TYPES for each in set(types)):
        raise VerifyError(
            f"metadata 'tokenizer.ggml.token_type' ({meta.path}): got {len(types)} types up to "
            f"{max(types, default=0)}, want {count} types from 0 to {_TYPES[-1]}"
        )
    return tuple(int(each) for each in types)


def _vocab(meta: Metadata) -> dict[str, int]:
    """Token text -> id."""
    tokens = meta.texts("tokenizer.ggml.tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(vocab) != len(tokens):
        twice = next((t for i, t in enumerate(tokens) if vocab[t] != i), None)
        raise VerifyError(
            f"metadata 'tokenizer.ggml.tokens' ({meta.path}): got {len(tokens)} tokens with "
            f"{shown(twice)} twice, want at least one and each once"
        )
    return vocab


def _added(vocab: dict[str, int], types: tuple[int, ...]) -> list[Json]:
    """Tokens that are found in text before anything is cut."""
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[i] != USER_DEFINED,
        }
        for token, i in vocab.items()
        if types[i] in (CONTROL, USER_DEFINED, UNKNOWN) and token
    ]


def _stored_merges(meta: Metadata, vocab: dict[str, int]) -> list[Merge]:
    """The merges of the file, each a pair whose parts and result are tokens."""
    pairs = []
    for merge in meta.texts("tokenizer.ggml.merges"):
        # No token of a byte alphabet holds a space, so the first one is the border.
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise VerifyError(
                f"metadata 'tokenizer.ggml.merges' ({meta.path}): got {shown(merge)}, "
                "want two tokens that join to a token"
            )
        pairs.append((left, right))
    return pairs


def _scored_merges(
    meta: Metadata, vocab: dict[str, int], types: tuple[int, ...]
) -> list[Merge]:
    """Merges of a SentencePiece vocabulary: every split of a piece, best piece first.

    SentencePiece joins the neighbours whose result has the highest score; a list of merges ordered
    by the score of their results does the same.
    """
    scores = meta.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocab):
        raise VerifyError(
            f"metadata 'tokenizer.ggml.scores' ({meta.path}): got {len(scores)} scores, "
            f"want {len(vocab)}"
        )
    plain = {token: i for token, i in vocab.items() if types[i] not in (UNKNOWN, CONTROL, BYTE)}
    found: list[tuple[float, int, int, Merge]] = []
    for token, i in plain.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in plain and right in plain:
                found.append((-scores[i], plain[left], plain[right], (left, right)))
    return [pair for *_, pair in sorted(found)]


def _model(vocab: dict[str, int], merges: list[Merge], **settings: object) -> Json:
    """The model part of the JSON."""
    plain: Json = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**plain, **settings, "vocab": vocab, "merges": merges}


def _byte_level(meta: Metadata, vocab: dict[str, int], types: tuple[int, ...]) -> Json:
    """A tokenizer over bytes in GPT-2's printable alphabet."""
    name = meta.text("tokenizer.ggml.pre", "")
    if name not in PRE_TOKENIZERS:
        got = shown(name) if name else "nothing"
        raise VerifyError(
            f"metadata 'tokenizer.ggml.pre' ({meta.path}): unknown pre-tokenizer: got {got}, "
            f"want one of {', '.join(PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    bytes_step: Json = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": pre.words,
    }
    digits: list[Json] = [{"type": "Digits", "individual_digits": True}] if pre.digits else []
    cuts: list[Json] = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
        for cut in pre.cuts
    ]
    merges = _stored_merges(meta, vocab)
    return {
        "normalizer": {"type": "NFC"} if pre.normalise else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*digits, *cuts, bytes_step]},
        "post_processor": None,
        "decoder": bytes_step,
        "model": _model(vocab, merges, ignore_merges=pre.whole_words),
    }


def _sentence_piece(meta: Metadata, vocab: dict[str, int], types: tuple[int, ...]) -> Json:
    """A SentencePiece-style tokenizer: spaces become a letter, unknown characters become bytes."""
    num_bytes = sum(f"<0x{byte:02X}>" in vocab for byte in range(256))
    unknown = next((token for token, i in vocab.items() if types[i] == UNKNOWN), None)
    if num_bytes not in (0, 256) or (num_bytes == 0 and unknown is None):
        raise VerifyError(
            f"metadata 'tokenizer.ggml.tokens' ({meta.path}): got {num_bytes} byte tokens, "
            "want all 256, or none and an unknown token"
        )
    prefix = meta.flag("tokenizer.ggml.add_space_prefix", default=True)
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    front: list[Json] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back: Json = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*front, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(
            vocab,
            _scored_merges(meta, vocab, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=num_bytes == 256,
        ),
    }


_MODELS = {"gpt2": _byte_level, "llama": _sentence_piece}


def gguf_tokenizer(meta: Metadata) -> str | None:
    """Hugging Face tokenizer JSON from GGUF metadata, or None for a file without a tokenizer.

    Raises VerifyError for an unknown kind or pre-tokenizer, and for lists that do not fit together.
    """
    if not any(key.startswith("tokenizer.ggml.") for key in meta.values):
        return None
    kind = meta.text("tokenizer.ggml.model")
    if kind not in _MODELS:
        raise VerifyError(
            f"metadata 'tokenizer.ggml.model' ({meta.path}): unknown tokenizer: "
            f"got {shown(kind)}, want one of {', '.join(_MODELS)}"
        )
    vocab = _vocab(meta)
    types = _token_types(meta, len(vocab))
    parts = _MODELS[kind](meta, vocab, types)
    frame: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(vocab, types),
    }
    return json.dumps({**frame, **parts}, ensure_ascii=False)
