"""Engram: rows of a big table, chosen by hashes of the newest tokens, added to the streams.

The hash works on compressed token ids: tokens whose texts are equal after normalisation share one.
Source: the V4.1 technical report, section 2.4, and the released configuration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from tilewright.graph import Value
from tilewright.graph.types import I32
from tilewright.models.deepseek_layers import Layer
from tilewright.models.paged_step import PagedStep, inverse_rms

TOKEN_MAP = "engram.token_map"  # made from the tokenizer, stored like a tensor of the checkpoint
_SENTINEL = "\ue000"


@dataclass(frozen=True)
class EngramSizes:
    """Layers with a table and the rows of each; n-grams of 2..`grams` tokens, `heads` rows each.

    `compressed` is the number of compressed ids, `pad` the compressed id of absent tokens.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    grams: int
    heads: int
    width: int
    buckets: int
    compressed: int
    pad: int


def token_map(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Return the compressed id of every token, and how many there are.

    Ids count normalised texts in order of first appearance; a token that is no text by itself
    keeps its stored form.
    """
    normalise = normalizers.Sequence([
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _SENTINEL),  # a lone space survives the strip
        normalizers.Strip(),
        normalizers.Replace(_SENTINEL, " "),
    ])  # fmt: skip
    seen: dict[str, int] = {}
    found = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        whole = "\ufffd" not in text
        key = (normalise.normalize_str(text) or text) if whole else tokenizer.id_to_token(token)
        found.append(seen.setdefault(str(key), len(seen)))
    return found, len(seen)


def multipliers(layer: int, sizes: EngramSizes) -> tuple[int, ...]:
    """Odd factors of a layer's hash, small enough that no product overflows int64."""
    bound = max(1, (2**63 - 1) // sizes.compressed // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, sizes.grams, dtype=np.int64)
    return tuple(2 * int(r) + 1 for r in drawn)


def bucket_primes(sizes: EngramSizes) -> dict[int, tuple[int, ...]]:
    """Bucket counts of each layer by n-gram size, then head: primes no other head uses."""
    used: set[int] = set()
    found = {}
    for layer in sizes.layers:
        primes = []
        for _ in range(sizes.grams - 1):
            last = sizes.buckets - 1
            for _ in range(sizes.heads):
                last = next(n for n in count(last + 1) if n not in used and _is_prime(n))
                used.add(last)
                primes.append(last)
        found[layer] = tuple(primes)
    return found


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def append_history(step: PagedStep, sizes: EngramSizes, vocab_size: int) -> Value:
    """Store the compressed ids of this step's tokens; return the history state."""
    b = step.b
    table = b.weight(TOKEN_MAP, I32, vocab_size, 1)
    ids = b.op("gather_rows", table, step.token_ids, name="compressed_ids")
    history = step.window_state("engram.history", I32, 1, sizes.grams)
    return step.append_window(history, ids)


def engram(
    w: Layer, streams: Value, history: Value, sizes: EngramSizes, layer: int, primes: Sequence[int]
) -> Value:
    """Add to each stream the looked-up value, gated by how well key and stream agree."""
    b, n, width = w.b, w.c.hyper.streams, w.c.hidden_size
    factors = multipliers(layer, sizes)
    rows = b.op(
        "ngram_rows", history, *w.step.history_operands(),
        multipliers=factors, primes=tuple(primes), pad=sizes.pad,
    )  # fmt: skip
    table = w.tensor("engram.embed.weight", sizes.rows[sizes.layers.index(layer)], sizes.width)
    found = w.round(b.op("merge_heads", b.op("embedding", rows, table, name="engram_rows")))
    both = w.project(found, "engram.wkv", (n + 1) * width)
    keys = b.op("slice_last", both, start=0, stop=n * width)
    keys = b.op("split_heads", keys, num_heads=n)
    value = b.op("slice_last", both, start=n * width, stop=(n + 1) * width)
    gate = _gate(w, streams, keys)
    return w.round(streams + gate * b.op("split_heads", value, num_heads=1))


def _gate(w: Layer, streams: Value, keys: Value) -> Value:
    """sigma(sign(a) sqrt(|a|)) of the normed agreement a of stream and key: [tokens, n, 1]."""
    b, n, width = w.b, w.c.hyper.streams, w.c.hidden_size
    query = streams * w.tensor("engram.q_weight", n, width)
    dot = b.op("reduce_sum", query * (keys * w.tensor("engram.k_weight", n, width)))
    eps = w.c.rms_norm_eps
    dot = dot * (inverse_rms(b, streams, eps) * inverse_rms(b, keys, eps)) * width**-0.5
    size = b.op("sqrt", b.op("at_least", b.op("abs", dot), limit=1e-6))
    return b.op("sigmoid", b.op("sign", dot) * size)
