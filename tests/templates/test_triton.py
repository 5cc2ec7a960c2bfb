"""Values of Triton kernels, in Triton's interpreter on the CPU, against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import triton_run
from support.kernel_case import Case, distinct_bodies, errors, make_case
from support.tiny import SETTINGS, tiny_graph
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec
from tilewright.targets.registry import resolve

TARGET = resolve("sm90")[0]
BF16 = CompileConfig(
    max_context=256, max_tokens_per_step=24, max_requests=24, block_size=8, dtype="bfloat16"
)
DIMS = {"tokens": 5, "requests": 3, "request_blocks": 20, "cache_blocks": 60, "logit_rows": 3}


def specs(graph: Any, rows: int) -> list[tuple[str, KernelSpec]]:
    found = []
    for name, kind, body in distinct_bodies(graph):
        template = next(t for t in TARGET.kernels if t.name == kind)
        assert template.accepts(body.graph) is None
        numerics = derive(kind, body.graph, TARGET)
        schedule = template.schedules(body.graph, numerics, rows)[0]
        found.append(
            (name, KernelSpec(kind, body.graph, template.name, numerics, schedule, body.buffers))
        )
    return found


def attend_specs(graph: Any, rows: int) -> list[KernelSpec]:
    return [spec for _, spec in specs(graph, rows) if spec.kind == "attend"]


def run_interpreted(spec: KernelSpec, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    template = next(t for t in TARGET.kernels if t.name == spec.template)
    return triton_run.run_spec(spec, template, case, folder)


@pytest.mark.parametrize(
    ("stored", "settings", "changes"),
    [
        ("f32", SETTINGS, {}),
        ("bf16", BF16, {"rope_pairing": "interleaved"}),
        ("q4_1", BF16, {}),
        ("q8_0", BF16, {"family": "Qwen3ForCausalLM", "head_dim": 24}),
    ],
)
def test_kernels_match_the_reference(
    stored: str, settings: CompileConfig, changes: dict[str, Any], tmp_path: Path
) -> None:
    graph = tiny_graph(stored, settings=settings, **changes)
    for rows in (5, 24):
        for name, spec in specs(graph, rows):
            case = make_case(spec, DIMS, seed=rows, padded=1)
            got = run_interpreted(spec, case, tmp_path)
            for result, error in errors(case, got):
                rounds = got[result].dtype == torch.bfloat16
                # fp32 angles of positions to a thousand are off by 2^-15.
                turned = any(n.op in ("sin", "cos") for n in spec.body.nodes)
                limit = 2.0**-7 if rounds else 2e-4 if turned else 2e-5
                assert error <= limit, (name, rows, result, error)


@pytest.mark.parametrize("stored", ["f32", "bf16"])
def test_neighbours_share_keys(stored: str, tmp_path: Path) -> None:
    """Tiles of tokens of one request or of several, with padding among them."""
    graph = tiny_graph(stored, settings=SETTINGS if stored == "f32" else BF16)
    (spec,) = attend_specs(graph, 600)
    assert spec.schedule.values["tile"] > 2
    for seed, requests in enumerate((1, 3)):
        case = make_case(spec, {**DIMS, "tokens": 21, "requests": requests}, seed=seed, padded=2)
        got = run_interpreted(spec, case, tmp_path)
        for result, error in errors(case, got):
            assert error <= (2e-5 if stored == "f32" else 2.0**-7), (requests, result, error)
