"""Perplexity of an artifact and of its model in the reference interpreter, on the same text.

python -m tilewright.tools.dev.perplexity ARTIFACT CHECKPOINT TEXT [--length N] [--windows N]
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from tilewright import runtime
from tilewright.codegen.config import CompileConfig
from tilewright.graph import reference
from tilewright.tools.prepare import prepare
from tilewright.tools.small.training import step_inputs, zero_states

Floats = NDArray[np.float32]


def main(
    artifact: Annotated[Path, typer.Argument(help="Compiled model.")],
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint it was compiled from.")],
    text: Annotated[Path, typer.Argument(help="Text file.")],
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 256,
    windows: Annotated[int, typer.Option(help="Windows, from the start of the text.")] = 16,
) -> None:
    """Print both perplexities as JSON, and how often both expect the same next token."""
    with runtime.load(artifact) as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(text.read_text(encoding="utf-8")).ids
        rows = [ids[at : at + length + 1] for at in range(0, length * windows, length)]
        rows = [row for row in rows if len(row) > 1]
        got = [engine.logits(row[:-1]) for row in rows]
    want = reference_logits(checkpoint, [row[:-1] for row in rows])
    agreed = np.concatenate(
        [g.argmax(1) == w.argmax(1) for g, w in zip(got, want, strict=True)]
    )
    report = {
        "tokens": sum(len(row) - 1 for row in rows),
        "artifact": math.exp(mean_loss(got, rows)),
        "reference": math.exp(mean_loss(want, rows)),
        "top1_agreement": float(agreed.mean()),
    }
    print(json.dumps(report))


def mean_loss(logits: Sequence[Floats], rows: Sequence[Sequence[int]]) -> float:
    """Mean cross-entropy in nats of each row's next ids."""
    losses = [
        torch.nn.functional.cross_entropy(
            torch.from_numpy(np.ascontiguousarray(found)), torch.tensor(list(row[1:])),
            reduction="none",
        )
        for found, row in zip(logits, rows, strict=True)
    ]  # fmt: skip
    return float(torch.cat(losses).double().mean())


def reference_logits(
    checkpoint: Path,
    rows: Sequence[Sequence[int]],
    *,
    precision: reference.Precision = reference.HONOUR_CASTS,
    observe: reference.Observer | None = None,
) -> list[Floats]:
    """Logits of every position of each row, each as a request of its own, honouring casts."""
    ready = prepare(str(checkpoint), CompileConfig())
    weights = {w.name: _value(ready, w) for w in ready.graph.weights if w.expr.kind != "literal"}
    found = []
    for row in rows:
        given: dict[str, Any] = step_inputs(ready.graph, 1, len(row), torch.device("cpu"))
        given["token_ids"] = torch.tensor(list(row), dtype=torch.int32)
        with torch.no_grad():
            result = reference.run(
                ready.graph, given, states=zero_states(ready.graph, given, torch.device("cpu")),
                weights=weights, precision=precision, observe=observe,
            )  # fmt: skip
        found.append(result.outputs["logits"].numpy())
    return found


def _value(ready: Any, weight: Any) -> torch.Tensor:
    tensors = ready.checkpoint.tensors
    parts = [tensors[name] for name in weight.expr.tensors]
    shape = tuple(int(d) for d in weight.type.shape)
    if str(weight.type.dtype) == "i32":
        return torch.from_numpy(parts[0].raw().view(np.int32).reshape(shape).copy())
    values = np.stack([part.dequantise() for part in parts]).reshape(shape)
    return torch.from_numpy(values)


if __name__ == "__main__":
    typer.run(main)
