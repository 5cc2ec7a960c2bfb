"""The last part of `make demo`: a compiled model answers a question, and says how fast."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tilewright import runtime

QUESTION = "Explain in two sentences why the sky is blue."
MAX_TOKENS = 160


def main(arguments: list[str]) -> int:
    """Talk to the artifact in the folder `arguments[0]`; return the exit code."""
    path = Path(arguments[0])
    try:
        with runtime.load(path) as engine:
            answer(engine)
    except (runtime.ArtifactError, runtime.RequestError) as error:
        print(error, file=sys.stderr)
        return 1
    print(next_steps(path))
    return 0


def answer(engine: runtime.Engine) -> None:
    """Stream the greedy answer to the question and print the rate of its tokens."""
    print(f"> {QUESTION}")
    prompt = engine.chat_prompt([{"role": "user", "content": QUESTION}])
    params = runtime.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    start, first, count = time.perf_counter(), 0.0, 0
    for event in engine.stream(prompt, params):
        first = first or time.perf_counter()
        count += len(event.token_ids)
        print(event.text, end="", flush=True)
    rate = (count - 1) / (time.perf_counter() - first) if count > 1 else 0.0
    manifest = engine.manifest
    print(
        f"\n\n{count} tokens, the first after {first - start:.2f} s, then {rate:.1f} tokens/s "
        f"({manifest.dtype} on {manifest.target.variant}, numerics {engine.numerics_digest[:16]})"
    )


def next_steps(path: Path) -> str:
    """Say where the artifact is and which commands go on from here."""
    commands = (
        f"tilewright chat {path}",
        f"tilewright generate {path} --chat --prompt 'Write a haiku about tiles.'",
        f"tilewright inspect {path} --html out/inspect.html",
        f"tilewright bench {path}",
    )
    listed = "\n".join(f"  .venv/bin/{command}" for command in commands)
    return f"The artifact is in {path}. Next:\n{listed}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
