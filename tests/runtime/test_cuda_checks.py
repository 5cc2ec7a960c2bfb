"""Refusals of GPUs by their full text, and the memory that is planned before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewright.runtime import ArtifactError, RequestError
from tilewright.runtime.artifact import TargetRecord
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.devices.cuda import (
    LAUNCH_GRAPH_BYTES,
    CudaDevice,
    find_facts,
    graph_bytes,
    memory_needs,
    most_blocks,
)
from tilewright.runtime.devices.cuda_checks import (
    CudaFacts,
    MemoryNeeds,
    check_machine,
    check_memory,
    check_target,
)
from tilewright.runtime.devices.gpu import fixed_bytes
from tilewright.runtime.devices.registry import open_device
from tilewright.runtime.lanes import LANES
from tilewright.runtime.plan_memory import PlanMemory

Write = Callable[..., Path]
H200 = CudaFacts((13, 0), None, "2.11.0+cu130", (13, 0), 1, "NVIDIA H200", (9, 0))


def target(*features: str) -> TargetRecord:
    return TargetRecord("sm90", "sm90a", features, "", ())


@pytest.mark.parametrize(
    ("facts", "index", "text"),
    [
        (
            replace(H200, driver=None),
            0,
            "device 'cuda': there is no NVIDIA driver: libcuda.so.1 cannot be loaded",
        ),
        (
            replace(H200, no_gpu="no CUDA-capable device is detected"),
            0,
            "device 'cuda': there is no GPU: the driver says no CUDA-capable device is detected",
        ),
        (
            replace(H200, torch="2.11.0+cpu", torch_cuda=None),
            0,
            "device 'cuda': this torch has no CUDA: got 2.11.0+cpu, want a build with CUDA",
        ),
        (
            replace(H200, driver=(12, 4)),
            0,
            "device 'cuda': the driver is too old: it supports CUDA 12.4, want 13.0 for "
            "torch 2.11.0+cu130",
        ),
        (H200, 1, "device 'cuda:1': there is no such GPU: this process sees 1"),
    ],
)
def test_machines_that_cannot_run_are_told(facts: CudaFacts, index: int, text: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        check_machine(facts, index)
    assert str(caught.value) == text


def test_a_machine_that_can_run_is_taken() -> None:
    check_machine(H200, 0)
    check_machine(replace(H200, driver=(13, 4)), 0)
    check_target(H200, target("sm_90a", "cuda-12.9"))
    check_target(H200, target("sm_90"))


@pytest.mark.parametrize(
    ("capability", "feature", "want"),
    [
        ((10, 0), "sm_90a", (9, 0)),
        ((9, 0), "sm_100a", (10, 0)),
        ((10, 3), "sm_100a", (10, 0)),
        ((8, 9), "sm_90", (9, 0)),
        ((12, 0), "sm_100f", (10, 0)),
    ],
)
def test_other_architectures_are_refused(
    capability: tuple[int, int], feature: str, want: tuple[int, int]
) -> None:
    facts = replace(H200, name="NVIDIA X", capability=capability)
    with pytest.raises(ArtifactError) as caught:
        check_target(facts, target(feature))
    assert str(caught.value) == (
        f"architecture '{feature}' cannot run on NVIDIA X: got compute capability "
        f"{capability[0]}.{capability[1]}, want {want[0]}.{want[1]}; "
        "compile the model again for this GPU"
    )


def test_family_code_runs_on_later_minors() -> None:
    check_target(replace(H200, capability=(10, 3)), target("sm_100f"))
    check_target(replace(H200, capability=(10, 3)), target("sm_100"))


@pytest.mark.parametrize(
    ("feature", "text"),
    [
        (
            "cuda-13.2",
            "device 'cuda': the driver is too old: it supports CUDA 13.0, want 13.2 for "
            "target 'sm90'",
        ),
        ("avx2", "target 'sm90': feature 'avx2' is unknown: want sm_<arch> or cuda-<x.y>"),
    ],
)
def test_features_of_targets(feature: str, text: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        check_target(H200, target("sm_90a", feature))
    assert str(caught.value) == text


def test_too_little_memory_is_told_with_the_numbers() -> None:
    gib = 1 << 30
    needs = MemoryNeeds(weights=70 * gib, working=2 * gib, graphs=gib // 2, cache=80 * gib)
    check_memory(needs, needs.total, "NVIDIA H200", 4096)
    with pytest.raises(ArtifactError) as caught:
        check_memory(needs, 139 * gib, "NVIDIA H200", 4096)
    assert str(caught.value) == (
        "memory of NVIDIA H200: too little is free: got 139.00 GiB, want 152.50 GiB: weights 70.00,"
        " steps 2.00, graphs 0.50, cache of 4096 positions 80.00; use a smaller cache, or a GPU "
        "with more memory"
    )


@pytest.mark.cpu
def test_memory_is_planned_from_the_manifest(write_artifact: Write) -> None:
    def edit(tree: dict[str, Any]) -> None:
        tree["dims"][1]["name"] = "cache_blocks"
        tree["dims"].append({"name": "blocks", "role": "context", "lower": 1, "upper": 100})
        tree["states"][0]["shape"] = ["cache_blocks", 8]
        for bucket in tree["buckets"]:
            bucket["launches"][1]["ints"] = ["tokens", "cache_blocks"]

    manifest = load_artifact(write_artifact(edit)).manifest
    plan = PlanMemory(manifest, 1)
    # Weights 128; x, y, h of 64 rows of 8 floats, 64 slots; arena 64 bytes more; scratch 64 a lane.
    assert fixed_bytes(plan) == 256 + 2048 + 256 + 2048 + 2304 + LANES * 256
    # Two buckets of two launches; context 1, 2, 4, ..., 64, 100.
    assert graph_bytes(plan) == 2 * 2 * 8 * LAUNCH_GRAPH_BYTES
    needs = memory_needs(plan, 10, True)
    assert needs.cache == 10 * 32 and needs.weights == 128
    assert memory_needs(plan, 10, False).graphs == 0
    assert most_blocks(plan, needs.total, graphs=True) == 10
    assert most_blocks(plan, needs.total - 1, graphs=True) == 9
    assert most_blocks(plan, 0, graphs=True) == 0


@pytest.mark.cpu
def test_settings_belong_to_devices(write_artifact: Write) -> None:
    manifest = load_artifact(write_artifact()).manifest
    gpu = replace(manifest, target=target("sm_90a"))
    for made, options, kind, text in (
        (manifest, {"name": "tpu"}, RequestError,
         "device 'tpu': unknown: have cpu, cuda, ascend950-model, cuda:N"),
        (manifest, {"name": "cpu:1"}, RequestError,
         "device 'cpu:1': unknown: have cpu, cuda, ascend950-model, cuda:N"),
        (manifest, {"name": ""}, RequestError,
         "device '': unknown: have cpu, cuda, ascend950-model, cuda:N"),
        (gpu, {"name": "cuda:"}, RequestError,
         "device 'cuda:': unknown: have cpu, cuda, ascend950-model, cuda:N"),
        (gpu, {"name": "cuda:\u0663"}, RequestError,
         "device 'cuda:\u0663': unknown: have cpu, cuda, ascend950-model, cuda:N"),
        (manifest, {"name": "cuda"}, ArtifactError,
         "target 'cpu' cannot run on this device: want sm90 or sm100"),
        (gpu, {"name": "cpu"}, ArtifactError, "target 'sm90' cannot run on this device: want cpu"),
        (manifest, {"graphs": True}, RequestError,
         "engine 'graphs': is a setting of GPUs: got target cpu"),
        (gpu, {"num_threads": 2}, RequestError,
         "engine 'num_threads': is a setting of CPUs: got target sm90"),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            open_device(made, **options)
        assert str(caught.value) == text
    device = open_device(gpu, "cuda:3", graphs=False)
    assert isinstance(device, CudaDevice) and (device.index, device.graphs) == (3, False)


@pytest.mark.cpu
def test_this_machine_is_told_before_anything_is_loaded(write_artifact: Write) -> None:
    facts = find_facts(0)
    if facts.driver is not None and facts.no_gpu is None:
        pytest.skip("this machine has a GPU")

    def edit(tree: dict[str, Any]) -> None:
        tree["target"].update(name="sm90", features=["sm_90a"])

    root = write_artifact(edit)
    (root / "weights.bin").unlink()
    with pytest.raises(ArtifactError, match=r"^artifact '.*': device 'cuda': there is no "):
        load_artifact(root)
