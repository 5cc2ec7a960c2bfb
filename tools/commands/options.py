"""Options that several commands share. Names and meanings of the sampling options are those of
`runtime.SamplingParams`; an option that is not given leaves its setting alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.tools.commands import values
from tilewright.tools.commands.values import integer, real, refusal

MAX_THREADS = 1024
MODES = ("deterministic", "fast")  # those of the compiler, which is slow to import
DTYPES = ("auto", "float32", "bfloat16")


def ids_of(text: str, option: str) -> list[int]:
    """Read the `1,2,3` of an option; raise typer.BadParameter for anything else."""
    try:
        return [integer(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise refusal(text, "token ids such as 1,2,3", option=option) from None


def replay_of(text: str | None) -> int | str | None:
    """Read an even number or `default`; raise typer.BadParameter for anything else."""
    if text is None or text == "default":
        return text
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        want = "an even number of tokens, or default"
        raise refusal(text, want, option="--replay-tokens")
    return int(text)


def bias_of(text: str) -> tuple[int, float]:
    """Read `ID:VALUE`; raise typer.BadParameter for anything else."""
    token_id, _, value = text.partition(":")
    try:
        return integer(token_id), real(value)
    except ValueError:
        raise refusal(text, "ID:VALUE such as 42:-1.5", option="--logit-bias") from None


def simulated(target: str) -> str:
    """Return the name of a target's functional model; raise typer.BadParameter for one without."""
    base, _, variant = target.partition(":")
    if base != "ascend950":
        raise typer.BadParameter(f"--simulate: got target {target!r}, want ascend950")
    return f"{base}:{variant.removesuffix('+model')}+model"


WHOLE, NUMBER = "<int>", "<float>"


def place(*names: str, metavar: str = "<path>", help: str) -> Any:  # noqa: A002
    """Return an option that is a path."""
    return typer.Option(*names, metavar=metavar, parser=values.path, help=help)


def count(
    *names: str, low: int | None = None, high: int | None = None, help: str  # noqa: A002
) -> Any:  # fmt: skip
    """Return an option that is a whole number, within bounds where there are any."""
    return typer.Option(*names, metavar=WHOLE, parser=values.whole(low, high), help=help)


def number(name: str, text: str) -> Any:
    """Return an option that is a number."""
    return typer.Option(name, metavar=NUMBER, parser=values.number, help=text)


ModelToCompile = Annotated[
    str | None,
    typer.Argument(parser=values.name, help="Directory, GGUF file, or a packaged name."),
]
ModelConfigName = Annotated[
    str | None,
    typer.Option("--config", metavar="NAME", parser=values.name,
                 help="A known configuration, or a file."),
]  # fmt: skip
PlanOnly = Annotated[
    bool, typer.Option("--plan-only", help="Build kernels, print memory; write nothing.")
]
NoCacheQuantisation = Annotated[
    bool, typer.Option("--no-cache-quantisation", help="For comparisons: keep entries unrounded.")
]
Layers = Annotated[
    str | None, typer.Option("--layers", metavar="A:B", help="Build layers A to B - 1 alone.")
]
ReplayTokens = Annotated[
    str | None,
    typer.Option("--replay-tokens", metavar="N|default",
                 help="Decoder on the last N tokens of a prompt alone: approximate."),
]  # fmt: skip
Artifact = Annotated[
    Path, typer.Argument(parser=values.path, help="Directory that compile-model wrote.")
]
TargetName = Annotated[str, typer.Option(
    "--target", help="cpu, sm90, sm100, ascend950, or a variant: cpu:x86-64-v4."
)]
Simulate = Annotated[
    bool, typer.Option("--simulate", help="ascend950: build for the functional model, on the CPU.")
]
ModeName = Annotated[
    str,
    typer.Option("--mode", metavar="|".join(MODES), parser=values.one_of(*MODES),
                 help="fast may give bits that batches change."),
]  # fmt: skip
DtypeName = Annotated[
    str,
    typer.Option("--dtype", metavar="|".join(DTYPES), parser=values.one_of(*DTYPES),
                 help="Of activations and cache."),
]  # fmt: skip
MaxContext = Annotated[
    int | None,
    count("--max-context", low=1,
          help="Tokens of prompt and answer together; default: the model's own."),
]  # fmt: skip
MaxTokensPerStep = Annotated[
    int, count("--max-tokens-per-step", low=1, help="Longer prompts are cut into steps.")
]
Jobs = Annotated[
    int | None,
    count("--jobs", "-j", low=1, high=MAX_THREADS, help="Compilers at once; default: all cores."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Threads = Annotated[
    int | None,
    count("--threads", low=1, high=MAX_THREADS, help="Worker threads; default: all cores."),
]
Tokens = Annotated[str, typer.Option("--tokens", metavar="1,2,3", help="Token ids.")]


MaxTokens = Annotated[int | None, count("--max-tokens", help="Most tokens generated.")]
Temperature = Annotated[float | None, number("--temperature", "0 is greedy.")]
TopK = Annotated[int | None, count("--top-k", help="Keep the k most likely; 0: all.")]
TopP = Annotated[float | None, number("--top-p", "Keep this much probability.")]
MinP = Annotated[float | None, number("--min-p", "Least share of the likeliest.")]
RepetitionPenalty = Annotated[float | None, number("--repetition-penalty", "1: off.")]
PresencePenalty = Annotated[float | None, number("--presence-penalty", "0: off.")]
FrequencyPenalty = Annotated[float | None, number("--frequency-penalty", "0: off.")]
LogitBias = Annotated[
    list[str] | None, typer.Option("--logit-bias", metavar="ID:VALUE", help="Repeatable.")
]
AllowedTokenIds = Annotated[
    str | None, typer.Option("--allowed-token-ids", metavar="1,2,3", help="Ban all others.")
]
BadWords = Annotated[list[str] | None, typer.Option("--bad-words", help="Ban a text; repeatable.")]
Seed = Annotated[int | None, count("--seed", help="Default: a fresh one, reported.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before it; repeatable.")]
StopTokenIds = Annotated[
    str | None, typer.Option("--stop-token-ids", metavar="1,2,3", help="End at these tokens.")
]
IgnoreEos = Annotated[bool | None, typer.Option("--ignore-eos", help="Go on past the end token.")]
Logprobs = Annotated[int | None, count("--logprobs", help="Report the most likely tokens.")]
PromptLogprobs = Annotated[int | None, count("--prompt-logprobs", help="Likewise for the prompt.")]
NumSamples = Annotated[int | None, count("--n", help="Samples per prompt.")]
MinTokens = Annotated[int | None, count("--min-tokens", help="Least tokens generated.")]

SAMPLING = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed",
    "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "n", "min_tokens",
)  # fmt: skip


def sampling_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters among a command's options, those that were given."""
    found: dict[str, Any] = {}
    for name in SAMPLING:
        value = given.get(name)
        if value is None or value == [] or value == ():
            continue
        match name:
            case "logit_bias":
                found[name] = tuple(bias_of(each) for each in value)
            case "allowed_token_ids" | "stop_token_ids":
                found[name] = ids_of(value, f"--{name.replace('_', '-')}")
            case "bad_words" | "stop":
                found[name] = list(value)
            case _:
                found[name] = value
    return found
