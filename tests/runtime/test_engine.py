"""The engine: requests good and bad side by side; what is refused, and that others go on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.tiny import Tiny, build, tiny
from tilewright import runtime
from tilewright.runtime import Engine, RequestError, SamplingParams

pytestmark = pytest.mark.cpu
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
NAN = float("nan")


def _with_tokenizer(folder: Path, model: Tiny) -> None:
    """Give an artifact a byte-level tokenizer of 67 tokens: some bytes, and some pairs."""
    import hashlib
    import json

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = {t: i for i, t in enumerate([*letters, "Ġ", ".", "!", "Ã", "©"])}
    merges = []
    for pair in ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd"):
        merges.append((pair[0], pair[1]))
        vocabulary[pair] = len(vocabulary)
    for i in range(len(vocabulary), 67):
        vocabulary[f"<{i}>"] = i
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["model"]["tokenizer"] = "tokenizer.json"
    manifest["model"]["eos_ids"] = [3]
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    manifest["digests"]["tokenizer.json"] = digest
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "artifact"
    model = tiny()
    build(model, folder, kernel_cache)
    _with_tokenizer(folder, model)
    return folder


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Iterator[Engine]:
    with runtime.load(artifact) as engine:
        yield engine


@pytest.fixture(scope="module")
def usual(engine: Engine) -> runtime.RequestOutput:
    """What a well-behaved request gives when nothing else runs."""
    return engine.generate([5, 6, 7], GREEDY)[0]


PARAMETER = "sampling parameter"
BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": NAN}, "temperature"), ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -1.0}, "temperature"), ({"temperature": True}, "temperature"),
    ({"top_p": NAN}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"top_p": -0.1}, "top_p"),
    ({"min_p": NAN}, "min_p"), ({"min_p": 2.0}, "min_p"), ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"), ({"seed": 1 << 64}, "seed"), ({"seed": -1}, "seed"),
    ({"seed": 1.0}, "seed"), ({"seed": True}, "seed"),
    ({"repetition_penalty": NAN}, "repetition_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"presence_penalty": NAN}, "presence_penalty"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty"),
    ({"logit_bias": {67: 1.0}}, "logit_bias"), ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: NAN}}, "logit_bias"), ({"stop_token_ids": [67]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"stop_token_ids": [1] * 5000},
                                                   "stop_token_ids"),
    ({"stop": [""]}, "stop"), ({"stop": ["x"] * 1000}, "stop"), ({"n": 0}, "n"),
    ({"n": True}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 10_000}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"), ({"logprobs": -1}, "logprobs"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"ignore_eos": 1}, "ignore_eos"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "named"), BAD_PARAMS, ids=lambda v: str(v)[:40])
def test_a_bad_setting_is_refused_and_others_keep_their_bits(
    engine: Engine, usual: runtime.RequestOutput, bad: dict[str, Any], named: str
) -> None:
    beside = engine.stream([5, 6, 7], GREEDY)
    first = next(beside)
    with pytest.raises(RequestError) as caught:
        engine.submit([1, 2], replace(GREEDY, **bad))
    text = str(caught.value)
    assert text.startswith(f"{PARAMETER} '{named}': ") and "got" in text and "want" in text
    assert "\n" not in text and len(text) < 400
    rest = [t for event in beside for t in event.token_ids]
    assert (*first.token_ids, *rest) == usual.token_ids


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt: is empty: got 0 tokens, want at least 1"),
    ([], "prompt: is empty: got 0 tokens, want at least 1"),
    ([1, 67], "prompt: token 1: got 67, want 0 to 66"),
    ([-1], "prompt: token 0: got -1, want 0 to 66"),
    ([True], "prompt: token 0: got True, want an int below 67"),
    ([1.5], "prompt: token 0: got 1.5, want an int below 67"),
    ([None], "prompt: token 0: got None, want an int below 67"),
    (7, "prompt: wrong type: got int, want a text or a list of token ids"),
    ([1] * 300, "prompt: is longer than the context: got 300 tokens, want at most 255 (context of "
     "256 tokens)"),
    ("a\ud800", "prompt: is not valid Unicode: got a lone surrogate at character 1, want text"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=lambda v: repr(v)[:30])
def test_a_bad_prompt_gets_one_sentence(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit(prompt, GREEDY)
    assert str(caught.value) == message


def test_max_tokens_beyond_the_context_is_refused_not_trimmed(engine: Engine) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate([1, 2, 3], replace(GREEDY, max_tokens=254))
    assert str(caught.value) == (
        "sampling parameter 'max_tokens': beyond the context: got 254 after a prompt of 3 tokens, "
        "want at most 253 (context of 256 tokens)"
    )
    (output,) = engine.generate([1, 2, 3], replace(GREEDY, max_tokens=253, ignore_eos=True))
    assert len(output.token_ids) == 253 and output.finish_reason == "length"


def test_one_bad_prompt_of_several_runs_nothing(engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.generate([[1, 2], [99]], GREEDY)
    assert not engine.step()


def test_two_live_requests_of_one_id(engine: Engine, usual: runtime.RequestOutput) -> None:
    first = engine.stream([5, 6, 7], GREEDY, request_id="mine")
    with pytest.raises(RequestError) as caught:
        engine.stream([1], GREEDY, request_id="mine")
    assert str(caught.value) == (
        "request 'mine': the id is in use: got a second live request, want a distinct id"
    )
    assert tuple(t for e in first for t in e.token_ids) == usual.token_ids
    again = engine.stream([5, 6, 7], GREEDY, request_id="mine")
    first.close()  # finished: must not touch the new request of the same id
    assert tuple(t for e in again for t in e.token_ids) == usual.token_ids


def test_tiny_temperature_is_greedy(engine: Engine, usual: runtime.RequestOutput) -> None:
    (output,) = engine.generate([5, 6, 7], replace(GREEDY, temperature=1e-12, seed=5))
    assert output.token_ids == usual.token_ids


def test_nan_logits_end_one_request_only(
    artifact: Path, usual: runtime.RequestOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runtime.load(artifact) as engine:
        execute = engine._execute

        def poisoned(batch: Any) -> dict[str, Any]:
            outputs = execute(batch)
            logits = outputs["logits"].copy()
            for row, owner in enumerate(batch.logit_requests):
                if batch.requests[owner].id == "request-1":
                    logits[row, 13] = np.nan
            return {**outputs, "logits": logits}

        monkeypatch.setattr(engine, "_execute", poisoned)
        bad, good = engine.generate([[1, 2], [5, 6, 7]], GREEDY)
    assert good.token_ids == usual.token_ids and good.samples[0].error is None
    assert bad.finish_reason == "error" and bad.token_ids == ()
    assert bad.samples[0].error == (
        "request 'request-1': logits 'position 2': not finite: got nan for token 13, "
        "want numbers or -inf"
    )


def test_a_failing_kernel_ends_its_batch_and_the_engine_stays_up(
    artifact: Path, usual: runtime.RequestOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runtime.load(artifact) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_execute", lambda batch: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.generate([1, 2], GREEDY)
        assert engine.generate([5, 6, 7], GREEDY)[0].token_ids == usual.token_ids


def test_samples_differ_and_repeat_with_the_seed(engine: Engine) -> None:
    params = replace(GREEDY, temperature=1.0, n=4, seed=11, max_tokens=12, ignore_eos=True)
    (first,), (second,) = engine.generate([4, 5], params), engine.generate([4, 5], params)
    tokens = [s.token_ids for s in first.samples]
    assert len(set(tokens)) > 1 and tokens == [s.token_ids for s in second.samples]
    assert first.seed == 11 and first.usage == runtime.Usage(2, 48)
    alone = [engine.generate([4, 5], replace(params, n=1))[0].token_ids]
    assert alone == tokens[:1]
    (greedy,) = engine.generate([4, 5], replace(params, temperature=0.0))
    assert len({s.token_ids for s in greedy.samples}) == 1 and len(greedy.samples) == 4


def test_the_loop_in_your_own_hands(engine: Engine, usual: runtime.RequestOutput) -> None:
    """What the README says of `submit`, `step`, `abort` and `output`."""
    kept, ended = engine.submit([5, 6, 7], GREEDY), engine.submit([5, 6, 7], GREEDY)
    assert isinstance(kept, runtime.Submitted) and kept.prompt_ids == (5, 6, 7)
    assert engine.step() and not any(s.is_finished for s in kept.samples)
    with pytest.raises(RequestError, match="is not finished: step the engine until"):
        engine.output(kept)
    engine.abort(ended.id)
    assert engine.output(ended).finish_reason == "abort"
    while not all(sample.is_finished for sample in kept.samples):
        assert engine.step()
    assert not engine.step()
    assert engine.output(kept).token_ids == usual.token_ids
    engine.abort("nobody")


def test_a_seed_is_drawn_and_returned(engine: Engine) -> None:
    params = replace(GREEDY, temperature=1.0, max_tokens=12)
    (first,), (other,) = engine.generate([4, 5], params), engine.generate([4, 5], params)
    assert first.seed != other.seed
    (again,) = engine.generate([4, 5], replace(params, seed=first.seed))
    assert again.token_ids == first.token_ids


@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_past_a_stop_string_is_given(engine: Engine, data: st.DataObject) -> None:
    params = replace(GREEDY, temperature=1.0, max_tokens=24, ignore_eos=True,
                     seed=data.draw(st.integers(0, 50)))  # fmt: skip
    (free,) = engine.generate("then", params)
    start = data.draw(st.integers(0, max(len(free.text) - 1, 0)))
    stop = free.text[start : start + data.draw(st.integers(1, 4))]
    if not stop:
        return
    events = list(engine.stream("then", replace(params, stop=stop)))
    text = "".join(e.text for e in events)
    assert text == free.text[: free.text.index(stop)]
    assert events[-1].finish_reason == "stop"


def test_end_tokens_end_and_min_tokens_keep_on(engine: Engine) -> None:
    bias = {3: 100.0}
    (ended,) = engine.generate([1, 2], replace(GREEDY, logit_bias=bias))
    assert ended.token_ids == (3,) and ended.finish_reason == "stop"
    (kept,) = engine.generate([1, 2], replace(GREEDY, logit_bias=bias, min_tokens=3))
    assert len(kept.token_ids) == 4 and kept.token_ids[-1] == 3 and 3 not in kept.token_ids[:3]
    (ignored,) = engine.generate([1, 2], replace(GREEDY, logit_bias=bias, ignore_eos=True))
    assert ignored.token_ids == (3,) * 6 and ignored.finish_reason == "length"


def test_logprobs_agree_with_the_logits(engine: Engine) -> None:
    prompt = [5, 1, 66, 2]
    (output,) = engine.generate(prompt, replace(GREEDY, logprobs=3, prompt_logprobs=2))
    logits = engine.logits([*prompt, *output.token_ids]).astype(np.float64)
    table = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for position, scored in enumerate(output.prompt_logprobs[1:], start=1):
        assert scored is not None and scored.token_id == prompt[position]
        assert scored.logprob == pytest.approx(table[position - 1, prompt[position]], abs=1e-6)
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    for index, chosen in enumerate(output.logprobs):
        row = table[len(prompt) - 1 + index]
        assert chosen.token_id == int(row.argmax()) == chosen.top_logprobs[0][0]
        assert chosen.logprob == pytest.approx(row.max(), abs=1e-6)


def test_bad_words_never_come(engine: Engine) -> None:
    letters = replace(GREEDY, max_tokens=10, ignore_eos=True, allowed_token_ids=list(range(26)))
    (free,) = engine.generate("an", letters)
    (kept,) = engine.generate("an", replace(letters, bad_words=[free.text[0]]))
    assert free.text[0] not in kept.text and len(kept.text) == 10


def test_a_dropped_stream_is_aborted(engine: Engine) -> None:
    stream = engine.stream([1, 2, 3], replace(GREEDY, max_tokens=200, ignore_eos=True))
    next(stream)
    del stream
    gc.collect()
    engine.generate([1], GREEDY)
    assert not engine.step()


def test_a_closed_stream_gives_nothing_more(engine: Engine) -> None:
    stream = engine.stream([1, 2, 3], replace(GREEDY, max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert list(stream) == [] and not engine.step()


def test_threads_share_the_steps(engine: Engine, usual: runtime.RequestOutput) -> None:
    found: list[tuple[int, ...]] = []

    def ask() -> None:
        for _ in range(5):
            found.append(engine.generate([5, 6, 7], GREEDY)[0].token_ids)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [usual.token_ids] * 20


def test_wrong_calls_are_refused(engine: Engine) -> None:
    for call, message in (
        (lambda: engine.generate([[1], [2]], [GREEDY]),
         "sampling parameters: got 1 for 2 prompts, want one, or one each"),
        (lambda: engine.submit([1], {"n": 1}),  # type: ignore[arg-type]
         "sampling parameters: wrong type: got dict, want SamplingParams"),
        (lambda: engine.submit([1], GREEDY, request_id=""),
         "request id: got '', want a non-empty text"),
        (lambda: engine.logits("abc"),
         "logits: got the text 'abc', want a list of token ids; engine.tokenizer gives those of a "
         "text"),
        (lambda: engine.abort(["a"]),  # type: ignore[arg-type]
         "request id: got list of 1, want a non-empty text"),
        (lambda: engine.output("a"),  # type: ignore[arg-type]
         "output: wrong type: got 'a', want what `submit` gave"),
        (lambda: engine.generate(5, GREEDY),  # type: ignore[arg-type]
         "prompts: wrong type: got int, want a text, token ids or a list"),
        (lambda: engine.chat_prompt([{"role": "user", "content": "x"}]),
         "chat: model 'tiny' has no chat template: want a plain prompt"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            call()
        assert str(caught.value) == message


def test_samples_of_another_engine_are_let_be(
    engine: Engine, artifact: Path, usual: runtime.RequestOutput
) -> None:
    with runtime.load(artifact) as other:
        foreign = other.submit([5, 6, 7], GREEDY)
        own = engine.submit([5, 6, 7], GREEDY, request_id=foreign.id)
        engine.cancel(foreign.samples)
        engine.drop(foreign.samples)
        for each, submitted in ((engine, own), (other, foreign)):
            while each.step():
                pass
            assert each.output(submitted).token_ids == usual.token_ids


def test_cache_size_is_checked(artifact: Path) -> None:
    for bad in (0, -1, 7, True, 1.5):
        with pytest.raises(RequestError, match="^engine 'cache_tokens': got "):
            runtime.load(artifact, cache_tokens=bad)  # type: ignore[arg-type]


def test_a_small_cache_still_serves_everyone(artifact: Path, usual: runtime.RequestOutput) -> None:
    with runtime.load(artifact, cache_tokens=32) as engine:
        outputs = engine.generate([[5, 6, 7]] * 6, GREEDY)
        with pytest.raises(RequestError, match="can never fit in the cache"):
            engine.submit([1] * 40, GREEDY)
    assert [o.token_ids for o in outputs] == [usual.token_ids] * 6
