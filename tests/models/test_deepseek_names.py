"""Names of DeepSeek checkpoints: released, prefixed, and what transformers writes and holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers import models as kinds

from support.deepseek_tiny import V4, V41, drawn_tensors
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import F32
from tilewright.models import deepseek_checkpoint, deepseek_v4, deepseek_v41
from tilewright.models.checkpoint import account, open_checkpoint
from tilewright.models.deepseek_names import canonical_name, sources
from tilewright.models.engram import TOKEN_MAP
from tilewright.models.layers import Formats, Limits
from tilewright.models.record import Checkpoint

GRAPH = deepseek_v4.build("g", deepseek_v4.read_config(V4), Formats({}, F32), Limits())
IN_MEMORY = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.layers.3.input_layernorm.weight": "layers.3.attn_norm.weight",
    "model.layers.3.post_attention_layernorm.weight": "layers.3.ffn_norm.weight",
    "model.layers.3.attn_hc.scale": "layers.3.hc_attn_scale",
    "model.layers.3.ffn_hc.base": "layers.3.hc_ffn_base",
    "model.layers.3.self_attn.sinks": "layers.3.attn.attn_sink",
    "model.layers.3.self_attn.q_a_proj.weight": "layers.3.attn.wq_a.weight",
    "model.layers.3.self_attn.q_b_proj.weight": "layers.3.attn.wq_b.weight",
    "model.layers.3.self_attn.q_a_norm.weight": "layers.3.attn.q_norm.weight",
    "model.layers.3.self_attn.kv_proj.weight": "layers.3.attn.wkv.weight",
    "model.layers.3.self_attn.kv_norm.weight": "layers.3.attn.kv_norm.weight",
    "model.layers.3.attn.norm.weight": "layers.3.attn.kv_norm.weight",
    "model.layers.3.self_attn.o_a_proj.weight": "layers.3.attn.wo_a.weight",
    "model.layers.3.self_attn.o_b_proj.weight": "layers.3.attn.wo_b.weight",
    "model.layers.3.self_attn.compressor.kv_proj.weight": "layers.3.attn.compressor.wkv.weight",
    "model.layers.3.self_attn.compressor.gate_proj.weight": "layers.3.attn.compressor.wgate.weight",
    "model.layers.3.self_attn.compressor.kv_norm.weight": "layers.3.attn.compressor.norm.weight",
    "model.layers.3.self_attn.compressor.position_bias": "layers.3.attn.compressor.ape",
    "model.layers.3.self_attn.compressor.indexer.kv_proj.weight":
        "layers.3.attn.indexer.compressor.wkv.weight",
    "model.layers.3.self_attn.compressor.indexer.kv_norm.weight":
        "layers.3.attn.indexer.compressor.norm.weight",
    "model.layers.3.self_attn.compressor.indexer.position_bias":
        "layers.3.attn.indexer.compressor.ape",
    "model.layers.3.self_attn.compressor.indexer.q_b_proj.weight":
        "layers.3.attn.indexer.wq_b.weight",
    "model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight":
        "layers.3.attn.indexer.weights_proj.weight",
    "model.layers.3.mlp.gate.weight": "layers.3.ffn.gate.weight",
    "model.layers.3.mlp.gate.tid2eid": "layers.3.ffn.gate.tid2eid",
    "model.layers.3.mlp.gate.e_score_correction_bias": "layers.3.ffn.gate.bias",
    "model.layers.3.mlp.shared_experts.gate_proj.weight":
        "layers.3.ffn.shared_experts.w1.weight",
    "model.layers.3.mlp.shared_experts.up_proj.weight": "layers.3.ffn.shared_experts.w3.weight",
    "model.layers.3.mlp.shared_experts.down_proj.weight": "layers.3.ffn.shared_experts.w2.weight",
    "model.layers.3.self_attn.q_a_proj.weight_scale_inv": "layers.3.attn.wq_a.scale",
}  # fmt: skip


@pytest.mark.parametrize("stored", IN_MEMORY)
def test_names_in_memory(stored: str) -> None:
    assert canonical_name(stored) == IN_MEMORY[stored]


def test_released_names_stay_with_and_without_prefix() -> None:
    for config, module in ((V4, deepseek_v4), (V41, deepseek_v41)):
        graph = module.build("g", module.read_config(config), Formats({}, F32), Limits())
        for weight in graph.weights:
            for name in weight.expr.tensors:
                assert canonical_name(name) == name
                assert canonical_name(f"model.{name}") == name


def test_stacked_experts_are_taken_apart() -> None:
    shapes = {"model.layers.1.mlp.experts.gate_up_proj": (3, 8, 5),
              "model.layers.1.mlp.experts.down_proj": (3, 5, 4)}
    found = sources(shapes)
    up = found["layers.1.ffn.experts.2.w3.weight"]
    assert (up.name, up.shape, up.start, up.rows) == (list(shapes)[0], (4, 5), 2 * 8 + 4, 4)
    down = found["layers.1.ffn.experts.1.w2.weight"]
    assert (down.name, down.shape, down.start, down.rows) == (list(shapes)[1], (5, 4), 5, 5)
    assert len(found) == 9


def test_bad_names() -> None:
    with pytest.raises(VerifyError) as caught:
        sources({"embed.weight": (2, 2), "model.embed_tokens.weight": (2, 2)})
    assert str(caught.value) == (
        "tensor 'model.embed_tokens.weight': is in the checkpoint twice: got it and "
        "'embed.weight', want one of them"
    )
    with pytest.raises(VerifyError) as caught:
        sources({"layers.0.mlp.experts.gate_up_proj": (3, 7, 5)})
    assert str(caught.value) == (
        "tensor 'layers.0.mlp.experts.gate_up_proj': no stack of experts: got [3, 7, 5], "
        "want [experts, 2 * n, k]"
    )


def saved(folder: Path, config: Any, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return open_checkpoint(folder)


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers holds a model: stacks of experts, other tensors prefixed."""
    found = {f"model.{k}": v for k, v in tensors.items() if ".experts." not in k}
    for layer in range(4):
        part = {
            p: [tensors[f"layers.{layer}.ffn.experts.{e}.{p}.weight"] for e in range(5)]
            for p in ("w1", "w2", "w3")
        }
        both = [torch.cat(pair) for pair in zip(part["w1"], part["w3"], strict=True)]
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(both)
        found[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(part["w2"])
    return found


@pytest.mark.parametrize("style", ["released", "prefixed", "stacked"])
def test_every_style_of_file_gives_the_same_tensors(style: str, tmp_path: Path) -> None:
    tensors = drawn_tensors(GRAPH, 4, ids_below=5)
    written = {
        "released": tensors,
        "prefixed": {f"model.{k}": v for k, v in tensors.items()},
        "stacked": stacked(tensors),
    }[style]
    extra = {"mtp.0.e_proj.weight": torch.ones(2, 2), "mtp.0.attn.wkv.weight": torch.ones(2, 2)}
    checkpoint = deepseek_checkpoint.adopt(saved(tmp_path, V4, written | extra))
    for name, expected in tensors.items():
        entry = checkpoint.tensors[name]
        assert entry.shape == tuple(expected.shape) and entry.name == name
        assert entry.raw().tobytes() == expected.numpy().tobytes()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    config = deepseek_v4.read_config(V4)
    account(shapes, checkpoint, ignored=deepseek_checkpoint.unread(config))


def test_missing_extra_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    tensors = drawn_tensors(GRAPH, 4, ids_below=5)
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    del tensors["layers.2.ffn.experts.3.w2.weight"]
    tensors["layers.0.attn.attn_sink"] = torch.ones(5)
    tensors["layers.0.attn.surprise"] = torch.ones(1)
    checkpoint = deepseek_checkpoint.adopt(saved(tmp_path, V4, tensors))
    with pytest.raises(VerifyError) as caught:
        account(shapes, checkpoint, ignored=deepseek_checkpoint.unread(deepseek_v4.read_config(V4)))
    message = str(caught.value)
    assert "missing 1 ('layers.2.ffn.experts.3.w2.weight')" in message
    assert "extra 1 ('layers.0.attn.surprise')" in message
    assert "wrongly shaped 1 ('layers.0.attn.attn_sink' got [5] want [4])" in message


def test_slices_of_layers() -> None:
    config = deepseek_checkpoint.with_layers(deepseek_v4.read_config(V4), 1, 3)
    graph = deepseek_v4.build("g", config, Formats({}, F32), Limits())
    names = {n for w in graph.weights for n in w.expr.tensors}
    assert {n.split(".")[1] for n in names if n.startswith("layers.")} == {"1", "2"}
    assert "embed.weight" in names and "head.weight" in names
    assert "layers.0.*" in deepseek_checkpoint.unread(config)
    for first, last in ((0, 5), (2, 2), (-1, 2)):
        with pytest.raises(VerifyError) as caught:
            deepseek_checkpoint.with_layers(config, first, last)
        expected = f"setting 'layers': got {first}:{last}, want a slice within 0:4"
        assert str(caught.value) == expected


def test_a_slice_begins_at_its_source() -> None:
    config = deepseek_checkpoint.with_layers(deepseek_v41.read_config(V41), 2, 4)
    with pytest.raises(VerifyError) as caught:
        deepseek_v41.build("g", config, Formats({}, F32), Limits())
    assert str(caught.value) == (
        "layers 2:4: layer 2 reads entries of a layer outside: got none, want the slice to begin "
        "at one of [1, 4] or before"
    )
    config = deepseek_checkpoint.with_layers(deepseek_v41.read_config(V41), 4, 6)
    deepseek_v41.build("g", config, Formats({}, F32), Limits())


def tokenizer_json(size: int) -> str:
    vocab = {f"{'T' if i % 2 else 't'}{i // 2}": i for i in range(size)}
    return Tokenizer(kinds.WordLevel(vocab, unk_token="t0")).to_str()


def test_token_map_is_added_and_its_size_checked(tmp_path: Path) -> None:
    tensors = {"embed.weight": torch.ones(67, 32)}
    layers = {"num_hidden_layers": 1}
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(66))
    good = {**V41, **layers, "engram_compressed_vocab_size": 33, "engram_pad_token_id": 5}
    adopted = deepseek_checkpoint.adopt_with_engram(saved(tmp_path, good, tensors))
    ids = adopted.tensors[TOKEN_MAP].raw().view("<i4")
    assert ids.tolist() == [i // 2 for i in range(66)] + [2]
    assert adopted.config["engram_compressed_pad_id"] == 2
    bad = saved(tmp_path, {**good, "engram_compressed_vocab_size": 34}, tensors)
    with pytest.raises(VerifyError) as caught:
        deepseek_checkpoint.adopt_with_engram(bad)
    assert str(caught.value) == (
        "config 'engram_compressed_vocab_size': does not fit the tokenizer: got 34, want 33 "
        f"({tmp_path})"
    )
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(VerifyError, match="Engram hashes texts of tokens: got no tokenizer.json"):
        deepseek_checkpoint.adopt_with_engram(saved(tmp_path, good, tensors))
