"""The sampler on torch tensors against the host's, id for id, on thousands of random rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from support.host_chip import HostChip
from tilewright.runtime import RequestError, SamplingParams
from tilewright.runtime.choose import HostChooser, Question
from tilewright.runtime.choose_torch import TorchChooser
from tilewright.runtime.philox import TOKEN_STREAM, Draw, keyed_words
from tilewright.runtime.sample_logits import SampleRules
from tilewright.runtime.sample_math import log, weights
from tilewright.runtime.sample_noise import noise
from tilewright.runtime.sample_torch import LEADING
from tilewright.runtime.sample_torch_math import (
    Draws,
    group_noise,
    ids_of_keys,
    order_keys,
    share_of,
    token_noise,
)
from tilewright.runtime.sample_torch_math import keyed_words as torch_words
from tilewright.runtime.sample_torch_math import log as torch_log
from tilewright.runtime.sample_torch_math import weights as torch_weights

Rng = np.random.Generator


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small: a second thread of torch would mostly wait for its core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
KINDS = ("normal", "flat", "steps", "peaked", "equal", "banned", "zeros", "few", "huge")


def random_row(rng: Rng, kind: str, vocab: int) -> np.ndarray[Any, Any]:
    row = rng.standard_normal(vocab).astype(np.float32)
    match kind:
        case "flat":
            row *= np.float32(1e-3)
        case "steps":  # many equal logits
            row = np.round(row * 2).astype(np.float32)
        case "peaked":
            row = (row * 12).astype(np.float32)
        case "equal":
            row[:] = rng.standard_normal()
        case "banned":
            row[rng.random(vocab) < 0.7] = -np.inf
            row[rng.integers(vocab)] = 1.0
        case "zeros":
            row = np.where(rng.random(vocab) < 0.5, np.float32(-0.0), np.float32(0.0))
        case "few":
            row[:] = -np.inf
            row[rng.integers(0, vocab, 3)] = rng.standard_normal(3)
        case "huge":
            row *= np.float32(1e37)
    return row.astype(np.float32)


def random_params(rng: Rng, vocab: int) -> SamplingParams:
    def sometimes(value: Any, default: Any, chance: float = 0.4) -> Any:
        return value if rng.random() < chance else default

    ids = rng.integers(0, vocab, 5).tolist()
    return SamplingParams(
        temperature=sometimes(0.0, float(rng.choice([1e-5, 0.1, 0.7, 1.0, 2.5, 50.0])), 0.1),
        top_k=sometimes(int(rng.choice([1, 2, 20, 700, 1500, vocab])), 0),
        top_p=sometimes(float(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.99, 0.999999])), 1.0),
        min_p=sometimes(float(rng.choice([1e-9, 0.01, 0.3, 1.0])), 0.0, 0.3),
        repetition_penalty=sometimes(float(rng.uniform(0.5, 2)), 1.0, 0.2),
        presence_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0, 0.2),
        frequency_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0, 0.2),
        logit_bias=sometimes({ids[0]: 3.25, ids[1]: float("-inf")}, (), 0.2),
        allowed_token_ids=sometimes(tuple(rng.integers(0, vocab, 40).tolist()), None, 0.1),
        min_tokens=sometimes(9, 0, 0.1),
        ignore_eos=False,
    )  # fmt: skip


def random_question(rng: Rng, row: int, vocab: int) -> Question:
    params = random_params(rng, vocab)
    output = rng.integers(0, vocab, int(rng.integers(0, 12))).tolist()
    words = [output[-1:] + [int(rng.integers(vocab))], [int(rng.integers(vocab))]]
    rules = SampleRules.build(
        params, eos_token_ids=(1, 2), bad_words=words if rng.random() < 0.2 else ()
    )
    draw = Draw(int(rng.integers(0, 2**63)) * 2 + 1, int(rng.integers(0, 10**6)),
                int(rng.integers(128)))  # fmt: skip
    return Question(row, rules, draw, rng.integers(0, vocab, 30), output)


def both(logits: np.ndarray[Any, Any], questions: Sequence[Question]) -> tuple[list[Any], ...]:
    argmax = logits.argmax(1).astype(np.int32)
    host = {"logits": logits, "argmax": argmax}
    device = {"logits": torch.from_numpy(logits), "argmax": torch.from_numpy(argmax)}
    got = TorchChooser(HostChip()).choose(device, questions)
    return got, HostChooser().choose(host, questions)


@pytest.mark.parametrize("vocab", [5, 700, 3001])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_host(kind: str, vocab: int) -> None:
    rng = np.random.default_rng([KINDS.index(kind), vocab])
    for _ in range(4):
        count = int(rng.integers(1, 50))
        logits = np.stack([random_row(rng, kind, vocab) for _ in range(count)])
        questions = [random_question(rng, row, vocab) for row in rng.permutation(count).tolist()]
        got, want = both(logits, questions)
        for question, mine, theirs in zip(questions, got, want, strict=True):
            assert str(mine) == str(theirs), question


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=1.0), SamplingParams(temperature=3.0, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=LEADING + 5), SamplingParams(temperature=1.0, min_p=1e-3),
])  # fmt: skip
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
def test_wide_choices_over_a_large_vocabulary(params: SamplingParams, spread: float) -> None:
    """Rows that no fixed number of leading entries decides are looked at in full."""
    rng = np.random.default_rng(int(spread * 100))
    logits = (rng.standard_normal((3, 20001)) * spread).astype(np.float32)
    rules = SampleRules.build(params)
    got, want = both(logits, [Question(i, rules, Draw(3, i)) for i in range(3)])
    assert [g.token_id for g in got] == [w.token_id for w in want]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_without_a_choice_are_told_like_the_hosts(bad: float, temperature: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 600)).astype(np.float32)
    logits[1, [7, 300]] = bad
    if bad == -np.inf:
        logits[1] = bad
    rules = SampleRules.build(SamplingParams(temperature=temperature))
    got, want = both(logits, [Question(i, rules, Draw(1, 5)) for i in range(3)])
    assert isinstance(want[1], RequestError) and str(got[1]) == str(want[1])
    assert (got[0], got[2]) == (want[0], want[2])


def test_bans_of_everything_are_told() -> None:
    rules = SampleRules.build(SamplingParams(allowed_token_ids=(3,), logit_bias={3: -np.inf}))
    got, want = both(np.zeros((1, 10), np.float32), [Question(0, rules, Draw(1, 5))])
    assert isinstance(want[0], RequestError) and str(got[0]) == str(want[0])


def test_a_wrong_argmax_of_a_kernel_is_not_believed() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    outputs = {"logits": logits, "argmax": torch.tensor([2], dtype=torch.int32)}
    rules = SampleRules.build(SamplingParams(temperature=0.0))
    (got,) = TorchChooser(HostChip()).choose(outputs, [Question(0, rules, Draw(1, 5))])
    assert not isinstance(got, RequestError) and got.token_id == 1


def test_logprobs_agree() -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((4, 500)).astype(np.float32)
    logits[3, 4:] = -np.inf
    rules = SampleRules.build(SamplingParams(temperature=1.0, logprobs=6))
    got, want = both(logits, [Question(i, rules, Draw(1, i)) for i in range(4)])
    for mine, theirs in zip(got, want, strict=True):
        assert mine.token_id == theirs.token_id
        assert [t[0] for t in mine.top_logprobs] == [t[0] for t in theirs.top_logprobs]
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-12)
        assert [t[1] for t in mine.top_logprobs] == pytest.approx(
            [t[1] for t in theirs.top_logprobs], abs=1e-12
        )


def test_arithmetic_has_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    x = np.exp(rng.uniform(-700, 700, 20000))
    assert torch_log(torch.from_numpy(x)).numpy().tobytes() == log(x).tobytes()
    row = random_row(rng, "peaked", 20000)
    row[::7] = -np.inf
    for temperature in (1e-6, 0.3, 1.0, 90.0):
        scale = torch.tensor([[np.float32(min(1.4426950408889634 / temperature, 3e38))]])
        top = torch.tensor([[row.max()]])
        got = torch_weights(torch.from_numpy(row)[None], top, scale)[0].numpy()
        np.testing.assert_array_equal(got, weights(row, row.max(), temperature))


@pytest.mark.parametrize("vocab", [1, 300, 512, 5000])
def test_noise_has_the_same_bits(vocab: int) -> None:
    rng = np.random.default_rng(4)
    ids = rng.permutation(vocab)[:900].astype(np.int64)
    for draw in (Draw(0, 0), Draw(2**64 - 1, 2**31, 127), Draw(12345678901234567, 17, 3)):
        columns = (draw.seed & 0xFFFFFFFF, draw.seed >> 32, draw.position, draw.sample_index)
        draws = Draws(*(torch.tensor([[c]]) for c in columns))
        words = torch_words(torch.from_numpy(ids)[None], TOKEN_STREAM, draws)
        want = keyed_words(ids, np.full_like(ids, TOKEN_STREAM), draw)
        np.testing.assert_array_equal(words[0][0].numpy(), want[0].astype(np.int64))
        np.testing.assert_array_equal(words[1][0].numpy(), want[1].astype(np.int64))
        got = token_noise(torch.from_numpy(ids)[None], group_noise(vocab, draws), draws)
        assert got[0].numpy().tobytes() == noise(ids, vocab, draw).tobytes()


def test_keys_order_by_logit_then_by_lowest_id() -> None:
    row = torch.tensor([[1.0, -0.0, 0.0, 1.0, -torch.inf, -3.0, 1e-40, -1e-40]])
    order = ids_of_keys(order_keys(row).sort(dim=1, descending=True).values)
    assert order.tolist() == [[0, 3, 6, 1, 2, 7, 5, 4]]


def test_shares_of_totals_are_exact() -> None:
    rng = np.random.default_rng(5)
    totals = [0, 1, 2**32 - 1, 2**32, 2**62, *rng.integers(0, 2**62, 200).tolist()]
    for share in (1, 7, 2**31 + 1, 2**32 - 1, 2**32):
        got = share_of(torch.tensor(totals), torch.tensor(share)).tolist()
        assert got == [-(-t * share >> 32) for t in totals]
