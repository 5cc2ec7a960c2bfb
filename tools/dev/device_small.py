"""The small V4.1 model on a GPU against the CPU artifact: tokens, logits, bits, speed.

    python -m tilewright.tools.dev.device_small expect out/small -o out/expected
    python -m tilewright.tools.dev.device_small check out/small-sm90 out/expected -o FILE.json

The first runs anywhere; the second on the machine with the GPU, with the runtime's packages only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewright import runtime

PROMPTS = (
    "And it came to pass, when the king",
    "In the beginning",
    "ROMEO: But soft, what light",
    "The LORD said unto Moses, speak unto the children of Israel, saying, " * 6,
)
GREEDY = runtime.SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
TIMED = runtime.SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
BATCHES = (1, 8, 32)


def expect(artifact: Path, folder: Path) -> None:
    """Write what the CPU artifact gives: greedy tokens, and logits of a text fed to it."""
    folder.mkdir(parents=True, exist_ok=True)
    with runtime.load(artifact) as engine:
        found = [
            {"prompt": o.prompt_token_ids, "tokens": o.token_ids}
            for o in engine.generate(list(PROMPTS), GREEDY)
        ]
        text = [t for row in reversed(found) for t in (*row["prompt"], *row["tokens"])]
        np.save(folder / "logits.npy", engine.logits(text))
    (folder / "expected.json").write_text(json.dumps({"greedy": found, "text": text}))


def check(artifact: Path, folder: Path, graphs: bool) -> dict[str, Any]:
    """Compare one opened artifact with what was expected, and with itself in other companies."""
    expected = json.loads((folder / "expected.json").read_text())
    want, text = np.load(folder / "logits.npy", allow_pickle=False), expected["text"]
    with runtime.load(artifact, graphs=graphs, cache_tokens=1 << 14) as engine:
        got = engine.logits(text)
        differs = np.abs(got - want).max(axis=1)
        prompts = [row["prompt"] for row in expected["greedy"]]
        together = [o.token_ids for o in engine.generate(prompts, GREEDY)]
        alone = [next(iter(engine.generate([p], GREEDY))).token_ids for p in prompts]
        return {
            "graphs": graphs,
            "positions": len(text),
            "largest_difference": float(differs.max()),
            "median_difference": float(np.median(differs)),
            "top1_agreement": float((got.argmax(1) == want.argmax(1)).mean()),
            "greedy_equal": [
                _common(a, row["tokens"]) for a, row in zip(together, expected["greedy"],
                                                            strict=True)
            ],
            "alone_is_together": alone == together,
            "prefix_bits_equal": _prefixes(engine, text, got),
            "milliseconds_a_step": {n: _step_ms(engine, text, n) for n in BATCHES},
            "prefill_ms": _prefill_ms(engine, text),
        }  # fmt: skip


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))


def _prefixes(engine: runtime.Engine, text: list[int], whole: Any) -> bool:
    """Whether the logits of prefixes of any length are those of the whole text, byte for byte."""
    lengths = (1, 2, 31, 32, 33, 127, 128, 129, len(text) - 1)
    return all(
        engine.logits(text[:n]).tobytes() == whole[:n].tobytes() for n in lengths if n < len(text)
    )


def _step_ms(engine: runtime.Engine, text: list[int], batch: int) -> float:
    prompts = [text[i : i + 60] for i in range(batch)]
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        list(engine.generate(prompts, TIMED))
        best = min(best, time.perf_counter() - start)
    return best * 1e3 / 64


def _prefill_ms(engine: runtime.Engine, text: list[int]) -> float:
    one = runtime.SamplingParams(max_tokens=1, temperature=0.0)
    prompt = (text * (512 // len(text) + 1))[:512]
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        list(engine.generate([prompt], one))
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("expect")
    first.add_argument("artifact", type=Path)
    first.add_argument("-o", "--output", type=Path, required=True)
    second = commands.add_parser("check")
    second.add_argument("artifact", type=Path)
    second.add_argument("expected", type=Path)
    second.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    if asked.command == "expect":
        expect(asked.artifact, asked.output)
        return
    found = [check(asked.artifact, asked.expected, graphs) for graphs in (False, True)]
    asked.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
