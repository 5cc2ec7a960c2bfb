"""Configurations without weights: by the names of those that come with us, or from a file."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tilewright.graph import Graph
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import BF16, F32, DType, ElementType, element_type
from tilewright.models.deepseek_config import expert_dtype
from tilewright.models.record import read_object, shown
from tilewright.models.settings import section, text_settings

FOLDER = Path(__file__).parent / "configs"
_FP8_ROWS = "fp8_e4m3[g=32,axis=1,scale=ue8m0]"
_FP4 = "fp4_e2m1[g=32,axis=1,scale=ue8m0]"
_FP8 = (  # what the released DeepSeek files store as fp8 with a scale per block
    "*.attn.wq_a.weight", "*.attn.wq_b.weight", "*.attn.wkv.weight", "*.attn.wo_a.weight",
    "*.attn.wo_b.weight", "*.indexer.wq_b.weight", "*.shared_experts.*", "*.engram.wkv.weight",
)  # fmt: skip
_WIDE = ("*hc_*", "*.attn_sink", "*.gate.bias", "*.ape")  # what they store in fp32


def config_names() -> tuple[str, ...]:
    """Names of the configurations that come with us."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def open_config(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return a model's name and configuration, of those that come with us or of a config.json.

    Raises VerifyError listing the known names.
    """
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    is_known = name.endswith(".json") or name in config_names()
    if not is_known or path.is_dir() or not path.exists():
        raise VerifyError(
            f"config {shown(name)}: unknown: have {', '.join(config_names())}, "
            "or the path of a config.json"
        )
    return path.stem, read_object(path)


def released_formats(
    config: Mapping[str, Any], graph: Graph, activation: DType
) -> dict[str, ElementType]:
    """Return how a released checkpoint of this configuration stores each tensor of `graph`.

    Files without a quantisation of their own store all matrices in the activation dtype.
    """
    text = text_settings(config)
    stored = section(text, "quantization_config")
    block = stored.get("weight_block_size")
    expert = expert_dtype(text)
    found: dict[str, ElementType] = {}
    for weight in graph.weights:
        for tensor in weight.expr.tensors:
            if block is None:
                found[tensor] = activation if weight.type.rank > 1 else F32
            else:
                found[tensor] = _released(tensor, block, expert)
    return found


def _released(name: str, block: list[int], expert: str | None) -> ElementType:
    matches = [p for p in _FP8 if fnmatchcase(name, p)]
    blocks = element_type(f"fp8_e4m3[block={block[0]}x{block[1]},scale=ue8m0]")
    if matches:
        return blocks
    if ".experts." in name:
        return element_type(_FP4) if expert == "fp4" else blocks
    if name.endswith(".engram.embed.weight"):
        return element_type(_FP8_ROWS)
    return F32 if any(fnmatchcase(name, p) for p in _WIDE) else BF16
