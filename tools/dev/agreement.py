"""How often artifacts of a small model and its reference expect the same next token, and if that is
what rounding alone gives: the reference is also compared with itself, every sum of it off by up to
one rounding of fp32.

    python -m tilewright.tools.dev.agreement CHECKPOINT ascend=ARTIFACT cpu=ARTIFACT

Texts are written by the first artifact's model itself at temperature 1. Of all positions, and of
those where the two best logits of the fp64 reference are more than 0.05 and 0.25 apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from tilewright import runtime
from tilewright.graph import Node
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.reference import HONOUR_CASTS, Observer, Precision
from tilewright.tools.dev.perplexity import Floats, reference_logits

MARGINS = (0.0, 0.05, 0.25)
REFERENCE, MOVED, FP32 = "reference in fp64", "the same, sums moved", "reference in fp32"
_SUMS = (Kind.ATTEND, Kind.CONTRACT, Kind.REDUCE)
WIDE = Precision(torch.float64, honour_casts=True)


@dataclass(frozen=True)
class Pair:
    """How often two expect the same token, and of how many positions, for each of the margins that
    positions have at least; how far apart their logits are, root of the mean square; the margins of
    the reference where they differ."""

    names: tuple[str, str]
    same: tuple[int, ...]
    tokens: tuple[int, ...]
    distance: float
    margins: tuple[float, ...]

    @property
    def text(self) -> str:
        counts = ", ".join(
            f"{same} of {count} ({same / max(count, 1):.1%})"
            for same, count in zip(self.same, self.tokens, strict=True)
        )
        return f"{' / '.join(self.names):45} {counts}; logits {self.distance:.3f} apart"


def written(artifact: Path, *, texts: int, length: int, first: int = 0) -> list[list[int]]:
    """Texts of so many tokens that a model writes, the same ones each time; `first` is a seed."""
    with runtime.load(artifact) as engine:
        found = []
        for seed in range(first, first + texts):
            params = runtime.SamplingParams(max_tokens=length - 1, seed=seed, ignore_eos=True)
            (output,) = engine.generate([seed + 7], params)
            found.append([seed + 7, *output.token_ids])
    return found


def artifact_logits(artifact: Path, rows: Sequence[Sequence[int]]) -> Floats:
    """Logits of every position of all rows."""
    with runtime.load(artifact) as engine:
        return np.concatenate([engine.logits(list(row)) for row in rows])


def moved(seed: int) -> Observer:
    """Move every sum by up to one rounding of fp32, as another order of adding would."""
    generator = torch.Generator().manual_seed(seed)

    def observe(node: Node, value: torch.Tensor) -> None:
        if value.is_floating_point() and op_def(node.op).kind in _SUMS:
            noise = torch.rand(value.shape, generator=generator, dtype=value.dtype) * 2 - 1
            value.mul_(1 + noise * 2.0**-24)

    return observe


def references(
    checkpoint: Path,
    rows: Sequence[Sequence[int]],
    names: Sequence[str] = (REFERENCE, MOVED, FP32),
) -> dict[str, Floats]:
    """Logits of the reference: as it is, with its sums moved, in fp32."""
    ways: dict[str, tuple[Precision, Observer | None]] = {
        REFERENCE: (WIDE, None), MOVED: (WIDE, moved(1)), FP32: (HONOUR_CASTS, None),
    }  # fmt: skip
    return {
        name: np.concatenate(
            reference_logits(checkpoint, rows, precision=precision, observe=observe)
        )
        for name, (precision, observe) in ways.items()
        if name in names
    }


def pairs(found: Mapping[str, Floats]) -> Iterator[Pair]:
    """Compare all with all."""
    best = np.sort(found[REFERENCE], 1)
    margin = best[:, -1] - best[:, -2]
    for a, b in combinations(found, 2):
        same = found[a].argmax(1) == found[b].argmax(1)
        distance = np.sqrt(((found[a].astype(np.float64) - found[b]) ** 2).mean())
        yield Pair(
            names=(a, b),
            same=tuple(int((same & (margin >= least)).sum()) for least in MARGINS),
            tokens=tuple(int((margin >= least).sum()) for least in MARGINS),
            distance=float(distance),
            margins=tuple(round(float(m), 3) for m in np.sort(margin[~same])),
        )


def main(
    checkpoint: Annotated[Path, typer.Argument(help="What the artifacts were compiled from.")],
    artifacts: Annotated[list[str], typer.Argument(metavar="NAME=ARTIFACT...")],
    texts: Annotated[int, typer.Option(help="Texts.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 256,
    first: Annotated[int, typer.Option(help="Seed of the first text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print a line for each pair."""
    paths = {name: Path(path) for name, path in (a.split("=", 1) for a in artifacts)}
    rows = written(next(iter(paths.values())), texts=texts, length=length, first=first)
    found = {name: artifact_logits(path, rows) for name, path in paths.items()}
    for pair in pairs(found | references(checkpoint, rows)):
        print(json.dumps(asdict(pair)) if as_json else f"{pair.text}; differ at {pair.margins}")


if __name__ == "__main__":
    typer.run(main)
