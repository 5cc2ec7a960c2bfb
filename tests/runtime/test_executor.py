"""Steps of a tiny artifact, on both paths, on threads, in forks and after failures."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilewright.runtime.artifact import LaunchRecord
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.devices import CpuDevice
from tilewright.runtime.devices.cpu import numpy_type
from tilewright.runtime.errors import LaunchError
from tilewright.runtime.executor import Executor, as_torch

pytestmark = pytest.mark.cpu
Write = Callable[..., Path]
WEIGHT = np.arange(1, 9, dtype=np.float32)


def step(tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, 8), dtype=np.float32)
    return {"x": x, "slots": np.arange(tokens, dtype=np.int32)}


def make(root: Path, threads: int = 2, **options: Any) -> Executor:
    executor = Executor(load_artifact(root), CpuDevice(threads), **options)
    executor.allocate_states({"slots": 64})
    return executor


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[tuple[int, ...], ...], tuple[int, ...]]] = []

    def before(
        self, launch: LaunchRecord, tensors: Sequence[np.ndarray], ints: Sequence[int]
    ) -> None:
        self.seen.append((launch.kernel, tuple(t.shape for t in tensors), tuple(ints)))

    def after(
        self, launch: LaunchRecord, tensors: Sequence[np.ndarray], ints: Sequence[int]
    ) -> None:
        if launch.kernel == "scale":
            np.testing.assert_array_equal(tensors[0], tensors[1] * tensors[2])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_steps_accumulate_in_the_state(write_artifact: Write, threads: int) -> None:
    with make(write_artifact(), threads, poison=True) as executor:
        total = np.zeros((64, 8), np.float32)
        for tokens in (1, 64, 4, 5, 1):
            inputs = step(tokens, tokens)
            outputs = executor.run(inputs, {"tokens": tokens})
            total[:tokens] += inputs["x"] * WEIGHT
            np.testing.assert_array_equal(outputs["y"], total[:tokens])
        np.testing.assert_array_equal(executor.state("sums"), total)


def test_both_paths_give_the_same_bits(write_artifact: Write) -> None:
    artifact = load_artifact(write_artifact())
    recorder = Recorder()
    with Executor(artifact, CpuDevice(2)) as fast, Executor(artifact, CpuDevice(3)) as slow:
        for executor in (fast, slow):
            executor.allocate_states({"slots": 70})
        a = fast.run(step(5), {"tokens": 5})["y"]
        b = slow.observe(step(5), {"tokens": 5}, recorder)["y"]
        assert a.tobytes() == b.tobytes()
    assert recorder.seen == [
        ("scale", ((5, 8), (5, 8), (8,)), (5,)),
        ("accumulate", ((5, 8), (70, 8), (5,), (5, 8), (192,)), (5, 70)),
    ]


def test_smallest_bucket_is_chosen(write_artifact: Write) -> None:
    with make(write_artifact()) as executor:
        names = [executor.bucket({"tokens": n}).name for n in (1, 4, 5, 64)]
        assert names == ["tokens4", "tokens4", "tokens64", "tokens64"]
        with pytest.raises(ValueError, match="no bucket is large enough: have tokens4, tokens64"):
            executor.bucket({"tokens": 65})


def test_launch_times_are_of_each_launch(write_artifact: Write) -> None:
    with make(write_artifact()) as executor:
        times = executor.time_launches(step(4), {"tokens": 4})
    assert [t.launch.kernel for t in times] == ["scale", "accumulate"]
    assert all(0 < t.seconds < 1 for t in times)


@pytest.mark.parametrize("observed", [False, True])
def test_failed_launch_is_named_and_the_next_step_runs(
    write_artifact: Write, observed: bool
) -> None:
    with make(write_artifact()) as executor:
        bad = {**step(2), "slots": np.array([0, -1], np.int32)}
        with pytest.raises(LaunchError) as caught:
            if observed:
                executor.observe(bad, {"tokens": 2}, Recorder())
            else:
                executor.run(bad, {"tokens": 2})
        assert str(caught.value) == (
            "launch 1 'layers.0.accumulate' of bucket 'tokens4' failed: "
            "kernel 'accumulate': slot -1 out of range"
        )
        executor.allocate_states({"slots": 64})
        outputs = executor.run(step(2), {"tokens": 2})
        np.testing.assert_array_equal(outputs["y"], step(2)["x"] * WEIGHT)


@pytest.mark.parametrize(
    ("inputs", "dims", "text"),
    [
        ({"x": step(2)["x"]}, {"tokens": 2}, "input 'slots': missing: got x"),
        ({**step(2), "z": WEIGHT}, {"tokens": 2}, "input 'z': unknown: have x, slots"),
        (step(3), {"tokens": 2}, "input 'x': got float32[3, 8], want float32[2, 8]"),
        (
            {**step(2), "slots": np.zeros(2, np.int64)},
            {"tokens": 2},
            "input 'slots': got int64[2], want int32[2]",
        ),
        (step(2), {}, "dim 'tokens': got None, want 1 to 64"),
        (step(2), {"tokens": 65}, "dim 'tokens': got 65, want 1 to 64"),
        (step(2), {"tokens": 2, "slots": 65}, "dim 'slots': got 65, but states have 64"),
    ],
)
def test_wrong_steps_are_refused(
    write_artifact: Write, inputs: dict[str, np.ndarray], dims: dict[str, int], text: str
) -> None:
    with make(write_artifact()) as executor:
        with pytest.raises(ValueError) as caught:
            executor.run(inputs, dims)
        assert str(caught.value) == text


def test_states_must_be_allocated_first(write_artifact: Write) -> None:
    with Executor(load_artifact(write_artifact()), CpuDevice(1)) as executor:
        with pytest.raises(ValueError, match="executor: allocate_states has not been called"):
            executor.run(step(1), {"tokens": 1})
        with pytest.raises(ValueError, match="dim 'slot': unknown: have tokens, slots"):
            executor.allocate_states({"slot": 1})


def test_untouched_state_costs_no_memory(write_artifact: Write) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with make(write_artifact()) as executor:
        before = resident()
        executor.allocate_states({"slots": 1 << 25})  # 1 GiB
        executor.run(step(4), {"tokens": 4})
        assert resident() - before < 16 << 20


def test_closed_executor_says_so(write_artifact: Write) -> None:
    executor = make(write_artifact())
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="executor: it is closed"):
        executor.run(step(1), {"tokens": 1})


def test_engines_and_threads_do_not_meet(write_artifact: Write) -> None:
    """Three executors, two threads each, every result checked: no run sees another's memory."""
    artifact = load_artifact(write_artifact())
    executors = [Executor(artifact, CpuDevice(n)) for n in (1, 2, 3)]
    errors: list[BaseException] = []
    counts: dict[int, int] = {}

    def call(executor: Executor, slot: int) -> None:
        try:
            inputs = {
                "x": np.full((1, 8), slot + 1, np.float32),
                "slots": np.array([slot], np.int32),
            }
            for _ in range(200):
                executor.run(inputs, {"tokens": 1})
            counts[id(executor)] = counts.get(id(executor), 0) + 200
        except BaseException as error:  # shown by the assertion below
            errors.append(error)

    for executor in executors:
        executor.allocate_states({"slots": 2})
    pairs = [(e, slot) for e in executors for slot in (0, 1)]
    threads = [threading.Thread(target=call, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for executor in executors:
        np.testing.assert_array_equal(executor.state("sums")[0], 200 * WEIGHT)
        np.testing.assert_array_equal(executor.state("sums")[1], 400 * WEIGHT)
        executor.close()


def test_forked_child_is_told_and_the_parent_goes_on(write_artifact: Write) -> None:
    with make(write_artifact()) as executor:
        executor.run(step(4), {"tokens": 4})
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                executor.run(step(4), {"tokens": 4})
                text = "ran"
            except RuntimeError as error:
                text = str(error)
            executor.close()
            os.write(write, text.encode())
            os._exit(0)
        os.close(write)
        deadline = time.monotonic() + 20
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline, "the forked child hangs"
            time.sleep(0.01)
        assert os.read(read, 1000).decode() == (
            "executor: the process was forked after it was made; "
            "load the artifact again in this process"
        )
        os.close(read)
        executor.run(step(4), {"tokens": 4})


def test_float_mode_is_ours_inside_and_the_callers_after(write_artifact: Write) -> None:
    """1e-39 is subnormal: zero in the caller's mode, kept in ours, on every thread."""
    inputs = step(64)
    inputs["x"] = np.full((64, 8), 1e-39, np.float32)
    want = (inputs["x"] * WEIGHT).tobytes()
    with make(write_artifact(), 3) as executor:
        assert torch.set_flush_denormal(True)
        try:
            got = executor.run(inputs, {"tokens": 64})["y"].tobytes()
            after = float(np.float32(1e-38) * np.float32(0.1))
        finally:
            torch.set_flush_denormal(False)
    assert got == want
    assert after == 0.0
    assert float(np.float32(1e-38) * np.float32(0.1)) != 0.0


def test_idle_pool_sleeps(write_artifact: Write) -> None:
    with make(write_artifact(), 4) as executor:
        executor.run(step(64), {"tokens": 64})
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.02


@pytest.mark.parametrize("dtype", ["bf16", "f16", "i32", "u8", "fp8_e4m3"])
def test_memory_reaches_single_kernels_as_its_type(dtype: str) -> None:
    array = np.arange(64, dtype=numpy_type(dtype)).reshape(2, 32)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = as_torch(array, dtype)
    want = {"bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32}.get(dtype)
    assert tensor.dtype == (want or torch.uint8) and tensor.shape == (2, 32)
    assert tensor.data_ptr() == array.ctypes.data
