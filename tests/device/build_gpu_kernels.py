"""Build what `check_gpu_kernels.py` runs on a machine with a GPU: one library of kernels in many
schedules, operands and expected values. Needs no GPU.

    python tests/device/build_gpu_kernels.py DIR [CACHE [MODEL[:COUNT[:NAME,..]] ...]]

COUNT: schedules of a kernel; NAME: ends of the names of kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from device.cases_attend import attend_cases
from device.cases_codes import code_cases
from device.cases_contract import DeviceCase, contract_cases
from device.cases_rows import row_cases
from device.cases_scaled import scaled_cases
from device.cases_thin import thin_cases
from device.cases_tiles import tile_cases
from support.kernel_case import distinct_bodies, make_case
from support.tiny import CONFIG, tiny_graph
from tilewright.codegen.arguments import argument_names, int_names, needs_scratch
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.graph.dims import to_json
from tilewright.graph.types import BlockFormat
from tilewright.targets.registry import resolve

SMALL = {"rope_pairing": "interleaved", "num_hidden_layers": 1}
SMOL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 4096, "num_hidden_layers": 1,
    "rope_pairing": "interleaved",
}  # fmt: skip
LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "num_hidden_layers": 1,
    "max_position_embeddings": 16384,
}  # fmt: skip
STEP = {"tokens": 70, "requests": 9, "request_blocks": 20, "cache_blocks": 200, "logit_rows": 21}


def config(dtype: str, context: int = 640, block_size: int = 32) -> CompileConfig:
    return CompileConfig(
        max_context=context, max_tokens_per_step=512, max_requests=128, block_size=block_size,
        dtype=dtype,
    )  # fmt: skip


def graphs() -> Iterator[tuple[str, Graph, int, bool]]:
    """Name, graph, schedules to take of each list, whether for timing alone."""
    smol = {**SMOL, "max_position_embeddings": 640}
    yield "smol q4_1", tiny_graph("q4_1", settings=config("bfloat16"), **smol), 8, False
    yield "smol bf16", tiny_graph("bf16", settings=config("bfloat16"), **smol), 6, False
    yield "tiny f32", tiny_graph("f32", settings=config("float32", block_size=8),
                                 max_position_embeddings=640, **SMALL), 3, False  # fmt: skip
    yield "qwen q8_0", tiny_graph(
        "q8_0", settings=config("bfloat16"), family="Qwen3ForCausalLM", head_dim=24,
        max_position_embeddings=640,
    ), 6, False  # fmt: skip
    yield "8B bf16", tiny_graph("bf16", settings=config("bfloat16", 8192), **LARGE), 6, True
    yield "8B q4_1", tiny_graph("q4_1", settings=config("bfloat16", 8192), **LARGE), 6, True


def specs_of(graph: Graph, count: int, target: Any) -> Iterator[tuple[str, list[KernelSpec]]]:
    """Every kernel with schedules for few rows and for many."""
    for name, kind, body in distinct_bodies(graph):
        template = next(t for t in target.kernels if t.name == kind)
        reason = template.accepts(body.graph)
        assert reason is None, reason
        numerics = derive(kind, body.graph, target)
        few = template.schedules(body.graph, numerics, 1)
        many = template.schedules(body.graph, numerics, 512)
        half = max(1, count // 2)
        chosen = list(dict.fromkeys([*_spread(few, half), *_spread(many, half)]))
        yield name, [
            KernelSpec(kind, body.graph, template.name, numerics, s, body.buffers) for s in chosen
        ]


def _spread(found: Any, count: int) -> list[Any]:
    step = max(1, len(found) // count)
    return list(found[::step][:count])


def cases_of(target: Any) -> Iterator[DeviceCase]:
    """Every kernel of the models, and kernels by themselves; of those asked for, if any are."""
    asked = {a.split(":")[0]: a.split(":")[1:] for a in sys.argv[3:]}
    for model, graph, count, timing in graphs():
        if asked and model not in asked:
            continue
        count = int((asked.get(model) or [count])[0])
        for name, specs in specs_of(graph, count, target):
            case = None if timing else partial(make_case, specs[0], STEP, seed=7, padded=1)
            yield DeviceCase(model, name, specs, case)
    for found in (*contract_cases(target), *row_cases(target), *attend_cases(target),
                  *thin_cases(target), *scaled_cases(target), *tile_cases(target),
                  *code_cases(target)):
        if not asked or found.model in asked:
            count = int((asked.get(found.model) or [len(found.specs)])[0])
            yield replace(found, specs=found.specs[:count])


def record(found_case: DeviceCase) -> dict[str, Any]:
    """Everything the other side needs of one body, in plain data."""
    spec, timing = found_case.specs[0], found_case.case is None
    body = spec.body
    names = argument_names(body)
    found: dict[str, Any] = {
        "names": names,
        "ints": int_names(body),
        "outputs": [v for _, v in body.outputs],
        "states": [s.name for s in body.states],
        "leading": {n: _leading(spec, n) for n in names},
        "row_dim": _row_dim(body),
        "kind": spec.kind,
        "scratch": needs_scratch(spec.kind),
        "timing": timing,
        "model": found_case.model,
        "name": found_case.name,
        **found_case.facts,
    }
    if timing:
        found["types"] = {n: _memory(spec, n) for n in names}
        found["weight_bytes"] = sum(
            int(body.type_of(w.name).num_bytes) for w in body.weights
        )
    if found_case.case is not None:
        case = found_case.case()
        found["arguments"] = dict(case.arguments)
        found["dims"] = dict(case.dims)
        found["expected"] = {
            n: t.float() if t.is_floating_point() else t for n, t in case.expected.items()
        }
    return found


def _leading(spec: KernelSpec, name: str) -> Any:
    type_ = spec.stored_type(name)
    packed = isinstance(type_.dtype, BlockFormat)
    return None if packed or not type_.shape else to_json(type_.shape[0])


def _row_dim(body: Graph) -> str:
    (first, *_) = [*(v for _, v in body.outputs), *(v for _, v in body.state_outputs)]
    node = body.node[first]
    shape = body.type_of(node.inputs[1]).shape if node.op.startswith("append") else node.type.shape
    return str(to_json(shape[0]))


def _memory(spec: KernelSpec, name: str) -> tuple[str, list[Any]]:
    from tilewright.codegen.pack_gpu import packed_bytes

    type_ = spec.stored_type(name)
    if isinstance(type_.dtype, BlockFormat):
        return "u8", [packed_bytes(type_)]
    return type_.dtype.name, [to_json(d) for d in type_.shape]


def scratch_bytes(spec: KernelSpec, target: Any, dims: Mapping[str, int]) -> int:
    template = next(t for t in target.kernels if t.name == spec.template)
    return int(template.scratch_bytes(spec.body, spec.numerics, spec.schedule, dims))


def main(folder: Path) -> None:
    """Build all kernels, then work out operands and expected values, which takes as long."""
    target, toolchain = resolve("sm90")
    templates = {t.name: t for t in target.kernels}
    wanted = {a.split(":")[0]: a.split(":")[2] for a in sys.argv[3:] if a.count(":") == 2}
    cases = [
        found for found in cases_of(target)
        if found.name.endswith(tuple(wanted.get(found.model, "").split(",")))
    ]  # fmt: skip
    sources = {s.symbol: emit(s, templates[s.template]) for found in cases for s in found.specs}
    print(len(cases), "cases", len(sources), "kernels", flush=True)
    cache = KernelCache(folder / "cache" if len(sys.argv) < 3 else Path(sys.argv[2]),
                        toolchain)  # fmt: skip
    built = cache.build(list(sources.values()), jobs=2, progress=_progress)
    folder.mkdir(parents=True, exist_ok=True)
    toolchain.link(built.objects, folder / "kernels.so")
    facts = {
        "cases": [recorded(found, target) for found in cases], "config": CONFIG,
        "reports": toolchain.reports,
    }  # fmt: skip
    torch.save(facts, folder / "cases.pt")


def recorded(found: DeviceCase, target: Any) -> dict[str, Any]:
    """A case with its kernels."""
    row = record(found)
    row["kernels"] = []
    for spec in found.specs:
        bounds = {d.name: d.upper for d in spec.body.dims} | {
            "tokens": 4096 if "rows" in row else 512, "logit_rows": 512, "requests": 128,
            "request_blocks": 256, **row.get("bounds", {}),
        }  # fmt: skip
        row["kernels"].append({
            "symbol": spec.symbol, "schedule": spec.schedule.to_json(),
            "scratch": scratch_bytes(spec, target, {**bounds, "tokens": 128})
            if spec.kind == "attend" and spec.schedule.values["split"] and "paged" not in row
            else scratch_bytes(spec, target, bounds),
        })  # fmt: skip
    return row


def _progress(stage: str, done: int, total: int) -> None:
    if done % 20 == 0:
        print(stage, done, total, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
