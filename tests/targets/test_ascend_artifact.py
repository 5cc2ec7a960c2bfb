"""Artifacts for the Ascend 950: on the functional model they run as any other, with the CPU's
tokens; for the chip they hold sources, and say so.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.ascend_artifact import SETTINGS, compile_for
from support.ascend_run import PRINTED, specs_of
from support.kernel_case import distinct_bodies
from support.tiny import Tiny, build, step_inputs, tiny, zero_states
from tilewright import runtime
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import reference
from tilewright.runtime.artifact_files import read_manifest
from tilewright.runtime.devices.ascend950_model import Ascend950Model
from tilewright.targets.ascend950.target import ascend950_target
from tilewright.targets.ascend950.toolchain import SOURCES_ONLY, AscendToolchain
from tilewright.tools.ascend_facts import pipe_facts, pipe_lines
from tilewright.tools.commands.check import check_artifact
from tilewright.tools.progress import StageBars

pytestmark = pytest.mark.cpu
PROMPTS = ([5, 1, 66, 0, 33, 7, 2], [9, 9, 3])
GREEDY = runtime.SamplingParams(max_tokens=4, temperature=0.0)
MARGIN = 0.05  # below it, two correct roundings may choose differently


@pytest.fixture(scope="module")
def model() -> Tiny:
    return tiny("bf16", settings=SETTINGS)


@pytest.fixture(scope="module")
def artifact(model: Tiny, kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ascend") / "tiny"
    compile_for("950-4+model", model, path, kernel_cache)
    return path


def test_logits_are_those_of_the_reference(model: Tiny, artifact: Path) -> None:
    tokens = PROMPTS[0]
    with runtime.load(artifact) as engine:
        logits = engine.logits(tokens)
    inputs, _ = step_inputs(tokens, block_size=SETTINGS.block_size)
    expected = reference.run(
        model.graph,
        {name: torch.from_numpy(array) for name, array in inputs.items()},
        states=zero_states(model.graph, 4),
        weights=model.weights.tensors(),
        precision=reference.HONOUR_CASTS,
    ).outputs["logits"]
    np.testing.assert_allclose(logits, expected.numpy(), atol=0.02)


def test_greedy_tokens_are_those_of_the_cpu(
    model: Tiny, artifact: Path, tmp_path: Path, kernel_cache: Path
) -> None:
    build(model, tmp_path / "cpu", kernel_cache)
    with runtime.load(tmp_path / "cpu") as cpu, runtime.load(artifact) as ascend:
        for prompt in PROMPTS:
            (want,) = cpu.generate(prompt, GREEDY)
            (got,) = ascend.generate(prompt, GREEDY)
            for place, token in enumerate(want.token_ids):
                if got.token_ids[place] != token:
                    best = np.sort(cpu.logits([*prompt, *want.token_ids[:place]])[-1])
                    assert best[-1] - best[-2] < MARGIN
                    break


def test_batch_does_not_change_bits(artifact: Path) -> None:
    with runtime.load(artifact) as engine:
        alone = [engine.logits(p) for p in PROMPTS]
        together = engine.generate(list(PROMPTS), GREEDY)
        apart = [engine.generate(p, GREEDY)[0] for p in PROMPTS]
        assert [o.token_ids for o in together] == [o.token_ids for o in apart]
        assert np.array_equal(engine.logits(PROMPTS[0]), alone[0])


def test_manifest_and_printed_sources(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    assert manifest.invariance == "unproven"
    assert (manifest.target.name, manifest.target.variant) == ("ascend950", "950-4+model")
    printed = [p for p in (artifact / "sources").glob("contract_*.asc")]
    assert len(printed) == len(list((artifact / "sources").glob("contract_*.tl.py"))) > 0
    assert all("asc_copy_gm2l1_nd2nz" in p.read_text() for p in printed)


def test_check_follows_an_artifact(artifact: Path) -> None:
    """Weights that are stored as bf16 rows are read back; every launch is near the reference."""
    found = check_artifact(artifact, PROMPTS[0], StageBars(visible=False))
    assert found and all(each.is_within for each in found)


def test_order_of_pipes_does_not_change_bits(artifact: Path) -> None:
    library = artifact / read_manifest(artifact).library
    with runtime.load(artifact) as engine:
        early = engine.logits(PROMPTS[0])
        Ascend950Model(library).configure(adversarial=True)
        late = engine.logits(PROMPTS[0])
        Ascend950Model(library).configure()
    assert np.array_equal(early, late)


def test_inspect_shows_pipes_and_writes_a_timeline(artifact: Path, tmp_path: Path) -> None:
    facts = pipe_facts(artifact, trace=tmp_path / "trace.json")
    lines = "\n".join(pipe_lines(facts))
    assert "  computes layers.0.o_proj and 1 more\n" in lines
    assert "AIC M " in lines and "gm_to_l1 " in lines
    assert re.search(r"memories: UB \d+\.\.\d+ of 253952", lines)
    assert re.search(r"    L0C 0\.\.\d+: asc_mmad on AIC M, line \d+", lines)
    assert re.search(r"    UB of AIV0 \d+\.\.\d+: asc_vf_call on AIV0 V, line \d+", lines)
    check_maps(facts)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"X"} and all(e["dur"] > 0 for e in events)
    by_pipe: dict[tuple[int, str], float] = {}
    for event in events:  # a pipe does one thing at a time
        key = event["pid"], event["tid"]
        assert event["ts"] >= by_pipe.get(key, 0.0) - 0.2
        by_pipe[key] = event["ts"] + event["dur"]


def check_maps(facts: list[dict[str, Any]]) -> None:
    """Ranges of a memory do not meet, and lie in the part that is used."""
    for record in facts:
        ends: dict[str, int] = {}
        for memory, first, end, *_ in record["map"]:
            low, high, _ = record["buffers"][memory.partition(" ")[0]]
            assert max(ends.get(memory, 0), low // 32 * 32) <= first < end <= -(-high // 32) * 32
            ends[memory] = end
        assert ends


def test_facts_of_a_step(artifact: Path) -> None:
    with runtime.load(artifact) as engine:
        model = Ascend950Model(artifact / read_manifest(artifact).library)
        model.configure(trace=True)
        engine.logits(PROMPTS[0])
        facts = {f["kernel"]: f for f in model.facts()}
        events = model.trace()
    matrix = next(f for name, f in facts.items() if f["busy"].get("AIC M"))
    assert matrix["bytes"]["gm_to_l1"] > 0 and matrix["cycles"] >= max(matrix["busy"].values()) / 4
    assert all(f["buffers"]["UB"][1] <= 221184 for f in facts.values())
    assert '"ph":"X"' in events and '"AIC MTE2"' in events


def test_a_fault_is_an_error_of_the_step(
    model: Tiny, tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that reads past its input is named, with the tensor and the line."""

    def broken(spec: KernelSpec, template: KernelTemplate) -> KernelSource:
        source = emit(spec, template)
        if spec.kind != "row":
            return source
        text = source.text.replace("num_rows - first : ", "num_rows - first + 1 : ")
        return KernelSource(source.name, source.language, text)

    monkeypatch.setattr("tilewright.codegen.compile.emit", broken)
    compile_for("950-4+model", model, tmp_path / "broken", kernel_cache)
    with runtime.load(tmp_path / "broken") as engine:
        with pytest.raises(RuntimeError, match="out of bounds: .* of tensor 'x0': want 0 to"):
            engine.logits(PROMPTS[0])


