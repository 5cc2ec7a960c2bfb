"""Engram: hashes against the released values, token maps, and the layer written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from tilewright.models.engram import EngramSizes, bucket_primes, multipliers, token_map

RELEASED = EngramSizes(
    layers=(1, 14), rows=(384006168, 384016682), grams=4, heads=8, width=256, buckets=16000000,
    compressed=99092, pad=2,
)  # fmt: skip


def test_released_multipliers() -> None:
    assert multipliers(1, RELEASED) == (
        76632096046245, 4839876093313, 35959672319349, 73987337458391
    )  # fmt: skip
    assert multipliers(14, RELEASED) == (
        67716810739261, 51510806800915, 30921347202721, 82619226485591
    )  # fmt: skip


def test_released_primes() -> None:
    found = bucket_primes(RELEASED)
    first, second = found[1], found[14]
    assert first[:8] == (
        16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183
    )  # fmt: skip
    assert (first[8], first[15], first[16], first[23]) == (16000189, 16000321, 16000339, 16000463)
    assert second[:3] == (16000477, 16000487, 16000499) and second[23] == 16000889
    assert (sum(first), sum(second)) == RELEASED.rows
    assert len(set(first + second)) == 48


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("grams", [2, 4])
def test_products_fit_int64_and_primes_are_prime(grams: int, heads: int) -> None:
    sizes = EngramSizes((0, 3, 9), (1, 1, 1), grams, heads, 8, 20, compressed=5, pad=0)
    for layer, primes in bucket_primes(sizes).items():
        assert all(all(p % d for d in range(2, p)) for p in primes)
        assert len(primes) == (grams - 1) * heads
        for factor in multipliers(layer, sizes):
            assert factor % 2 == 1 and factor * (sizes.compressed - 1) < 2**63


def test_token_map_joins_texts_equal_after_normalisation() -> None:
    words = ["<pad>", "Hello", "hello", "HÉLLO", "a\tb", "a  b", " ", "\n", "", "ﬁ", "fi", "x"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    found, count = token_map(inner)
    assert found == [0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 5, 6]
    assert count == 7


def test_token_map_keeps_what_is_no_text() -> None:
    """A byte that is no character by itself is known by its stored form."""
    vocab = {"a": 0, "A": 1, **{c: i + 2 for i, c in enumerate("âĤ¬")}}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    inner.decoder = decoders.ByteLevel()
    found, count = token_map(inner)
    assert found == [0, 0, 1, 2, 3] and count == 4


def test_gate_and_value_of_one_layer() -> None:
    """The released formula, element by element, against a graph of the layer alone."""
    from support.deepseek_tiny import V41, drawn_tensors
    from support.paged_run import PagedRun, graph_weights
    from tilewright.graph import GraphBuilder, reference
    from tilewright.graph.types import F32
    from tilewright.models import deepseek_v41
    from tilewright.models.deepseek_layers import Layer
    from tilewright.models.engram import append_history, engram
    from tilewright.models.layers import Formats, Limits
    from tilewright.models.paged_step import declare_paged_step

    c = deepseek_v41.read_config(V41)
    sizes, n, width = c.engram, 4, 32
    assert sizes is not None
    b, primes = GraphBuilder("engram"), bucket_primes(sizes)[3]
    step = declare_paged_step(b, Limits(context_page=32, window_page=8), 12)
    streams = b.input("streams", F32, step.token_ids.type.shape[0], n, width)
    w = Layer(b, "layers.3", c, Formats({}, F32), step, c.rope)
    history = append_history(step, sizes, c.vocab_size)
    out = engram(w, streams, history, sizes, 3, primes)
    b.output("logits", b.op("merge_heads", b.op("gather_rows", out, step.logit_rows)))
    graph = b.build()
    tensors = drawn_tensors(graph, 5, ids_below=50)
    before = torch.randn(20, n, width, generator=torch.Generator().manual_seed(1))
    tokens = [(7 * i * i + 1) % 67 for i in range(20)]
    run = PagedRun(graph, graph_weights(graph, tensors), reference.IDEAL_F32, context_page=32,
                   window_page=8, max_step=20, window=12)
    got = run.step({0: tokens}, extra={"streams": before})["logits"].view(20, n, width)
    factors = multipliers(3, sizes)
    ids = [int(tensors["engram.token_map"][t, 0]) for t in tokens]
    for i in range(20):
        past = [ids[i - k] if i >= k else sizes.pad for k in range(sizes.grams)]
        rows, mixed = [], past[0] * factors[0]
        for k in range(1, sizes.grams):
            mixed ^= past[k] * factors[k]
            for j in range((k - 1) * sizes.heads, k * sizes.heads):
                rows.append(mixed % primes[j] + sum(primes[:j]))
        e = tensors["layers.3.engram.embed.weight"][rows].flatten()
        kv = (tensors["layers.3.engram.wkv.weight"] @ e).view(n + 1, width).numpy()
        weight = tensors["layers.3.engram.q_weight"] * tensors["layers.3.engram.k_weight"]
        for s in range(n):
            r, key = before[i, s].numpy(), kv[s]
            agree = (r * weight[s].numpy() * key).sum() / np.sqrt((r * r).mean())
            agree = agree / np.sqrt((key * key).mean()) / np.sqrt(width)
            gate = 1 / (1 + np.exp(-np.sign(agree) * np.sqrt(max(abs(agree), 1e-6))))
            np.testing.assert_allclose(got[i, s].numpy(), r + gate * kv[n], rtol=1e-4, atol=1e-5)
