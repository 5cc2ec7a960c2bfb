"""A model with states of both pools on a GPU made of host memory: the bits of the CPU, also where
steps are padded and replayed, set back, resumed and shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.host_chip import HostGpu
from support.paged import PAGE, VOCAB, Served, build_paged
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.cache import page_counts
from tilewright.runtime.cache_layout import cache_layout
from tilewright.runtime.devices.cpu import CpuDevice
from tilewright.runtime.devices.cuda import LAUNCH_GRAPH_BYTES, graph_bytes, memory_needs
from tilewright.runtime.executor import Executor
from tilewright.runtime.params import SamplingParams
from tilewright.runtime.plan_memory import PlanMemory
from tilewright.runtime.request import Request

pytestmark = pytest.mark.cpu
PROMPT = 37


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("paged") / "artifact"
    build_paged(folder, kernel_cache)
    return folder


@pytest.fixture(scope="module")
def on_cpu(artifact: Path) -> dict[tuple[str, int], bytes]:
    """Logits of three requests that ran undisturbed."""
    with Executor(load_artifact(artifact), CpuDevice(1), poison=True) as executor:
        served = Served.of(executor=executor)
        for request in requests():
            served.scheduler.add(request)
        while served.scheduler.has_work:
            served.step()
        return dict(served.device.logits)


@pytest.fixture
def gpu() -> HostGpu:
    return HostGpu(graphs=True)


@pytest.fixture
def executor(artifact: Path, gpu: HostGpu) -> Iterator[Executor]:
    with Executor(load_artifact(artifact, gpu), gpu, poison=True) as found:
        yield found


def requests() -> list[Request]:
    found = []
    for salt, (name, count) in enumerate((("a", PROMPT), ("b", 5), ("c", 18))):
        prompt = tuple((salt + 11 * i * i) % VOCAB for i in range(count))
        found.append(Request(name, prompt, SamplingParams(), salt, 60))
    return found


def test_padded_steps_give_the_bits_of_the_cpu(
    executor: Executor, gpu: HostGpu, on_cpu: dict[tuple[str, int], bytes]
) -> None:
    served = Served.of(executor=executor)
    for request in requests():
        served.scheduler.add(request)
    while served.scheduler.has_work:
        served.step()
        served.check_accounts()
    assert served.device.logits == on_cpu
    assert gpu.chip.num_replayed > gpu.chip.num_captured > 0


def test_set_back_and_resumed(
    executor: Executor, on_cpu: dict[tuple[str, int], bytes]
) -> None:
    """Rows of the window are copied out and in; shared blocks are copied before they change."""
    served = Served.of(executor=executor, retained=0, snapshot_interval=8)
    request = requests()[0]
    served.scheduler.add(request)
    while request.num_computed < PROMPT + 20:
        served.step()
    tokens = request.token_ids(0, request.num_tokens)
    snapshot = served.scheduler.snapshot(request)
    again = Request("again", (*tokens[: snapshot.position], 3), SamplingParams(), 1, 4,
                    resume=snapshot)  # fmt: skip
    served.scheduler.add(again)
    del request.output_ids[4:]
    served.scheduler.rollback(request, PROMPT + 3)
    served.poison()
    while request.num_computed < PROMPT + 50:
        served.step()
        served.check_accounts()
    for position in range(PROMPT, PROMPT + 50):
        assert served.device.logits["a", position] == on_cpu["a", position], position
    assert again.num_computed > snapshot.position


def test_copies_are_those_of_the_host(executor: Executor, artifact: Path) -> None:
    """Rows read after they were written, and blocks after they were copied, state by state."""
    layout, rng = cache_layout(executor.artifact.manifest), np.random.default_rng(0)
    executor.allocate_states({"cache_blocks": 5, "window_blocks": 4})
    memory = executor.cache_memory(layout)
    slots = rng.permutation(4 * PAGE)[:9]
    for state in memory.window_states:
        rows = memory.read_rows(state.name, slots)
        given = rng.integers(0, 100, rows.shape).astype(rows.dtype)
        memory.write_rows(state.name, slots, given)
        assert memory.read_rows(state.name, slots).tobytes() == given.tobytes()
        whole = executor.state(state.name).reshape(-1, given.shape[-1])
        assert whole[slots].tobytes() == given.tobytes()
        assert not np.delete(whole, slots, 0).any()
    memory.copy_blocks([(0, 3), (1, 2)])
    for state in layout.blocks.states:
        found = executor.state(state.name)
        assert (found[3] == found[0]).all() and (found[2] == found[1]).all()


def test_memory_is_planned_for_both_pools(artifact: Path) -> None:
    manifest = load_artifact(artifact).manifest
    layout, plan = cache_layout(manifest), PlanMemory(manifest, 1)
    assert layout.window is not None
    pages = page_counts(manifest, 10)["window_blocks"]
    want = 10 * layout.blocks.page_bytes + pages * layout.window.page_bytes
    assert memory_needs(plan, 10, graphs=True).cache == want
    # The width of a window's ring never varies: shapes of graphs differ in blocks alone.
    most = {d.name: d.upper for d in manifest.dims}["request_blocks"]
    shapes = len([n for n in range(12) if 1 << n < 2 * most])
    launches = sum(len(b.launches) for b in manifest.buckets)
    assert graph_bytes(plan) == launches * shapes * LAUNCH_GRAPH_BYTES
