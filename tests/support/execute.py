"""Run a compiled graph and its reference on the same random inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from support.weights import RandomWeights
from tilewright.graph import Graph, reference
from tilewright.graph.dims import evaluate
from tilewright.graph.types import BF16, I32
from tilewright.runtime.artifact_files import load_artifact
from tilewright.runtime.devices.cpu import CpuDevice
from tilewright.runtime.executor import Executor

Arrays = Mapping[str, NDArray[Any]]
EXACT_F32 = reference.HONOUR_CASTS


def random_inputs(graph: Graph, dims: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
    """Normally distributed floats, and ints below the number of rows."""
    r = np.random.default_rng(seed)
    found = {}
    for declared in graph.inputs:
        shape = [evaluate(d, dims) for d in declared.type.shape]
        if declared.type.dtype == I32:
            high = dims.get("rows", 1)
            found[declared.name] = torch.from_numpy(r.integers(0, high, shape).astype(np.int32))
        else:
            values = torch.from_numpy(r.standard_normal(shape).astype(np.float32))
            bf16 = declared.type.dtype == BF16
            found[declared.name] = values.bfloat16().float() if bf16 else values
    return found


def stored(tensor: torch.Tensor, dtype: str) -> NDArray[Any]:
    """A tensor as it lies in memory: bf16 as uint16."""
    if dtype == "bf16":
        return tensor.bfloat16().contiguous().view(torch.uint16).numpy()
    kinds = {"f32": torch.float32, "f16": torch.float16, "i32": torch.int32}
    return tensor.to(kinds[dtype]).contiguous().numpy()


def widened(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Memory of a float type as fp32; ints as they are."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == "f16" else array


def run_artifact(
    path: Path, graph: Graph, steps: Sequence[tuple[dict[str, torch.Tensor], Mapping[str, int]]],
    *, threads: int = 2,
) -> list[dict[str, NDArray[Any]]]:  # fmt: skip
    """Outputs of every step, floats as fp32; memory is poisoned before each."""
    dtypes = {i.name: str(i.type.dtype) for i in graph.inputs}
    results = []
    with Executor(load_artifact(path), CpuDevice(threads), poison=True) as executor:
        for inputs, dims in steps:
            given = {name: stored(t, dtypes[name]) for name, t in inputs.items()}
            outputs = executor.run(given, dims)
            results.append(
                {
                    public: widened(np.array(outputs[public]), str(graph.type_of(value).dtype))
                    for public, value in graph.outputs
                }
            )
    return results


def run_reference(
    graph: Graph, inputs: dict[str, torch.Tensor], weights: RandomWeights, *, keep: bool = False
) -> reference.Result:
    """The reference in fp32 that honours casts."""
    return reference.run(
        graph, inputs, states={}, weights=weights.tensors(), precision=EXACT_F32, keep_values=keep
    )
