"""Contractions with weights as they are stored, for kernels of the Ascend target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from support.kernel_case import TORCH, WIDE
from support.weights import RandomWeights
from tilewright.codegen.arguments import argument_names, int_names, matrix_weights
from tilewright.codegen.pack import PACKINGS, pack_weight
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, GraphBuilder, Role, Value, Weight, WeightExpr
from tilewright.graph.dims import evaluate
from tilewright.graph.reference import run_node
from tilewright.graph.types import BF16, F32, I32, BlockFormat, TensorType, element_type

FP8 = "fp8_e4m3[block=32x32,scale=ue8m0]"
FP8_WIDE = "fp8_e4m3[block=128x128,scale=ue8m0]"
FP4 = "fp4_e2m1[g=32,axis=1,scale=ue8m0]"
ACTIVATION = "fp8_e4m3[g=32,axis=1,scale=ue8m0]"
ACTIVATION_WIDE = "fp8_e4m3[g=128,axis=1,scale=ue8m0]"
UPPER = 64


def quantised_with_residual(stored: str, k: int, n: int) -> Graph:
    """What a launch computes before (a quantised row), and an operand with rows after."""
    b = GraphBuilder("linear")
    tokens = b.dim("tokens", Role.BATCH, upper=UPPER)
    x = b.op("quantise", b.input("x", BF16, tokens, k), dtype=ACTIVATION)
    y = b.op("linear", x, b.weight("w", element_type(stored), n, k))
    b.output("y", b.op("add", y, b.input("r", F32, tokens, n)))
    return b.build()


def quantised_operand(stored: str, k: int, n: int) -> Graph:
    b = GraphBuilder("linear")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=UPPER), k)
    x = quantised(b, x, ACTIVATION)
    b.output("codes", x)
    b.output("y", b.op("linear", x, b.weight("w", element_type(stored), n, k)))
    return b.build()


def plain(stored: str, k: int, n: int) -> Graph:
    b = GraphBuilder("linear")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=UPPER), k)
    b.output("y", b.op("linear", x, b.weight("w", element_type(stored), n, k)))
    return b.build()


def quantised(b: GraphBuilder, x: Value, wanted: str) -> Value:
    """A quantised activation, if one is wanted: then weights of codes meet codes."""
    return b.op("quantise", x, dtype=wanted) if wanted else x


def gated(k: int, n: int, other: int, activation: str = "") -> Graph:
    """Two matrices whose results meet, and one of another format apart."""
    b = GraphBuilder("gated")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=UPPER), k)
    x = quantised(b, x, activation)
    y, z = (b.op("linear", x, b.weight(w, element_type(FP8_WIDE), n, k)) for w in ("w", "v"))
    b.output("y", b.op("cast", b.op("mul", b.op("silu", y), z), dtype="bf16"))
    b.output("z", b.op("linear", x, b.weight("u", element_type(FP4), other, k)))
    return b.build()


def experts(
    stored: str, k: int, n: int, slots: int, count: int, *, shared: bool, activation: str = ""
) -> Graph:
    b = GraphBuilder("experts")
    tokens = b.dim("tokens", Role.BATCH, upper=UPPER)
    x = b.input("x", BF16, tokens, k) if shared else b.input("x", BF16, tokens, slots, k)
    w = b.weight("w", element_type(stored), count, n, k)
    x = quantised(b, x, activation)
    y = b.op("expert_linear", x, w, b.input("ids", I32, tokens, slots))
    b.output("y", b.op("cast", b.op("silu", y), dtype="bf16"))
    return b.build()


def groups(k: int, n: int, count: int, activation: str = "") -> Graph:
    b = GraphBuilder("groups")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=UPPER), count, k)
    x = quantised(b, x, activation)
    y = b.op("grouped_linear", x, b.weight("w", element_type(FP8), count * n, k))
    b.output("y", b.op("cast", y, dtype="bf16"))
    return b.build()


@dataclass(frozen=True)
class ContractCase:
    """Arguments by name as they lie in memory, outputs poisoned; expected outputs in fp64, NaN in
    slots whose id names no matrix."""

    arguments: Mapping[str, torch.Tensor]
    dims: Mapping[str, int]
    expected: Mapping[str, torch.Tensor]


def contract_case(spec: KernelSpec, tokens: int, *, seed: int, stray: bool = False) -> ContractCase:
    """Draw operands; with `stray` some ids are out of range."""
    body, rng, dims = spec.body, np.random.default_rng(seed), {"tokens": tokens}
    outputs = {value for _, value in body.outputs}
    found, values, strays = {}, {}, torch.zeros(())
    for name in argument_names(body):
        type_ = body.type_of(name)
        shape = [evaluate(d, dims) for d in type_.shape]
        if name in outputs:
            found[name] = torch.full(shape, torch.nan, dtype=TORCH[str(type_.dtype)])
        elif name in body.weight:
            found[name], values[name] = _weight(body, body.weight[name], seed)
        elif type_.dtype == I32:
            ids = torch.from_numpy(rng.integers(0, _experts(body), shape).astype(np.int32))
            values[name] = ids.clone()
            if stray:
                strays = torch.from_numpy(rng.random(shape) < 0.3)
                ids[strays] = torch.tensor([-1, _experts(body)], dtype=torch.int32)[
                    torch.arange(int(strays.sum())) % 2
                ]
            found[name] = ids
        elif isinstance(type_.dtype, BlockFormat):
            values[name] = _quantised(rng, type_, shape)
            found[name] = values[name].bfloat16()
        else:
            drawn = rng.standard_normal(shape).astype(np.float32)
            found[name] = torch.from_numpy(drawn).to(TORCH[str(type_.dtype)])
            values[name] = found[name].double()
    for node in body.nodes:
        values[node.name] = run_node(node, [values[i] for i in node.inputs], WIDE)
    expected = {v: values[v].clone() for v in outputs}
    if strays.dim():
        for value in expected.values():
            value[strays] = torch.nan
    return ContractCase(found, {n: dims[n] for n in int_names(body)}, expected)


def _quantised(rng: np.random.Generator, type_: TensorType, shape: list[int]) -> torch.Tensor:
    """Values that a quantiser leaves, of rows of very different sizes; some groups are zeros."""
    b = GraphBuilder("codes")
    b.output("y", b.op("quantise", b.input("x", BF16, *shape), dtype=str(type_.dtype)))
    drawn = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, (*shape[:-1], 1))
    drawn[..., : shape[-1] // 3] *= rng.random((*shape[:-1], 1)) < 0.5
    (node,) = b.build().nodes
    return run_node(node, [torch.from_numpy(drawn).bfloat16().double()], WIDE)


def _experts(body: Graph) -> int:
    return next(int(w.type.shape[0]) for w in body.weights if w.type.rank == 3)


def _weight(body: Graph, weight: Weight, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as it lies in memory, and its values."""
    if weight.type.rank == 3:
        names = tuple(f"{weight.name}.{i}" for i in range(int(weight.type.shape[0])))
        weight = Weight(weight.name, weight.type, WeightExpr("stack", names))
    alone = Graph(name="w", dims=(), inputs=(), states=(), weights=(weight,), nodes=(), outputs=())
    source = RandomWeights(alone, seed=seed)
    values = source.tensors()[weight.name]
    if weight.name not in matrix_weights(body):
        return values.to(TORCH[str(weight.type.dtype)]), values.double()
    layout = PACKINGS["ascendc"].layout(weight.type)
    packed: Any = pack_weight(weight, layout, source).data
    return torch.from_numpy(packed.copy()), values.double()
