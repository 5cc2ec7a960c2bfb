"""Train the small V4.1 model that comes with the repository: tokenizer, weights, checkpoint.

    python -m tilewright.tools.train_small CORPUS.txt ... --output models/small --seconds 600
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer

from tilewright.graph import Graph, reference
from tilewright.graph.types import BF16, element_type
from tilewright.models import deepseek_v41 as v41
from tilewright.models.engram import TOKEN_MAP, EngramSizes, bucket_primes, token_map
from tilewright.models.layers import Formats, Limits
from tilewright.tools.commands.options import place
from tilewright.tools.small import corpus as texts
from tilewright.tools.small import shape
from tilewright.tools.small.checkpoint import write_checkpoint
from tilewright.tools.small.training import (
    Model,
    Settings,
    evaluate_loss,
    tensor_shapes,
    train,
)


def main(
    corpus: Annotated[list[Path], typer.Argument(help="Text files to train on.")],
    output: Annotated[Path, place("--output", "-o", help="Directory to write.")],
    seconds: Annotated[float, typer.Option(help="Wall-clock time to train for.")] = 600.0,
    rows: Annotated[int, typer.Option(help="Sequences of a batch.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    weight_decay: Annotated[float, typer.Option(help="Decay of matrices.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
) -> None:
    """Train the tokenizer and the model, report perplexities, write the checkpoint."""
    settings = Settings(seconds, rows, length, learning_rate, weight_decay, seed=seed)
    read = [texts.read_text(path) for path in corpus]
    tokenizer = texts.train_tokenizer([texts.split(text)[0] for text in read])
    data = texts.tokenise(tokenizer, read)
    config, ids = released_config(tokenizer)
    quantised = build(config, settings, stored=shape.storage)
    stored = {name: shape.storage(name) for name in tensor_shapes(quantised)}
    model = Model(quantised, stored, {TOKEN_MAP: ids}, torch.device(device), seed)
    size = sum(m.numel() for m in model.masters.values())
    print(f"{size / 1e6:.1f} M parameters, {len(data.train)} ids to train on", flush=True)
    trained = train(model, data, settings, lambda entry: print(_line(entry), flush=True))
    losses = final_losses(model, config, data, settings)
    print(json.dumps({name: math.exp(loss) for name, loss in losses.items()}), flush=True)
    record = {
        "held_out_perplexity": {name: math.exp(loss) for name, loss in losses.items()},
        "held_out_tokens": len(data.held_out),
        "train_tokens": len(data.train),
        "parameters": size,
        "settings": vars(settings),
        "device": torch.cuda.get_device_name(0) if device.startswith("cuda") else device,
        "history": list(trained.history),
    }
    write_checkpoint(output, trained.masters, stored, config, tokenizer, record)


def released_config(tokenizer: Tokenizer) -> tuple[dict[str, Any], torch.Tensor]:
    """Return config.json and the map from token ids to the ids that Engram hashes."""
    found, count = token_map(tokenizer)
    sizes = EngramSizes(
        layers=(1, 6), rows=(0, 0), grams=4, heads=2, width=32, buckets=800, compressed=count,
        pad=found[2],
    )  # fmt: skip
    rows = tuple(sum(primes) for primes in bucket_primes(sizes).values())
    return shape.config(rows, count), torch.tensor(found, dtype=torch.int32)[:, None]


def build(config: Mapping[str, Any], settings: Settings, stored: Any) -> Graph:
    """Build the graph of a training step with tensors stored as `stored` says by name."""
    limits = Limits(
        max_tokens=settings.rows * settings.length,
        max_requests=settings.rows,
        max_logit_rows=settings.rows * settings.length,
        max_context=settings.length,
    )
    read = v41.read_config(config)
    plain = v41.build("small", read, Formats({}, BF16), limits)
    kinds = {name: element_type(stored(name)) for name in tensor_shapes(plain)}
    kinds[TOKEN_MAP] = element_type("i32")
    return v41.build("small", read, Formats(kinds, BF16), limits)


def final_losses(
    model: Model, config: Mapping[str, Any], data: texts.Corpus, settings: Settings
) -> dict[str, float]:
    """Held-out losses: as stored and quantised, and with bf16 weights without quantisation."""
    plain = {n: "f32" if kind == "f32" else "bf16" for n, kind in model.stored.items()}
    quantised = evaluate_loss(model, data.held_out, settings, model.stored)
    graph = model.graph
    model.graph = build(config, settings, stored=plain.__getitem__)
    bf16 = evaluate_loss(model, data.held_out, settings, plain)
    ideal = evaluate_loss(model, data.held_out, settings, plain, precision=reference.IDEAL_F32)
    model.graph = graph
    return {"bf16 weights": bf16, "quantised": quantised, "bf16 weights, no casts": ideal}


def _line(entry: Mapping[str, float]) -> str:
    return (
        f"{entry['used'] * 100:5.1f} %  step {entry['step']:5.0f}  loss {entry['loss']:.3f}  "
        f"held-out {entry['held_out']:.3f}  gradient {entry['gradient']:.2f}  "
        f"imbalance {entry['imbalance']:.2f}  rate {entry['rate']:.1e}"
    )


if __name__ == "__main__":
    typer.run(main)
