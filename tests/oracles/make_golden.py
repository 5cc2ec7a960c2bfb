"""Write tests/data/deepseek_golden_*.npz: logits of `transformers` (V4) and nemo-automodel (V4.1).

Weights are drawn by name (support/deepseek_tiny.py), so that the files hold logits alone. V4's go
through a checkpoint directory under the released names, which `transformers` itself converts.

    PYTHONPATH=src:tests TILEWRIGHT_NEMO=<folder> python tests/oracles/make_golden.py
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.deepseek_tiny import V4, V41, drawn_tensors, golden_tokens
from tilewright.graph import Graph
from tilewright.graph.types import F32
from tilewright.models import deepseek_v4, deepseek_v41
from tilewright.models.engram import TOKEN_MAP
from tilewright.models.layers import Formats, Limits

SEED = 7
DATA = Path(__file__).parents[1] / "data"


def write(name: str, tokens: list[int], logits: torch.Tensor) -> None:
    values = {"tokens": np.array(tokens, np.int32), "logits": logits.float().numpy()}
    np.savez_compressed(DATA / f"deepseek_golden_{name}.npz", seed=SEED, **values)


def v4_logits(tokens: list[int]) -> torch.Tensor:
    from safetensors.torch import save_file
    from transformers import DeepseekV4ForCausalLM

    graph = deepseek_v4.build("g", deepseek_v4.read_config(V4), Formats({}, F32), Limits())
    tensors = drawn_tensors(graph, SEED, ids_below=V4["n_routed_experts"])
    tensors = {k: v.long() if v.dtype == torch.int32 else v for k, v in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**V4, "dtype": "float32"}))
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model = DeepseekV4ForCausalLM.from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager", dtype="float32"
        ).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def v41_logits(tokens: list[int]) -> torch.Tensor:
    sys.path.insert(0, os.environ["TILEWRIGHT_NEMO"])
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41 import attention, engram
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM

    graph = deepseek_v41.build("g", deepseek_v41.read_config(V41), Formats({}, F32), Limits())
    tensors = drawn_tensors(graph, SEED, ids_below=50)
    ids = tensors[TOKEN_MAP].flatten().tolist()
    engram._compressed_token_map = lambda tokenizer: (tuple(ids), 50)
    attention.quantize_cache = lambda x, **_: x
    text = {k: v for k, v in V41.items() if k not in ("architectures", "model_type")}
    text |= {"dtype": "float32", "dspark_noise_token_id": 60, "dspark_target_layer_ids": [1, 2]}
    settings = DeepseekV41Config(
        text_config=text, vision_config={"num_hidden_layers": 0}, image_token_id=66
    )
    backend = BackendConfig(
        attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch"
    )
    model = DeepseekV41ForCausalLM(settings, backend=backend, tokenizer=object()).eval()
    load(model, graph, tensors)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def load(model: Any, graph: Graph, tensors: dict[str, torch.Tensor]) -> None:
    """Give the model the drawn tensors through its own reading of released names."""
    released = model.state_dict_adapter.to_hf(dict(model.state_dict()))
    given = {
        name: tensors[name] if name in tensors else torch.zeros_like(value)
        for name, value in released.items()
    }
    for name in tensors.keys() - given.keys():
        assert name == TOKEN_MAP, name
    model.load_state_dict(model.state_dict_adapter.from_hf(dict(given)), strict=False)
    after = model.state_dict_adapter.to_hf(dict(model.state_dict()))
    for name, value in after.items():
        assert torch.equal(value.float(), given[name].float()), name


if __name__ == "__main__":
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    tokens = golden_tokens(150)
    write("v4", tokens, v4_logits(tokens))
    write("v41", tokens[:80], v41_logits(tokens[:80]))
