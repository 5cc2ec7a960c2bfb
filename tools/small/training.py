"""Train a graph through its own reference interpreter.

The interpreter is differentiable and honours casts and quantisation, whose gradients pass straight
through: what is trained is what the compiled model computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tilewright.graph import Graph, Node, reference
from tilewright.graph.dims import evaluate
from tilewright.tools.small.corpus import Corpus, Ids, windows
from tilewright.tools.small.weights import rounded

BALANCE_RATE = 5e-3  # step of a router bias towards an even load, per batch
Report = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Settings:
    """How long and how fast: `seconds` of wall-clock time, rows of `length` tokens."""

    seconds: float
    rows: int
    length: int
    learning_rate: float
    weight_decay: float = 0.1
    warmup: float = 0.02
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """Master weights by checkpoint name and the held-out losses along the way."""

    masters: Mapping[str, torch.Tensor]
    history: tuple[dict[str, float], ...]


class Model:
    """A graph with trainable masters on one device."""

    def __init__(
        self, graph: Graph, stored: Mapping[str, str], constants: Mapping[str, torch.Tensor],
        device: torch.device, seed: int,
    ) -> None:  # fmt: skip
        self.graph, self.stored, self.device = graph, stored, device
        self.constants = {name: tensor.to(device) for name, tensor in constants.items()}
        generator = torch.Generator().manual_seed(seed)
        self.masters = {
            name: initial(name, shape, generator).to(device).requires_grad_()
            for name, shape in tensor_shapes(graph).items()
            if name not in constants
        }

    def weights(self, stored: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Values of all graph weights, rounded as `stored` says."""
        values = {n: rounded(m, stored[n]) for n, m in self.masters.items()}
        values.update(self.constants)
        found = {}
        for weight in self.graph.weights:
            match weight.expr.kind:
                case "tensor":
                    found[weight.name] = values[str(weight.expr.args[0])]
                case "stack":
                    found[weight.name] = torch.stack([values[str(n)] for n in weight.expr.args])
        return found

    def loss(
        self, batch: Ids, weights: Mapping[str, torch.Tensor],
        precision: reference.Precision = reference.HONOUR_CASTS,
        observe: reference.Observer | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Mean cross-entropy in nats of predicting each next id of [rows, length + 1]."""
        rows, length = batch.shape[0], batch.shape[1] - 1
        given = step_inputs(self.graph, rows, length, self.device)
        ids = torch.from_numpy(np.ascontiguousarray(batch)).to(self.device)
        given["token_ids"] = ids[:, :-1].flatten().int()
        result = reference.run(
            self.graph, given, states=zero_states(self.graph, given, self.device),
            weights=weights, precision=precision, observe=observe,
        )  # fmt: skip
        logits = result.outputs["logits"]
        return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten().long())


def tensor_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint tensors that a graph's weights are made of."""
    found: dict[str, tuple[int, ...]] = {}
    for weight in graph.weights:
        shape = tuple(int(d) for d in weight.type.shape)
        if weight.expr.kind == "tensor":
            found[str(weight.expr.args[0])] = shape
        elif weight.expr.kind == "stack":
            found.update({str(name): shape[1:] for name in weight.expr.args})
    return found


def initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Initial values: norms and key weights one, biases and sinks zero, matrices by fan-in."""
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return torch.ones(shape)
    if name.endswith("_scale"):
        return torch.full(shape, 0.05)
    if name.endswith(("gate.bias", "attn_sink")):
        return torch.zeros(shape)
    if name.endswith("hc_head_base"):
        return torch.zeros(shape)
    if name.endswith("_base"):
        return _base(shape)
    spread = 0.02 if name.startswith(("embed", "head")) or "engram.embed" in name else None
    values = torch.randn(shape, generator=generator)
    return values * (spread if spread is not None else shape[-1] ** -0.5)


def _base(shape: tuple[int, ...]) -> torch.Tensor:
    """Mixes that start near plain residual streams: each stream keeps itself."""
    streams = math.isqrt(shape[0] + 1) - 1
    comb = 6.0 * torch.eye(streams) - 3.0
    pre = torch.full((streams,), math.log(1 / (streams - 1)) if streams > 1 else 0.0)
    return torch.cat((pre, torch.zeros(streams), comb.flatten()))


def step_inputs(
    graph: Graph, rows: int, length: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Inputs of one step in which each row is a fresh request of `length` tokens."""
    pages = _page_positions(graph)
    given = {
        "positions": torch.arange(length).repeat(rows),
        "request_rows": torch.arange(rows).repeat_interleave(length),
        "logit_rows": torch.arange(rows * length),
    }
    for name, size in pages.items():
        count = -(-length // size)
        given[name] = torch.arange(rows * count).reshape(rows, count)
    return {name: tensor.int().to(device) for name, tensor in given.items()}


def _page_positions(graph: Graph) -> dict[str, int]:
    """Positions a page of each pool holds, by the name of its tables."""
    found = {}
    for state in graph.states:
        tables = "window_tables" if state.scope == "window" else "block_tables"
        found[tables] = int(state.type.shape[1]) * state.positions_per_entry
    return found


def zero_states(
    graph: Graph, given: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Empty states with as many pages as the tables name."""
    binding = {"cache_blocks": given["block_tables"].numel()}
    if "window_tables" in given:
        binding["window_blocks"] = given["window_tables"].numel()
    return {
        s.name: torch.zeros(
            [evaluate(d, binding) for d in s.type.shape],
            dtype=torch.int32 if str(s.type.dtype) == "i32" else torch.float32,
            device=device,
        )
        for s in graph.states
    }


def train(model: Model, corpus: Corpus, settings: Settings, report: Report) -> Trained:
    """Train until the time is over and keep the weights of the best held-out loss.

    The learning rate follows a cosine of the time used.
    """
    random = np.random.default_rng(settings.seed)
    optimizer = torch.optim.AdamW(_groups(model, settings), betas=(0.9, 0.95), eps=1e-12)
    history: list[dict[str, float]] = []
    best: dict[str, torch.Tensor] = {}
    start, step, next_report = time.monotonic(), 0, 0.0
    while (used := (time.monotonic() - start) / settings.seconds) < 1:
        rate = settings.learning_rate * _schedule(used, settings.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        loads = Loads(model.graph)
        batch = windows(corpus.train, settings.length, settings.rows, random)
        loss = model.loss(batch, model.weights(model.stored), observe=loads)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(list(model.masters.values()), 1.0)
        optimizer.step()
        loads.balance(model.masters)
        step += 1
        if used >= next_report:
            next_report = used + 0.04
            held = evaluate_loss(model, corpus.held_out, settings, model.stored, limit=2)
            if held <= min((entry["held_out"] for entry in history), default=held):
                best = {name: master.detach().clone() for name, master in model.masters.items()}
            history.append(
                {"step": float(step), "used": used, "loss": float(loss.detach()), "held_out": held,
                 "gradient": float(norm), "imbalance": loads.worst(), "rate": rate}
            )  # fmt: skip
            report(history[-1])
    with torch.no_grad():
        for name, master in model.masters.items():
            master.copy_(best[name])
    return Trained(best, tuple(history))


def _groups(model: Model, settings: Settings) -> Iterator[dict[str, object]]:
    """Matrices decay; vectors and router biases do not, and the latter learn from loads only."""
    for name, master in model.masters.items():
        decay = settings.weight_decay if master.ndim > 1 else 0.0
        factor = 0.0 if name.endswith("gate.bias") else 1.0
        if "engram.embed" in name:
            decay, factor = 0.0, 3.0
        yield {"params": [master], "weight_decay": decay, "factor": factor, "lr": 0.0}


def _schedule(used: float, warmup: float) -> float:
    if used < warmup:
        return used / warmup + 0.01
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (used - warmup) / (1 - warmup)))


def evaluate_loss(
    model: Model, ids: Ids, settings: Settings, stored: Mapping[str, str], *, limit: int = 1 << 30,
    precision: reference.Precision = reference.HONOUR_CASTS,
) -> float:  # fmt: skip
    """Mean loss in nats over consecutive windows of held-out ids, at most `limit` batches."""
    length = settings.length
    count = (len(ids) - 1) // length
    rows = np.stack([ids[i * length : i * length + length + 1] for i in range(count)])
    losses, weights = [], []
    with torch.no_grad():
        values = model.weights(stored)
        for at in range(0, min(count, limit * settings.rows), settings.rows):
            batch = rows[at : at + settings.rows]
            losses.append(float(model.loss(batch, values, precision)))
            weights.append(len(batch))
    return float(np.average(losses, weights=weights))


class Loads:
    """Observes which experts a batch chose, per router, and evens them out without a loss.

    Source: auxiliary-loss-free balancing (Wang et al. 2024): a bias on the choice alone.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._counts: dict[str, torch.Tensor] = {}

    def __call__(self, node: Node, value: torch.Tensor) -> None:
        if node.op == "top_k_indices":
            bias = self._bias(node)
            if bias is not None:
                size = int(self._graph.weight[bias].type.shape[0])
                self._counts[bias] = torch.bincount(value.flatten(), minlength=size)

    def _bias(self, node: Node) -> str | None:
        """The weight added to the scores that a choice is made from."""
        added = self._graph.node.get(node.inputs[0])
        names = added.inputs if added is not None else ()
        return next((n for n in names if n in self._graph.weight), None)

    def balance(self, masters: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, counts in self._counts.items():
                error = counts.float().mean() - counts.float()
                masters[name] += BALANCE_RATE * error.sign()

    def worst(self) -> float:
        """Largest load over the mean load, over all routers."""
        ratios = [float(c.max() / c.float().mean()) for c in self._counts.values()]
        return max(ratios, default=1.0)
