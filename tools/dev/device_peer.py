"""A Llama in plain torch, bf16, for comparison: static cache, fused projections, CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class TorchLlama:
    """Random weights of a configuration's shapes; decodes `batch` requests at one position."""

    def __init__(self, config: Mapping[str, Any], batch: int, positions: int) -> None:
        c = config
        self.c, self.batch = c, batch
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.width = c["hidden_size"] // self.heads
        hidden, mlp = c["hidden_size"], c["intermediate_size"]
        rows = (self.heads + 2 * self.kv_heads) * self.width

        def made(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

        self.embedding = made(c["vocab_size"], hidden)
        self.layers = [
            {"qkv": made(rows, hidden), "o": made(hidden, self.heads * self.width),
             "up": made(2 * mlp, hidden), "down": made(hidden, mlp),
             "norm": torch.ones(2, hidden, device="cuda", dtype=torch.bfloat16)}
            for _ in range(c["num_hidden_layers"])
        ]  # fmt: skip
        shape = (len(self.layers), 2, batch, self.kv_heads, positions, self.width)
        self.cache = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        angle = torch.arange(positions, device="cuda")[:, None] * c["rope_theta"] ** (
            -torch.arange(0, self.width, 2, device="cuda") / self.width
        )
        self.cos = torch.cat((angle, angle), -1).cos().bfloat16()
        self.sin = torch.cat((angle, angle), -1).sin().bfloat16()

    def step(self, tokens: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens [batch, n] at positions [n] -> next token ids [batch]; `mask` for decoding."""
        x = F.embedding(tokens, self.embedding)
        hidden = x.shape[-1]
        for i, w in enumerate(self.layers):
            h = F.rms_norm(x, (hidden,), w["norm"][0], 1e-5)
            x = x + F.linear(self._attend(F.linear(h, w["qkv"]), i, at, mask), w["o"])
            h = F.rms_norm(x, (hidden,), w["norm"][1], 1e-5)
            gate, up = F.linear(h, w["up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        x = F.rms_norm(x[:, -1], (hidden,), None, 1e-5)
        return F.linear(x, self.embedding).argmax(-1)

    def _attend(self, qkv: Tensor, layer: int, at: Tensor, mask: Tensor | None) -> Tensor:
        b, n, _ = qkv.shape
        heads = qkv.view(b, n, -1, self.width).transpose(1, 2)
        values_at = self.heads + self.kv_heads
        q, k, v = heads[:, : self.heads], heads[:, self.heads : values_at], heads[:, values_at:]
        cos, sin = self.cos[at], self.sin[at]
        q, k = self._turn(q, cos, sin), self._turn(k, cos, sin)
        self.cache[layer, 0].index_copy_(2, at, k)
        self.cache[layer, 1].index_copy_(2, at, v)
        if mask is not None:
            k, v = self.cache[layer, 0], self.cache[layer, 1]
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return y.transpose(1, 2).reshape(b, n, -1)

    @staticmethod
    def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def decode(self, position: int) -> Callable[[], object]:
        """Return what replays a captured decode step at a position."""
        tokens = torch.randint(0, 1000, (self.batch, 1), device="cuda")
        at = torch.tensor([position], device="cuda")
        mask = (torch.arange(self.cache.shape[4], device="cuda") <= position)[None, None, None]
        return captured(lambda: self.step(tokens, at, mask))

    def prefill(self, count: int) -> Callable[[], object]:
        """Return what replays a captured prefill of `count` tokens."""
        tokens = torch.randint(0, 1000, (self.batch, count), device="cuda")
        at = torch.arange(count, device="cuda")
        return captured(lambda: self.step(tokens, at, None))


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Run once, then capture as a CUDA graph; return its replay."""
    cuda: Any = torch.cuda  # its classes have no types
    stream = cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        run()
        graph.capture_end()
    replay: Callable[[], object] = graph.replay
    return replay