def test_without_cann_the_artifact_holds_sources_only(
    model: Tiny, tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AscendToolchain, "bisheng", None)
    compile_for("950-4", replace(model), tmp_path / "chip", kernel_cache)
    manifest = read_manifest(tmp_path / "chip")
    assert (tmp_path / "chip" / manifest.library).read_text() == SOURCES_ONLY
    assert manifest.target.compiler.endswith("sources only")
    with pytest.raises(runtime.ArtifactError, match="target 'ascend950' cannot run here"):
        runtime.load(tmp_path / "chip")


@pytest.mark.slow
def test_tilelang_prints_the_golden_files(
    model: Tiny, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What the other tests start from is what TileLang prints; a golden file that no kernel of the
    tiny model gives is stale."""
    target = ascend950_target("950-4")
    toolchain = AscendToolchain(target, folder=tmp_path)
    specs = specs_of(distinct_bodies(model.graph), target)
    templates = {t.name: t for t in target.kernels}
    for spec in specs.values():
        source = emit(spec, templates[spec.template])
        toolchain.printed(source.file_name, source.text)
    printed = {p.name: p.read_text() for p in tmp_path.glob("*.asc")}
    if request.config.getoption("--update-golden"):
        shutil.rmtree(PRINTED, ignore_errors=True)
        PRINTED.mkdir(parents=True)
        for name, text in printed.items():
            (PRINTED / name).write_text(text)
    assert printed == {p.name: p.read_text() for p in PRINTED.glob("*.asc")}
