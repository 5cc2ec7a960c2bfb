"""The bench on a tiny artifact: a complete report, fractions that add up, refusals by full text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilewright.graph.types import TensorType, element_type
from tilewright.runtime import RequestError
from tilewright.runtime.artifact_files import read_manifest
from tilewright.tools import bench_peers
from tilewright.tools.bench import batches_of, refuse_unwritable
from tilewright.tools.bench_engine import (
    CostTable,
    cache_bytes_per_token,
    make_step,
    prefill_steps,
    prompt_ids,
)
from tilewright.tools.bench_peer_process import PeerProcess, PeerRequest, parse_peer
from tilewright.tools.bench_plot import plot
from tilewright.tools.bench_report import _figures
from tilewright.tools.bench_run import Measure, find, take_turns
from tilewright.tools.cli import app

pytestmark = pytest.mark.cpu

Call = Callable[..., Any]
SMALL = ("--threads", 1, "--prompt-tokens", 12, "--decode-tokens", 3, "--batch", "2",
         "--context", 4, "--repeat", 2)  # fmt: skip


@pytest.fixture(scope="module")
def report(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    result = CliRunner().invoke(
        app, ["bench", str(artifact), *map(str, SMALL), "--by-kernel", "-o", str(path)]
    )
    assert result.exit_code == 0, result.stderr
    assert "prefill of 12" in result.stdout and "decode, batch 2" in result.stdout
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_where_nothing_can_be_written_is_said_before_measuring(tmp_path: Path) -> None:
    for place in (tmp_path / "no" / "x.json", tmp_path):
        with pytest.raises(OSError) as caught:
            refuse_unwritable(place)
        assert caught.value.filename == str(place)
    kept = tmp_path / "kept.json"
    kept.write_text("mine")
    refuse_unwritable(kept)
    refuse_unwritable(tmp_path / "new.json")
    assert kept.read_text() == "mine" and list(tmp_path.iterdir()) == [kept]


def test_report_is_complete(report: dict[str, Any]) -> None:
    assert set(report) == {
        "schema", "version", "date", "machine", "artifact", "settings", "load", "results",
        "derived", "peers", "steps",
    }  # fmt: skip
    assert report["settings"] == {
        "threads": 1, "prompt_tokens": 12, "decode_tokens": 3, "batches": [1, 2], "start": 4,
        "repeat": 2,
    }  # fmt: skip
    names = [(r["who"], r["name"]) for r in report["results"]]
    assert names == [
        ("machine", "read_bandwidth"), ("machine", "fma_rate"), ("tilewright", "prefill"),
        ("tilewright", "prefill_executor"), ("tilewright", "decode_1"), ("tilewright", "decode_2"),
    ]  # fmt: skip
    for result in report["results"]:
        assert len(result["samples"]) == 2 and result["dtype"]
        assert 0 < result["low"] <= result["median"] <= result["high"]


def test_load_is_measured_in_a_fresh_process(report: dict[str, Any]) -> None:
    load = report["load"]
    assert load["seconds"] == load["import_seconds"] + load["load_seconds"] > 0
    assert load["peak_bytes"] >= load["samples"][0]["load_bytes"] > 0
    assert load["weights_bytes"] == report["artifact"]["weights_bytes"]


def test_fractions_follow_from_the_medians(report: dict[str, Any], artifact: Path) -> None:
    by_name = {r["name"]: r["median"] for r in report["results"]}
    derived = report["derived"]
    weights = derived["decode_1_weight_bytes_per_token"]
    assert derived["decode_1_weights_of_read_bandwidth"] == pytest.approx(
        weights * by_name["decode_1"] / by_name["read_bandwidth"]
    )
    per_step = derived["decode_2_weight_bytes_per_step"]
    assert derived["decode_2_weight_bytes_per_token"] == per_step / 2
    assert derived["decode_2_over_prefill"] == by_name["decode_2"] / by_name["prefill"]
    assert derived["time_to_first_token_seconds"] == 12 / by_name["prefill"]


def test_kernels_and_host_make_the_step(report: dict[str, Any], artifact: Path) -> None:
    assert [s["name"] for s in report["steps"]] == ["decode_1", "decode_2", "prefill"]
    launches = len(read_manifest(artifact).buckets[0].launches)
    for step in report["steps"]:
        assert sum(k["launches"] for k in step["kernels"]) == launches
        seconds = [k["seconds"] for k in step["kernels"]]
        assert seconds == sorted(seconds, reverse=True)
        assert step["kernel_seconds"] == pytest.approx(sum(seconds))
        assert step["kernel_seconds"] + step["host_seconds"] == pytest.approx(step["step_seconds"])


def test_picture(report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_no_matplotlib(call: Call, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = call("bench", artifact, "--png", "bench.png")
    assert (done.code, done.err) == (
        1, "error: bench 'png': matplotlib is not installed; run pip install 'tilewright[bench]'\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-tokens", 96),
         "bench 'prompt-tokens': got 96, want 1 to 95 (the context less one token)"),
        (("--prompt-tokens", 8, "--decode-tokens", 90, "--batch", 1),
         "bench 'context': got 64, want 1 to 5 (the model's context less the decoded tokens)"),
        (("--prompt-tokens", 8, "--decode-tokens", 8, "--batch", "1,65"),
         "bench 'batch': got 65, want 1 to 4 (the most requests of a step)"),
        (("--prompt-tokens", 8, "--decode-tokens", 8, "--batch", 1, "--peer",
          "llama.cpp=none.gguf"),
         "bench 'peer': no such file: got 'llama.cpp=none.gguf', want llama.cpp=FILE.gguf"),
    ],
)  # fmt: skip
def test_refusals(call: Call, artifact: Path, arguments: tuple[object, ...], message: str) -> None:
    done = call("bench", artifact, *arguments)
    assert (done.code, done.err) == (1, f"error: {message}\n")


USAGE = {
    ("--threads", 0): "'--threads': got '0', want a whole number from 1 to 1024",
    ("--repeat", 0): "'--repeat': got '0', want a whole number from 1 to 1000",
    ("--repeat", 1001): "'--repeat': got '1001', want a whole number from 1 to 1000",
    ("--context", 0): "'--context': got '0', want a whole number of at least 1",
    ("--decode-tokens", "x"): "'--decode-tokens': got 'x', want a whole number of at least 1",
    ("--batch", "two"): "'--batch': got 'two', want sizes of at least 1, such as 1,8",
    ("--batch", "0"): "'--batch': got '0', want sizes of at least 1, such as 1,8",
    ("--peer", "vllm"): "'--peer': got 'vllm', want llama.cpp=FILE.gguf or transformers",
    ("--peer", "llama.cpp"): "'--peer': got 'llama.cpp', want llama.cpp=FILE.gguf or transformers",
    ("--png", ""): "'--png': got '', want a path",
}  # fmt: skip


@pytest.mark.parametrize("arguments", USAGE, ids=str)
def test_usage_errors(call: Call, arguments: tuple[object, ...]) -> None:
    """What no artifact could be measured with is a usage error, as it is for other commands."""
    done = call("bench", "none", *arguments)
    want = f"error: Invalid value for {USAGE[arguments]}; see tilewright bench --help\n"
    assert (done.code, done.err) == (2, want)


def test_an_interpreter_for_no_peer_is_refused(call: Call) -> None:
    done = call("bench", "none", "--peer-python", "python3")
    assert (done.code, done.err) == (
        2, "error: option '--peer-python': is for peers: want --peer beside it\n"
    )  # fmt: skip


def test_no_artifact(call: Call, tmp_path: Path) -> None:
    done = call("bench", tmp_path / "none")
    assert done.err == f"error: artifact '{tmp_path / 'none'}': there is no such directory\n"


def test_batch_one_is_always_measured() -> None:
    assert batches_of("8, 2") == (1, 2, 8)


@pytest.mark.parametrize(
    ("repeat", "title", "columns"),
    [
        (1, "measured once: no spread", ["value", "unit"]),
        (3, "median of 3, taken in turns", ["median", "low", "high", "unit"]),
    ],
)
def test_a_single_measurement_is_not_called_a_median(
    repeat: int, title: str, columns: list[str]
) -> None:
    figure = {"who": "us", "name": "decode_1", "dtype": "f32", "unit": "tokens/s",
              "median": 2.0, "low": 1.0, "high": 3.0}  # fmt: skip
    table = _figures({"settings": {"repeat": repeat, "prompt_tokens": 8}, "results": [figure]})
    assert table.title == title
    assert [c.header for c in table.columns][3:] == columns
    assert next(iter(table.columns[3].cells)) == "2.0"


def test_turns_interleave() -> None:
    taken: list[str] = []

    def measure(name: str) -> Measure:
        return Measure("us", name, "f32", "s", lambda: (taken.append(name), float(len(taken)))[1])

    seen: list[tuple[int, int]] = []
    results = take_turns([measure("a"), measure("b")], repeat=2, progress=lambda *x: seen.append(x))
    assert taken == ["a", "b"] * 3 and seen[-1] == (6, 6)
    assert [r.samples for r in results] == [(3.0, 5.0), (4.0, 6.0)]
    assert find(results, "us", "b") is results[1] and find(results, "us", "c") is None


def test_steps_fill_a_prompt(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    most = next(d.upper for d in manifest.dims if d.name == "tokens")
    steps = prefill_steps(manifest, 2 * most + 3)
    assert [s.dims["tokens"] for s in steps] == [most, most, 3]
    assert steps[1].inputs["positions"].tolist() == list(range(most, 2 * most))
    two = make_step(manifest, requests=2, start=33, tokens=1)
    assert two.inputs["slots"].tolist() == [33, 64 + 33]
    assert two.dims == {"tokens": 2, "requests": 2, "logit_rows": 2, "request_blocks": 2}


def test_weights_are_counted_once_a_step(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    table = next(w for w in manifest.weights if "embed" in w.name)
    step = make_step(manifest, requests=1, start=3, tokens=1)
    cost = CostTable(manifest).step(manifest.buckets[0].launches, step.dims)
    bytes_of = {
        w.name: TensorType(element_type(w.format), w.shape).num_bytes for w in manifest.weights
    }  # without what packing adds
    looked_up = bytes_of[table.name] // table.shape[0]  # the table is also the output matrix
    assert cost.weight_bytes == sum(bytes_of.values()) + looked_up
    assert cost.weight_bytes < cost.num_bytes and cost.flops > 0
    assert cache_bytes_per_token(manifest) == 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, width


def test_peers_see_the_same_prompts() -> None:
    assert bench_peers.prompt_ids(600, 49152, 3) == prompt_ids(600, 49152, salt=3)


def test_transformers_is_measured_in_two_dtypes() -> None:
    labels = [r.label for r in parse_peer("transformers", {"model_type": "llama"})]
    assert labels == ["transformers bfloat16", "transformers float32"]


def test_a_peer_that_is_not_installed() -> None:
    request = PeerRequest("llama.cpp", "llama.cpp", {"path": "none.gguf"})
    # Either the package is missing here, or it cannot open the file: both are one sentence.
    with pytest.raises(RequestError, match="^peer 'llama.cpp': "):
        PeerProcess(request, sys.executable, common={"threads": 1, "positions": 8, "sequences": 1})


def test_a_peer_that_is_missing_says_how_to_get_it(tmp_path: Path) -> None:
    """An interpreter that finds no package stands for one that has none."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    for peer, module, packages in (
        ("transformers", "torch", "transformers torch"),
        ("llama.cpp", "llama_cpp", "llama-cpp-python"),
    ):
        with pytest.raises(RequestError) as caught:
            PeerProcess(PeerRequest(peer, peer, {}), str(bare), common={"threads": 1})
        assert str(caught.value) == (
            f"peer '{peer}': module '{module}' is not installed: run {bare} -m pip install "
            f"{packages}, or name another interpreter in --peer-python"
        )


