"""The smallest use of each op that a model could make: a target's coverage is what becomes of it.

Operands are written `dtype[extents]`: an input, or with `weight ` or `state ` in front one of
those. Named extents are dims; rows of states and of most operands are 64 wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewright.graph import Dim, Graph, GraphBuilder, Role, Value
from tilewright.graph.ir import Attr
from tilewright.graph.ops import op_def
from tilewright.graph.types import DType, element_type


@dataclass(frozen=True)
class _Use:
    operands: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)


_ROW, _X, _HEADS = "f32[tokens, 64]", "bf16[tokens, 64]", "bf16[tokens, 32, 64]"
_STREAMS, _IDS = "f32[tokens, 4, 64]", "i32[tokens]"
_STEP = (_IDS, _IDS, "i32[requests, pages]")  # positions, request rows, page tables
_STATE, _EXPERTS = "state bf16[window_pages, 32, 64]", "weight bf16[4, 64, 64]"
_LATENT = (_HEADS, _STATE, *_STEP, "weight f32[32]")
_ENTRIES = ("state bf16[context_pages, 32, 64]", "i32[requests, entry_pages]")
_KEYS = (_HEADS, "f32[tokens, 32]", _ENTRIES[0], *_STEP)
_INDEX: Mapping[str, Attr] = {"k": 64, "ratio": 4}
_MIX = 4 * (2 + 4)  # coefficients of four streams

USES: Mapping[str, _Use] = {
    "append": _Use(("state bf16[blocks, 2, 16, 64]", "bf16[tokens, 2, 64]", _IDS)),
    "append_rows": _Use((_STATE, _X, _IDS)),
    "argmax": _Use((_ROW,)),
    "attend": _Use(("bf16[tokens, 4, 64]", "state bf16[blocks, 2, 16, 64]",
                    "state bf16[blocks, 2, 16, 64]", *_STEP), {"scale": 0.125}),
    "attend_compressed": _Use((*_LATENT, *_ENTRIES), {"scale": 0.125, "window": 32, "ratio": 4}),
    "attend_selected": _Use((*_LATENT, *_ENTRIES, "i32[tokens, 64]"),
                            {"scale": 0.125, "window": 32}),
    "attend_window": _Use(_LATENT, {"scale": 0.125, "window": 32}),
    "cast": _Use((_ROW,), {"dtype": "bf16"}),
    "embedding": _Use((_IDS, "weight bf16[64, 64]")),
    "expert_linear": _Use((_X, _EXPERTS, "i32[tokens, 2]")),
    "gather_last": _Use(("f32[tokens, 8]", "i32[tokens, 2]")),
    "gather_rows": _Use((_ROW, "i32[rows]")),
    "grouped_linear": _Use(("bf16[tokens, 4, 64]", "weight bf16[256, 64]")),
    "hadamard": _Use((_ROW,)),
    "hyper_collapse": _Use((_STREAMS, f"f32[tokens, {_MIX}]")),
    "hyper_mix": _Use((f"f32[tokens, {_MIX}]", "weight f32[3]", f"weight f32[{_MIX}]"),
                      {"streams": 4, "iterations": 20, "eps": 1e-6}),
    "hyper_update": _Use((_STREAMS, _ROW, f"f32[tokens, {_MIX}]")),
    "linear": _Use((_X, "weight bf16[64, 64]")),
    "merge_heads": _Use(("f32[tokens, 4, 16]",)),
    "modulo": _Use(("i32[tokens, 2]",), {"divisor": 7}),
    "ngram_rows": _Use(("state i32[window_pages, 32, 1]", *_STEP),
                       {"multipliers": (3, 5, 7), "primes": (101, 103, 107, 109), "pad": 2}),
    "page_slots": _Use(_STEP, {"ratio": 4, "entries": 32}),
    "pool_window": _Use(("state f32[window_pages, 32, 64]", "state f32[window_pages, 32, 64]",
                         *_STEP), {"ratio": 4, "overlap": True}),
    "quantise": _Use((_ROW,), {"dtype": "fp8_e4m3[g=32,axis=1,scale=ue8m0]"}),
    "repeat_streams": _Use((_ROW,), {"streams": 4}),
    "rms_norm": _Use((_ROW, "weight f32[64]"), {"eps": 1e-6}),
    "rotate_pairs": _Use((_ROW,), {"pairing": "half"}),
    "scale": _Use((_ROW,), {"factor": 0.5}),
    "select_entries": _Use(_KEYS, _INDEX),
    "select_with_blocks": _Use(_KEYS, {**_INDEX, "blocks": 4, "block_size": 8}),
    "select_within": _Use((*_KEYS, "i32[tokens, 4]"), {**_INDEX, "block_size": 8}),
    "slice_last": _Use((_ROW,), {"start": 0, "stop": 32}),
    "split_heads": _Use((_ROW,), {"num_heads": 4}),
    "sum_slots": _Use((_STREAMS,)),
    "take_stream": _Use((_STREAMS,), {"index": 1}),
    "top_k_indices": _Use((_ROW,), {"k": 4}),
    "top_k_values": _Use((_ROW,), {"k": 4}),
}  # fmt: skip
_UPPER = {"pages": 8, "entry_pages": 8, "requests": 4}
_CONTEXT = ("pages", "entry_pages")


def sample_graph(op: str) -> Graph:
    """Return a graph that uses an op once, on rows of fp32 where it has no use of its own here."""
    definition = op_def(op)
    floats: dict[str, Attr] = {name: 0.5 for name, t in definition.attrs.items() if t is float}
    use = USES.get(op, _Use((_ROW,) * definition.num_inputs, floats))
    b = GraphBuilder(op)
    operands = [_declare(b, f"x{i}", text) for i, text in enumerate(use.operands)]
    if op.startswith("append"):
        b.append(*operands, name=op, op=op)
    else:
        b.output("y", b.op(op, *operands, name=op, **use.attrs))
    return b.build()


def _declare(b: GraphBuilder, name: str, text: str) -> Value:
    head, _, shape = text.removesuffix("]").rpartition("[")
    kind, _, dtype_name = head.rpartition(" ")
    extents = [_extent(b, each) for each in shape.split(", ")]
    dtype = element_type(dtype_name)
    match kind:
        case "weight":
            return b.weight(name, dtype, *extents)
        case "state":
            return b.state(name, dtype, *extents)
    assert isinstance(dtype, DType), text
    return b.input(name, dtype, *extents)


def _extent(b: GraphBuilder, text: str) -> Dim | int:
    if text.isdigit():
        return int(text)
    role = Role.CONTEXT if text in _CONTEXT else Role.BATCH
    return b.dim(text, role, upper=_UPPER.get(text, 16))
