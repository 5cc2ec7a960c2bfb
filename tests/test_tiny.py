"""The whole chain on a tiny decoder: build, compile, load, run, compare with the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.tiny import build, step_inputs, tiny, zero_states
from tilewright import runtime
from tilewright.graph import reference

pytestmark = pytest.mark.cpu


def test_tiny_model_end_to_end(tmp_path: Path, kernel_cache: Path) -> None:
    model, tokens = tiny(), [5, 1, 66, 0, 33, 7, 2]
    report = build(model, tmp_path / "tiny", kernel_cache)
    with runtime.load(tmp_path / "tiny") as engine:
        logits = engine.logits(tokens)
        (output,) = engine.generate(tokens, runtime.SamplingParams(max_tokens=3, temperature=0.0))
    inputs, _ = step_inputs(tokens, block_size=model.settings.block_size)
    expected = reference.run(
        model.graph,
        {name: torch.from_numpy(array) for name, array in inputs.items()},
        states=zero_states(model.graph, 4),
        weights=model.weights.tensors(),
        precision=reference.IDEAL_F64,
    ).outputs["logits"]
    np.testing.assert_allclose(logits, expected.numpy(), atol=1e-5)
    assert output.token_ids[0] == int(expected[-1].argmax())
    assert output.numerics_digest == report.numerics_digest
