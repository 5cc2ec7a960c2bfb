"""A tiny random Llama as a Hugging Face directory, and its artifact, made once per session."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from typer.testing import CliRunner

from tilewright.tools.cli import app

HIDDEN, HEADS, KV_HEADS, WIDTH, MLP, LAYERS, VOCAB = 64, 4, 2, 16, 96, 2, 262
CONTEXT = 96
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer: one token per byte, and six special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|start|>", "<|user|>", "<|assistant|>", "<|system|>", "<|spare|>"]
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    assert len(vocab) == VOCAB
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|end|>", "bos_token": "<|start|>",
                "add_bos_token": False}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(folder: Path) -> Path:
    """Write the model's directory."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)
    }  # fmt: skip
    queries, entries = HEADS * WIDTH, KV_HEADS * WIDTH
    rows = {
        "self_attn.q_proj": (queries, HIDDEN), "self_attn.k_proj": (entries, HIDDEN),
        "self_attn.v_proj": (entries, HIDDEN), "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }  # fmt: skip
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{k}.weight": v for k, v in rows.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{norm}.weight"] = (HIDDEN,)
    tensors = {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) == 2 else 1.0)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "intermediate_size": MLP, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


@dataclass(frozen=True)
class Done:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


Call = Callable[..., Done]


def call_in_process(*arguments: object, environment: Mapping[str, str] | None = None,
                    given: str = "") -> Done:  # fmt: skip
    """Run `tilewright` with these arguments in this process."""
    env = {"TILEWRIGHT_CACHE": os.environ["TILEWRIGHT_CACHE"], **(environment or {})}
    result = CliRunner().invoke(app, [str(a) for a in arguments], env=env, input=given,
                                prog_name="tilewright", catch_exceptions=False)  # fmt: skip
    return Done(result.exit_code, result.stdout, result.stderr)


def command(*arguments: object) -> list[str]:
    """Return the command line of a real process."""
    code = "import sys; sys.argv[0] = 'tilewright'; from tilewright.tools.cli import main; main()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(
    *arguments: object, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start `tilewright` as a process of its own. It can be interrupted even where this one, put
    into the background by a shell, ignores the signal."""
    root = Path(__file__).parents[2] / "src"
    env = {**os.environ, "PYTHONPATH": str(root), **(environment or {})}
    return subprocess.Popen(command(*arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=env,
                            preexec_fn=_take_interrupts)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One kernel cache for the session; one that is set from outside stays."""
    before = os.environ.get("TILEWRIGHT_CACHE")
    folder = Path(before) if before else tmp_path_factory.mktemp("cache")
    os.environ["TILEWRIGHT_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["TILEWRIGHT_CACHE"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The model compiled for float32, with two buckets: one token, and up to four."""
    folder = tmp_path_factory.mktemp("artifact") / "tiny"
    done = call_in_process("compile", model, "-o", folder, "--max-tokens-per-step", 4, "--json")
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def call() -> Call:
    return call_in_process
