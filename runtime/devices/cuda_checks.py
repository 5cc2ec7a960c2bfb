"""Whether a GPU can run an artifact: every refusal is one sentence, said before anything is loaded.

The checks are pure functions of what was found on the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tilewright.runtime.artifact import TargetRecord
from tilewright.runtime.errors import ArtifactError


@dataclass(frozen=True)
class CudaFacts:
    """What a machine has for CUDA.

    `driver`: the newest CUDA version the driver supports, None without a driver. `no_gpu`: why the
    driver shows no GPU, None if it shows some. `torch_cuda`: the CUDA version torch was built
    with, None for a CPU build. `name` and `capability` are those of the GPU asked for.
    """

    driver: tuple[int, int] | None
    no_gpu: str | None
    torch: str
    torch_cuda: tuple[int, int] | None
    num_gpus: int = 0
    name: str = ""
    capability: tuple[int, int] = (0, 0)


def check_machine(facts: CudaFacts, index: int) -> None:
    """Raise ArtifactError unless the machine has a GPU with this index that torch can use."""
    if facts.driver is None:
        raise ArtifactError(
            "device 'cuda': there is no NVIDIA driver: libcuda.so.1 cannot be loaded"
        )
    if facts.no_gpu is not None:
        raise ArtifactError(f"device 'cuda': there is no GPU: the driver says {facts.no_gpu}")
    if facts.torch_cuda is None:
        raise ArtifactError(
            f"device 'cuda': this torch has no CUDA: got {facts.torch}, want a build with CUDA"
        )
    _check_driver(facts, facts.torch_cuda[0], 0, f"torch {facts.torch}")
    if not 0 <= index < facts.num_gpus:
        raise ArtifactError(
            f"device 'cuda:{index}': there is no such GPU: this process sees {facts.num_gpus}"
        )


def check_target(facts: CudaFacts, target: TargetRecord) -> None:
    """Raise ArtifactError unless the GPU and its driver can run the target's machine code."""
    for feature in target.features:
        if match := re.fullmatch(r"sm_(\d+)(\d)([af]?)", feature):
            _check_architecture(facts, feature, (int(match[1]), int(match[2])), match[3])
        elif match := re.fullmatch(r"cuda-(\d+)\.(\d+)", feature):
            _check_driver(facts, int(match[1]), int(match[2]), f"target '{target.name}'")
        else:
            raise ArtifactError(
                f"target '{target.name}': feature '{feature}' is unknown: "
                "want sm_<arch> or cuda-<x.y>"
            )


def _check_architecture(
    facts: CudaFacts, feature: str, want: tuple[int, int], suffix: str
) -> None:
    """Refuse another chip. Code for `a` runs on that one alone, other code on later minors too."""
    got = facts.capability
    fits = got == want if suffix == "a" else got[0] == want[0] and got[1] >= want[1]
    if not fits:
        raise ArtifactError(
            f"architecture '{feature}' cannot run on {facts.name}: got compute capability "
            f"{got[0]}.{got[1]}, want {want[0]}.{want[1]}; compile the model again for this GPU"
        )


def _check_driver(facts: CudaFacts, major: int, minor: int, who: str) -> None:
    driver = facts.driver or (0, 0)
    if driver < (major, minor):
        raise ArtifactError(
            f"device 'cuda': the driver is too old: it supports CUDA {driver[0]}.{driver[1]}, "
            f"want {major}.{minor} for {who}"
        )


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes a GPU must have free: weights, what every step uses, graphs, and the cache."""

    weights: int
    working: int
    graphs: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.working + self.graphs + self.cache


def check_memory(needs: MemoryNeeds, free: int, name: str, cache_tokens: int) -> None:
    """Raise ArtifactError, with the numbers, unless all fits into what is free."""
    if needs.total <= free:
        return
    gib = 1 << 30
    raise ArtifactError(
        f"memory of {name}: too little is free: got {free / gib:.2f} GiB, want "
        f"{needs.total / gib:.2f} GiB: weights {needs.weights / gib:.2f}, steps "
        f"{needs.working / gib:.2f}, graphs {needs.graphs / gib:.2f}, cache of {cache_tokens} "
        f"positions {needs.cache / gib:.2f}; use a smaller cache, or a GPU with more memory"
    )
