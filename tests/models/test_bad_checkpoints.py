"""Copies of the small model with one thing wrong: one sentence names it before all else."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tilewright.codegen.config import CompileConfig
from tilewright.graph.errors import VerifyError
from tilewright.tools.prepare import prepare

SMALL = Path(__file__).parents[2] / "models" / "small"
CONFIG: dict[str, Any] = json.loads((SMALL / "config.json").read_text())
TEXT: dict[str, Any] = CONFIG["text_config"]
Tensor = tuple[str, list[int], bytes]
Tensors = dict[str, Tensor]
WEIGHT, SCALE = "layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.scale"
TABLE = "layers.1.engram.embed"
EXPERT = "layers.0.ffn.experts.0.w1"


@pytest.fixture(scope="module")
def stored() -> Tensors:
    content = (SMALL / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        found[name] = (entry["dtype"], entry["shape"], content[start + first : start + last])
    return found


def write(folder: Path, tensors: Tensors, config: object) -> None:
    header, parts, at = {}, [], 0
    for name, (dtype, shape, content) in tensors.items():
        offsets = [at, at + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        parts.append(content)
        at += len(content)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"".join(parts)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SMALL / name, folder / name)


def refusal(folder: Path) -> str:
    with pytest.raises(VerifyError) as caught:
        prepare(str(folder), CompileConfig())
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text.replace(str(folder), "*")


def with_settings(changes: Mapping[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        place = config if key in ("architectures", "text_config") else config["text_config"]
        place[key] = value
    return config


def block(*sizes: object, **changes: object) -> dict[str, Any]:
    found = {**TEXT["quantization_config"], "weight_block_size": list(sizes), **changes}
    return {"quantization_config": found}


BLOCKS = "want [128, 128] or [32, 32] or [1, 128] or [1, 64] or [1, 32]"
YARN = {"type": "yarn", "original_max_position_embeddings": 65536}
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"n_routed_experts": 9}, "config 'n_routed_experts': does not match the tensors of layer 0: "
     "got 9, and 8 experts are stored, 'layers.0.ffn.experts.8' not among them (*)"),
    ({"n_routed_experts": 4}, "config 'n_routed_experts': does not match the tensors of layer 0: "
     "got 4, and 8 experts are stored, 'layers.0.ffn.experts.8' not among them (*)"),
    ({"n_routed_experts": 10**9}, "config 'n_routed_experts': does not match the tensors of layer "
     "0: got 1000000000, and 8 experts are stored, 'layers.0.ffn.experts.8' not among them (*)"),
    (block(128, 128), "tensor 'layers.0.attn.wkv.scale' (*/model.safetensors): does not fit config "
     "'weight_block_size' [128, 128]: got [2, 8], want [1, 2] for a weight of [64, 256]"),
    (block(0, 32), f"config 'weight_block_size': got [0, 32], {BLOCKS}"),
    (block(32, 32.0), f"config 'weight_block_size': got [32, 32.0], {BLOCKS}"),
    (block(32, 32, quant_method="awq"),
     "config 'quant_method': not supported: got 'awq', want 'fp8'"),
    (block(32, 32, fmt="e5m2"), "config 'fmt': not supported: got 'e5m2', want 'e4m3'"),
    ({"quantization_config": [1]}, "config 'quantization_config': got [1], want an object"),
    ({"compress_ratios": [*TEXT["compress_ratios"], 1]},
     "config 'compress_ratios': more than the layers: got 11 ratios, want 10, or 10 with the draft "
     "layers"),
    ({"compress_ratios": None, "layer_types": [["a"]] * 10},
     "config 'layer_types': unknown mode of layer 0: got ['a'], want one of sliding_attention"),
    ({"compress_ratios": None, "layer_types": 5},
     "config 'layer_types': got 5, want a list of names"),
    ({"candidate_source_layer_id": 5.0}, "config 'candidate_source_layer_id': got 5.0, want a KV "
     "source of [2, 5] or -1"),
    ({"engram_num_embeddings": 5}, "config 'engram_num_embeddings': got 5, want 2 positive ints"),
    ({"engram_num_embeddings": [4000, 5148]}, "config 'engram_num_embeddings': too few rows for "
     "layer 1: got 4000, want at least 4800"),
    ({"engram_num_embeddings": [4919, 5148]}, "config 'engram_num_embeddings': too few rows for "
     "layer 1: got 4919, want at least 4920"),
    ({"engram_max_ngram_size": 10**9}, "config 'engram_n_heads': too many rows a token: got "
     "1999999998 (heads times n-gram sizes), want at most 1024"),
    ({"engram_n_heads": 100}, "config 'engram_num_embeddings': too few rows for layer 1: got 4920, "
     "want at least 240000"),
    ({"engram_pad_token_id": None},
     "config 'engram_pad_token_id': got None, want a token of the tokenizer's 2048 (*)"),
    ({"vocab_size": 10**9}, "config 'vocab_size': got 1000000000, want 2048, the rows of "
     "'embed.weight', and at least the tokenizer's 2048 tokens (*)"),
    ({"vocab_size": 2047}, "config 'vocab_size': got 2047, want 2048, the rows of 'embed.weight', "
     "and at least the tokenizer's 2048 tokens (*)"),
    ({"head_dim": 63}, "config 'head_dim': is odd: got 63, want an even width"),
    ({"head_dim": 10**9},
     "config 'head_dim': got 1000000000, want a positive int of at most 16384"),
    ({"hc_sinkhorn_iters": 10**9},
     "config 'hc_sinkhorn_iters': got 1000000000, want a positive int of at most 1000"),
    ({"norm_topk_prob": "no"}, "config 'norm_topk_prob': got 'no', want true or false"),
    ({"rope_scaling": "x"}, "config 'rope_scaling': got 'x', want an object"),
    ({"rope_scaling": YARN}, "config 'rope_scaling.factor': got None, want a positive number"),
    ({"rope_scaling": {**YARN, "factor": float("nan")}},
     "config 'rope_scaling.factor': got nan, want a positive number"),
    ({"rope_parameters": 5}, "config 'rope_parameters': got 5, want an object"),
    ({"rope_parameters": {"main": 5, "compress": {}}}, "config 'main': got 5, want an object"),
    ({"torch_dtype": "float8"}, "config 'torch_dtype': got 'float8', want float32, bfloat16, "
     "float16; or choose with --dtype"),
    ({"dtype": 16}, "config 'dtype': got 16, want float32, bfloat16, float16; or choose with "
     "--dtype"),
    ({"text_config": 5}, "config 'text_config': got 5, want an object"),
    ({"architectures": [[]]}, "model architecture [[]]: not supported: have LlamaForCausalLM, "
     "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, DeepseekV4ForCausalLM, "
     "DeepseekV41ForCausalLM"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), SETTINGS, ids=lambda value: str(value)[:50])
def test_a_bad_setting_is_named(
    stored: Tensors, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    write(tmp_path, stored, with_settings(changes))
    assert refusal(tmp_path) == sentence


def reshaped(name: str, rows: int, cols: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        dtype, _, content = tensors[name]
        tensors[name] = dtype, [rows, cols], (content * 99)[: rows * cols]

    return change


def without(*prefixes: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(prefixes)]:
            del tensors[name]

    return change


def both(*changes: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for each in changes:
            each(tensors)

    return change


BLOCK = "does not fit config 'weight_block_size' [32, 32]"
FILE = "(*/model.safetensors)"
DAMAGE: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "scale missing": (without(SCALE), f"tensor '{WEIGHT}' {FILE}: its scale is missing: got "
                      f"f8_e4m3 without a tensor '{SCALE}'"),
    "weight missing": (without(WEIGHT), f"tensor '{SCALE}' {FILE}: scales of a weight that is "
                       "missing or not quantised"),
    "a row too few": (reshaped(SCALE, 2, 8), f"tensor '{SCALE}' {FILE}: shape does not fit "
                      f"'{WEIGHT}' [96, 256]: got [2, 8], want [1, 2] for blocks of 128x128 or "
                      "[3, 8] for blocks of 32x32 or [96, 2] for blocks of 1x128 or [96, 4] for "
                      "blocks of 1x64 or [96, 8] for blocks of 1x32"),
    "blocks of 128": (reshaped(SCALE, 1, 2), f"tensor '{SCALE}' {FILE}: {BLOCK}: got [1, 2], want "
                      "[3, 8] for a weight of [96, 256]"),
    "blocks of rows": (reshaped(SCALE, 96, 8), f"tensor '{SCALE}' {FILE}: {BLOCK}: got [96, 8], "
                       "want [3, 8] for a weight of [96, 256]"),
    "expert missing": (without("layers.3.ffn.experts.2."),
                       "config 'n_routed_experts': does not match the tensors of layer 3: got 8, "
                       "and 7 experts are stored, 'layers.3.ffn.experts.2' not among them (*)"),
    "table too short": (both(reshaped(f"{TABLE}.weight", 4900, 32),
                             reshaped(f"{TABLE}.scale", 4900, 1)),
                        "checkpoint '*': tensors do not fit the model: wrongly shaped 1 "
                        f"('{TABLE}.weight' got [4900, 32] want [4920, 32]) (*)"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_bad_tensor_is_named(stored: Tensors, tmp_path: Path, name: str) -> None:
    change, sentence = DAMAGE[name]
    tensors = dict(stored)
    change(tensors)
    write(tmp_path, tensors, CONFIG)
    assert refusal(tmp_path).replace(f"'{tmp_path.name}'", "'*'") == sentence


@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        (SCALE, 0xFF, "holds NaN: got scale 255 at [1, 2], want 0 to 254"),
        (f"{EXPERT}.scale", 0xFF, "holds NaN: got scale 255 at [1, 2], want 0 to 254"),
        (WEIGHT, 0x7F, "holds NaN: got fp8 code 127 at [0, 10], want a number"),
    ],
)
def test_nan_is_found_while_packing(
    stored: Tensors, tmp_path: Path, name: str, code: int, sentence: str
) -> None:
    dtype, shape, content = stored[name]
    damaged = bytearray(content)
    damaged[10] = code
    write(tmp_path, {**stored, name: (dtype, shape, bytes(damaged))}, CONFIG)
    prepared = prepare(str(tmp_path), CompileConfig())
    weight = next(w for w in prepared.graph.weights if name.rpartition(".")[0] in str(w.expr))
    with pytest.raises(VerifyError) as caught:
        for tensor in weight.expr.tensors:
            prepared.weights.unpacked(tensor, weight.type)  # type: ignore[arg-type]
    assert str(caught.value) == f"tensor '{name}' ({tmp_path}/model.safetensors): {sentence}"


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("layers.2.attn.indexer.weights_proj.weight", b"\xc1\x7f"),
        ("layers.0.attn.q_norm.weight", b"\x81\xff"),
        ("layers.0.attn.attn_sink", b"\x01\x00\x80\x7f"),
    ],
)
def test_a_nan_among_floats_is_found_while_packing(
    stored: Tensors, tmp_path: Path, name: str, bits: bytes
) -> None:
    dtype, shape, content = stored[name]
    assert dtype == ("F32" if len(bits) == 4 else "BF16")
    write(tmp_path, {**stored, name: (dtype, shape, bits + content[len(bits) :])}, CONFIG)
    prepared = prepare(str(tmp_path), CompileConfig())
    weight = next(w for w in prepared.graph.weights if name in w.expr.tensors)
    with pytest.raises(VerifyError) as caught:
        prepared.weights.unpacked(name, weight.type.dtype)
    file = f"{tmp_path}/model.safetensors"
    assert str(caught.value) == f"tensor '{name}' ({file}): holds NaN: want numbers"


def test_infinities_are_numbers(stored: Tensors, tmp_path: Path) -> None:
    name = "layers.0.attn.attn_sink"
    dtype, shape, content = stored[name]
    write(tmp_path, {**stored, name: (dtype, shape, b"\0\0\x80\xff" + content[4:])}, CONFIG)
    prepared = prepare(str(tmp_path), CompileConfig())
    weight = next(w for w in prepared.graph.weights if name in w.expr.tensors)
    values = prepared.weights.unpacked(name, weight.type.dtype).values
    assert values is not None and values[0] == -float("inf")


def test_token_ids_that_end_a_text_are_of_the_vocabulary(stored: Tensors, tmp_path: Path) -> None:
    write(tmp_path, stored, {**CONFIG, "eos_token_id": [1, 2048]})
    assert refusal(tmp_path).endswith(
        "special token outside the vocabulary: got 2048, want below 2048 (*)"
    )
