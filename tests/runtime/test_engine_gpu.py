"""The engine over a GPU made of host memory gives what it gives over the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.host_chip import HostGpu
from support.tiny import build, tiny
from tilewright import runtime
from tilewright.runtime import RequestOutput, SamplingParams, opening

pytestmark = pytest.mark.cpu
PROMPTS = [[5, 6, 7], list(range(1, 40)), [3], [60, 2, 60, 2, 60]]
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=5, temperature=0.0, repetition_penalty=1.7),
    SamplingParams(max_tokens=7, temperature=1.5, seed=3, n=3, top_k=9, logprobs=0),
    SamplingParams(max_tokens=8, temperature=0.9, seed=4, top_p=0.8, min_p=0.01,
                   frequency_penalty=0.7, logit_bias={4: 2.0}, min_tokens=3),
]  # fmt: skip


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "artifact"
    build(tiny(), folder, kernel_cache)
    return folder


def generated(path: Path, **options: Any) -> list[RequestOutput]:
    with runtime.load(path, cache_tokens=512, **options) as engine:
        return engine.generate(PROMPTS, PARAMS)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines run on a GPU of host memory; CPU kernels know no padding, so without graphs."""
    monkeypatch.setattr(opening, "open_device", lambda *_, **__: HostGpu(graphs=False))


def rounded(output: RequestOutput) -> object:
    """An output with its log-probabilities to 11 digits."""

    def near(tokens: Any) -> Any:
        return tokens and tuple(
            t and (t.token_id, round(t.logprob, 11), [(i, round(p, 11)) for i, p in t.top_logprobs])
            for t in tokens
        )

    samples = tuple((replace(s, logprobs=None), near(s.logprobs)) for s in output.samples)
    return output.token_ids, samples, near(output.prompt_logprobs), output.usage


def test_every_request_gives_what_the_cpu_gives(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = generated(artifact)
    monkeypatch.setattr(opening, "open_device", lambda *_, **__: HostGpu(graphs=False))
    got = generated(artifact)
    assert [rounded(g) for g in got] == [rounded(w) for w in want]


def test_logits_of_every_position_come_back(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runtime.load(artifact) as engine:
        want = engine.logits(PROMPTS[1])
    monkeypatch.setattr(opening, "open_device", lambda *_, **__: HostGpu(graphs=False))
    with runtime.load(artifact) as engine:
        assert engine.logits(PROMPTS[1]).tobytes() == want.tobytes()
        assert np.isfinite(want).all()


def test_a_row_without_a_choice_ends_that_request_alone(
    artifact: Path, on_gpu: None
) -> None:
    banned = SamplingParams(max_tokens=3, allowed_token_ids=(4,), logit_bias={4: float("-inf")})
    with runtime.load(artifact) as engine:
        bad, good = engine.generate([[1], [5, 6, 7]], [banned, PARAMS[0]])
        alone = engine.generate([5, 6, 7], PARAMS[0])[0]
    assert bad.finish_reason == "error" and "no token left to choose" in str(bad.samples[0].error)
    assert good.token_ids == alone.token_ids
