"""Plans without weights: the same kernels and the same bytes as the artifact has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewright.runtime.artifact_files import load_artifact, read_manifest
from tilewright.runtime.errors import ArtifactError
from tilewright.tools.artifact_facts import memory_facts

from .conftest import Call

pytestmark = pytest.mark.cpu
FEW = ("--max-tokens-per-step", "4")
PLAN = ("--jobs", "1", *FEW)


def test_a_plan_of_a_configuration_is_that_of_the_artifact(
    call: Call, model: Path, artifact: Path
) -> None:
    done = call("compile", "--config", model / "config.json", *PLAN, "--json")
    assert done.code == 0, done.err
    (plan,) = done.lines
    manifest = read_manifest(artifact)
    assert plan["memory"] == json.loads(json.dumps(memory_facts(manifest)))
    assert (plan["kernels"], plan["kernels_compiled"]) == (len(manifest.kernels), 0)
    assert plan["launches_per_step"] == len(manifest.buckets[0].launches)
    assert sum(plan["kernels_by_template"].values()) == plan["kernels"]  # type: ignore[attr-defined]
    assert plan["model"] == "config"


def test_a_plan_of_a_model_reads_no_weights(call: Call, model: Path, artifact: Path) -> None:
    done = call("compile", model, "--plan-only", *PLAN, "--json")
    assert done.code == 0, done.err
    (plan,) = done.lines
    assert plan["memory"] == json.loads(json.dumps(memory_facts(read_manifest(artifact))))


def test_an_artifact_of_a_configuration_has_all_but_weights(
    call: Call, model: Path, artifact: Path, tmp_path: Path
) -> None:
    output = tmp_path / "bare"
    done = call("compile", "--config", model / "config.json", *PLAN, "-o", output, "--json")
    assert done.code == 0, done.err
    assert done.lines[0]["has_weights"] is False
    bare, whole = read_manifest(output), read_manifest(artifact)
    assert (bare.weights, bare.buckets) == (whole.weights, whole.buckets)
    assert bare.library == whole.library and (output / bare.library).exists()
    assert not (output / bare.weights_file).exists()
    with pytest.raises(ArtifactError) as caught:
        load_artifact(output)
    assert str(caught.value) == (
        f"artifact '{output}': has no weights: it was compiled from a configuration without them"
    )


def test_tables(call: Call, model: Path) -> None:
    done = call("compile", "--config", model / "config.json", *PLAN)
    assert (done.code, done.err) == (0, "")
    for title in ("weights", "cache, by kind of state", "cache, of a sequence", "step",
                  "kernels, by template"):  # fmt: skip
        assert any(line.strip().startswith(title) for line in done.out.splitlines()), title
    assert "tokens_4" in done.out and "512 B" in done.out  # 2 layers, k and v, 2 heads of 16 f32


REFUSED = {
    (): "argument 'MODEL': got neither, want a model or --config",
    ("some", "--config", "other", "-o", "x"):
        "argument 'MODEL': got both, want a model or --config",
    ("some",): "option '--output': missing: want the directory to write",
    ("some", "--plan-only", "-o", "x"):
        "option '--output': a plan is not written: got both, want one of them",
    ("--config", "some", "--tune"):
        "option '--tune': a plan measures nothing: want it with --output",
    ("--config", "none"): "config 'none': unknown: have deepseek-v4-flash, deepseek-v4-pro, "
        "deepseek-v4.1-flash, or the path of a config.json",
    ("--config", "deepseek-v4-flash", "--layers", "3:1"):
        "setting 'layers': got '3:1', want A:B with 0 <= A < B",
    ("--config", "deepseek-v4-flash", "--layers", "3:99"):
        "setting 'layers': got 3:99, want a slice within 0:43",
    ("--config", "deepseek-v4-flash", "--replay-tokens", "9"):
        "setting 'replay_tokens': got 9, want an even int from 2 on, or 'default'",
    ("--config", "CONFIG", "--layers", "0:1"): "setting 'layers': the family 'llama' has none",
    ("--config", "CONFIG", "--replay-tokens", "140"):
        "setting 'replay_tokens': the family 'llama' has none",
    ("--config", "CONFIG", "--no-cache-quantisation"):
        "setting 'quantise_cache': the family 'llama' has none",
}  # fmt: skip


MALFORMED = ("setting 'layers': got '3:1'", "setting 'replay_tokens': got 9")  # for every model


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_refusals(call: Call, model: Path, options: tuple[str, ...]) -> None:
    given = [str(model / "config.json") if o == "CONFIG" else o for o in options]
    done = call("compile", *given)
    together = REFUSED[options].startswith(("argument", "option", *MALFORMED))
    assert (done.code, done.err) == (2 if together else 1, f"error: {REFUSED[options]}\n")
