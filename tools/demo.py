"""What `make demo` shows of compiled models: the DeepSeek-V4.1 of `models/small` continues an old
text, then SmolLM2 answers a question; each says how fast.

    python -m tilewright.tools.demo SMALL SMOLLM2
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tilewright import runtime

QUESTION = "Explain in two sentences why the sky is blue."
MAX_TOKENS = 160
OPENING = "And it came to pass, when the king"
CONTINUED, TEMPERATURE, SEED = 64, 0.7, 1


def main(arguments: list[str]) -> int:
    """Run the artifacts in these two folders; return the exit code."""
    small, chat = (Path(argument) for argument in arguments)
    try:
        with runtime.load(small) as engine:
            continue_text(engine)
        print()
        with runtime.load(chat) as engine:
            answer(engine)
    except (runtime.ArtifactError, runtime.RequestError) as error:
        print(error, file=sys.stderr)
        return 1
    print(next_steps(chat))
    return 0


def continue_text(engine: runtime.Engine) -> None:
    """Stream a sampled continuation of a sentence like those the small model was trained on."""
    print("models/small, a DeepSeek-V4.1 of 11.5 M parameters that knows two old books")
    print(f"> {OPENING}")
    params = runtime.SamplingParams(max_tokens=CONTINUED, temperature=TEMPERATURE, seed=SEED)
    _stream(engine, OPENING, params)


def answer(engine: runtime.Engine) -> None:
    """Stream the greedy answer to the question and print the rate of its tokens."""
    print(f"SmolLM2-135M-Instruct\n> {QUESTION}")
    prompt = engine.chat_prompt([{"role": "user", "content": QUESTION}])
    _stream(engine, prompt, runtime.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))


def _stream(
    engine: runtime.Engine, prompt: str | list[int], params: runtime.SamplingParams
) -> None:
    """Print the text as it comes, then the rate of its tokens."""
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
