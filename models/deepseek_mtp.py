"""The draft layer of DeepSeek-V4 (`mtp.0`), as a graph of its own over the same page tables.

At position i it reads the streams that the model left there and the next token, and predicts the
token after that. Source: the released model; embedding and head are the model's.
"""

from __future__ import annotations

from tilewright.graph import Graph, GraphBuilder
from tilewright.graph.types import DType
from tilewright.models.deepseek_layers import Layer, embed, head
from tilewright.models.deepseek_v4 import V4Config, block
from tilewright.models.hyper_connections import head_collapse
from tilewright.models.layers import Formats, Limits
from tilewright.models.paged_step import declare_paged_step

PREFIX = "mtp.0"


def build_mtp(name: str, c: V4Config, formats: Formats, limits: Limits) -> Graph:
    """Return the graph of one draft step.

    Beside the inputs of the model, `streams` [tokens, n, hidden] are the model's own after its last
    layer, or this layer's where it is applied again; they are an output too. `token_ids` are the
    next tokens, `positions` those of the streams.
    """
    b = GraphBuilder(name)
    step = declare_paged_step(b, limits, c.attention.window)
    dtype = formats.activation
    assert isinstance(dtype, DType)
    shape = (step.token_ids.type.shape[0], c.hyper.streams, c.hidden_size)
    streams = b.input("streams", dtype, *shape)
    with b.scope(PREFIX):
        w = Layer(b, PREFIX, c, formats, step, c.rope)
        token = w.norm(embed(b, c, formats, step.token_ids), "enorm")
        token = w.project(token, "e_proj", c.hidden_size)
        before = w.project(w.norm(streams, "hnorm"), "h_proj", c.hidden_size)
        merged = w.round(before + b.op("split_heads", token, num_heads=1))
        after = block(w, merged, PREFIX, 0, hashed=False)
    last = b.op("gather_rows", after, step.logit_rows)
    head(b, c, formats, head_collapse(w, last, "hc_head"), f"{PREFIX}.norm.weight")
    b.output("streams", after)
    return b.build()
