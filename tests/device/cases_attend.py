"""Attention over latent rows and selection of entries on a machine with a GPU: odd shapes are
checked, the shapes of V4.1's and V4's layers are timed at two lengths of context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from device.cases_contract import DeviceCase
from support import index_cases, latent_cases
from support.contract_graphs import only_body
from support.index_cases import MXFP4
from support.kernel_case import Case
from support.paged_rows import format_of
from tilewright.codegen.arguments import argument_names, int_names
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.graph.types import BlockFormat

Latent, Index = latent_cases.Problem, index_cases.Problem
SPANS = [(0, 3), (137, 6), (9, 1), (700, 5), (300, 1)]
ROWS_TIMED, CONTEXTS = (1, 4, 32, 128, 148, 256, 512), (8192, 65536)
INDEX_ROWS = (1, 32, 128)
BOUNDS = {"cache_blocks": 512, "tokens": 512}  # of the steps that are run, for their workspace
FLASH = {"heads": 64, "width": 512, "window": 128, "per_page": 128, "selected": 512,
         "scaled": False}  # fmt: skip
LATENT: Mapping[str, latent_cases.Problem] = {
    "window": Latent("attend_window", heads=7, width=40, window=133),
    "compressed": Latent("attend_compressed", heads=20, width=72, window=100, ratio=2,
                         window_format="v4_short", entry_format="v4_short"),
    "selected": Latent(heads=17, width=64, window=140, window_format="fp8", entry_format="nvfp4",
                       selected=150, ratio=1),
    "fp32": Latent(heads=5, width=136, window=70, window_format="fp8", entry_format="mxfp4",
                   selected=90, ratio=1, epilogue=False),
    "v4": Latent(heads=64, width=512, window=128, window_format="v4", entry_format="v4",
                 selected=140),
    "v4.1": Latent(heads=64, width=512, window=128, window_format="fp8", entry_format="nvfp4",
                   selected=300, ratio=1),
    "v4 plain": Latent(heads=64, width=512, window=128, window_format="v4", entry_format="v4",
                       selected=140, scaled=False),
    "v4.1 plain": Latent(heads=128, width=512, window=100, window_format="fp8",
                         entry_format="nvfp4", selected=300, ratio=1, scaled=False),
    "compressed plain": Latent("attend_compressed", heads=64, width=512, window=128, ratio=2,
                               window_format="v4", entry_format="v4", scaled=False),
    "bf16": Latent(heads=40, width=512, window=128, window_format="bf16", entry_format="bf16",
                   selected=130),
}  # fmt: skip
INDEX: Mapping[str, index_cases.Problem] = {
    "entries": Index(k=40, ratio=2, heads=7, width=40),
    "bf16": Index(k=300, heads=32, key_format="bf16", query="bf16"),
    "blocks": Index("select_with_blocks", heads=32, width=128, key_format="mxfp4", query=MXFP4,
                    k=100, blocks=20, block_size=8),
    "within": Index("select_within", heads=24, key_format="mxfp4", query=MXFP4, blocks=30, k=70,
                    block_size=8),
    "within plain": Index("select_within", heads=32, width=128, key_format="mxfp4", query=MXFP4,
                          blocks=30, k=70, block_size=8),
    "many": Index("select_with_blocks", heads=64, width=128, key_format="mxfp4", query=MXFP4,
                  k=512, blocks=60, block_size=8),
}  # fmt: skip
TIMED: Mapping[str, Any] = {
    "V4.1 window": Latent("attend_window", **FLASH, window_format="fp8"),
    "V4.1 selected": Latent(**FLASH, entries_per_page=128, window_format="fp8",
                            entry_format="nvfp4", ratio=1),
    "V4 selected": Latent(**FLASH, entries_per_page=32, ratio=4, window_format="v4",
                          entry_format="v4"),
    "V4 selected 1024": Latent(**{**FLASH, "selected": 1024}, entries_per_page=32, ratio=4,
                               window_format="v4", entry_format="v4"),
    "V4-Pro selected": Latent(**{**FLASH, "selected": 1024, "heads": 128}, entries_per_page=32,
                              ratio=4, window_format="v4", entry_format="v4"),
    "V4 compressed": Latent("attend_compressed", **FLASH, entries_per_page=1, ratio=128,
                            window_format="v4", entry_format="v4"),
    "bf16 selected": Latent(**FLASH, entries_per_page=128, window_format="bf16",
                            entry_format="bf16", ratio=1),
    "V4.1 index": Index(heads=32, width=128, key_format="mxfp4", query=MXFP4, per_page=64, k=512,
                        ratio=2),
    "V4.1 index, blocks": Index("select_with_blocks", heads=32, width=128, key_format="mxfp4",
                                query=MXFP4, per_page=128, k=512, blocks=2048, block_size=8),
    "V4.1 index, within": Index("select_within", heads=32, width=128, key_format="mxfp4",
                                query=MXFP4, per_page=128, k=512, blocks=2048, block_size=8),
    "V4 index": Index(heads=64, width=128, key_format="mxfp4", query=MXFP4, per_page=32, k=512,
                      ratio=4),
}  # fmt: skip


def attend_cases(target: Any) -> Iterator[DeviceCase]:
    """All of them, in schedules for few tokens and for many."""
    for label, problems in (("latent", LATENT), ("select", INDEX)):
        for name, p in problems.items():
            specs = _specs(built(p), target)
            case = partial(_case, p, specs[0])
            yield DeviceCase(label, name, specs, case, {"bounds": BOUNDS})
    for name, p in TIMED.items():
        specs = _specs(built(p), target)
        yield DeviceCase("paged", name, specs, None, _facts(p, specs[0]))


def built(p: Any) -> Graph:
    """The graph of a problem."""
    return latent_cases.build(p) if isinstance(p, Latent) else index_cases.build(p)


def _specs(graph: Graph, target: Any) -> list[KernelSpec]:
    body = only_body(graph)
    kind = "select" if body.graph.nodes[-1].op.startswith("select") else "attend"
    template = next(
        t for t in target.kernels if t.kind == kind and t.accepts(body.graph) is None
    )
    numerics = derive(kind, body.graph, target)
    lists = [template.schedules(body.graph, numerics, n)[:6] for n in (1, 32, 512)]
    return [
        KernelSpec(kind, body.graph, template.name, numerics, s, body.buffers)
        for s in dict.fromkeys(s for found in lists for s in found)
    ]


def _case(p: Any, spec: KernelSpec) -> Case:
    """States are NaN wherever no token of the step may look."""
    cases: Any = latent_cases if isinstance(p, Latent) else index_cases
    step = cases.make_step(p, SPANS, seed=7)
    want = torch.from_numpy(cases.expected(p, step))
    body, binding = spec.body, only_body(built(p)).binding
    arguments: dict[str, torch.Tensor] = {}
    ((_, result),) = body.outputs
    for name in argument_names(body):
        if name == result:
            dtype = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}[
                str(spec.stored_type(name).dtype)
            ]
            arguments[name] = torch.zeros(want.shape, dtype=dtype)
            continue
        tensor = torch.from_numpy(step.arrays[binding[name]].copy())
        is_bf16 = tensor.dtype == torch.uint16
        arguments[name] = tensor.view(torch.bfloat16) if is_bf16 else tensor
    return Case(arguments, {n: step.dims[n] for n in int_names(body)}, {result: want})


def _facts(p: Any, spec: KernelSpec) -> dict[str, Any]:
    """Which inputs mean what, and what a token reads at a length of context."""
    binding: Mapping[str, str] = only_body(built(p)).binding
    is_latent = isinstance(p, Latent)
    per_page = p.entries_per_page if is_latent else p.per_page
    rows = {"window_format": 0, "entry_format": 0, "key_format": 0}
    for field in rows:
        if hasattr(p, field):
            kind = format_of(getattr(p, field))
            packed = isinstance(kind, BlockFormat)
            rows[field] = kind.row_bytes(p.width) if packed else p.width * int(kind.bits) // 8
    return {
        "rows": ROWS_TIMED if is_latent else INDEX_ROWS, "bounds": BOUNDS,
        "contexts": CONTEXTS if not is_latent or "ratio" in p.attrs else CONTEXTS[:1],
        "roles": {i.name: binding[i.name] for i in spec.body.inputs},
        "paged": {
            "op": p.op, "ratio": p.ratio, "per_page": per_page, "heads": p.heads, "width": p.width,
            "window_per_page": p.per_page if is_latent else 1,
            "window": p.window if is_latent else 0,
            "selected": p.selected if is_latent else 0,
            "blocks": 0 if is_latent else p.blocks, "block_size": 1 if is_latent else p.block_size,
            "window_bytes": rows["window_format"],
            "entry_bytes": rows["entry_format"] or rows["key_format"],
        },
    }  # fmt: skip

