"""Write a checkpoint in the released V4 form with random weights: for measurements of speed.

    python -m tilewright.tools.dev.random_checkpoint out/v4-half-billion

FP8 matrices with scales per 128x128, FP4 experts, bf16 for the rest, as V4-Flash stores them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from tilewright.graph.types import BF16
from tilewright.models import deepseek_v4
from tilewright.models.layers import Formats, Limits
from tilewright.tools.small.checkpoint import write_settings
from tilewright.tools.small.training import initial, tensor_shapes
from tilewright.tools.small.weights import released_tensors

# 0.5 B parameters with V4-Flash's head width, window, ratios, streams, routing and index width.
SHAPE: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 512,
    "o_groups": 4,
    "o_lora_rank": 256,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FP8 = "fp8_e4m3[block=128x128,scale=ue8m0]"
FP4 = "fp4_e2m1[g=32,axis=1,scale=ue8m0]"
_FP8_PARTS = ("attn.wq_a.", "attn.wq_b.", "attn.wkv.", "attn.wo_a.", "attn.wo_b.",
              "indexer.wq_b.", "shared_experts.")  # fmt: skip
_F32_PARTS = ("hc_", "attn_sink", "gate.bias", ".ape")


def storage(name: str) -> str:
    """Return how V4-Flash stores a tensor, by its released name."""
    if name.endswith("tid2eid"):
        return "i32"
    if ".experts." in name:
        return FP4
    if any(part in name for part in _FP8_PARTS):
        return FP8
    return "f32" if any(part in name for part in _F32_PARTS) else "bf16"


def tensors(config: Mapping[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the released checkpoint, one at a time in memory as fp32."""
    plain = deepseek_v4.build(
        "random", deepseek_v4.read_config(config), Formats({}, BF16), Limits()
    )
    generator = torch.Generator().manual_seed(seed)
    for name, shape in tensor_shapes(plain).items():
        kind = storage(name)
        if kind == "i32":
            experts = config["n_routed_experts"]
            drawn = torch.rand(shape[0], experts, generator=generator)
            yield name, drawn.topk(shape[1]).indices.int()
        else:
            yield from released_tensors(
                {name: initial(name, shape, generator)}, {name: kind}
            )


def tokenizer(size: int) -> Tokenizer:
    """A tokenizer with a word for every id: rates do not depend on texts."""
    return Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))


def main() -> None:
    """Write config.json, model.safetensors and a tokenizer; print the number of parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    found = dict(tensors(SHAPE, asked.seed))
    save_file(found, asked.folder / "model.safetensors", metadata={"format": "pt"})
    write_settings(asked.folder, SHAPE, tokenizer(SHAPE["vocab_size"]))
    parameters = sum(
        t.numel() * (2 if t.dtype == torch.int8 else 1)
        for n, t in found.items()
        if not n.endswith((".scale", "tid2eid"))
    )
    size = (asked.folder / "model.safetensors").stat().st_size
    print(f"{parameters / 1e6:.0f} M parameters, {size / 1e6:.0f} MB, in '{asked.folder}'")


if __name__ == "__main__":
    main()
