"""Prompts: what a tokenizer makes of a text, and what a chat template is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tilewright.runtime.artifact import ModelRecord
from tilewright.runtime.errors import RequestError
from tilewright.runtime.prompt import encode, load_tokenizer, render_chat, token_ids

WORDS = {word: i for i, word in enumerate("abcdef")}


def model(**changes: str) -> ModelRecord:
    return ModelRecord(
        name="m", family="llama", vocab_size=6, max_context=64, block_size=8, bos_id=None,
        eos_ids=(), add_bos=False, tokenizer="tokenizer.json",
        **{"chat_template": None, **changes},
    )  # fmt: skip


def words(unknown: str = "<unk>") -> Tokenizer:
    """A tokenizer of six words, which lacks one for the unknown."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_no_prompt_is_cut_or_filled_up_by_what_the_file_keeps_of_training(tmp_path: Path) -> None:
    tokenizer = words()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5, pad_id=0, pad_token="a")
    assert tokenizer.encode("f").ids == [5, 0, 0, 0, 0]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path, model())
    assert encode("f e d c", loaded, model()) == (5, 4, 3, 2)
    assert encode("f", loaded, model()) == (5,)


def test_a_text_that_the_tokenizer_cannot_read_is_refused() -> None:
    why = "WordLevel error: Missing [UNK] token from the vocabulary"
    for what in ("prompt", "bad_words"):
        with pytest.raises(RequestError) as caught:
            token_ids(words(), "a zebra", what)
        assert str(caught.value) == (
            f"{what}: the tokenizer cannot read 'a zebra': {why}: want other text"
        )
    with pytest.raises(RequestError, match="^prompt: the tokenizer cannot read 'a zebra': "):
        encode("a zebra", words(), model())


def test_a_text_with_an_added_token_that_the_model_lacks_is_refused() -> None:
    tokenizer = words()
    tokenizer.add_special_tokens(["<pad>"])
    assert encode("a b", tokenizer, model()) == (0, 1)
    with pytest.raises(RequestError) as caught:
        encode("a <pad>", tokenizer, model())
    assert str(caught.value) == "prompt: the tokenizer gives token 6, want less than 6"


def test_templates_find_what_published_ones_look_for() -> None:
    said = [{"role": "user", "content": "<a> & 'b' é"}]
    for template, text in (
        ("{{ messages[0].content | tojson }}", "\"<a> & 'b' é\""),
        ("{{ {'b': 1, 'a': [2]} | tojson(sort_keys=True, separators=(',', ':')) }}",
         '{"a":[2],"b":1}'),
        ("{{ [1] | tojson(indent=4) }}", "[\n    1\n]"),
        ("{{ 'é' | tojson(ensure_ascii=True) }}", '"\\u00e9"'),
        ("{% if tools is not none or documents is not none %}{{ tools[0] }}{% endif %}ok", "ok"),
        ("{{ bos_token + eos_token + pad_token }}", "<s><pad>"),
    ):  # fmt: skip
        special = {"bos_token": "<s>", "pad_token": "<pad>"}
        assert render_chat(said, model(chat_template=template), special) == text
