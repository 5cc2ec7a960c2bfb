"""A window layer of DeepSeek-V4 written out: one sequence, no cache, one dense mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


def norm(x: torch.Tensor, w: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rotated(x: torch.Tensor, width: int, theta: float, *, inverse: bool = False) -> torch.Tensor:
    """Turn the last `width` columns of x [tokens, .., columns], pair by pair."""
    angle = torch.arange(x.shape[0])[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    turn = torch.polar(torch.ones_like(angle), -angle if inverse else angle)
    pairs = torch.view_as_complex(x[..., -width:].reshape(*x.shape[:-1], -1, 2).contiguous())
    turn = turn.reshape(x.shape[0], *[1] * (x.ndim - 2), -1)
    return torch.cat((x[..., :-width], torch.view_as_real(pairs * turn).flatten(-2)), -1)


def mixes(w: Tensors, p: str, part: str, r: torch.Tensor, c: Mapping[str, Any]) -> Any:
    """pre [t, n], post [t, n], comb [t, n, n]."""
    n, eps, flat = c["hc_mult"], c["hc_eps"], r.flatten(1)
    m = (flat @ w[f"{p}.hc_{part}_fn"].T) * norm_factor(flat, c["rms_norm_eps"])
    scale, base = w[f"{p}.hc_{part}_scale"], w[f"{p}.hc_{part}_base"]
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + eps
    for i in range(c["hc_sinkhorn_iters"]):
        comb = comb if i == 0 else comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre, post, comb


def norm_factor(x: torch.Tensor, eps: float) -> torch.Tensor:
    return 1 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def window_attention(w: Tensors, p: str, x: torch.Tensor, c: Mapping[str, Any]) -> torch.Tensor:
    heads, d, rope = c["num_attention_heads"], c["head_dim"], c["qk_rope_head_dim"]
    eps, theta, groups = c["rms_norm_eps"], c["rope_theta"], c["o_groups"]
    q = norm(x @ w[f"{p}.wq_a.weight"].T, w[f"{p}.q_norm.weight"], eps) @ w[f"{p}.wq_b.weight"].T
    q = rotated(norm(q.view(-1, heads, d), 1.0, eps), rope, theta)
    kv = norm(x @ w[f"{p}.wkv.weight"].T, w[f"{p}.kv_norm.weight"], eps)
    kv = rotated(kv, rope, theta)
    t = torch.arange(len(x))
    seen = (t[None] <= t[:, None]) & (t[None] > t[:, None] - c["sliding_window"])
    scores = torch.einsum("thd,sd->hts", q, kv) / math.sqrt(d)
    scores = scores.masked_fill(~seen, -torch.inf).exp()
    weights = scores / (scores.sum(-1, keepdim=True) + w[f"{p}.attn_sink"].exp()[:, None, None])
    out = rotated(torch.einsum("hts,sd->thd", weights, kv), rope, theta, inverse=True)
    wo_a = w[f"{p}.wo_a.weight"].view(groups, -1, heads * d // groups)
    low = [out.reshape(len(x), groups, -1)[:, g] @ wo_a[g].T for g in range(groups)]
    return torch.cat(low, -1) @ w[f"{p}.wo_b.weight"].T


def expert(w: Tensors, p: str, x: torch.Tensor, limit: float) -> torch.Tensor:
    gate = (x @ w[f"{p}.w1.weight"].T).clamp(max=limit)
    up = (x @ w[f"{p}.w3.weight"].T).clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up @ w[f"{p}.w2.weight"].T


def experts(w: Tensors, p: str, x: torch.Tensor, c: Mapping[str, Any]) -> torch.Tensor:
    """One token at a time."""
    rows = []
    for row in x:
        scores = (row @ w[f"{p}.gate.weight"].T).exp().log1p().sqrt()
        k = c["num_experts_per_tok"]
        chosen = (scores + w[f"{p}.gate.bias"]).topk(k).indices.tolist()
        y = expert(w, f"{p}.shared_experts", row, c["swiglu_limit"])
        total = sum(scores[e] for e in chosen)
        for e in chosen:
            part = expert(w, f"{p}.experts.{e}", row, c["swiglu_limit"])
            y = y + part * scores[e] / total * c["routed_scaling_factor"]
        rows.append(y)
    return torch.stack(rows)


def window_block(w: Tensors, p: str, r: torch.Tensor, c: Mapping[str, Any]) -> torch.Tensor:
    """Streams [tokens, n, hidden] through one layer."""
    for part in ("attn", "ffn"):
        pre, post, comb = mixes(w, p, part, r, c)
        x = norm((pre[..., None] * r).sum(1), w[f"{p}.{part}_norm.weight"], c["rms_norm_eps"])
        sublayer = window_attention if part == "attn" else experts
        y = sublayer(w, f"{p}.{part}", x, c)
        r = post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, r)
    return r


def head_logits(w: Tensors, p: str, r: torch.Tensor, norm_name: str, c: Any) -> torch.Tensor:
    flat = r.flatten(1)
    m = flat @ w[f"{p}hc_head_fn"].T * norm_factor(flat, c["rms_norm_eps"])
    pre = torch.sigmoid(m * w[f"{p}hc_head_scale"] + w[f"{p}hc_head_base"]) + c["hc_eps"]
    y = (pre[..., None] * r).sum(1)
    return norm(y, w[norm_name], c["rms_norm_eps"]) @ w["head.weight"].T
