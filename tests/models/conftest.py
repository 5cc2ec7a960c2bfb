"""Small checkpoints that the tests of this folder write and then break."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

GgufBuilder = Callable[..., Path]

HIDDEN, HEADS, KV_HEADS, MLP, LAYERS = 64, 2, 1, 96, 2


def byte_alphabet() -> list[str]:
    """GPT-2's printable letter for each byte, in its order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(rest))]


def tiny_vocab() -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges of a byte-level tokenizer."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "' s", "3 3"]
    tokens = ["<|end|>", "<|start|>", *byte_alphabet(), *(m.replace(" ", "") for m in merges)]
    return tokens, [3, 3] + [1] * (len(tokens) - 2), merges


def tiny_tensors(arch: str) -> dict[str, NDArray[np.float32]]:
    """Random tensors of a two-layer model under GGUF names."""
    rng = np.random.default_rng(7)
    head_dim = HIDDEN // HEADS
    num_tokens = len(tiny_vocab()[0])
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (num_tokens, HIDDEN)}
    for i in range(LAYERS):
        rows = {"q": HIDDEN, "k": KV_HEADS * head_dim, "v": KV_HEADS * head_dim}
        shapes |= {f"blk.{i}.attn_{k}.weight": (n, HIDDEN) for k, n in rows.items()}
        shapes |= {f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN)}
        shapes |= {f"blk.{i}.ffn_{k}.weight": (MLP, HIDDEN) for k in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down.weight": (HIDDEN, MLP)}
        shapes |= {f"blk.{i}.{k}_norm.weight": (HIDDEN,) for k in ("attn", "ffn")}
        if arch == "qwen2":
            shapes |= {f"blk.{i}.attn_{k}.bias": (n,) for k, n in rows.items()}
        if arch == "qwen3":
            shapes |= {f"blk.{i}.attn_{k}_norm.weight": (head_dim,) for k in ("q", "k")}
    shapes |= {"output_norm.weight": (HIDDEN,)}
    return {k: rng.standard_normal(v).astype(np.float32) for k, v in shapes.items()}


def settings(arch: str) -> dict[str, object]:
    """Metadata of the two-layer model."""
    tokens, types, merges = tiny_vocab()
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": MLP,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    }


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Store one metadata value by the type of the Python value."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    metadata: Mapping[str, object] | None = None,
    tensors: Mapping[str, object] | None = None,
    quant: str = "Q4_1",
) -> Path:
    """Write a small GGUF file; None as a change removes a key or a tensor."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**settings(arch), **(metadata or {})}.items():
        if value is not None:
            add(writer, key, value)
    kind = gguf.GGMLQuantizationType[quant]
    for name, array in {**tiny_tensors(arch), **(tensors or {})}.items():
        if isinstance(array, np.ndarray) and array.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        elif isinstance(array, np.ndarray):
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def build_gguf(tmp_path: Path) -> GgufBuilder:
    """Write the small model's file with changes."""
    return partial(write_gguf, tmp_path / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of the small model's file."""
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf").read_bytes()
