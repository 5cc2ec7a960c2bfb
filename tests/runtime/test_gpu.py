"""Sessions of GPUs, on one made of host memory: padding, staging, graphs, memory, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.host_chip import HostGpu
from tilewright.runtime.artifact import LaunchRecord, TensorRecord
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.devices.cpu import CpuDevice
from tilewright.runtime.devices.gpu import GRAPH_TOKENS
from tilewright.runtime.devices.padding import fill, padded_dims, paddings
from tilewright.runtime.executor import Executor

pytestmark = pytest.mark.cpu
Write = Callable[..., Path]
WEIGHT = np.arange(1, 9, dtype=np.float32)


@pytest.fixture(scope="session")
def library(skipping_library: Path) -> Path:
    """Have the tiny artifact skip slot -1."""
    return skipping_library


def step(tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, 8), dtype=np.float32)
    return {"x": x, "slots": rng.permutation(64)[:tokens].astype(np.int32)}


def make(root: Path, gpu: HostGpu, **options: Any) -> Executor:
    executor = Executor(load_artifact(root, gpu), gpu, **options)
    executor.allocate_states({"slots": 64})
    return executor


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_give_the_bits_of_the_cpu(write_artifact: Write, graphs: bool) -> None:
    root, gpu = write_artifact(), HostGpu(graphs=graphs)
    with make(root, gpu, poison=True) as executor, Executor(
        load_artifact(root), CpuDevice(2)
    ) as cpu:
        cpu.allocate_states({"slots": 64})
        for seed, tokens in enumerate((3, 4, 1, 64, 5, 3, 64, 2, 4)):
            inputs, dims = step(tokens, seed), {"tokens": tokens}
            got, want = executor.run(inputs, dims), cpu.run(inputs, dims)
            assert got["y"].tobytes() == want["y"].tobytes()
        assert executor.state("sums").tobytes() == cpu.state("sums").tobytes()
    # One graph a bucket; the step that a graph is made for runs once, launch by launch.
    assert (gpu.chip.num_captured, gpu.chip.num_replayed) == ((2, 7) if graphs else (0, 0))


def test_large_buckets_are_not_captured(write_artifact: Write) -> None:
    most = GRAPH_TOKENS + 1

    def widen(tree: dict[str, Any]) -> None:
        tree["dims"][0]["upper"] = most
        bucket = tree["buckets"][0]
        bucket["bounds"]["tokens"] = most
        bucket["placements"][0]["num_bytes"] = 32 * most
        bucket["arena_bytes"] = 64 + 32 * most

    gpu = HostGpu()
    with make(write_artifact(widen), gpu, poison=True) as executor:
        inputs = step(30)
        for _ in range(2):
            outputs = executor.run(inputs, {"tokens": 30})
        assert gpu.chip.num_captured == 0
        np.testing.assert_array_equal(outputs["y"], 2 * inputs["x"] * WEIGHT)


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[tuple[int, ...], ...], tuple[int, ...]]] = []

    def before(
        self, launch: LaunchRecord, tensors: Sequence[np.ndarray], ints: Sequence[int]
    ) -> None:
        self.seen.append((launch.kernel, tuple(t.shape for t in tensors), tuple(ints)))
        self.kept = [t.copy() for t in tensors]

    def after(
        self, launch: LaunchRecord, tensors: Sequence[np.ndarray], ints: Sequence[int]
    ) -> None:
        if launch.kernel == "scale":
            np.testing.assert_array_equal(tensors[0], tensors[1] * tensors[2])
            assert not np.array_equal(self.kept[0], tensors[0])


def test_observers_see_copies_of_padded_launches(write_artifact: Write) -> None:
    gpu, recorder = HostGpu(), Recorder()
    with make(write_artifact(), gpu) as executor:
        outputs = executor.observe(step(3), {"tokens": 3}, recorder)
        np.testing.assert_array_equal(outputs["y"], step(3)["x"] * WEIGHT)
        assert outputs["y"].shape == (3, 8)
    assert recorder.seen == [
        ("scale", ((4, 8), (4, 8), (8,)), (4,)),
        ("accumulate", ((4, 8), (64, 8), (4,), (4, 8), (64,)), (4, 64)),
    ]


def test_launch_times_are_of_each_launch(write_artifact: Write) -> None:
    with make(write_artifact(), HostGpu()) as executor:
        times = executor.time_launches(step(4), {"tokens": 4})
    assert [t.launch.kernel for t in times] == ["scale", "accumulate"]
    assert all(0 < t.seconds < 1 for t in times)


@pytest.mark.parametrize("way", ["run", "observe", "time_launches"])
def test_failed_launch_is_named_and_the_next_step_runs(write_artifact: Write, way: str) -> None:
    with make(write_artifact(), HostGpu()) as executor:
        bad = {**step(2), "slots": np.array([0, 99], np.int32)}
        rest = (Recorder(),) if way == "observe" else ()
        with pytest.raises(RuntimeError) as caught:
            getattr(executor, way)(bad, {"tokens": 2}, *rest)
        assert str(caught.value) == (
            "launch 1 'layers.0.accumulate' of bucket 'tokens4' failed: "
            "kernel 'accumulate': slot 99 out of range"
        )
        executor.allocate_states({"slots": 64})
        outputs = executor.run(step(2), {"tokens": 2})
        np.testing.assert_array_equal(outputs["y"], step(2)["x"] * WEIGHT)


def test_states_are_made_anew_and_graphs_follow_them(write_artifact: Write) -> None:
    gpu = HostGpu()
    with make(write_artifact(), gpu) as executor:
        for slots in (64, 100):
            executor.allocate_states({"slots": slots})
            for _ in range(3):
                outputs = executor.run(step(2), {"tokens": 2})
            np.testing.assert_allclose(outputs["y"], 3 * step(2)["x"] * WEIGHT, rtol=1e-6)
            assert executor.state("sums").shape == (slots, 8)
    assert gpu.chip.num_captured == 2


def test_outputs_stay_on_the_device_until_asked_for(write_artifact: Write) -> None:
    with make(write_artifact(), HostGpu()) as executor:
        found = executor.launch(step(3), {"tokens": 3})["y"]
        assert found.device.type == "cpu" and tuple(found.shape) == (3, 8)
        host = executor.run(step(3, 1), {"tokens": 3})["y"]
        kept = host.copy()
        executor.run(step(3, 2), {"tokens": 3})
        np.testing.assert_array_equal(host, kept)


def test_padding_takes_limits_and_powers_of_two(write_artifact: Write) -> None:
    def add_context(tree: dict[str, Any]) -> None:
        tree["dims"].append({"name": "blocks", "role": "context", "lower": 1, "upper": 100})

    manifest = load_artifact(write_artifact(add_context), HostGpu()).manifest
    small = next(b for b in manifest.buckets if b.name == "tokens4")
    for blocks, want in ((1, 1), (2, 2), (3, 4), (64, 64), (65, 100), (100, 100)):
        dims = {"tokens": 3, "slots": 64, "blocks": blocks}
        found = padded_dims(manifest, small, dims, fixed={"slots"})
        assert found == {"tokens": 4, "slots": 64, "blocks": want}


def test_padded_entries(write_artifact: Write) -> None:
    manifest = load_artifact(write_artifact(), HostGpu()).manifest

    def of(*names: str) -> list[int]:
        inputs = tuple(TensorRecord(n, "i32", ("tokens",)) for n in names)
        return list(paddings(replace(manifest, inputs=inputs)).values())

    assert of("slots", "window_slots", "positions", "slotsx") == [-1, -1, 0, 0]
    # Where the graph finds slots itself, no position means none.
    assert of("positions", "tail_window_positions", "token_ids") == [-1, -1, 0]
    target = np.full((3, 4), 9, np.int32)
    fill(target, np.ones((2, 3), np.int32), 0)
    assert target.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    fill(target, np.full((3, 4), 5, np.int32), 0)
    assert (target == 5).all()