def test_no_such_interpreter() -> None:
    request = PeerRequest("llama.cpp", "llama.cpp", {"path": "none.gguf"})
    with pytest.raises(RequestError) as caught:
        PeerProcess(request, "/none/python", common={})
    assert str(caught.value) == "bench 'peer-python': /none/python: No such file or directory"


def test_protocol_answers_errors_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        facts = {"dtype": "f32"}

        def __init__(self, request: dict[str, Any]) -> None:
            assert request["threads"] == 2

        def prefill(self, tokens: int) -> float:
            return tokens / 100

        def decode(self, batch: int, start: int, tokens: int) -> float:
            return batch * tokens + start / 10

    monkeypatch.setattr(bench_peers, "PEERS", {"fixed": Fixed})
    peers: list[bench_peers.Peer] = []
    opened = bench_peers.answer(peers, {"op": "open", "peer": "fixed", "threads": 2})
    assert opened == {"facts": {"dtype": "f32"}}
    assert bench_peers.answer(peers, {"op": "prefill", "tokens": 50}) == {"seconds": 0.5}
    asked = {"op": "decode", "batch": 2, "start": 5, "tokens": 3}
    assert bench_peers.answer(peers, asked) == {"seconds": 6.5}
    assert bench_peers.answer(peers, {"op": "dance"}) == {"error": "unknown request 'dance'"}
