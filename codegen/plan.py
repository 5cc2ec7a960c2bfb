"""The plan: kernels of all groups, and per bucket the launches in order with buffers placed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from tilewright.codegen.arguments import argument_names, int_names, needs_scratch
from tilewright.codegen.beside import Order
from tilewright.codegen.body import Body, extract, memory_type, root_of
from tilewright.codegen.buffers import Lifetime, clashing, place
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.cost import BodyCost, body_cost
from tilewright.codegen.numerics import derive
from tilewright.codegen.passes.partition import kind_of
from tilewright.codegen.select import Choice, select
from tilewright.codegen.spec import KernelSpec, Numerics, Schedule
from tilewright.codegen.target import KernelTemplate, Target
from tilewright.graph import DimDecl, Graph, Group, Role
from tilewright.graph.dims import evaluate, symbols_of, to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ir import State
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import TensorType
from tilewright.runtime.artifact import (
    Argument,
    BucketRecord,
    Extent,
    LaunchRecord,
    Placement,
    StateRecord,
    TensorRecord,
)


@dataclass(frozen=True)
class Bucket:
    """Steps whose dims are at most `bounds`."""

    name: str
    bounds: Mapping[str, int]


@dataclass(frozen=True)
class Candidate:
    """What may be chosen for one body in one bucket. `measured`: on the chip it is chosen for."""

    template: KernelTemplate
    numerics: Numerics
    schedule: Schedule
    measured: bool = False


@dataclass(frozen=True)
class GroupPlan:
    """A group with its body, its template, and its kernel in each bucket."""

    group: Group
    body: Body
    choice: Choice
    specs: Mapping[str, KernelSpec]  # by bucket name


Chooser = Callable[[Body, Choice, Bucket], Candidate]


def buckets_of(graph: Graph, target: Target, config: CompileConfig) -> tuple[Bucket, ...]:
    """Return the buckets, smallest first: bounds of every dim for steps of up to so many tokens."""
    limits = sorted(
        {min(n, config.max_tokens_per_step) for n in target.buckets} | {config.max_tokens_per_step}
    )
    few, pages = target.buckets[1], _page_dims(graph)
    found = []
    for tokens in limits:
        # A long prefill wants the logits of a few rows only: that is a shape of its own.
        for rows in sorted({min(few, tokens) if tokens > target.buckets[-1] else tokens, tokens}):
            bounds = {d.name: _bound(d, tokens, rows, pages) for d in graph.dims}
            suffix = f"_logits_{rows}" if rows != tokens else ""
            found.append(Bucket(f"tokens_{tokens}{suffix}", bounds))
    return tuple(found)


def _page_dims(graph: Graph) -> frozenset[str]:
    """Names of the dims that count the pages of states: these do not grow with a step."""
    return symbols_of([s.type.shape[0] for s in graph.states if s.type.shape])


def _bound(decl: DimDecl, tokens: int, rows: int, pages: frozenset[str]) -> int:
    if decl.role is not Role.BATCH or decl.name in pages:
        return decl.upper
    return min(decl.upper, rows if decl.name == "logit_rows" else tokens)


def first_candidate(target: Target) -> Chooser:
    """Choose without measuring: derived numerics and the first schedule."""

    def choose(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        numerics = derive(choice.template.kind, body.graph, target)
        rows = bucket_rows(body, bucket)
        schedule = choice.template.schedules(body.graph, numerics, rows)[0]
        return Candidate(choice.template, numerics, schedule)

    return choose


def bucket_rows(body: Body, bucket: Bucket) -> int:
    """Return the most rows a body has in a bucket."""
    last = body.graph.nodes[0]
    for node in body.graph.nodes:
        if kind_of(node) != "row":
            last = node
            break
    shape = last.type.shape
    return evaluate(shape[0], bucket.bounds) if shape else 1


def plan_groups(
    graph: Graph, target: Target, config: CompileConfig, choose: Chooser
) -> tuple[GroupPlan, ...]:
    """Choose a kernel for every group in every bucket; equal bodies are chosen for once.

    Raises LowerError where two buckets of one node would have different numerics in deterministic
    mode.
    """
    _check_outputs(graph)
    buckets = buckets_of(graph, target, config)
    known: dict[str, tuple[Choice, Mapping[str, KernelSpec]]] = {}
    plans = []
    for group in graph.groups:
        body = extract(graph, group)
        key = body.graph.digest + repr(body.buffers)
        if key not in known:
            choice = select(group, body, target)
            made = {b.name: _spec(group, body, choose(body, choice, b)) for b in buckets}
            _check_numerics(group, made, config)
            known[key] = choice, made
        choice, specs = known[key]
        plans.append(GroupPlan(group, body, choice, specs))
    return tuple(plans)


def _spec(group: Group, body: Body, chosen: Candidate) -> KernelSpec:
    return KernelSpec(
        group.kind,
        body.graph,
        chosen.template.name,
        chosen.numerics,
        chosen.schedule,
        body.buffers,
    )


def _check_outputs(graph: Graph) -> None:
    """Every output is memory of its own that a kernel writes."""
    owner: dict[str, str] = {}
    for public, value in graph.outputs:
        root = root_of(graph, value)
        if root not in graph.node:
            raise LowerError(f"output '{public}': nothing computes it: got {root} as it is given")
        if owner.setdefault(root, public) != public:
            raise LowerError(
                f"output '{public}': is the memory of another: got that of '{owner[root]}', "
                "want one output for each value"
            )


def _check_numerics(group: Group, specs: Mapping[str, KernelSpec], config: CompileConfig) -> None:
    """Refuse variants of one node that would give different bits."""
    found = {s.numerics for s in specs.values()}
    if config.mode == "deterministic" and len(found) > 1:
        names = ", ".join(f"{b}: {s.numerics.to_json()}" for b, s in specs.items())
        raise LowerError(
            f"plan of '{group.name}': buckets differ in numerics: got {names}, want one for all"
        )


def plan_buckets(
    graph: Graph, plans: Sequence[GroupPlan], target: Target, config: CompileConfig
) -> tuple[tuple[BucketRecord, ...], tuple[TensorRecord, ...]]:
    """Return the launches and placements of every bucket, and the buffers they name."""
    buffers = [Lifetime(name, 0, *span) for name, span in _buffers(graph, plans).items()]
    sizes = {b.name: memory_type(graph, b.name).num_bytes for b in buffers}
    in_order = clashing(buffers)
    beside = clashing(buffers, _order(graph, plans).clash) if target.beside_tokens else in_order
    records = []
    for bucket in buckets_of(graph, target, config):
        lifetimes = [
            replace(b, num_bytes=evaluate(sizes[b.name], bucket.bounds)) for b in buffers
        ]
        is_graph = 0 < bucket.bounds.get("tokens", 0) <= target.beside_tokens
        offsets, arena = place(lifetimes, beside if is_graph else in_order)
        placements = tuple(Placement(b.name, offsets[b.name], b.num_bytes) for b in lifetimes)
        records.append(_bucket_record(graph, plans, bucket, placements, arena))
    tensors = tuple(tensor_record(b.name, memory_type(graph, b.name)) for b in buffers)
    return tuple(records), tensors


def _buffers(graph: Graph, plans: Sequence[GroupPlan]) -> dict[str, tuple[int, int]]:
    """Map each value that passes between kernels to its first and last launch."""
    outputs = {root_of(graph, value) for _, value in graph.outputs}
    lives: dict[str, tuple[int, int]] = {}
    for index, plan in enumerate(plans):
        for name in argument_names(plan.body.graph):
            value = plan.body.binding[name]
            if value in graph.node and value not in outputs:
                first, _ = lives.get(value, (index, index))
                lives[value] = (first, index)
    return lives


def _order(graph: Graph, plans: Sequence[GroupPlan]) -> Order:
    """What must come before what among the launches of a step."""
    kept = {root_of(graph, value) for _, value in graph.outputs} | set(graph.state)
    uses = [[p.body.binding[n] for n in argument_names(p.body.graph)] for p in plans]
    return Order([[v for v in names if v in graph.node or v in kept] for names in uses], kept)


def _bucket_record(
    graph: Graph,
    plans: Sequence[GroupPlan],
    bucket: Bucket,
    placements: tuple[Placement, ...],
    arena_bytes: int,
) -> BucketRecord:
    scratch = 0
    launches = []
    for plan in plans:
        spec = plan.specs[bucket.name]
        template = plan.choice.template
        if needs_scratch(spec.kind):
            need = template.scratch_bytes(spec.body, spec.numerics, spec.schedule, bucket.bounds)
            scratch = max(scratch, -(-need // 64) * 64)
        launches.append(_launch(graph, plan, spec))
    return BucketRecord(
        name=bucket.name,
        bounds=dict(bucket.bounds),
        launches=tuple(launches),
        placements=placements,
        arena_bytes=arena_bytes,
        scratch_bytes_per_thread=scratch,
    )


def _launch(graph: Graph, plan: GroupPlan, spec: KernelSpec) -> LaunchRecord:
    outputs = {root_of(graph, value): public for public, value in graph.outputs}
    inputs = {i.name for i in graph.inputs}
    arguments = []
    for name in argument_names(spec.body):
        value = plan.body.binding[name]
        if value in inputs:
            arguments.append(Argument("input", value))
        elif value in graph.state:
            arguments.append(Argument("state", value))
        elif value in graph.weight:
            arguments.append(Argument("weight", value))
        elif value in outputs:
            arguments.append(Argument("output", outputs[value]))
        else:
            arguments.append(Argument("buffer", value))
    if needs_scratch(spec.kind):
        arguments.append(Argument("scratch", "scratch"))
    return LaunchRecord(spec.symbol, plan.group.name, tuple(arguments), int_names(spec.body))


def tensor_record(name: str, type_: TensorType) -> TensorRecord:
    """Return the record of a tensor of the model graph."""
    return TensorRecord(name, str(type_.dtype), tuple(to_json(d) for d in type_.shape))


def state_record(graph: Graph, state: State) -> StateRecord:
    """Return the record of a state: how it lies in memory, and how long its entries live."""
    tensor = tensor_record(state.name, memory_type(graph, state.name))
    return StateRecord(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        format=str(state.type.dtype),
        scope=state.scope,
        positions_per_entry=state.positions_per_entry,
        window=state.window,
        group=_read_group(graph, state),
        tables=_tables_of(graph, state),
    )


def _tables_of(graph: Graph, state: State) -> str:
    """Return the page tables that a state's slots are looked up in, where the graph does it."""
    for node in (graph.node[name] for name in graph.users[state.name]):
        if op_def(node.op).kind is Kind.STORE and node.inputs[0] == state.name:
            slots = graph.node.get(node.inputs[2])
            if slots is not None and slots.op == "page_slots":
                return slots.inputs[2]
    return "window_tables" if state.scope == "window" else "block_tables"


def _read_group(graph: Graph, state: State) -> int:
    """Return the ratio of the pools that alone read a window state, else 1: every row for itself.

    Once a pooled group is complete it is read again only as the older half of an overlapping one,
    so that a snapshot between two groups needs fewer rows.
    """
    versions, ratios = [state.name], set()  # of the state, each stored into the one before
    for version in versions:
        for node in (graph.node[name] for name in graph.users[version]):
            if op_def(node.op).kind is Kind.STORE and node.inputs[0] == version:
                versions.append(node.name)
            else:
                ratios.add(node.attr["ratio"] if node.op == "pool_window" else 1)
    ratio = ratios.pop() if len(ratios) == 1 else 1
    assert isinstance(ratio, int), (state, ratio)
    return ratio if 0 < ratio <= state.window else 1


def kernel_cost(spec: KernelSpec) -> dict[str, Extent]:
    """Return a kernel's operations, bytes and bytes of weights as JSON expressions of the dims."""
    cost = body_cost(spec.body)
    return {f.name: to_json(getattr(cost, f.name)) for f in fields(BodyCost)}
