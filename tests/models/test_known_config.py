"""Configurations that come with us: the published sizes follow from them."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tilewright.graph import Graph
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import BF16, BlockFormat
from tilewright.models.known_config import config_names, open_config, released_formats
from tilewright.models.layers import Formats, Limits
from tilewright.models.registry import family_of

FLASH = "fp8_e4m3[block=128x128,scale=ue8m0]"


@cache
def built(name: str) -> tuple[Any, Graph]:
    _, config = open_config(name)
    family = family_of(config)
    read: Any = family.read_config(config)
    plain = family.build(name, read, Formats({}, BF16), Limits())
    stored = released_formats(config, plain, BF16)
    return config, family.build(name, read, Formats(stored, BF16), Limits())


def parameters(graph: Graph, part: str) -> int:
    return sum(
        math.prod(int(d) for d in w.type.shape) for w in graph.weights
        if part in w.name and w.expr.kind != "literal"
    )  # fmt: skip


def test_names() -> None:
    assert config_names() == ("deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4.1-flash")
    for name in ("deepseek-v5", "", "../configs/deepseek-v4-flash", "deepseek-v4-flash.json"):
        with pytest.raises(VerifyError) as error:
            open_config(name)
        assert str(error.value) == (
            f"config '{name}': unknown: have deepseek-v4-flash, deepseek-v4-pro, "
            "deepseek-v4.1-flash, or the path of a config.json"
        )


def test_a_file_is_a_configuration_too(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"hidden_size": 8}))
    assert open_config(str(tmp_path / "mine.json")) == ("mine", {"hidden_size": 8})


def test_parameters_of_the_releases() -> None:
    """Published: 284 B and 1.6 T; of V4.1 543.6 B in routed experts and 196.6 B in Engram."""
    _, flash = built("deepseek-v4-flash")
    assert 281e9 < parameters(flash, "") < 287e9
    _, newer = built("deepseek-v4.1-flash")
    assert 543.5e9 < parameters(newer, ".experts.") < 543.7e9
    assert 196.5e9 < parameters(newer, "engram.embed") < 196.7e9
    _, pro = built("deepseek-v4-pro")
    assert 1.55e12 < parameters(pro, "") < 1.65e12


def test_stored_formats_of_the_releases() -> None:
    _, graph = built("deepseek-v4-flash")
    stored = {w.name: str(w.type.dtype) for w in graph.weights}
    assert stored["layers.5.attn.wq_a.weight"] == FLASH
    assert stored["layers.5.ffn.shared_experts.w2.weight"] == FLASH
    assert stored["layers.5.ffn.experts.w2.weight"] == "fp4_e2m1[g=32,axis=1,scale=ue8m0]"
    assert stored["layers.5.attn.compressor.wkv.weight"] == "bf16"
    assert stored["layers.5.attn.compressor.ape"] == stored["layers.5.hc_attn_fn"] == "f32"
    assert stored["head.weight"] == stored["norm.weight"] == "bf16"
    _, graph = built("deepseek-v4.1-flash")
    stored = {w.name: str(w.type.dtype) for w in graph.weights}
    assert stored["layers.5.attn.wq_a.weight"] == "fp8_e4m3[block=32x32,scale=ue8m0]"
    assert stored["layers.1.engram.embed.weight"] == "fp8_e4m3[g=32,axis=1,scale=ue8m0]"
    experts = next(w for w in graph.weights if w.name == "layers.3.ffn.experts.w1.weight")
    assert isinstance(experts.type.dtype, BlockFormat)
    assert experts.type.num_bytes == 384 * 2304 * 5120 * 17 // 32


def test_without_a_quantisation_matrices_are_in_the_activation_dtype(tmp_path: Path) -> None:
    _, config = open_config("deepseek-v4-flash")
    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    _, graph = built("deepseek-v4-flash")
    stored = {str(v) for v in released_formats(plain, graph, BF16).values()}
    assert stored == {"bf16", "f32"}


@pytest.mark.parametrize("place", ["quantization_config", None])
@pytest.mark.parametrize("wrong", ["int4", ["fp4"], 4, ""])
def test_experts_of_an_unknown_dtype_are_refused(place: str | None, wrong: object) -> None:
    """Without tensors nothing else says how experts are stored."""
    config, graph = built("deepseek-v4-flash")
    changes: dict[str, object] = {"expert_dtype": wrong}
    if place is not None:
        changes = {"expert_dtype": None, place: {**config[place], "expert_dtype": wrong}}
    with pytest.raises(VerifyError) as caught:
        released_formats({**config, **changes}, graph, BF16)
    assert str(caught.value) == f"config 'expert_dtype': got {wrong!r}, want fp4 or fp8"
